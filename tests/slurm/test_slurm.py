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
from tests.slurm.conftest import write_checkout
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import load_recipe
from vcore_ds.distributed import process_group

pytestmark = pytest.mark.dist
ARRAY = "--array=0-2 launch_scripts/train_32b_lora.slurm sweep/%a.yaml run.seed=%a run.output_dir=runs/sweep_%a"
TASKS = ("1", "2")
"""Tasks of the array that are submitted here, one for each node."""
CHANGES = ("methods/sft.yaml", "schedule.kind=constant", "schedule.warmup_ratio=0", "data.validation_path=null")
"""Plain fine-tuning, since launching, stopping and requeueing do not depend on the method; with a constant learning
rate and no evaluation of the last step, so that steps do not depend on their number."""
PARALLEL = ("model.provider=megatron", "parallel.tensor=2")


@dataclass(frozen=True)
class Disturbed:
    """A job on both nodes that was requeued, and ended with the line of docs/slurm.md for another number of nodes."""

    cluster: Cluster
    job: str
    folder: Path
    """From which it was submitted."""

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "it"

    @property
    def output(self) -> str:
        return (self.folder / f"slurm-{self.job}.out").read_text()

    @property
    def logs(self) -> Path:
        return self.folder / "runs" / "slurm" / self.job

    def wait_for_step(self, step: int, *, restarts: int) -> None:
        """Wait until the job, after this many restarts, has finished this step."""
        num_polls = itertools.count()

        def holds() -> bool:
            if next(num_polls) % 20 == 0:  # check the job less often than the file
                assert self.cluster.state(self.job) in {"PENDING", "RUNNING", "COMPLETING", "REQUEUED"}, self.output
            is_finished = count_finished_steps(self.run) >= step
            return is_finished and self.cluster.field(self.job, "Restarts") == str(restarts)

        wait_until(holds, f"step {step} after {restarts} restarts")

    def wait_for_restart(self, restarts: int) -> None:
        """Wait until the job runs again. Before, the ranks that stop may still finish steps."""
        expected = (str(restarts), "RUNNING")
        wait_until(
            lambda: (self.cluster.field(self.job, "Restarts"), self.cluster.state(self.job)) == expected,
            f"restart {restarts}",
            every_seconds=1,
        )


@pytest.fixture(scope="module")
def disturbed(cluster: Cluster, setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    checkout = write_checkout(tmp_path_factory.mktemp("disturbed"))
    overrides = setup.overrides(checkout / "runs" / "it", *CHANGES, "schedule.num_steps=100_000")
    # A job submitted from a task of an array inherits these variables and must still requeue itself.
    inherited = {"SLURM_ARRAY_JOB_ID": "0", "SLURM_ARRAY_TASK_ID": "0"}
    job = cluster.submit("launch_scripts/train_32b.slurm", checkout, *overrides, **inherited)
    disturbed = Disturbed(cluster, job, checkout)

    # As by an administrator, or by SLURM on preemption: SIGTERM everywhere, SIGKILL half a minute later.
    disturbed.wait_for_step(1, restarts=0)
    cluster.run(f"scontrol requeue {job}")
    disturbed.wait_for_restart(1)
    if IS_SOAK:  # otherwise only `test_the_last_task_of_an_array_is_requeued_alone` has a job that requeues itself
        # As by SLURM before the time limit (--signal); the job's script then requeues it.
        disturbed.wait_for_step(count_finished_steps(disturbed.run) + 1, restarts=1)
        cluster.run(f"scancel --signal=USR1 {job}")
        disturbed.wait_for_restart(2)
    disturbed.wait_for_step(count_finished_steps(disturbed.run) + 1, restarts=1 + IS_SOAK)
    submit = stop_for_another_number_of_nodes(cluster, job)
    wait_until(lambda: cluster.state(job) == "FAILED", "end of the job", every_seconds=1)
    if not IS_SOAK:
        cluster.submit(f"--test-only {submit}", checkout, *overrides)
        return disturbed
    first_steps = (disturbed.run / "metrics.jsonl").read_text()
    other = cluster.submit(submit, checkout, *overrides)
    log = checkout / "runs" / "slurm" / other / "attempt_0" / "n1.log"
    try:
        wait_until(lambda: log.is_file() and "\nstep " in log.read_text(), "step on one node")
        assert "ZeRO-3 over 1 rank" in log.read_text() and "Resumed after step " in log.read_text()
    finally:
        cluster.run(f"scancel {other}")
    wait_until(lambda: cluster.state(other) == "CANCELLED", "end of the other job", every_seconds=1)
    (disturbed.run / "metrics.jsonl").write_text(first_steps)
    return disturbed


def stop_for_another_number_of_nodes(cluster: Cluster, job: str) -> str:
    """Run the line of docs/slurm.md for another number of nodes, here one, up to its last command; returns the
    arguments of sbatch in that. Only `make soak` runs it: `dist/test_resume.py` tests resuming on other numbers of
    ranks, so here SLURM only checks that it would run the job."""
    page = (REPOSITORY / "docs" / "slurm.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("scontrol update JobId=JOB Requeue=0 && "))
    forbid, stop, submit = line.replace("JOB", job).replace("--nodes=4", "--nodes=1").split(" && ")
    cluster.run(forbid)
    cluster.run(stop)
    return submit.removeprefix("sbatch ")


@dataclass(frozen=True)
class Undisturbed:
    """A run on two ranks with the steps of the disturbed one, on the two nodes if they can be reached by ssh."""

    folder: Path
    output: str
    num_steps: int
    without_hosts: str | None
    """Reason why it ran on this machine instead; None if it ran on the nodes."""


@pytest.fixture(scope="module")
def undisturbed(
    cluster: Cluster, setup: TinySetup, disturbed: Disturbed, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    folder, num_steps = tmp_path_factory.mktemp("undisturbed"), count_finished_steps(disturbed.run)
    overrides = " ".join(setup.overrides(folder / "run", *CHANGES, f"schedule.num_steps={num_steps}"))
    missing = find_missing_requirement("sshd", "pdsh")
    if missing is not None:
        done = run_command(f"torchrun --nproc_per_node 2 launch_scripts/train_32b.sh {overrides}")
        assert done.returncode == 0, done.stdout
        return Undisturbed(folder / "run", done.stdout, num_steps, missing)
    (folder / "hosts").write_text("# name, and ranks on it\nn1 slots=1\nn2 slots=1\n")
    # The only variable that the launcher passes to the nodes. Without it each rank would start a thread per core of
    # this machine, which is both nodes, and waiting threads spin: steps would take 15 s on busy cores.
    (folder / "environment").write_text("OMP_NUM_THREADS=1\n")
    command = f"DS_ENV_FILE={folder}/environment deepspeed --master_port {free_port()} --hostfile {folder}/hosts"
    command += " launch_scripts/train_32b.sh"
    return Undisturbed(folder / "run", cluster.run_on("n1", f"{command} {overrides}"), num_steps, None)


def test_a_run_goes_on_through_requeues(disturbed: Disturbed, undisturbed: Undisturbed):
    """`unit/test_slurm_scripts.py` tests the end of a job that has finished."""
    cluster, job, text = disturbed.cluster, disturbed.job, disturbed.output
    num_attempts = 3 if IS_SOAK else 2
    assert (cluster.field(job, "Restarts"), cluster.field(job, "ExitCode")) == (str(num_attempts - 1), "85:0"), text
    assert [f"attempt {n}, on n[1-2]" in text for n in range(4)] == [n < num_attempts for n in range(4)]
    for said in ("preflight: 2 nodes; on n1", "all-reduce of 16 MiB over 2 ranks"):
        assert text.count(said) == num_attempts
    assert text.count("back into the queue") == num_attempts - 2 and text.count("ended with exit code 85") == 1
    assert sorted(str(path.relative_to(disturbed.logs)) for path in disturbed.logs.rglob("*.log")) == [
        f"attempt_{attempt}/{node}.log" for attempt in range(num_attempts) for node in ("n1", "n2")
    ]
    for attempt, signal in enumerate(("SIGTERM", *["SIGUSR1"] * (num_attempts - 1))):
        assert f"stopped by {signal}" in (disturbed.logs / f"attempt_{attempt}" / "n1.log").read_text()
    # No step is lost, repeated or different.
    lines, expected = read_metrics(disturbed.run), read_metrics(undisturbed.folder)
    assert [line["step"] for line in lines] == list(range(1, undisturbed.num_steps + 1))
    assert [drop_machine_keys(line) for line in lines] == [drop_machine_keys(line) for line in expected]


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


def test_the_last_task_of_an_array_is_requeued_alone(cluster: Cluster, setup: TinySetup, checkout: Path):
    """The last task has the job id of the array. Each task has a node; task 1 only exists throughout."""
    assert f"\nsbatch {ARRAY}\n" in (REPOSITORY / "docs" / "slurm.md").read_text()
    (checkout / "sweep").mkdir()
    for task in TASKS:
        (checkout / "sweep" / f"{task}.yaml").write_text(f"schedule: {{num_steps: 10000{task}}}\n")
    tiny = [override for override in setup.overrides(checkout) if not override.startswith(("schedule.", "run."))]
    array = cluster.submit(ARRAY.replace("0-2", "-".join(TASKS)), checkout, "methods/sft.yaml", *tiny)
    first, last = (f"{array}_{task}" for task in TASKS)
    run = checkout / "runs" / f"sweep_{TASKS[-1]}"

    def last_is_back() -> bool:
        assert cluster.field(first, "Restarts") == "0", "the whole array was requeued"
        return (cluster.field(last, "Restarts"), cluster.state(last)) == ("1", "RUNNING")

    def first_is_suspended() -> bool:
        cluster.run(f"scontrol suspend {first}", check=False)  # which a job that is just starting may refuse
        return cluster.state(first) == "SUSPENDED"

    try:
        wait_until(first_is_suspended, "suspended task 1")
        wait_until(lambda: count_finished_steps(run) > 0, "step of the last task")
        assert cluster.field(last, "JobId") == array
        cluster.run(f"scancel --signal=USR1 {last}")
        wait_until(last_is_back, "restart of the last task", every_seconds=1)
        assert [cluster.state(task) for task in (first, last)] == ["SUSPENDED", "RUNNING"]
        cluster.run(f"scancel {last}")
        cluster.run(f"scontrol resume {first}")  # else its processes would get the signal half a minute later
    finally:
        cluster.run(f"scancel {array}")
    recipe = load_recipe(run / "recipe.yaml")
    assert (recipe.run.seed, recipe.schedule.num_steps) == (2, 100_002)


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
    last = f"step {undisturbed.num_steps}/{undisturbed.num_steps}  loss "
    assert f"n1: {last}" in undisturbed.output and "n2: step" not in undisturbed.output
    assert "ZeRO-3 over 2 ranks" in undisturbed.output
    assert len(read_metrics(undisturbed.folder)) == undisturbed.num_steps
