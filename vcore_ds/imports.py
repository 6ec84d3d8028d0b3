"""Imports that take seconds, at the start of a command."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Around the imports of a command's work. What they make lasts as long as the process, so no search for garbage
    looks at it, now or later.

    Those of a run (torch, transformers, peft, DeepSpeed) make half a million objects. To search them takes 1 of 6 s
    while they are imported, and as long again when DeepSpeed collects garbage as an engine starts. The second time in a
    process nothing is done.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
