"""Records of tokens of two runs, compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.step_runs import relative_error
from vcore_ds.train.token_records import read_all_followed, read_records


def assert_same_records(folder: Path, expected: Path, *, num_sequences: int, tolerance: float = 1e-4) -> list[int]:
    """The records of both runs hold the same tokens, up to rounding. Returns their steps.

    `num_sequences`: of each record.
    """
    found, wanted = read_records(folder), read_records(expected)
    assert [record.step for record in found] == [record.step for record in wanted]
    for here, there in zip(found, wanted, strict=True):
        assert here.num_sequences_global == there.num_sequences_global == len(here.sequences) == num_sequences
        assert [s.sequence_id for s in here.sequences] == [s.sequence_id for s in there.sequences]
        assert_same_tokens(here.sequences, there.sequences, ("losses", "utilities", "weights"), tolerance)
        for field in ("share", "uniform_share", "alpha"):
            left, right = ([getattr(s, field) for s in record.sequences] for record in (here, there))
            assert left == pytest.approx(right, rel=1e-5), (here.step, field)
    return [record.step for record in found]


def assert_same_followed(folder: Path, expected: Path, *, num_traces: int, tolerance: float = 1e-4) -> list[int]:
    """Both runs followed the same traces, and measured the same, up to rounding. Returns the steps."""
    found, wanted = read_all_followed(folder), read_all_followed(expected)
    assert [record.step for record in found] == [record.step for record in wanted]
    for here, there in zip(found, wanted, strict=True):
        assert here.origins == there.origins and len(here.traces) == len(there.traces) == num_traces
        assert_same_tokens(here.traces, there.traces, ("losses", "entropies", "utilities", "weights"), tolerance)
    return [record.step for record in found]


def assert_same_tokens(here: Sequence[Any], there: Sequence[Any], measured: Sequence[str], tolerance: float) -> None:
    """`measured`: the fields that may differ by rounding."""
    for field in ("positions", "token_ids", *measured):
        left, right = (torch.from_numpy(np.concatenate([getattr(one, field) for one in of])) for of in (here, there))
        assert left.dtype == right.dtype
        if field in measured:
            assert relative_error(left, right) < tolerance, field
        else:
            assert torch.equal(left, right)
