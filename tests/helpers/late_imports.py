"""Modules that are imported when they are first used. Each worker of pytest collects all files, and inspect_ai, which
few of them use, would take a third of that time."""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LateModule:
    """A module by its name; has its public attributes. The others are what pytest asks every object for."""

    _name: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
