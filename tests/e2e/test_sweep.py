"""`vcore-ds sweep` on real runs: 2 methods x 3 seeds of a tiny model, killed, failing, interrupted and taken up again,
end with the table of a sweep that nothing has disturbed."""

import signal
import time
from pathlib import Path

import pytest

from tests.helpers.commands import HANG_SECONDS, read_metrics, run_command
from tests.helpers.jobs import Job
from tests.helpers.setups import TinySetup
from tests.helpers.sweeps import losses_table, write_sweep
from vcore_ds.files.sweep_folder import State, read_sweep_folder

pytestmark = pytest.mark.e2e

NUM_STEPS = 40
CHANGES = (f"schedule.num_steps={NUM_STEPS}", "checkpoint.every_steps=10", "run.num_token_records=2")


def test_a_disturbed_sweep_ends_with_the_undisturbed_table(setup: TinySetup, tmp_path: Path) -> None:
    disturbed, straight = tmp_path / "disturbed", tmp_path / "straight"
    # Probes come from a file that is not there yet.
    file = write_sweep(disturbed, setup, CHANGES, vcore=[f"data.probe_path={disturbed / 'probe.jsonl'}"])
    line, sweep = f"vcore-ds sweep {file}", disturbed / "sweep"
    runs = [f"{cell}/seed_{seed}" for cell in ("sft", "vcore") for seed in (1, 2, 3)]

    # Killed with all its processes in the middle of the second run.
    with Job(line, tmp_path / "killed.log") as job:
        wait_for_step(job, sweep / "runs" / runs[1], 12)
    assert states(line) == ["done", "stopped", *["waiting"] * 4]
    assert not (sweep / "runs" / runs[1] / "adapter").exists()

    # Three cells fail one after another, and the others are not held up.
    failed = run_command(line)
    assert failed.returncode == 1 and "Traceback" not in failed.stdout, failed.stdout
    assert failed.stdout.startswith(f"[1/6] {runs[0]}: done already\n")
    end = failed.stdout.partition("\nvcore-ds: ")[2].splitlines()
    assert end[0] == "3 of 6 runs are done, 3 failed:"
    for run, text in zip(runs[3:], end[1:4], strict=True):
        assert text.startswith(f"  {run}: exit code 2: vcore-ds: {disturbed}/probe.jsonl: there is no such file")
    assert "Resumed after step " in (sweep / "logs" / f"{runs[1]}.log").read_text()
    assert states(line) == ["done"] * 3 + ["failed"] * 3

    # Ctrl-C in the middle of a run.
    (disturbed / "probe.jsonl").write_bytes(setup.validation.read_bytes())
    with Job(line, tmp_path / "interrupted.log") as job:
        wait_for_step(job, sweep / "runs" / runs[3], 12)
        assert read_sweep_folder(sweep).state(runs[3]) == State.RUNNING
        job.launcher.send_signal(signal.SIGINT)
        assert job.wait() == 85, job.output
        assert "vcore-ds: stopped by SIGINT: 3 of 6 runs are done, 2 failed, 1 stopped. The same command" in job.output
    assert states(line)[3:] == ["stopped", "failed", "failed"]

    finished = run_command(line)
    assert finished.returncode == 0, finished.stdout
    assert f"6 of 6 runs are done. Tables and curves: vcore-ds report {sweep}" in finished.stdout
    again = run_command(line)
    assert again.returncode == 0 and again.stdout.count(": done already") == 6

    other = write_sweep(straight, setup, CHANGES, vcore=[f"data.probe_path={disturbed / 'probe.jsonl'}"])
    assert run_command(f"vcore-ds sweep {other}").returncode == 0
    table = losses_table(sweep)
    assert table == losses_table(straight / "sweep")
    assert [row[:3] for row in table[1:]] == [["sft", "3", ""], ["vcore", "3", "sft"]]
    assert all(" ± " in cell for cell in table[2][3:])
    for run in runs:
        assert [step["step"] for step in read_metrics(sweep / "runs" / run)] == list(range(1, NUM_STEPS + 1))

    # Nothing of this is another recipe's.
    file.write_text(file.read_text().replace(CHANGES[0], "schedule.num_steps=41"))
    mixed = run_command(line)
    assert mixed.returncode == 2 and f"sft/seed_1: schedule.num_steps: {NUM_STEPS} there, 41 here" in mixed.stdout


def wait_for_step(job: Job, run: Path, step: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < step:
        assert job.launcher.poll() is None and time.monotonic() < deadline, job.output
        time.sleep(0.02)


def states(line: str) -> list[str]:
    """The second column of --status."""
    shown = run_command(f"{line} --status")
    assert shown.returncode == 0, shown.stdout
    return [row.split()[1] for row in shown.stdout.splitlines()[:-1]]
