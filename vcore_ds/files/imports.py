"""Imports of packages of which a part is used."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH = "TORCHDYNAMO_DISABLE"
"""An environment variable that torch reads whenever it is to compile a function."""


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
