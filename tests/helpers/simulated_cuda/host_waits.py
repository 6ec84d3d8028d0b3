"""Counts of host-device synchronisations: reads of numbers and shapes, blocking copies, explicit synchronisations."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.packages import path_in_package

_counted: Counter[str] = Counter()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count waits inside the block, by place and kind: `method/weights.py solve: item`."""
    _counted.clear()
    waits: Counter[str] = Counter()
    yield waits
    waits.update(_counted)


def note(kind: str) -> None:
    """Count a wait of the calling code, also in autograd's device thread."""
    _counted[f"{_place()}: {_KINDS.get(kind, kind)}"] += 1


_KINDS = {"_local_scalar_dense": "item"}


def _place() -> str:
    """The innermost function of the package or of DeepSpeed."""
    frame = sys._getframe()
    while frame is not None:
        if path := path_in_package(frame.f_code.co_filename):
            return f"{path.removeprefix('vcore_ds/')} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"  # PyTorch's backward code, in the device's thread
