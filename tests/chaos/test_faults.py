"""Failures of clusters, inflicted on one run in turn: after each fault the same command resumes from the newest intact
checkpoint, and in the end the run equals, bit for bit, an undisturbed one.

The test with a wandb process and the last one start the command with its launcher; the others fork its ranks.
"""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.chaos.inject import Fault
from tests.chaos.tiny_run import TinyRun, make_setup
from tests.helpers.jobs import AnyJob, ForkedJob
from tests.helpers.setups import sums
from tests.helpers.small_disk import mount_small_disk
from tests.helpers.soak import soak_only

pytestmark = [pytest.mark.e2e, soak_only]

NUM_STEPS = 8
NUM_SEQUENCES = 32  # one epoch
DISK_BYTES = 96 * 2**20
WITH_WANDB = "track.trackers=[wandb]"
OFFLINE = {"WANDB_MODE": "offline"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    folder = tmp_path_factory.mktemp("undisturbed")
    setup = make_setup(folder, sums(range(NUM_SEQUENCES)))
    run = TinyRun(folder / "run", setup, NUM_STEPS, ("batch.sequence_parallel=2",))
    with run.fork() as job:
        assert job.wait() == 0, job.output
    return run


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small disk where this process may mount one, otherwise an ordinary folder."""
    folder = tmp_path_factory.mktemp("disk")
    with mount_small_disk(folder, DISK_BYTES):
        yield folder


@pytest.fixture(scope="module")
def run(undisturbed: TinyRun, disk: Path) -> TinyRun:
    return TinyRun(disk / "run", undisturbed.setup, NUM_STEPS, undisturbed.changes)


def run_until_struck(run: TinyRun, fault: Fault, *, resumed_after: int | None) -> ForkedJob:
    """Run until the fault has ended it."""
    with run.fork(fault) as job:
        check_struck(run, job, fault, resumed_after)
    return job


def check_struck(run: TinyRun, job: AnyJob, fault: Fault, resumed_after: int | None) -> None:
    """Check that the run ends by itself with a message that names the killed rank."""
    assert job.wait() == 1, job.output
    check_resumed(run, job, resumed_after)
    struck = re.search(rf"FAULT: SIGKILL: {fault.place} of rank {fault.rank} \(pid (\d+)\) at: (.*)", job.output)
    assert struck and struck[2] == f"step {fault.step}, {fault.phase}", job.output
    named = re.escape(f"rank {1 - fault.rank}: rank {fault.rank} (host {socket.gethostname()}, pid {struck[1]})")
    # The reported place may be a second old.
    assert re.search(named + r", last seen at: [\w, ]+: its process is dead", job.output), job.output


def check_resumed(run: TinyRun, job: AnyJob, step: int | None) -> None:
    if step is None:
        assert "Resumed" not in job.output and "warning: skipped" not in job.output, job.output
    else:
        assert f"Resumed after step {step} from {run.checkpoint(step)}" in job.output, job.output


def find_rank_file(run: TinyRun, step: int, rank: int) -> Path:
    """Find the file with a rank's tensors in a checkpoint."""
    (path,) = (run.checkpoint(step) / "state").glob(f"__{rank}_*")
    return path


def test_a_rank_killed_in_the_forward_is_named(run: TinyRun):
    run_until_struck(run, Fault("forward", rank=1, step=3, phase="main", call=2), resumed_after=None)
    assert run.marked_steps() == [2] and run.steps_taken() == [1, 2]


def test_a_resumed_run_names_a_rank_killed_in_the_backward(run: TinyRun):
    run_until_struck(run, Fault("backward", rank=0, step=3, phase="main", call=9), resumed_after=2)
    assert run.marked_steps() == [2] and run.steps_taken() == [1, 2]


def test_a_run_continues_without_its_cache_until_a_kill_in_the_optimizer_step(run: TinyRun):
    """Mapped files stay readable after they are deleted, so the ranks continue."""
    fault = Fault("optimizer step", rank=1, step=5, phase="step")
    with run.fork(fault) as job:
        job.wait_for(f"Resumed after step 2 from {run.checkpoint(2)}")
        shutil.rmtree(run.setup.cache)
        assert job.wait() == 1, job.output
    assert "FAULT: SIGKILL: optimizer step of rank 1" in job.output
    assert run.marked_steps() == [2, 4] and run.steps_taken() == [1, 2, 3, 4]


def test_a_checkpoint_with_a_flipped_bit_is_skipped_before_a_kill_while_files_are_written(run: TinyRun):
    path = find_rank_file(run, 4, rank=1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    job = run_until_struck(run, Fault("checkpoint file", rank=1, step=6, phase="checkpoint", call=5), resumed_after=2)
    skipped = f"skipped checkpoint step_00000004: state/{path.name}: its SHA-256 differs from manifest.json"
    assert job.output.count(skipped) == 1, job.output
    partial = run.folder / "checkpoints" / "step_00000006.unfinished"
    assert list((partial / "state").iterdir()) and not (partial / "manifest.json").exists()
    assert run.marked_steps() == [2, 4]  # step 4 was saved again


def test_a_truncated_checkpoint_is_skipped_before_a_kill_before_the_rename_beside_wandb(run: TinyRun):
    """The process that wandb starts for rank 0 ends with it."""
    path = find_rank_file(run, 4, rank=0)
    size = path.stat().st_size
    os.truncate(path, size - 100)
    fault = Fault("before the rename", rank=0, step=6, phase="checkpoint")
    with replace(run, changes=(*run.changes, WITH_WANDB)).start(fault, **OFFLINE) as job:
        check_struck(run, job, fault, resumed_after=2)
    skipped = f"step_00000004: state/{path.name}: found {size - 100:,} bytes; manifest.json says {size:,}"
    assert job.output.count(f"skipped checkpoint {skipped}") == 1, job.output
    assert job.output.count("skipped checkpoint step_00000006.unfinished: not finished") == 1
    assert (run.folder / "checkpoints" / "step_00000006.unfinished" / "manifest.json").is_file()
    assert run.marked_steps() == [2, 4]


def test_a_checkpoint_without_a_file_is_skipped_before_a_kill_after_the_rename(run: TinyRun):
    path = find_rank_file(run, 4, rank=1)
    path.unlink()
    job = run_until_struck(run, Fault("after the rename", rank=0, step=6, phase="checkpoint"), resumed_after=2)
    assert job.output.count(f"skipped checkpoint step_00000004: state/{path.name}: missing") == 1, job.output
    assert (run.checkpoint(6) / "manifest.json").is_file() and run.marked_steps() == [2, 4]


def test_a_full_disk_is_reported_and_earlier_checkpoints_are_kept(run: TinyRun, disk: Path):
    if not os.path.ismount(disk):
        pytest.skip(
            "NOT TESTED: a full disk while a checkpoint is written, as no tmpfs can be mounted here (not root?)"
        )
    filler = disk / "filler"
    fault = Fault("checkpoint file", rank=1, step=6, phase="checkpoint", call=5, filler=str(filler))
    with run.fork(fault) as job:
        assert job.wait() == 1, job.output
    check_resumed(run, job, 4)
    filler.unlink()
    assert job.output.count("skipped checkpoint step_00000006: no COMPLETE: its writing was interrupted") == 1
    message = rf"the checkpoint of step 6 could not be written: .*rank 1 on host {re.escape(socket.gethostname())}: "
    assert re.search(rf"{message}{run.folder}.* No space left on device \(0 bytes free", job.output), job.output
    assert "Earlier checkpoints are untouched" in job.output
    assert run.marked_steps() == [2, 4]


def test_missing_data_is_reported_without_a_traceback(run: TinyRun):
    away = run.setup.train.with_suffix(".away")
    run.setup.train.rename(away)
    with run.fork() as job:
        code = job.wait()
    away.rename(run.setup.train)
    assert code == 2 and "Traceback" not in job.output, job.output
    assert job.output.count(f"vcore-ds: {run.setup.train}: there is no such file") == 1, job.output


def test_a_corrupt_complete_file_and_another_base_model_are_reported_before_a_kill_in_the_last_step(run: TinyRun):
    """The base model of the adapters is changed between two attempts, and restored."""
    (run.checkpoint(4) / "COMPLETE").write_bytes(b"\xff" * 10)
    path = run.setup.untied / "model.safetensors"
    good = path.read_bytes()
    weights = load_file(path)
    weights["model.embed_tokens.weight"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    with run.fork() as job:
        assert job.wait() == 2 and "Traceback" not in job.output, job.output
    path.write_bytes(good)
    refusal = f"found other weights than those that {run.checkpoint(2)} has adapters for"
    assert job.output.count(refusal) == 1, job.output
    assert job.output.count("skipped checkpoint step_00000004: COMPLETE cannot be read") == 1, job.output
    run_until_struck(run, Fault("forward", rank=0, step=NUM_STEPS, phase="main"), resumed_after=2)
    assert run.marked_steps() == [2, 4, 6] and run.steps_taken() == list(range(1, NUM_STEPS))


def test_the_finished_run_equals_the_undisturbed_one(run: TinyRun, undisturbed: TinyRun):
    with replace(run, changes=(*run.changes, WITH_WANDB)).start(**OFFLINE) as job:
        assert job.wait() == 0, job.output
    check_resumed(run, job, 6)
    assert len(run.steps_lost()) > NUM_STEPS
    assert run.differences(undisturbed) == []
