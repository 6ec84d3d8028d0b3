"""Imports that take seconds, at the start of a command."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH = "TORCHDYNAMO_DISABLE"
"""An environment variable that torch reads whenever it is to compile a function."""

_FROZEN_BEFORE = gc.get_freeze_count()
"""Objects that Python itself has frozen: none in 3.11, some hundreds in 3.12."""


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Around the imports of a command's work. What they make lasts as long as the process, so no search for garbage
    looks at it, now or later.

    Those of a run (torch, transformers, peft, DeepSpeed) make half a million objects. To search them takes 1 of 6 s
    while they are imported, and as long again when DeepSpeed collects garbage as an engine starts. The second time in a
    process nothing is done.
    """
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
