"""`vcore-ds sweep` on real runs: 2 methods x 2 seeds of a tiny model, killed and resumed on this machine, end with the
same table as a job array. `e2e/test_sweep_command.py` interrupts runs and lets them fail."""

import os
import re
import shutil
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
    """The folder of a sweep on this machine that was killed with all its processes in the middle of the second run, and
    then resumed."""
    here = tmp_path_factory.mktemp("sweeps") / "here"
    file = write_sweep(here, setup, SEEDS, CHANGES)
    line, sweep = f"vcore-ds sweep {file}", here / "sweep"
    with Job(line, here.parent / "killed.log") as job:
        wait_for_step(job, sweep / "runs" / RUNS[1], 27)
        assert read_sweep_folder(sweep).state(RUNS[1]) == State.RUNNING
    assert read_states(line) == ["done", "stopped", "waiting", "waiting"]
    assert not (sweep / "runs" / RUNS[1] / "adapter").exists()
    finished = run_command(line)
    assert finished.returncode == 0 and finished.stdout.startswith(f"[1/4] {RUNS[0]}: done already\n"), finished.stdout
    assert "Resumed after step " in (sweep / "logs" / f"{RUNS[1]}.log").read_text()
    again = run_command(line)
    assert again.returncode == 0 and again.stdout.count(": done already") == 4
    return here


def test_a_disturbed_sweep_finishes_all_runs(disturbed: Path) -> None:
    table = report_losses(disturbed / "sweep")
    assert [row[:2] for row in table[1:]] == [["sft", "2"], ["vcore", "2"]]
    assert len(table[2]) > 3 and all(table[2][2:])
    for run in RUNS:
        steps = [step["step"] for step in read_metrics(disturbed / "sweep" / "runs" / run)]
        assert steps == list(range(1, NUM_STEPS + 1))


def test_a_job_array_gives_the_same_table(cluster: Cluster, setup: TinySetup, disturbed: Path, tmp_path: Path) -> None:
    """Each unfinished run has a node. The last task is stopped and requeued alone. The folder from which the user
    submits is none of the repository's."""
    file = write_sweep(tmp_path / "there", setup, SEEDS, CHANGES)
    folder = tmp_path / "there" / "sweep"
    begin_sweep(load_sweep(file, None))
    for run in RUNS[::2]:
        shutil.copytree(disturbed / "sweep" / "runs" / run, folder / "runs" / run)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def sweep(option: str) -> str:
        return cluster.run(f"vcore-ds sweep {file} {option}", tmp_path, environment)

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
