"""Handling of stop requests, each case in a separate process."""

import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from vcore_ds.commands import cli
from vcore_ds.common.errors import EXIT_STOPPED

START = """
    import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
    from vcore_ds.distributed import signals
    from vcore_ds.distributed.signals import stop_signals

    signals.SAME_REQUEST_SECONDS = 0.4

    def after(seconds, number):
        threading.Timer(seconds, os.kill, (os.getpid(), number)).start()

    def wait_until_noted():
        while stop_signals.received is None:
            time.sleep(0.01)

    def once_noted(number):
        "Sends a second signal, when it cannot be an echo of the first any more."
        wait_until_noted()
        time.sleep(2 * signals.SAME_REQUEST_SECONDS)
        os.kill(os.getpid(), number)

    def block():
        "The main thread as in a collective that never returns: in C, where no Python signal handler can run."
        lock = threading.Lock()
        lock.acquire()
        ctypes.CDLL(None).pause.restype = None
        while True:
            ctypes.CDLL(None).sleep(60)
"""


def run(code: str, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(START) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_outside_of_training_steps_ends_the_process_at_once(number: str):
    done = run(f"stop_signals.listen(); after(0.2, signal.{number}); block()")
    assert done.returncode == EXIT_STOPPED
    assert done.stderr == f"vcore-ds: rank 0: {number} outside of the training steps: there is nothing to save\n"


def test_a_deferred_signal_is_noted_and_its_echoes_are_no_second_signal():
    done = run("""
        signals.SAME_REQUEST_SECONDS = 600.0
        requests, request = [], stop_signals.request
        stop_signals.request = lambda name: (request(name), requests.append(name))
        stop_signals.listen()
        with stop_signals.deferred():
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
                num_before = len(requests)
                os.kill(os.getpid(), number)
                while len(requests) == num_before:
                    time.sleep(0.01)
            print(stop_signals.received)
            raise SystemExit(7)  # as a run that has saved leaves
    """)
    assert done.returncode == 7 and done.stdout == "SIGUSR1\n"
    assert done.stderr.count("\n") == 1 and "rank 0: SIGUSR1: this step is finished" in done.stderr


def test_a_second_signal_ends_a_process_that_hangs():
    done = run("""
        stop_signals.listen()
        with stop_signals.deferred():
            after(0.1, signal.SIGTERM)
            threading.Thread(target=once_noted, args=(signal.SIGTERM,)).start()
            block()
    """)
    assert done.returncode == 128 + signal.SIGTERM
    assert "SIGTERM after SIGTERM: ending at once, without saving" in done.stderr


def test_a_signal_pending_at_the_end_of_training_is_honoured():
    done = run("""
        stop_signals.listen()
        with stop_signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until_noted()
        print("went on")
    """)
    assert done.returncode == EXIT_STOPPED and done.stdout == ""


def test_the_last_message_is_not_cut_short():
    done = run("""
        stop_signals.listen()
        stop_signals.leave(last_words_seconds=600)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until_noted()
        print("words", flush=True)
        stop_signals.leave(last_words_seconds=0)
        os.kill(os.getpid(), signal.SIGTERM)
        block()
    """)
    assert done.returncode == 128 + signal.SIGTERM and done.stdout == "words\n"


def test_signals_of_a_forked_child_do_not_reach_its_parent():
    done = run("""
        stop_signals.listen()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join()
        time.sleep(0.2)
        print(child.exitcode, stop_signals.received)
    """)
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM} None\n")


def test_ignored_signals_stay_ignored():
    done = run("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and `&` in a script do
        stop_signals.listen()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        print(stop_signals.received)
    """)
    assert (done.returncode, done.stdout) == (0, "None\n")


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "a shell"])
def test_the_end_of_the_launcher_stops_its_ranks(launcher: str, tmp_path: Path):
    """Three generations: a command, the launcher that it starts (for deepspeed), and a rank that outlives them."""
    done = run(
        """
        signals.LAUNCHER_POLL_SECONDS = 0.1
        generation, launcher, ready = int(sys.argv[1]), *sys.argv[2:4]
        if launcher == "torchrun":
            os.environ["TORCHELASTIC_RUN_ID"] = "1"
        if generation < (2 if launcher == "deepspeed" else 1):
            # The names that a rank looks for in the command lines above it.
            name = ["deepspeed." + "launcher.launch"] if launcher == "deepspeed" else []
            code = open(f"/proc/{os.getpid()}/cmdline").read().split("\\0")[2]
            child = subprocess.Popen([sys.executable, "-c", code, str(generation + 1), launcher, ready, *name])
            while generation == 0 and not os.path.exists(ready):
                time.sleep(0.01)
            generation == 0 or child.wait()
            os._exit(0)
        look_up = signals._find_launchers

        def look_up_and_say():
            launchers = look_up()
            open(ready, "w").close()  # the launcher may end now
            return launchers

        signals._find_launchers = look_up_and_say
        stop_signals.listen()
        with stop_signals.deferred():
            deadline = time.monotonic() + (2 if launcher == "a shell" else 200)
            while stop_signals.received is None and time.monotonic() < deadline:
                time.sleep(0.01)
            print(stop_signals.received, flush=True)
            raise SystemExit
        """,
        ["0", launcher, str(tmp_path / "ready")],
    )
    assert done.stdout == ("None\n" if launcher == "a shell" else "the end of its launcher\n"), done.stderr


def test_every_command_that_starts_ranks_listens():
    """Commands whose modules join the process group, and `train`, whose run does."""
    commands = Path(cli.__file__).parent
    names = {module.__name__.rpartition(".")[2]: name for name, module in cli.COMMANDS.items()}
    starting = {
        names[path.relative_to(commands).parts[0].removesuffix(".py")]
        for path in commands.rglob("*.py")
        if re.search(r"\bstart_(ranks|process_group)\(", path.read_text())
    }
    assert {"score", "fidelity", "reference"} <= starting
    assert starting | {"train", "preflight"} == cli.START_RANKS
