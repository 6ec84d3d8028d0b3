"""Where the host would wait for the device: reads of numbers and shapes, copies that block, synchronisations."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("/vcore_ds/", "/deepspeed/")
"""Whose code a wait is put down to: that of their innermost function."""

_counted: Counter[str] = Counter()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """A block in which waits are counted, by place and kind: `method/weights.py solve: item`."""
    _counted.clear()
    waits: Counter[str] = Counter()
    yield waits
    waits.update(_counted)


def note(kind: str) -> None:
    """Counts a wait of the code that calls this, the device's autograd thread included."""
    _counted[f"{_place()}: {_KINDS.get(kind, kind)}"] += 1


_KINDS = {"_local_scalar_dense": "item"}


def _place() -> str:
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        for package in PACKAGES:
            if package in file:
                name = file.rpartition(package)[2]
                return f"{name if package == PACKAGES[0] else package[1:] + name} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"  # a rule of PyTorch's own, in the device's thread
