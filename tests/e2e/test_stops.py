"""Stop requests, and ranks that die or hang: one run, stopped and resumed by one test after the other.

Tests of a launcher start it, most of them with ranks that train nothing; in all others the ranks are forked.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import free_port, read_metrics
from tests.helpers.jobs import AnyJob, ForkedJob, Job, forget_rank
from tests.helpers.setups import TinySetup
from tests.helpers.soak import soak_only
from vcore_ds.commands.cli import launch, main
from vcore_ds.common.errors import EXIT_STOPPED

pytestmark = pytest.mark.e2e

RECIPE = "launch_scripts/recipes/qwen3_32b_math_lora.yaml"
SCRIPT = f"launch_scripts/train_32b.sh --recipe {RECIPE}"
NUM_STEPS = 80
LOST_RANK_SECONDS = 10
"""Long enough that a rank waiting for a core does not count as lost."""


def run_script(arguments: Sequence[str]) -> int:
    """Do what train_32b.sh does on each rank."""
    return launch(RECIPE, arguments)


class SharedRun:
    """A run that all tests of this file share: its folder, command lines and saved steps."""

    def __init__(self, setup: TinySetup, folder: Path):
        self.folder, self._logs = folder / "run", folder
        self._overrides = setup.overrides(
            self.folder,
            "methods/sft.yaml",
            f"schedule.num_steps={NUM_STEPS}",
            "schedule.kind=constant",
            "schedule.warmup_ratio=0",
            f"engine.lost_rank_seconds={LOST_RANK_SECONDS}",
        )

    def start(self, launcher: str) -> Job:
        return Job(f"{launcher} {SCRIPT} {' '.join(self._overrides)}", self._new_log())

    def fork(self, *changes: str, num_ranks: int = 2, rank_0_serves_store: bool = False) -> ForkedJob:
        return ForkedJob(
            run_script,
            [*self._overrides, *changes],
            self._new_log(),
            num_ranks=num_ranks,
            rank_0_serves_store=rank_0_serves_store,
        )

    def _new_log(self) -> Path:
        return self._logs / f"{time.monotonic_ns()}.log"

    def saved_steps(self) -> list[int]:
        complete = (self.folder / "checkpoints").glob("step_*/COMPLETE")
        return sorted(int(path.parent.name.removeprefix("step_")) for path in complete)

    def check_stopped(self, job: AnyJob, reason: str, code: int = EXIT_STOPPED) -> None:
        """Assert that the job ends with a checkpoint of its last step, and says so once."""
        assert job.wait() == code, job.output
        steps = [line["step"] for line in read_metrics(self.folder)]
        assert steps == list(range(1, steps[-1] + 1)) and steps[-1] < NUM_STEPS
        assert self.saved_steps()[-1] == steps[-1]
        message = f"stopped by {reason} after step {steps[-1]} of {NUM_STEPS} and saved in {self.folder}"
        assert job.output.count(message) == 1, job.output
        assert "Traceback" not in job.output


@pytest.fixture(scope="module")
def run(setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    return SharedRun(setup, tmp_path_factory.mktemp("stops"))


def next_step_line(run: SharedRun) -> str:
    """Beginning of the console line of the first step after resuming."""
    return f"step {max([0, *run.saved_steps()]) + 1}/{NUM_STEPS} "


def test_a_stop_file_stops_the_run(run: SharedRun):
    with run.fork() as job:
        job.wait_for(f"step 2/{NUM_STEPS} ")
        (run.folder / "STOP").touch()
        run.check_stopped(job, "the STOP file")
    assert not (run.folder / "STOP").exists()


def test_sigusr1_to_one_rank_stops_the_run(run: SharedRun):
    with run.fork(rank_0_serves_store=True) as job:
        job.wait_for(next_step_line(run))
        job.rank(1).send_signal(signal.SIGUSR1)
        run.check_stopped(job, "SIGUSR1")


def test_sigterm_to_all_ranks_stops_the_run(run: SharedRun):
    """As torchrun passes it on (`test_torchrun.py`)."""
    with run.fork() as job:
        job.wait_for(next_step_line(run))
        for rank in (0, 1):
            job.rank(rank).terminate()
        run.check_stopped(job, "SIGTERM")


RANK = """
import os, sys, time
from vcore_ds.distributed.signals import stop_signals
stop_signals.listen()
with stop_signals.deferred():
    os.write(1, f"rank {os.environ['RANK']} is {os.getpid()}\\n".encode())
    while stop_signals.received is None:
        time.sleep(0.05)
    time.sleep(2 * int(os.environ["RANK"]))
    os.write(1, f"saved after {stop_signals.received}\\n".encode())
    stop_signals.leave()
sys.exit(85)
"""
"""A rank that trains nothing. Below, one that trains runs under a launcher as well."""


def run_deepspeed(arguments: Sequence[str]) -> int:
    """Do what the `deepspeed` command does."""
    from deepspeed.launcher import runner  # only here: the tests are collected without deepspeed

    forget_rank()
    runner.main(arguments)
    return 0


def deepspeed_words(folder: Path, num_ranks: int) -> list[str]:
    (folder / "rank.py").write_text(RANK)
    return [f"--num_accelerators={num_ranks}", f"--master_port={free_port()}", str(folder / "rank.py")]


def find_rank(job: AnyJob, rank: int) -> psutil.Process:
    job.wait_for(f"rank {rank} is ")
    return psutil.Process(int(re.search(rf"rank {rank} is (\d+)\n", job.output)[1]))


def test_deepspeed_waits_for_ranks_that_save_and_passes_their_exit_code_on(tmp_path: Path):
    """One rank gets the signal, and the launcher stops the other one after its end."""
    with ForkedJob(run_deepspeed, deepspeed_words(tmp_path, 2), tmp_path / "log", rank_0_serves_store=True) as job:
        find_rank(job, 1)
        find_rank(job, 0).send_signal(signal.SIGUSR1)
        assert job.wait() == EXIT_STOPPED, job.output
    assert "saved after SIGUSR1" in job.output and "saved after SIGTERM" in job.output


def test_sigterm_to_the_deepspeed_command_stops_the_ranks(tmp_path: Path):
    """The command does not pass the signal on; a rank stops by itself once its launcher is gone."""
    with Job(f"deepspeed {' '.join(deepspeed_words(tmp_path, 1))}", tmp_path / "log") as job:
        find_rank(job, 0)
        job.launcher.terminate()
        assert job.wait() == -signal.SIGTERM, job.output
    assert "saved after the end of its launcher" in job.output


def test_ctrl_c_stops_a_script_without_a_traceback(run: SharedRun):
    """A terminal sends SIGINT to all processes at once."""
    with run.start("bash") as job:
        job.wait_for(next_step_line(run))
        os.killpg(job.launcher.pid, signal.SIGINT)
        job.wait()
        # The launcher's SIGTERM may come first.
        reason = "SIGTERM" if "stopped by SIGTERM" in job.output else "SIGINT"
        run.check_stopped(job, reason, code=128 + signal.SIGINT)
    assert "KeyboardInterrupt" not in job.output


@soak_only
def test_plain_torchrun_loses_the_exit_code_after_sigterm(run: SharedRun):
    """torchrun passes the signal on and waits for the ranks, but does not return their exit code."""
    with run.start("torchrun --nproc_per_node 2") as job:
        job.wait_for(next_step_line(run))
        job.launcher.terminate()
        assert job.wait() == 1
        steps = [line["step"] for line in read_metrics(run.folder)]
        assert run.saved_steps()[-1] == steps[-1]
        assert job.output.count(f"stopped by SIGTERM after step {steps[-1]} of {NUM_STEPS}") == 1


def test_a_killed_rank_ends_the_run_and_is_named(run: SharedRun):
    with run.fork() as job:
        job.wait_for(next_step_line(run))
        victim = job.rank(1)
        victim.kill()
        assert job.wait() != 0
        message = rf"rank 0: {name_pattern(1, victim)}: its process is dead; what follows"
        assert re.search(message, job.output), job.output
        assert "Traceback" in job.output  # of the other rank


def test_a_hanging_rank_that_serves_the_store_ends_the_run_and_is_named(run: SharedRun):
    """Each other rank must notice by itself, since the store does not answer."""
    with run.fork(rank_0_serves_store=True) as job:
        job.wait_for(next_step_line(run))
        victim = job.rank(0)
        victim.suspend()
        # The exit code of rank 1, or of rank 0, which is killed once rank 1 has ended.
        assert job.wait() in (1, 256 - signal.SIGKILL)
        message = rf"rank 1: {name_pattern(0, victim)}: (no sign of life|no answer) for \d+ s.*; the run ends"
        assert re.search(message, job.output), job.output
        assert "most recent call first" in job.output  # the stacks of the rank that waited


def name_pattern(rank: int, process: psutil.Process) -> str:
    """Pattern of the words that name a rank. Its reported position may be a second old, so any matches."""
    return re.escape(f"rank {rank} (host {socket.gethostname()}, pid {process.pid})") + r", last seen at: [\w, ]+"


def test_a_time_limit_stops_the_run(run: SharedRun):
    expected = next_step_line(run)
    with run.fork("run.time_limit_minutes=1e-3", num_ranks=1) as job:  # shorter than the first step on any machine
        run.check_stopped(job, "run.time_limit_minutes")
        assert expected in job.output and next_step_line(run) not in job.output


def test_a_signal_before_the_first_step_saves_nothing(run: SharedRun):
    before = run.saved_steps()
    with run.fork(num_ranks=1) as job:
        job.wait_for("Data: ")
        job.rank(0).send_signal(signal.SIGINT)
        assert job.wait() == EXIT_STOPPED
        assert "rank 0: SIGINT outside of the training steps: there is nothing to save" in job.output
        assert "Traceback" not in job.output and "Resumed" not in job.output
    assert run.saved_steps() == before


def test_the_stopped_run_can_be_finished(run: SharedRun):
    """It may have fewer steps than it was started with, since the learning rate is constant."""
    num_steps = run.saved_steps()[-1] + 2
    with run.fork(f"schedule.num_steps={num_steps}") as job:
        assert job.wait() == 0, job.output
    assert [line["step"] for line in read_metrics(run.folder)] == list(range(1, num_steps + 1))
    assert (run.folder / "adapter" / "adapter_model.safetensors").is_file()


def test_a_signal_stops_scoring_without_output(run: SharedRun, setup: TinySetup):
    output = run.folder.with_name("scores")
    words = ["score", str(run.folder), f"data.probe_path={setup.validation}", "--output", str(output)]
    with ForkedJob(main, words, output.with_name("scores.log"), num_ranks=1) as job:
        job.wait_for("Trusted set trusted: ")
        job.rank(0).terminate()
        assert job.wait() == EXIT_STOPPED, job.output
        assert "warning: the run was trained on traces selected" not in job.output  # it was not
        assert "Traceback" not in job.output and not output.exists()


def test_a_hanging_rank_ends_scoring_after_the_seconds_of_the_recipe(run: SharedRun, setup: TinySetup):
    output = run.folder.with_name("scores")
    words = ["score", str(run.folder), f"data.probe_path={setup.validation}", "--output", str(output)]
    with ForkedJob(main, words, output.with_name("hanging.log"), num_ranks=2) as job:
        job.wait_for("Gradient of trusted")
        victim = job.rank(1)
        victim.suspend()
        assert job.wait() == 1, job.output
    message = rf"rank 0: {name_pattern(1, victim)}: no sign of life for (\d+) s"
    assert LOST_RANK_SECONDS <= int(re.search(message, job.output)[1]) < 600, job.output
