"""What `make soak` alone tests: repetition that takes hours, and combinations of options each of which is tested
without it too. CI does not run it."""

import os
from collections.abc import Mapping
from typing import TypeVar

import pytest

IS_SOAK = os.environ.get("VCORE_DS_SOAK") == "1"

Case = TypeVar("Case")

soak_only = pytest.mark.soak
"""For a test or a module that `make soak` alone runs."""


def soak(cases: Mapping[str, Case]) -> dict[str, Case]:
    """The cases in `make soak`, none of them elsewhere."""
    return dict(cases) if IS_SOAK else {}
