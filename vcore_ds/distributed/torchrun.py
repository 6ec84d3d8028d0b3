"""torchrun, for runs that stop on request: `python -m vcore_ds.distributed.torchrun <torchrun's arguments>`.

torchrun turns every exit code of a rank into 1, and told to end it ends the ranks within 30 seconds, whatever they are
doing. This one passes on what a job script has to tell apart (2 and 85, see `vcore_ds.common.errors`), and hands a
request to stop to the ranks, which end their step, save, and exit by themselves.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import psutil

from vcore_ds.common.errors import EXIT_STOPPED, UserError

# torch reads it when it is imported. At the end of every run on several nodes the node that holds the rendezvous leaves
# first, and the others would print a stack trace of C++ about it. What matters is raised in Python too.
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_is_chosen = LOG_LEVEL in os.environ
os.environ.setdefault(LOG_LEVEL, "ERROR")
from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

if not _is_chosen:
    del os.environ[LOG_LEVEL]  # not for the ranks

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

SECONDS_FOR_OTHER_NODES = 10.0
"""Ranks that end together do so within seconds of each other."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 2 or 85 where a rank ended with it; else 1, with torchrun's table of failed ranks."""
    parsed = run.parse_args(arguments)
    parsed.signals_to_handle = "SIGHUP,SIGQUIT"  # torchrun's own way for these: end the ranks
    received: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        ranks = psutil.Process().children()
        if not ranks:
            sys.exit(EXIT_STOPPED)  # still waiting for the other nodes: there is nothing to save
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    # "failed (exitcode: 85)" is no error here, and the table that is printed below says more about a real one.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not str(record.msg).startswith("failed (exitcode")
    )
    try:
        run.run(parsed)
    except ChildFailedError as error:
        # The first: the others were ended because of it.
        code = error.get_first_failure()[1].exitcode
        stopped_early = -code in received  # it came before the rank had a handler, so before there was anything to save
        if code not in (UserError.EXIT_CODE, EXIT_STOPPED) and not stopped_early:
            print(error, file=sys.stderr, flush=True)
            return 1
        if parsed.nnodes not in ("1", "1:1"):
            # The store of the rendezvous may live in this process (as long as `error` does). Where it is gone before
            # the ranks of another node have ended, their torchrun kills them and ends with another code.
            time.sleep(SECONDS_FOR_OTHER_NODES)
        return EXIT_STOPPED if stopped_early else code
    return 0


if __name__ == "__main__":
    sys.exit(main())
