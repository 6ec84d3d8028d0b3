"""Two ranks, one of which fails in a way that a launcher does not notice, or notices later than the other rank."""

import os
import pickle
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.commands import HANG_SECONDS
from tests.helpers.jobs import ForkedJob
from vcore_ds.common.errors import UserError
from vcore_ds.distributed import layout, position, watchdog
from vcore_ds.distributed.position import mark
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.distributed.signals import stop_signals
from vcore_ds.distributed.watchdog import Identity, is_alive

pytestmark = pytest.mark.dist

SAID = {
    # Both ranks end within a beat of each other: the stuck one first, where rank 0 notices it by its collective.
    "stuck": r"rank 0: PLACE: stuck there for \d+ s; others wait at: step 3, main; (the run ends|what follows)",
    "error": r"rank 0: PLACE: ValueError: no such token; what follows is how this rank noticed",
    "mistake elsewhere": r"rank 0: PLACE: no such file; the run ends",
    "killed elsewhere": r"rank 0: PLACE: no sign of life for \d+ s; what follows is how this rank noticed",
    "stopped elsewhere": r"rank 0: PLACE: no sign of life for \d+ s; the run ends",
    "stopped elsewhere in its first collective": r"rank 0: PLACE: no sign of life for \d+ s; the run ends",
    "all in one phase": r"rank 1: rank 0 .*, last seen at: step 3, main: no rank has gone on for \d+ s; the run ends",
}
SAID_WITHOUT_STEPS = {
    "error without steps": r"rank 0: PLACE: ValueError: no such token; the launcher ended this rank \(SIGTERM\)",
    "stopped elsewhere without steps": r"rank 0: PLACE: no sign of life for \d+ s; the run ends",
}
"""Outside of training: while a run starts, or in commands without steps."""
NOTICED_BY_THE_COLLECTIVE = ("error", "killed elsewhere")
"""The error of rank 0's collective ends it, however long rank 1 takes to exit."""
STOPPED = tuple(case for case in SAID | SAID_WITHOUT_STEPS if case.startswith("stopped"))
NOTICED_BY_SILENCE = ("killed elsewhere", *STOPPED)

SAME_MISTAKE = "same mistake on both ranks"
NO_FAILURE = "no failure"

STALL_SECONDS, SUSPENDED_SECONDS = 5.0, 7.0


def run_case(arguments: Sequence[str]) -> int:
    (case,) = arguments
    if "elsewhere" in case:
        name = f"node{os.environ['RANK']}"
        socket.gethostname = lambda: name  # so that no rank looks for the other's process
    if case in NOTICED_BY_THE_COLLECTIVE or case == "error without steps":
        watchdog.GRACE_SECONDS = watchdog.SEARCH_SECONDS = HANG_SECONDS
    watchdog.LEAVING_SECONDS = HANG_SECONDS
    position.LEAST_STALL_SECONDS = STALL_SECONDS if case in ("all in one phase", NO_FAILURE) else HANG_SECONDS
    stop_signals.listen()
    start_process_group(timeout_minutes=2)
    rank, first_process = int(os.environ["RANK"]), layout.gather_objects("job", Identity.current())[0].process()
    if "first collective" in case and rank == 1:
        torch.distributed.all_reduce = torch.distributed.all_gather_object = lambda *_, **__: stop_and_exit()
    # 0.2 minutes: a rank is stuck after 10.8 s, long before the collectives of this group give up.
    timeout_minutes = 0.2 if case == "stuck" else HANG_SECONDS / 60
    try:
        in_steps = nullcontext() if case in SAID_WITHOUT_STEPS else stop_signals.deferred()
        with watchdog.watching(HANG_SECONDS, timeout_minutes), in_steps:
            fail(case, rank)
    except UserError as error:
        print(error, file=sys.stderr)
        while rank == 1 and first_process is not None and is_alive(first_process):
            time.sleep(0.1)  # the launcher of another node does not end rank 0 because this one has left
        sys.exit(error.EXIT_CODE)
    assert case == NO_FAILURE
    ended = f"rank {rank}: group {torch.distributed.is_initialized()}, first {layout.is_first()}\n"
    os.write(sys.stdout.fileno(), ended.encode())  # one write: print sends its newline by itself
    return 0


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_and_exit() -> None:
    stop_this_process()
    os._exit(1)


def mark_phase_three_times() -> None:
    for _ in range(3):
        mark("main")
        time.sleep(0.1)


class SlowStore:
    """A store read by a rank that waits a second for a core between two requests, as under load."""

    def __init__(self, store: Any):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        time.sleep(1.0)
        return self._store.multi_get(keys)


def fail(case: str, rank: int) -> None:
    mark("reading", step=None if case in SAID_WITHOUT_STEPS else 3)
    if case == NO_FAILURE:
        mark_phase_three_times()
        stop_this_process()  # and all others, as a cluster suspends a job
        time.sleep(watchdog.GRACE_SECONDS + 3 * watchdog.BEAT_SECONDS)  # a verdict would end this process
        return
    rank_watchdog = stop_signals.before_exit.__self__
    if case == SAME_MISTAKE:
        if rank == 1:
            rank_watchdog._store = SlowStore(rank_watchdog._store)
        time.sleep(4 * rank)  # it is busy elsewhere when it is told
        raise UserError("no such file")
    while rank == 0 and rank_watchdog._positions[1].phase != "reading":
        time.sleep(0.1)
    if case in NOTICED_BY_SILENCE:
        rank_watchdog._patience_seconds = 5
    num_exchanges = rank_watchdog._num_exchanges
    while rank == 1 and rank_watchdog._num_exchanges < num_exchanges + 2:
        time.sleep(0.1)  # it must not stop in the collective before it has sent its place
    layout.sum_over("job", [0.0])  # rank 0 has seen the place
    if case == "all in one phase":
        mark_phase_three_times()
        time.sleep(600 * rank)
    if rank == 1:
        if case == "stuck":
            time.sleep(600)
        elif case.startswith("error"):
            raise ValueError("no such token")
        elif case == "mistake elsewhere":
            raise UserError("no such file")
        else:
            os.kill(os.getpid(), signal.SIGKILL) if case == "killed elsewhere" else stop_this_process()
    if case == "error without steps":
        time.sleep(HANG_SECONDS)  # it reads a file while the launcher ends it because of rank 1
    mark("main")
    layout.sum_over("shards", [1.0])


@dataclass(frozen=True)
class Ended:
    code: int
    output: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Run all cases at the same time, since each waits for most of it."""
    folder: Path = tmp_path_factory.mktemp("watchdog")

    def start(case: str, *, rank_0_serves_store: bool = False) -> ForkedJob:
        log, traces = folder / f"{case}.log", {"TORCH_FR_DUMP_TEMP_FILE": str(folder / f"{case} ")}
        return ForkedJob(run_case, [case], log, num_ranks=2, rank_0_serves_store=rank_0_serves_store, **traces)

    with ExitStack() as stack:
        jobs = {case: stack.enter_context(start(case)) for case in SAID | SAID_WITHOUT_STEPS}
        for case in (SAME_MISTAKE, NO_FAILURE):
            jobs[case] = stack.enter_context(start(case, rank_0_serves_store=True))
        for stopped in (jobs[case] for case in STOPPED):
            stopped.wait_for("; the run ends")
            # No rank ends it from another host, and its node's launcher would wait half a minute.
            stopped.rank(1).resume()
        suspended = [jobs[NO_FAILURE].rank(rank) for rank in range(2)]
        while any(process.status() != psutil.STATUS_STOPPED for process in suspended):
            time.sleep(0.1)
        time.sleep(SUSPENDED_SECONDS)
        for process in suspended:
            process.resume()
        return {case: Ended(job.wait(), job.output) for case, job in jobs.items()}


@pytest.mark.parametrize("case", SAID | SAID_WITHOUT_STEPS)
def test_the_failing_rank_is_named_with_its_place(ended: dict[str, Ended], case: str):
    code, output = ended[case].code, ended[case].output
    assert code == (2 if case == "mistake elsewhere" else 1), output
    host = "node1" if "elsewhere" in case else socket.gethostname()
    step = "" if case in SAID_WITHOUT_STEPS else "step 3, "
    place = rf"rank 1 \(host {host}, pid \d+\), last seen at: {step}reading"
    assert re.search((SAID | SAID_WITHOUT_STEPS)[case].replace("PLACE", place), output), output
    assert "nothing to save" not in output
    if case == "stuck":  # both show where they are, the stuck one too
        assert output.count("most recent call first") >= 4
        assert re.search(r"in sum_over$", output, re.MULTILINE)
        assert re.search(r"test_watchdog.py\", line \d+ in fail", output)
    for path in re.findall("its last collectives, for torchfrtrace: (.*)", output):
        recorded = [entry["profiling_name"] for entry in pickle.loads(Path(path).read_bytes())["entries"]]
        assert "gloo:all_reduce" in recorded
    assert case != "all in one phase" or "torchfrtrace" in output


def test_ranks_with_the_same_error_seconds_apart_exit_in_order(ended: dict[str, Ended]):
    """Rank 0 serves the store: when it left first, torch printed C++ frames on ranks that still asked it."""
    code, output = ended[SAME_MISTAKE].code, ended[SAME_MISTAKE].output
    assert code == 2 and "no such file" in output
    assert not re.search("frame #|TCPStore", output), output


def test_the_process_group_is_destroyed_before_the_ranks_exit(ended: dict[str, Ended]):
    """NCCL may wait for all ranks when it is destroyed, and PyTorch warns of a process that has not done so."""
    code, output = ended[NO_FAILURE].code, ended[NO_FAILURE].output
    assert code == 0
    assert sorted(output.splitlines()) == ["rank 0: group False, first True", "rank 1: group False, first False"]
