"""`python -m tests.chaos.inject ARGUMENTS`: run `vcore-ds ARGUMENTS` with the fault in the environment variable FAULT.

No result is replaced: the function at which the fault strikes runs unchanged before or after it.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import vcore_ds.engine  # noqa: F401  before anything that imports deepspeed
from vcore_ds.commands import cli
from vcore_ds.distributed.position import get_position
from vcore_ds.training import checkpoint_folder


@dataclass(frozen=True)
class Fault:
    """When to strike, and how: kill the rank with SIGKILL, or fill a disk."""

    place: str
    """One of PLACES."""
    rank: int
    step: int
    """Optimizer step, from 1."""
    phase: str
    """Part of the step, as the watchdog names it: "main" is the pass that trains."""
    call: int = 1
    """Number of the call to the function at that place, in that phase, from 1."""
    filler: str | None = None
    """File that grows until its disk is full; None to kill."""

    @property
    def environment(self) -> dict[str, str]:
        return {"FAULT": json.dumps(asdict(self))}

    def strike(self) -> None:
        what = "SIGKILL" if self.filler is None else "disk full"
        rank = f"rank {self.rank} (pid {os.getpid()})"
        os.write(2, f"FAULT: {what}: {self.place} of {rank} at: {get_position()}\n".encode())
        if self.filler is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            fill_disk(Path(self.filler))


def fill_disk(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        for num_bytes in (2**20, 1):  # the last page too
            try:
                while True:
                    file.write(b"\0" * num_bytes)
            except OSError:
                continue


def patch(fault: Fault) -> None:
    """Wrap the function at the fault's place."""
    owner, name, is_after, concerns = PLACES[fault.place]()
    original = getattr(owner, name)
    num_calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        position = get_position()
        is_counted = (position.step, position.phase) == (fault.step, fault.phase) and concerns(*args)
        num_calls += is_counted
        if is_counted and num_calls == fault.call and not is_after:
            fault.strike()
        result = original(*args, **kwargs)
        if is_counted and num_calls == fault.call and is_after:
            fault.strike()
        return result

    setattr(owner, name, call)


Place = tuple[Any, str, bool, Callable[..., bool]]
"""Owner and name of the function, whether the fault comes after it, and which of its calls count."""


def _forward() -> Place:
    """Inside a layer. Wrapped, the layer itself would not be checkpointed on this rank, and its norms and MLP would not
    get the formulas of `models/pointwise.py`, which round utilities in another way."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    return Qwen3Attention, "forward", False, _always


def _backward() -> Place:
    """After autograd has computed the gradient of a parameter."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return DeepSpeedZeroOptimizer_Stage3, "reduce_ready_partitions_and_remove_grads", False, _always


def _optimizer_step() -> Place:
    """After the fp32 masters are updated, before the model's parameters are."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return DeepSpeedZeroOptimizer_Stage3, "_optimizer_step", True, _always


def _checkpoint_file() -> Place:
    """While a rank's file contains only some of its tensors."""
    from torch.distributed.checkpoint import filesystem

    return filesystem, "_write_item", False, _always


def _names_checkpoint(_: Path, target: Path) -> bool:
    return checkpoint_folder.parse_step(Path(target)) is not None


def _always(*_: Any) -> bool:
    return True


PLACES: dict[str, Callable[[], Place]] = {
    "forward": _forward,
    "backward": _backward,
    "optimizer step": _optimizer_step,
    "checkpoint file": _checkpoint_file,
    "before the rename": lambda: (Path, "rename", False, _names_checkpoint),
    "after the rename": lambda: (Path, "rename", True, _names_checkpoint),
}


def main(arguments: Sequence[str]) -> int:
    fault = Fault(**json.loads(os.environ["FAULT"]))
    if fault.rank == int(os.environ["RANK"]):
        patch(fault)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
