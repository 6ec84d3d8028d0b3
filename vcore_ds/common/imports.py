"""Faster imports of torch, transformers and DeepSpeed at the start of a command."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH = "TORCHDYNAMO_DISABLE"  # environment variable that torch reads in `torch.compile`

_FROZEN_BEFORE = gc.get_freeze_count()  # objects frozen by Python itself: none in 3.11, some hundreds in 3.12


@contextmanager
def lasting_imports() -> Iterator[None]:
    """A context for a command's imports (torch, transformers, peft, DeepSpeed), whose half a million objects live
    forever and are excluded from garbage collection, which takes 1 of 6 s during the imports, and as long again when
    DeepSpeed collects garbage at the start of an engine. Entering it again has no effect."""
    if gc.get_freeze_count() > _FROZEN_BEFORE:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_compiler() -> Iterator[None]:
    """A context in which `torch.compile` returns its argument, for modules that compile unused functions on import:
    wrapping a function already imports torch's compiler, which takes a second on every rank."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
