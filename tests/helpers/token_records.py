"""Comparison of the token records of two runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.step_runs import relative_error
from vcore_ds.training.token_records import read_records


def assert_same_records(folder: Path, expected: Path, *, num_sequences: int, tolerance: float = 1e-4) -> list[int]:
    """Assert that the token records of both runs are equal up to rounding; returns their steps.

    `num_sequences`: number of sequences in each record.
    """
    records, expected_records = read_records(folder), read_records(expected)
    assert [record.step for record in records] == [record.step for record in expected_records]
    for record, expected_record in zip(records, expected_records, strict=True):
        assert (
            record.num_sequences_global
            == expected_record.num_sequences_global
            == len(record.sequences)
            == num_sequences
        )
        assert [s.sequence_id for s in record.sequences] == [s.sequence_id for s in expected_record.sequences]
        assert_same_tokens(record.sequences, expected_record.sequences, ("losses", "utilities", "weights"), tolerance)
        for field in ("share", "uniform_share", "alpha"):
            left, right = ([getattr(s, field) for s in record.sequences] for record in (record, expected_record))
            assert left == pytest.approx(right, rel=1e-5), (record.step, field)
    return [record.step for record in records]


def assert_same_followed(folder: Path, expected: Path, *, num_traces: int, tolerance: float = 1e-4) -> list[int]:
    """Assert that both runs followed the same traces with equal numbers up to rounding; returns the steps."""
    records, expected_records = (read_records(run, "followed") for run in (folder, expected))
    assert [record.step for record in records] == [record.step for record in expected_records]
    for record, expected_record in zip(records, expected_records, strict=True):
        origins = [(trace.source, trace.sequence_id) for trace in record.sequences]
        assert origins == [(trace.source, trace.sequence_id) for trace in expected_record.sequences]
        assert len(origins) == num_traces
        measured = ("losses", "entropies", "utilities", "weights")
        assert_same_tokens(record.sequences, expected_record.sequences, measured, tolerance)
    return [record.step for record in records]


def assert_same_tokens(
    actual: Sequence[Any], expected: Sequence[Any], measured: Sequence[str], tolerance: float
) -> None:
    """Assert that sequences or traces are equal. `measured`: fields that may differ by rounding."""
    for field in ("positions", "token_ids", *measured):
        left, right = (
            torch.from_numpy(np.concatenate([getattr(tokens, field) for tokens in side])) for side in (actual, expected)
        )
        assert left.dtype == right.dtype
        if field in measured:
            assert relative_error(left, right) < tolerance, field
        else:
            assert torch.equal(left, right)
