"""`vcore_ds.distributed.torchrun`: exit codes of ranks, signals on their way to them, several nodes. The launcher is
forked, since its imports take most of its time; `test_stops.py` and `test_launch.py` type it."""

import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.commands import free_port, is_listened_on, run_command, wait_until
from tests.helpers.jobs import ForkedJob

pytestmark = pytest.mark.e2e


def run_launcher(arguments: Sequence[str]) -> int:
    """Do what `python -m vcore_ds.distributed.torchrun` does, without the variables of a rank."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    sys.argv = ["torchrun", *arguments]
    runpy.run_module("vcore_ds.distributed.torchrun", run_name="__main__")
    raise AssertionError("the module has not exited")


def start(folder: Path, source: str, *options: str) -> ForkedJob:
    """Start a launcher of ranks that run `source`."""
    script = folder / "rank.py"
    script.write_text("import os, signal, sys, time\n" + source)
    log = folder / f"log_{len(list(folder.iterdir()))}"
    return ForkedJob(run_launcher, [*options, str(script)], log, rank_0_serves_store=True)


def finish(job: ForkedJob) -> tuple[int, str]:
    """Wait for the end of a launcher; returns exit code and output."""
    with job:
        return job.wait(), job.output


def one_node(num_ranks: int) -> tuple[str, ...]:
    return f"--nproc_per_node={num_ranks}", f"--master_port={free_port()}"


def test_exit_codes_of_ranks_are_passed_on(tmp_path: Path):
    """The next tests cover 85, the exit code of a stopped run."""
    for source, expected in {"sys.exit(2)": 2, "sys.exit(3)": 1, "pass": 0}.items():
        # The other rank is terminated because of the first; its exit code does not count.
        wait = f"if os.environ['RANK'] == '1': time.sleep(5 * {expected})\n"
        code, output = finish(start(tmp_path, wait + source, *one_node(2)))
        assert code == expected and ("exitcode" in output) == (expected == 1), output


def test_a_stop_request_reaches_the_ranks_and_waits_for_them(tmp_path: Path):
    source = f"""
mark = "{tmp_path}/rank_" + os.environ["RANK"]
def stop(number, _):
    time.sleep(3)  # a step and a save
    os.write(1, f"rank {{os.environ['RANK']}} saved\\n".encode())  # in one piece, with two ranks on one pipe
    sys.exit(85)
signal.signal(signal.SIGTERM, stop)
open(mark, "w").close()
time.sleep(600)
"""
    job = start(tmp_path, source, *one_node(2))
    for rank in (0, 1):
        wait_until((tmp_path / f"rank_{rank}").exists, f"rank {rank}")
    job.rank(0).terminate()
    code, output = finish(job)
    assert code == 85 and "rank 0 saved" in output and "rank 1 saved" in output


def test_a_stop_request_before_the_ranks_listen_is_no_failure(tmp_path: Path):
    job = start(tmp_path, f"open('{tmp_path}/started', 'w').close()\ntime.sleep(600)", *one_node(1))
    wait_until((tmp_path / "started").exists, "rank")
    job.rank(0).send_signal(signal.SIGUSR1)
    assert finish(job) == (85, "")


def two_nodes(port: int) -> tuple[str, ...]:
    return "--nnodes=2", "--nproc_per_node=1", "--master-addr=127.0.0.1", f"--master-port={port}"


def test_a_stop_request_before_the_other_nodes_come_is_no_failure(tmp_path: Path):
    """The launcher waits for them in C."""
    port = free_port()
    job = start(tmp_path, "", *two_nodes(port), "--node-rank=0")
    wait_until(lambda: is_listened_on(port), f"server on port {port}")
    job.rank(0).send_signal(signal.SIGUSR1)
    assert finish(job) == (85, "")


def test_nodes_that_end_seconds_apart_have_the_same_exit_code(tmp_path: Path):
    """The node that serves the rendezvous ends first."""
    port = free_port()
    several = two_nodes(port)
    source = "time.sleep(4 * int(os.environ['RANK']))\nsys.exit(85)"
    first = start(tmp_path, source, *several, "--node-rank=0")
    second = start(tmp_path, source, *several, "--node-rank=1")
    ended = finish(first), finish(second)
    assert [code for code, _ in ended] == [85, 85], ended
    assert not any("Traceback" in output for _, output in ended)


def test_a_taken_port_is_one_message(tmp_path: Path):
    """Typed, since torch reads its log level when it is imported."""
    (tmp_path / "rank.py").touch()
    with socket.create_server(("", 0)) as other_job:
        port = other_job.getsockname()[1]
        options = f"--nproc_per_node=2 --master_port={port}"
        done = run_command(f"python -m vcore_ds.distributed.torchrun {options} {tmp_path}/rank.py")
    assert done.returncode == 2
    assert done.stdout.startswith(f"vcore-ds: MASTER_PORT: found {port}") and done.stdout.count("\n") == 1, done.stdout
