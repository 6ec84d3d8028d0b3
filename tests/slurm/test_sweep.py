"""`vcore-ds sweep` on real runs: 2 methods x 2 seeds of a tiny model, killed, failing, interrupted and resumed on this
machine, end with the same table as a job array."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import count_finished_steps, read_metrics, run_command, wait_until
from tests.helpers.jobs import Job
from tests.helpers.setups import TinySetup
from tests.helpers.soak import soak_only
from tests.helpers.sweeps import report_losses, wait_for_step, write_sweep
from tests.slurm.cluster import Cluster
from vcore_ds.commands.sweep import begin_sweep
from vcore_ds.commands.sweep.folder import State, load_sweep, read_sweep_folder

pytestmark = [pytest.mark.dist, soak_only]

NUM_STEPS = 60
CHANGES = (f"schedule.num_steps={NUM_STEPS}", "checkpoint.every_steps=25", "run.num_token_records=0")
SEEDS = (1, 2)
RUNS = [f"{cell}/seed_{seed}" for cell in ("sft", "vcore") for seed in SEEDS]


@pytest.fixture(scope="module")
def disturbed(setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep on this machine that took five commands."""
    folder = tmp_path_factory.mktemp("sweeps")
    here, probes = folder / "here", folder / "here" / "probe.jsonl"
    # Probes come from a file that is not there yet.
    file = write_sweep(here, setup, SEEDS, CHANGES, vcore=[f"data.probe_path={probes}"])
    line, sweep = f"vcore-ds sweep {file}", here / "sweep"

    # Killed with all its processes in the middle of the second run.
    with Job(line, folder / "killed.log") as job:
        wait_for_step(job, sweep / "runs" / RUNS[1], 27)
    assert read_states(line) == ["done", "stopped", "waiting", "waiting"]
    assert not (sweep / "runs" / RUNS[1] / "adapter").exists()

    # Two runs fail one after the other without stopping the others.
    failed = run_command(line)
    assert failed.returncode == 1 and "Traceback" not in failed.stdout, failed.stdout
    assert failed.stdout.startswith(f"[1/4] {RUNS[0]}: done already\n")
    end = failed.stdout.partition("\nvcore-ds: ")[2].splitlines()
    assert end[0] == "2 of 4 runs are done, 2 failed:"
    for run, text in zip(RUNS[2:], end[1:3], strict=True):
        assert text.startswith(f"  {run}: exit code 2: vcore-ds: {probes}: there is no such file")
    assert "Resumed after step " in (sweep / "logs" / f"{RUNS[1]}.log").read_text()
    assert read_states(line) == ["done"] * 2 + ["failed"] * 2

    # Ctrl-C in the middle of a run.
    probes.write_bytes(setup.validation.read_bytes())
    with Job(line, folder / "interrupted.log") as job:
        wait_for_step(job, sweep / "runs" / RUNS[2], 5)
        assert read_sweep_folder(sweep).state(RUNS[2]) == State.RUNNING
        job.launcher.send_signal(signal.SIGINT)
        assert job.wait() == 85, job.output
        assert "vcore-ds: stopped by SIGINT: 2 of 4 runs are done, 1 failed, 1 stopped. The same command" in job.output
    assert read_states(line)[2:] == ["stopped", "failed"]

    finished = run_command(line)
    assert finished.returncode == 0, finished.stdout
    assert f"4 of 4 runs are done. Tables and curves: vcore-ds report {sweep}" in finished.stdout
    assert "Resumed after step " in (sweep / "logs" / f"{RUNS[2]}.log").read_text()
    again = run_command(line)
    assert again.returncode == 0 and again.stdout.count(": done already") == 4
    return here


def test_a_disturbed_sweep_finishes_all_runs(disturbed: Path) -> None:
    sweep, file = disturbed / "sweep", disturbed / "sweep_file.yaml"
    table = report_losses(sweep)
    assert [row[:3] for row in table[1:]] == [["sft", "2", ""], ["vcore", "2", "sft"]]
    assert len(table[2]) > 3 and all(table[2][3:])
    for run in RUNS:
        assert [step["step"] for step in read_metrics(sweep / "runs" / run)] == list(range(1, NUM_STEPS + 1))

    # The runs do not count for another recipe.
    text = file.read_text()
    try:
        file.write_text(text.replace(CHANGES[0], f"schedule.num_steps={NUM_STEPS + 1}"))
        mixed = run_command(f"vcore-ds sweep {file}")
    finally:
        file.write_text(text)
    assert mixed.returncode == 2 and f"schedule.num_steps: {NUM_STEPS} there, {NUM_STEPS + 1} here" in mixed.stdout


def test_a_job_array_gives_the_same_table(
    cluster: Cluster, setup: TinySetup, checkout: Path, disturbed: Path, tmp_path: Path
) -> None:
    """Each unfinished run has a node. The last task is stopped and requeued alone."""
    file = write_sweep(
        tmp_path / "there", setup, SEEDS, CHANGES, vcore=[f"data.probe_path={disturbed / 'probe.jsonl'}"]
    )
    folder = tmp_path / "there" / "sweep"
    begin_sweep(load_sweep(file, None))
    for run in RUNS[::2]:
        shutil.copytree(disturbed / "sweep" / "runs" / run, folder / "runs" / run)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def sweep(option: str) -> str:
        return cluster.run(f"vcore-ds sweep {file} {option}", checkout, environment)

    options = "--slurm --sbatch=--gpus-per-node=0"
    array = re.fullmatch(r"job array (\d+): 2 of 4 runs\. .*", sweep(options)).group(1)
    status = sweep("--status")
    assert "2 done" in status and ("2 queued" in status or "running" in status)
    assert sweep(options).startswith("nothing to submit: all 4 runs are done, running or queued")
    last, tasks = folder / "runs" / RUNS[-1], [f"{array}_{task}" for task in (1, 3)]
    try:
        wait_until(lambda: count_finished_steps(last) >= 5, "step 5 of the last task", 900)
        assert cluster.field(tasks[-1], "JobId") == array
        cluster.run(f"scancel --signal=USR1 {tasks[-1]}")
        # A run is done once its result exists, shortly before its job ends.
        wait_until(lambda: {cluster.state(task) for task in tasks} == {"COMPLETED"}, "end of all tasks")
        assert "4 done" in sweep("--status")
    finally:
        cluster.run(f"scancel {array}", check=False)
    assert [cluster.field(task, "Restarts") for task in tasks] == ["0", "1"]
    log = (folder / "logs" / f"{RUNS[-1]}.log").read_text()
    assert log.count("== attempt of") == 2 and "back into the queue" in log and "ended with exit code 0" in log
    assert report_losses(folder) == report_losses(disturbed / "sweep")


def read_states(line: str) -> list[str]:
    """States of the runs, by --status."""
    shown = run_command(f"{line} --status")
    assert shown.returncode == 0, shown.stdout
    return [row.split()[1] for row in shown.stdout.splitlines()[:-1]]
