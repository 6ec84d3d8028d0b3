"""Two ranks, one of which fails in a way that the launcher does not notice, or not first."""

import re
import socket
from pathlib import Path

import pytest

from tests.helpers.jobs import Job

pytestmark = pytest.mark.dist

PROGRAM = """
import os, signal, socket, sys, time
from vcore_ds.distributed import layout, watchdog
from vcore_ds.distributed.positions import mark
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.distributed.signals import stop_signals
from vcore_ds.errors import UserError

case, rank = sys.argv[1], int(os.environ["RANK"])
if case.endswith("elsewhere"):
    socket.gethostname = lambda: f"node{rank}"  # then nobody looks at the other's process
stop_signals.listen()
start_process_group(timeout_minutes=2)

def main():
    mark("reading", step=3)
    if rank == 1:
        time.sleep(4)  # until rank 0 has seen the place
        if case == "stuck":
            time.sleep(600)
        elif case == "error":
            raise ValueError("no such token")
        elif case == "mistake elsewhere":
            raise UserError("no such file")
        else:
            os.kill(os.getpid(), signal.SIGKILL if case == "killed elsewhere" else signal.SIGSTOP)
    mark("main")
    layout.sum_over("shards", [1.0])

# 0.2 minutes: a rank is stuck after 10.8 s, long before the collectives of this group give up.
try:
    with watchdog.watching(lost_rank_seconds=5, timeout_minutes=0.2), stop_signals.held_back():
        main()
except UserError as error:
    time.sleep(15)  # the launcher of another node does not end rank 0 because this one has left
    sys.exit(error.EXIT_CODE)
"""

SAID = {
    # Both ranks end within a beat of each other: the stuck one first, where rank 0 notices it by its collective.
    "stuck": r"rank 0: PLACE: stuck there for \d+ s; others wait at: step 3, main; (the run ends|what follows)",
    "error": r"rank 0: PLACE: ValueError: no such token; what follows is how this rank noticed",
    "mistake elsewhere": r"rank 0: PLACE: no such file; the run ends",
    "killed elsewhere": r"rank 0: PLACE: no sign of life for \d+ s; what follows is how this rank noticed",
    "stopped elsewhere": r"rank 0: PLACE: no sign of life for \d+ s; the run ends",
}


@pytest.mark.parametrize("case", SAID)
def test_rank_is_named(case: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    line = f"python -m vcore_ds.distributed.torchrun --nproc_per_node 2 {program} '{case}'"
    with Job(line, tmp_path / "log", PYTHONPATH=str(Path.cwd())) as job:
        if case == "stopped elsewhere":
            job.wait_for("; the run ends")
            job.rank(1).resume()  # nobody ends it from another host; the launcher of its own waits half a minute
        assert job.wait() == (2 if case == "mistake elsewhere" else 1), job.output
    host = "node1" if "elsewhere" in case else socket.gethostname()
    place = rf"rank 1 \(host {host}, pid \d+\), last seen at: step 3, reading"
    assert re.search(SAID[case].replace("PLACE", place), job.output), job.output
    if case == "stuck":  # both show where they are, the stuck one too
        assert job.output.count("most recent call first") >= 4
        assert re.search(r"in sum_over$", job.output, re.MULTILINE) and re.search(
            r"program.py\", line \d+ in <module>", job.output
        )
