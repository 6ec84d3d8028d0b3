"""Imports that take seconds, at the start of a command."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH = "TORCHDYNAMO_DISABLE"
"""An environment variable that torch reads whenever it is to compile a function."""


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Around the imports of a command's work. What they make lasts as long as the process, so no search for garbage
    looks at it, now or later. scipy cannot be imported meanwhile.

    Those of a run (torch, transformers, peft, DeepSpeed) make half a million objects. To search them takes 1 of 6 s
    while they are imported, and as long again when DeepSpeed collects garbage as an engine starts. The second time in a
    process nothing is done. scipy is optional to transformers, which would import its optimizers, 7% of the CPU
    time, for losses of models that find objects in images.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.disable()
    hides_scipy = "scipy" not in sys.modules
    if hides_scipy:
        sys.modules["scipy"] = None  # type: ignore[assignment]  # an import of it fails, as where it is not installed
    try:
        yield
    finally:
        if hides_scipy:
            del sys.modules["scipy"]
        gc.freeze()
        gc.enable()


@contextmanager
def without_compiler() -> Iterator[None]:
    """A context in which `torch.compile` returns functions as they are, for modules that compile on import what is not
    called here: only to wrap a function, torch imports its compiler, a second on every rank."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
