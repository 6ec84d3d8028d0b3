"""Fixtures of the command-line tests."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers.browser import find_missing_requirement, started_browser
from tests.helpers.setups import TinySetup, sums, write_conversations, write_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def setup(tmp_path_factory: pytest.TempPathFactory) -> TinySetup:
    folder = tmp_path_factory.mktemp("tiny")
    return TinySetup(
        untied=write_model(folder / "untied"),
        tied=write_model(folder / "tied", tied=True),
        train=write_conversations(folder / "train.jsonl", sums(range(12))),
        validation=write_conversations(folder / "validation.jsonl", sums(range(20, 25))),
        cache=folder / "cache",
    )


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Let commands of this process join a process group of one rank, and restore the environment afterwards."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    missing = find_missing_requirement()
    if missing:
        pytest.skip(f"REPORTS ARE NOT TESTED IN A BROWSER HERE: {missing}")
    with started_browser() as browser:
        yield browser
