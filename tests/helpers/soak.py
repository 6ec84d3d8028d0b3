"""Tests and cases that only `make soak` runs: repetitions that take hours, and combinations of options each of which is
also tested alone. CI does not run them."""

import os
from collections.abc import Mapping
from typing import TypeVar

import pytest

IS_SOAK = os.environ.get("VCORE_DS_SOAK") == "1"

Case = TypeVar("Case")

soak_only = pytest.mark.soak
"""Mark of tests and modules that only `make soak` runs."""


def soak(cases: Mapping[str, Case]) -> dict[str, Case]:
    """The cases under `make soak`, none otherwise."""
    return dict(cases) if IS_SOAK else {}
