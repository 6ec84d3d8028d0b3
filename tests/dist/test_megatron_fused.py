"""Parallel layers: one fused forward for losses and utilities against two separate ones, and its memory."""

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.test_fused import Pass, assert_fused_equals_separate, measure_peaks, run_both_passes
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK, soak
from vcore_ds.distributed import layout

pytestmark = pytest.mark.dist

PASSES = {
    "full, tied, checkpointed, packed": Pass(tied=True, checkpointing=True, packed=True),
    "bf16, checkpointed": Pass(precision="bf16", checkpointing=True),
} | soak(
    {
        "full": Pass(),
        "full, bf16, checkpointed, packed": Pass(precision="bf16", checkpointing=True, packed=True),
        "full, checkpointed, 2 sequence-parallel groups": Pass(checkpointing=True, sequence_parallel=2),
        "full, bf16": Pass(precision="bf16"),
    }
)
MEMORY_CASES = {
    "full, checkpointed, norms of a kernel": Pass(checkpointing=True, kernel_norm=True),
} | soak(
    {
        "full, checkpointed": Pass(checkpointing=True),
        "full": Pass(),
    }
)


def run_all() -> tuple[dict[str, dict[bool, dict[str, Any]]], dict[str, dict[str, int]]]:
    layout.arrange(tensor=2)
    if IS_SOAK:
        layout.make_sequence_groups([2])
    passes = {name: run_both_passes(replace(case, tensor=2)) for name, case in PASSES.items()}
    # A rank's shard of a layer and the prefetched parameters are as large as in `test_fused`.
    sizes = dict(intermediate_size=512, num_attention_heads=8, num_key_value_heads=4)
    peaks = {
        name: measure_peaks(replace(case, precision="bf16", tensor=2), **sizes) for name, case in MEMORY_CASES.items()
    }
    return passes, peaks


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[str, dict[bool, dict[str, Any]]], dict[str, dict[str, int]]]]:
    return run_ranks(run_all, 4 if IS_SOAK else 2)


@pytest.mark.parametrize("name", PASSES)
def test_a_fused_forward_equals_two_separate_ones(results, name: str) -> None:
    assert_fused_equals_separate([passes[name] for passes, _ in results], PASSES[name].precision)


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_a_fused_pass_takes_at_most_five_percent_more_memory(results, name: str) -> None:
    for _, peaks in results:
        rank_peaks = peaks[name]
        print(rank_peaks, rank_peaks["fused"] / rank_peaks["plain"])
        assert rank_peaks["fused"] <= 1.05 * rank_peaks["plain"]
