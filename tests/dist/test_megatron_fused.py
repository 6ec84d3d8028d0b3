"""Parallel layers: one forward for losses and utilities against two, and what it allocates."""

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.test_fused import Pass, check, main_pass, peak_bytes
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK, soak
from vcore_ds.distributed import layout

pytestmark = pytest.mark.dist

PASSES = {
    "full, tied, checkpointed, packed": Pass(tied=True, checkpointing=True, packed=True),
    "lora, bf16, checkpointed": Pass(lora=True, precision="bf16", checkpointing=True),
} | soak(
    {
        "full": Pass(),
        "full, bf16, checkpointed, packed": Pass(precision="bf16", checkpointing=True, packed=True),
        "lora, row of 2 groups": Pass(lora=True, sequence_parallel=2),
        "full, checkpointed, row of 2 groups": Pass(checkpointing=True, sequence_parallel=2),
        "full, bf16": Pass(precision="bf16"),
        "lora, tied, checkpointed, packed": Pass(lora=True, tied=True, checkpointing=True, packed=True),
    }
)
MEMORY_CASES = {
    "full, checkpointed, norms of a kernel": Pass(checkpointing=True, kernel_norm=True),
} | soak(
    {
        "full, checkpointed": Pass(checkpointing=True),
        "lora": Pass(lora=True),
        "full": Pass(),
        "lora, checkpointed": Pass(lora=True, checkpointing=True),
    }
)


def run_all() -> tuple[dict[str, dict[bool, dict[str, Any]]], dict[str, dict[str, int]]]:
    layout.arrange(tensor=2)
    if IS_SOAK:
        layout.make_sequence_groups([2])
    passes = {
        name: {fused: main_pass(replace(case, tensor=2), fused) for fused in (True, False)}
        for name, case in PASSES.items()
    }
    # A rank has as much of a layer as one of two ranks has in `test_fused`, beside the same prefetched parameters.
    sizes = dict(intermediate_size=512, num_attention_heads=8, num_key_value_heads=4)
    peaks = {
        name: peak_bytes(replace(case, precision="bf16", tensor=2), **sizes) for name, case in MEMORY_CASES.items()
    }
    return passes, peaks


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, dict[bool, dict[str, Any]]], dict[str, dict[str, int]]]]:
    return run_ranks(run_all, 4 if IS_SOAK else 2)


@pytest.mark.parametrize("name", PASSES)
def test_one_forward_gives_what_two_give(found, name: str) -> None:
    check([passes[name] for passes, _ in found], exact=PASSES[name].precision == "fp32")


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_memory_stays_within_five_percent_of_the_main_pass(found, name: str) -> None:
    for _, peaks in found:
        of_rank = peaks[name]
        print(of_rank, of_rank["fused"] / of_rank["plain"])
        assert of_rank["fused"] <= 1.05 * of_rank["plain"]
