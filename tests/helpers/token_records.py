"""Comparison of the token records of two runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.step_runs import relative_error
from vcore_ds.training.token_records import Kind, read_records


def assert_same_records(
    folder: Path, expected: Path, kind: Kind = "step", *, num_sequences: int, tolerance: float = 1e-4
) -> list[int]:
    """Assert that both runs recorded the same sequences (or followed traces), `num_sequences` in each record, with
    numbers that are equal up to rounding; returns the steps."""
    records, expected_records = read_records(folder, kind), read_records(expected, kind)
    assert [record.step for record in records] == [record.step for record in expected_records]
    measured = ("losses", "utilities", "weights", *(("entropies",) if kind == "followed" else ()))
    for record, expected_record in zip(records, expected_records, strict=True):
        assert record.num_sequences_global == expected_record.num_sequences_global == num_sequences
        sides = (record.sequences, expected_record.sequences)
        origins, expected_origins = ([(item.source, item.sequence_id) for item in side] for side in sides)
        assert origins == expected_origins and len(origins) == num_sequences
        for name in ("positions", "token_ids", *measured):
            left, right = (torch.from_numpy(np.concatenate([getattr(item, name) for item in side])) for side in sides)
            assert left.dtype == right.dtype
            assert relative_error(left, right) < tolerance if name in measured else torch.equal(left, right), name
        for name in ("share", "uniform_share", "alpha"):
            left, right = ([getattr(item, name) for item in side] for side in sides)
            assert left == pytest.approx(right, rel=1e-5), (record.step, name)
    return [record.step for record in records]
