"""`python -m vcore_ds.distributed.torchrun`: exit codes of ranks, signals on their way to them, several nodes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import HANG_SECONDS, REPOSITORY, free_port, is_listened_on, wait_until

pytestmark = pytest.mark.e2e


def start(script: Path, source: str, *options: str) -> subprocess.Popen[str]:
    script.write_text("import os, signal, sys, time\n" + source)
    words = [sys.executable, "-m", "vcore_ds.distributed.torchrun", *options, str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end; returns the output."""
    try:
        return process.communicate(timeout=HANG_SECONDS)[0]
    finally:
        process.kill()  # no rank sleeps longer than this, so they end by themselves


def one_node(num_ranks: int) -> tuple[str, ...]:
    return f"--nproc_per_node={num_ranks}", f"--master_port={free_port()}"


def test_exit_codes_of_ranks_are_passed_on(tmp_path: Path):
    """The next tests cover 85, the exit code of a stopped run."""
    cases = {"sys.exit(2)": 2, "sys.exit(3)": 1, "pass": 0}
    codes = {}
    for source, code in cases.items():
        # The other rank is terminated because of the first; its exit code does not count.
        process = start(
            tmp_path / "rank.py", f"if os.environ['RANK'] == '1': time.sleep(5 * {code})\n{source}", *one_node(2)
        )
        output = finish(process)
        codes[source] = process.returncode
        assert ("exitcode" in output) == (code == 1), output
    assert codes == cases


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
    process = start(tmp_path / "rank.py", source, *one_node(2))
    for rank in (0, 1):
        wait_until((tmp_path / f"rank_{rank}").exists, f"rank {rank}")
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 85 and "rank 0 saved" in output and "rank 1 saved" in output


def test_a_stop_request_before_the_ranks_listen_is_no_failure(tmp_path: Path):
    process = start(tmp_path / "rank.py", f"open('{tmp_path}/started', 'w').close()\ntime.sleep(600)", *one_node(1))
    wait_until((tmp_path / "started").exists, "rank")
    process.send_signal(signal.SIGUSR1)
    output = finish(process)
    assert process.returncode == 85 and output == ""


def test_nodes_that_end_seconds_apart_have_the_same_exit_code(tmp_path: Path):
    """The node that serves the rendezvous ends first."""
    port = free_port()
    several = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}")
    source = "time.sleep(4 * int(os.environ['RANK']))\nsys.exit(85)"
    first = start(tmp_path / "rank.py", source, *several, "--local_addr=127.0.0.1")  # nodes are ranked by address
    wait_until(lambda: is_listened_on(port), f"server on port {port}")
    second = start(tmp_path / "rank.py", source, *several, "--local_addr=127.0.0.2")
    outputs = finish(first), finish(second)
    assert (first.returncode, second.returncode) == (85, 85), outputs
    assert "Traceback" not in "".join(outputs)


def test_a_taken_port_is_one_message(tmp_path: Path):
    with socket.create_server(("", 0)) as other_job:
        port = other_job.getsockname()[1]
        process = start(tmp_path / "rank.py", "", "--nproc_per_node=2", f"--master_port={port}")
        output = finish(process)
    assert process.returncode == 2
    assert output.startswith(f"vcore-ds: MASTER_PORT: found {port}") and output.count("\n") == 1, output
