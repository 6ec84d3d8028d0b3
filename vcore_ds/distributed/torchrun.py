"""torchrun for runs that stop on request: `python -m vcore_ds.distributed.torchrun <torchrun's arguments>`.

torchrun turns every exit code of a rank into 1, and kills the ranks within 30 seconds after a signal. This wrapper
keeps the exit codes that a job script distinguishes (2 and 85, see `vcore_ds.common.errors`), and forwards stop signals
to the ranks, which finish their step, save and exit.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

import psutil

from vcore_ds.common.errors import EXIT_STOPPED, UserError

# Read by torch on import. At the end of every multi-node run, the node that hosts the store leaves first, and the
# others would print a C++ stack trace about it. Real errors are also raised in Python.
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_is_chosen = LOG_LEVEL in os.environ
os.environ.setdefault(LOG_LEVEL, "ERROR")
from torch.distributed import DistNetworkError, run  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

if not _is_chosen:
    del os.environ[LOG_LEVEL]  # not inherited by the ranks

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

SECONDS_FOR_OTHER_NODES = 10.0
"""Time for the ranks of other nodes to end; all ranks end within seconds of each other."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun. Returns 0, 2 or 85 like the first rank that failed, or 1 with torchrun's table of failed ranks."""
    parsed = run.parse_args(arguments)
    parsed.signals_to_handle = "SIGHUP,SIGQUIT"  # for these torchrun still kills the ranks
    received: list[int] = []
    forward_stop_signals(received)
    # "failed (exitcode: 85)" is no error, and the table printed below describes real ones.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not str(record.msg).startswith("failed (exitcode")
    )
    try:
        run.run(parsed)
    except DistNetworkError as error:
        from vcore_ds.distributed.process_group import explain_taken_port  # imports most of torch

        if (problem := explain_taken_port(error)) is None:
            raise
        print(f"vcore-ds: {problem}", file=sys.stderr, flush=True)
        return UserError.EXIT_CODE
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode  # the other ranks were ended because of it
        stopped_early = -code in received  # before the rank had a signal handler, so there was nothing to save
        if code not in (UserError.EXIT_CODE, EXIT_STOPPED) and not stopped_early:
            print(error, file=sys.stderr, flush=True)
            return 1
        if parsed.nnodes not in ("1", "1:1"):
            # The rendezvous store may live in this process, kept alive by `error`. If it is gone before the ranks of
            # another node have ended, their torchrun kills them and exits with another code.
            time.sleep(SECONDS_FOR_OTHER_NODES)
        return EXIT_STOPPED if stopped_early else code
    return 0


def forward_stop_signals(received: list[int]) -> None:
    """Send stop signals on to the ranks and append their numbers to `received`. In a thread, because a handler would
    not run while torchrun waits for other nodes in C."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno())
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # the number of a signal without a handler is not written

    def forward() -> None:
        with reading, writing:
            while True:
                if (number := reading.recv(1)[0]) in STOP_SIGNALS:
                    received.append(number)
                    if not (ranks := psutil.Process().children()):
                        os._exit(EXIT_STOPPED)  # still waiting for the other nodes, so there is nothing to save
                    for rank in ranks:
                        with suppress(psutil.NoSuchProcess):
                            rank.send_signal(number)

    Thread(target=forward, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
