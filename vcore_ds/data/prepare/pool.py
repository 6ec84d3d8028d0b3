"""Processes that share work, and end with the one that started them."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, as_completed, wait
from multiprocessing import connection, parent_process
from typing import Any


class Pool:
    """Processes that end with this one; none for a single one."""

    def __init__(self, processes: int, preload: list[str]) -> None:
        """`preload`: modules that each process would import."""
        self.processes = processes
        self._executor = None
        if processes > 1:
            context = multiprocessing.get_context("forkserver")
            # Forked from a server that has imported everything and started no thread.
            context.set_forkserver_preload(preload)
            self._executor = ProcessPoolExecutor(processes, context, initializer=_end_with_parent)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
        """Results in the order of completion. Calls are taken one by one, when a process is about to be free."""
        if self._executor is None:
            yield from (call() for call in calls)
            return
        running = set()
        for call in calls:
            running.add(self._executor.submit(call))
            if len(running) >= 2 * self.processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in as_completed(running))


def _end_with_parent() -> None:
    """A process of a pool otherwise outlives a parent that was killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism here
    parent = parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
