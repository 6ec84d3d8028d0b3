"""`run_ranks(function, world_size)` runs a function on several CPU ranks, and always ends."""

import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.multiprocessing as multiprocessing


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_seconds: float = 900,
    start: Literal["forkserver", "fork"] = "forkserver",
) -> list[Any]:
    """Run `function(*arguments)` once per rank, in new processes with a gloo process group; returns the results by
    rank.

    A rank that fails ends all of them with an AssertionError, whose message is the traceback of the first failure. The
    timeout only bounds a hang. Ranks meet at a file store instead of a port, so that two tests cannot collide.

    The imports, 10 s of CPU time, are made once per calling process, by a server from which ranks are forked. Engines
    take time to start, so put many checks into one function.

    `function`: at the top level of a module, since each rank imports it. `start`: `fork` if this process has already
    imported everything, in its special way."""
    folder = Path(tempfile.mkdtemp(prefix="ranks_"))
    context = forkserver() if start == "forkserver" else multiprocessing.get_context(start)
    processes = [
        context.Process(
            target=_run_rank, args=(function, rank, world_size, str(folder), dict(os.environ), arguments), daemon=True
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        _wait(processes, folder, timeout_seconds)
        return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(world_size)]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def forkserver() -> Any:
    """The multiprocessing context whose server has imported everything."""
    multiprocessing.set_forkserver_preload(["tests.helpers.imports"])
    return multiprocessing.get_context("forkserver")


def _wait(processes: list[Any], folder: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(process.is_alive() for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if failed:
            time.sleep(1.0)  # the rank at fault may be another one that is still writing its traceback
            raise AssertionError(_first_failure(folder) or f"rank {failed[0]} died without a traceback")
        if time.monotonic() > deadline:
            alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
            raise AssertionError(f"timeout after {timeout_seconds} s; still running: ranks {alive}")
        time.sleep(0.05)
    message = _first_failure(folder)
    if message is not None or any(process.exitcode != 0 for process in processes):
        raise AssertionError(message or "a rank died without a traceback")


def _first_failure(folder: Path) -> str | None:
    """The traceback that was written first; later ones are usually consequences of it (a lost connection)."""
    written = sorted(folder.glob("failure_*"), key=lambda path: path.stat().st_mtime_ns)
    return f"rank {written[0].name.removeprefix('failure_')} failed:\n{written[0].read_text()}" if written else None


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(
        environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        import torch

        from vcore_ds.config.sections import EngineConfig, ParallelConfig
        from vcore_ds.distributed.device import uses_gpu
        from vcore_ds.training.setup import start_ranks

        if uses_gpu():  # a simulated GPU
            torch.cuda.set_device(rank)
        torch.distributed.init_process_group(
            "nccl" if uses_gpu() else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=10),
        )
        start_ranks(EngineConfig(deepspeed_config="none", timeout_minutes=10), ParallelConfig())
        result = function(*arguments)
        Path(folder, f"result_{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        Path(folder, f"failure_{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the other ranks may be waiting in a collective; nothing here must wait for them
    os._exit(0)  # gloo's threads can keep a finished process alive
