"""The shipped SLURM scripts on a real cluster of two nodes: requeues, a job array, unfit nodes."""

import itertools
import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.commands import (
    REPOSITORY,
    count_finished_steps,
    drop_machine_keys,
    free_port,
    read_metrics,
    run_command,
    wait_until,
)
from tests.helpers.setups import TinySetup
from tests.helpers.soak import IS_SOAK, soak_only
from tests.slurm.cluster import Cluster, find_missing_requirement
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import load_recipe
from vcore_ds.distributed import process_group

pytestmark = pytest.mark.dist
NUM_STEPS = 32
"""Enough steps after the awaited ones that a request arrives before the last, even on busy cores."""
ARRAY = "--array=0-2 launch_scripts/train_32b_lora.slurm sweep/%a.yaml run.seed=%a run.output_dir=runs/sweep_%a"
TASKS = ("1", "2")
"""Tasks of the array that are submitted here, one for each node."""
CHANGES = ("methods/sft.yaml", f"schedule.num_steps={NUM_STEPS}", "checkpoint.every_steps=2")
"""Plain fine-tuning, since launching, stopping and requeueing do not depend on the method."""
PARALLEL = ("model.provider=megatron", "parallel.tensor=2")


@dataclass(frozen=True)
class Undisturbed:
    """A run on two ranks from its first step to its last, on the two nodes if they can be reached by ssh."""

    folder: Path
    output: str
    without_hosts: str | None
    """Reason why it ran on this machine instead; None if it ran on the nodes."""


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    overrides = " ".join(setup.overrides(folder / "run", *CHANGES))
    missing = find_missing_requirement("sshd", "pdsh")
    if missing is not None:
        done = run_command(f"torchrun --nproc_per_node 2 launch_scripts/train_32b.sh {overrides}")
        assert done.returncode == 0, done.stdout
        return Undisturbed(folder / "run", done.stdout, missing)
    (folder / "hosts").write_text("# name, and ranks on it\nn1 slots=1\nn2 slots=1\n")
    # The only variable that the launcher passes to the nodes. Without it each rank would start a thread per core of
    # this machine, which is both nodes, and waiting threads spin: steps would take 15 s on busy cores.
    (folder / "environment").write_text("OMP_NUM_THREADS=1\n")
    command = f"DS_ENV_FILE={folder}/environment deepspeed --master_port {free_port()} --hostfile {folder}/hosts"
    command += " launch_scripts/train_32b.sh"
    return Undisturbed(folder / "run", cluster.run_on("n1", f"{command} {overrides}"), None)


def test_a_run_goes_on_through_requeues(cluster: Cluster, setup: TinySetup, checkout: Path, undisturbed: Undisturbed):
    run = checkout / "runs" / "it"
    # A job submitted from a task of an array inherits these variables and must still requeue itself.
    inherited = {"SLURM_ARRAY_JOB_ID": "0", "SLURM_ARRAY_TASK_ID": "0"}
    overrides = setup.overrides(run, *CHANGES)
    job = cluster.submit("launch_scripts/train_32b.slurm", checkout, *overrides, **inherited)
    output = checkout / f"slurm-{job}.out"

    # As by an administrator, or by SLURM on preemption: SIGTERM everywhere, SIGKILL half a minute later.
    wait_for(cluster, job, run, step=3, restarts=0)
    cluster.run(f"scontrol requeue {job}")
    if IS_SOAK:  # otherwise only `test_the_last_task_of_an_array_is_requeued_alone` sends this signal
        # As by SLURM before the time limit (--signal); the job's script then requeues it.
        wait_for(cluster, job, run, step=8, restarts=1)
        cluster.run(f"scancel --signal=USR1 {job}")
    wait_until(lambda: cluster.state(job) == "COMPLETED", "end of the job", every_seconds=1)
    num_attempts = 3 if IS_SOAK else 2
    assert cluster.field(job, "Restarts") == str(num_attempts - 1)

    text = output.read_text()
    assert [f"attempt {n}, on n[1-2]" in text for n in range(4)] == [n < num_attempts for n in range(4)]
    for said in ("preflight: 2 nodes; on n1", "all-reduce of 16 MiB over 2 ranks"):
        assert text.count(said) == num_attempts
    assert text.count("back into the queue") == num_attempts - 2 and "ended with exit code 0" in text
    logs = checkout / "runs" / "slurm" / job
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.log")) == [
        f"attempt_{attempt}/{node}.log" for attempt in range(num_attempts) for node in ("n1", "n2")
    ]
    assert not IS_SOAK or "stopped by SIGUSR1" in (logs / "attempt_1" / "n1.log").read_text()

    check_equal(run, undisturbed.folder)


@soak_only
def test_tensor_parallel_ranks_run_two_on_each_node(cluster: Cluster, setup: TinySetup, checkout: Path):
    """`chaos/test_tensor_groups.py` tests that such a run resumes and ends like an undisturbed one."""
    run = checkout / "runs" / "it"
    job = cluster.submit(
        "launch_scripts/train_32b.slurm", checkout, *setup.overrides(run, *PARALLEL), RANKS_PER_NODE="2"
    )
    wait_until(
        lambda: cluster.state(job) not in {"PENDING", "RUNNING", "COMPLETING"}, "end of the job", every_seconds=1
    )
    text = (checkout / f"slurm-{job}.out").read_text()
    assert (cluster.state(job), cluster.field(job, "Restarts")) == ("COMPLETED", "0"), text
    assert text.count("all-reduce of 16 MiB over 4 ranks") == 1, text
    assert [line["step"] for line in read_metrics(run)] == [1, 2]


def wait_for(cluster: Cluster, job: str, run: Path, *, step: int, restarts: int) -> None:
    """Wait until the job, after this many restarts, has finished this step."""

    num_polls = itertools.count()

    def holds() -> bool:
        if next(num_polls) % 20 == 0:  # check the job less often than the file
            output = run.parents[1] / f"slurm-{job}.out"
            assert cluster.state(job) in {"PENDING", "RUNNING", "COMPLETING", "REQUEUED"}, output.read_text()
        return count_finished_steps(run) >= step and cluster.field(job, "Restarts") == str(restarts)

    wait_until(holds, f"step {step} after {restarts} restarts")


def check_equal(run: Path, undisturbed: Path) -> None:
    """Assert that no step is lost, repeated or different."""
    lines, expected = read_metrics(run), read_metrics(undisturbed)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert [drop_machine_keys(line) for line in lines] == [drop_machine_keys(line) for line in expected]


def test_the_last_task_of_an_array_is_requeued_alone(cluster: Cluster, setup: TinySetup, checkout: Path):
    """The last task has the job id of the array. Each task has a node; task 1 exists throughout, and then continues on
    both nodes."""
    assert f"\nsbatch {ARRAY}\n" in (REPOSITORY / "docs" / "slurm.md").read_text()
    (checkout / "sweep").mkdir()
    for task in TASKS:
        (checkout / "sweep" / f"{task}.yaml").write_text("schedule: {num_steps: 100_000}\n")
    tiny = [override for override in setup.overrides(checkout) if not override.startswith(("schedule.", "run."))]
    array = cluster.submit(ARRAY.replace("0-2", "-".join(TASKS)), checkout, "methods/sft.yaml", *tiny)
    first, last = (f"{array}_{task}" for task in TASKS)
    runs = [checkout / "runs" / f"sweep_{task}" for task in TASKS]

    def last_is_back() -> bool:
        assert cluster.field(first, "Restarts") == "0", "the whole array was requeued"
        return (cluster.field(last, "Restarts"), cluster.state(last)) == ("1", "RUNNING")

    try:
        wait_until(lambda: count_finished_steps(runs[0]) > 0, "step of task 1")
        cluster.run(f"scontrol suspend {first}")  # it only has to exist
        wait_until(lambda: count_finished_steps(runs[1]) > 0, "step of task 2")
        assert cluster.field(last, "JobId") == array
        cluster.run(f"scancel --signal=USR1 {last}")
        wait_until(last_is_back, "restart of the last task", every_seconds=1)
        assert [cluster.state(task) for task in (first, last)] == ["SUSPENDED", "RUNNING"]
        cluster.run(f"scancel {last}")
        num_steps = count_finished_steps(runs[0])
        cluster.run(f"scontrol resume {first}")
        # A signal to a job whose processes are still stopped was once lost.
        wait_until(lambda: count_finished_steps(runs[0]) > num_steps, "another step of task 1")
        words = ("sweep/1.yaml", "methods/sft.yaml", "run.seed=1", "run.output_dir=runs/sweep_1")
        check_other_number_of_nodes(cluster, checkout, first, runs[0], *tiny, *words)
    finally:
        cluster.run(f"scancel {array}")
    assert [load_recipe(run / "recipe.yaml").run.seed for run in runs] == [1, 2]


def check_other_number_of_nodes(cluster: Cluster, checkout: Path, job: str, run: Path, *overrides: str) -> None:
    """Run the line of docs/slurm.md for two nodes: the job saves and ends, and another one takes more steps. Only
    `make soak` takes these: `dist/test_resume.py` tests resuming on other numbers of ranks, so here SLURM only checks
    that it would run the job."""
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("scontrol update JobId=JOB Requeue=0 && "))
    for word, ours in {"JOB": job, "--nodes=4": "--nodes=2", "train_32b.slurm": "train_32b_lora.slurm"}.items():
        line = line.replace(word, ours)
    forbid, stop, submit = line.split(" && ")
    cluster.run(forbid)
    cluster.run(stop)
    words = submit.removeprefix("sbatch ")
    if IS_SOAK:
        other = cluster.submit(words, checkout, *overrides)
        log = checkout / "runs" / "slurm" / other / "attempt_0" / "n1.log"
        try:
            wait_until(lambda: log.is_file() and "\nstep " in log.read_text(), "step on two nodes")
            assert "ZeRO-3 over 2 ranks" in log.read_text() and "Resumed after step " in log.read_text()
        finally:
            cluster.run(f"scancel {other}")
    else:
        cluster.submit(f"--test-only {words}", checkout, *overrides)
        wait_until(lambda: cluster.state(job) == "FAILED", "end of the job", every_seconds=1)
    assert (cluster.state(job), cluster.field(job, "ExitCode")) == ("FAILED", "85:0")
    assert (
        cluster.field(job, "Restarts") == "0"
        and "back into the queue" not in (checkout / f"slurm-{job}.out").read_text()
    )
    steps = [line["step"] for line in read_metrics(run)]
    assert steps == list(range(1, len(steps) + 1))


def test_unfit_nodes_are_named_before_anything_starts(cluster: Cluster, setup: TinySetup, tmp_path: Path):
    """The user submits from a folder that is not the repository."""
    disk, script = cluster.folder / "node_disk", REPOSITORY / "launch_scripts" / "train.slurm"
    cluster.run(f"srun --nodelist=n1 cp {setup.train} {disk}/train.jsonl")
    (tmp_path / "mine.yaml").write_text("base: qwen3_32b_math_lora\n")
    changes = (f"run.output_dir={disk}/run", f"data.train_path={disk}/train.jsonl", "lora=null", *PARALLEL)
    job = cluster.submit(f"--nodes=2 {script} mine.yaml", tmp_path, *setup.overrides(disk), *changes)
    wait_until(lambda: cluster.state(job) in {"COMPLETED", "FAILED"}, "end of the job", every_seconds=1)
    text = (tmp_path / f"slurm-{job}.out").read_text()
    assert (cluster.field(job, "ExitCode"), cluster.field(job, "Restarts")) == ("2:0", "0"), text
    assert "Traceback" not in text and not (tmp_path / "runs" / "slurm" / job / "attempt_0" / "n1.log").exists()
    problems = text.partition("the nodes are not ready for this run:\n")[2].splitlines()
    for part in (
        "n1: free disk: found 0.2",
        f"n2: data.train_path: found nothing to read at {disk}/train.jsonl.",
        f"n2: run.output_dir: found no file that rank 0 made in {disk}, expected a folder that all nodes share",
        "n1: parallel.tensor: found 2 with 1 ranks on the node, expected a divisor of them",
        "n2: parallel.tensor: found 2 with 1 ranks on the node, expected a divisor of them",
    ):
        assert sum(line.strip().startswith(part) for line in problems) == 1, f"{part}\n{text}"


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("srun --nodes=2 --ntasks=2 --label", True),
        ("srun --ntasks=1 --label", False),
        ("salloc --quiet --nodes=2 --ntasks=2 srun --interactive --preserve-env --ntasks=1 --label", False),
    ],
)
def test_tasks_without_a_launcher_are_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, line: str, is_refused: bool
):
    """Each would train alone, and write the same files. The last line is the shell that `salloc` opens on a node."""
    environment = dict(re.findall(r"^0: (\w+)=(.*)", cluster.run(f"{line} env"), re.MULTILINE))
    environment.pop("RANK", None)
    assert environment["SLURM_NTASKS"] == ("1" if line.startswith("srun --ntasks=1") else "2")
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(process_group, "_variables_before", {})
    with pytest.raises(UserError, match="^RANK: found none in one of 2 tasks") if is_refused else nullcontext():
        process_group.set_variables_of_one_process()
    assert ("RANK" in environment) != is_refused


def test_deepspeed_trains_on_the_nodes_of_a_hostfile(cluster: Cluster, undisturbed: Undisturbed):
    """The launcher works through ssh and pdsh, without SLURM."""
    if undisturbed.without_hosts is not None:
        pytest.skip(f"deepspeed --hostfile IS NOT TESTED HERE: {undisturbed.without_hosts}")
    last = f"step {NUM_STEPS}/{NUM_STEPS}  loss "
    assert f"n1: {last}" in undisturbed.output and "n2: step" not in undisturbed.output
    assert "ZeRO-3 over 2 ranks" in undisturbed.output
    assert [line["step"] for line in read_metrics(undisturbed.folder)] == list(range(1, NUM_STEPS + 1))
