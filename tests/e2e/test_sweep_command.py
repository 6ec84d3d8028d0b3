"""`vcore-ds sweep` on real runs of a tiny model: a failing run does not stop the others, an interrupted one resumes,
and the same command finishes both. `slurm/test_sweep.py` adds seeds, kills and a job array, in `make soak`."""

import signal
from pathlib import Path

import pytest

from tests.helpers.commands import read_metrics, run_command
from tests.helpers.jobs import Job
from tests.helpers.setups import TinySetup
from tests.helpers.sweeps import wait_for_step, write_sweep
from vcore_ds.commands.cli import main

pytestmark = pytest.mark.e2e

NUM_STEPS = 30
CHANGES = (f"schedule.num_steps={NUM_STEPS}", "run.num_token_records=0", "run.num_followed_traces=0")


def test_repeating_the_command_finishes_interrupted_and_failed_runs(
    setup: TinySetup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, probes = tmp_path / "here", tmp_path / "here" / "probe.jsonl"
    file = write_sweep(here, setup, [1], CHANGES, vcore=["schedule.num_steps=2", f"data.probe_path={probes}"])
    line, sweep = f"vcore-ds sweep {file}", here / "sweep"

    with Job(line, tmp_path / "interrupted.log") as job:
        wait_for_step(job, sweep / "runs" / "sft" / "seed_1", 3)
        job.launcher.send_signal(signal.SIGINT)
        assert job.wait() == 85, job.output
        assert "vcore-ds: stopped by SIGINT: 0 of 2 runs are done, 1 stopped" in job.output

    failed = run_command(line)  # there are no probes yet
    assert failed.returncode == 1 and "Traceback" not in failed.stdout, failed.stdout
    end = failed.stdout.partition("\nvcore-ds: ")[2].splitlines()
    assert end[0] == "1 of 2 runs are done, 1 failed:"
    assert end[1].startswith(f"  vcore/seed_1: exit code 2: vcore-ds: {probes}: there is no such file")
    assert "Resumed after step " in (sweep / "logs" / "sft" / "seed_1.log").read_text()
    assert [line["step"] for line in read_metrics(sweep / "runs" / "sft" / "seed_1")] == [*range(1, NUM_STEPS + 1)]

    probes.write_bytes(setup.validation.read_bytes())
    finished = run_command(line)
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.startswith("[1/2] sft/seed_1: done already\n")
    assert f"2 of 2 runs are done. Tables and curves: vcore-ds report {sweep}" in finished.stdout
    assert main(["sweep", str(file), "--status"]) == 0
    assert [row.split()[1] for row in capsys.readouterr().out.splitlines()[:-1]] == ["done", "done"]
