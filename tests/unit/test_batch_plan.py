"""The batch arithmetic: what it plans, what it refuses, and that every remedy it names works."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.recipes import smallest_recipe
from vcore_ds.config import BatchPlan, Recipe, RecipeError, plan_batch


def plan(ranks: int, **sections: dict[str, Any]) -> BatchPlan:
    return plan_batch(Recipe.model_validate(smallest_recipe() | sections), ranks)


def test_plan() -> None:
    assert plan(2, batch={"micro_batch_size_per_rank": 2}) == BatchPlan(
        data_parallel_size=2,
        global_batch_size=32,
        micro_batch_size_per_rank=2,
        num_micro_batches_per_rank=8,
        packed_row_tokens=None,
        probe_batch_size_global=4,
        probe_batch_size_per_rank=2,
        probe_micro_batch_size_per_rank=2,
        utility_micro_batch_size_per_rank=2,
    )
    assert plan(2, probe={"micro_batch_size_per_rank": 1}).probe_micro_batch_size_per_rank == 1
    assert plan(2, utility={"micro_batch_size_per_rank": 7}).utility_micro_batch_size_per_rank == 7


def test_plan_in_words() -> None:
    line = plan(2, batch={"micro_batch_size_per_rank": 2}).describe()
    assert line == "32 sequences a step = 2 ranks x 8 micro-batches x 2; probe 4 = 2 ranks x 2"
    line = plan(1, batch={"micro_batch_size_per_rank": 32}).describe()
    assert line == "32 sequences a step = 1 rank x 1 micro-batch x 32; probe 4 = 1 rank x 4"


def test_probe_is_rounded_up_unless_round_up_is_false() -> None:
    rounded = plan(8)
    assert (rounded.probe_batch_size_global, rounded.probe_batch_size_per_rank) == (8, 1)
    exact = plan(8, probe={"round_up": False})
    assert (exact.probe_batch_size_global, exact.probe_batch_size_per_rank) == (4, 1)
    assert exact.describe().endswith("; probe 4 < 8 ranks x 1")
    uneven = plan(2, probe={"round_up": False, "batch_size": 5})
    assert (uneven.probe_batch_size_global, uneven.probe_batch_size_per_rank) == (5, 3)


def test_sft_has_no_probe() -> None:
    sft = plan(2, method={"name": "sft"})
    assert (sft.probe_batch_size_global, sft.probe_batch_size_per_rank) == (0, 0)
    assert sft.describe() == "32 sequences a step = 2 ranks x 16 micro-batches x 1"


@pytest.mark.parametrize(
    ("ranks", "sections", "words"),
    [
        (
            3,
            {},
            "found 32 on 3 ranks with batch.micro_batch_size_per_rank 1; expected a multiple of 3 x 1 = 3; "
            "nearest that work: batch.global_size 30 or 33, or data-parallel size 2 or 4",
        ),
        (
            8,
            {"batch": {"micro_batch_size_per_rank": 8}},
            "found 32 on 8 ranks with batch.micro_batch_size_per_rank 8; expected a multiple of 8 x 8 = 64; nearest "
            "that work: batch.global_size 64, or batch.micro_batch_size_per_rank 2 or 4, or data-parallel size 2 or 4",
        ),
    ],
)
def test_impossible_arithmetic(ranks: int, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as error:
        plan(ranks, **sections)
    assert str(error.value) == f"batch.global_size: {words}"


@given(groups=st.integers(1, 40), micro=st.integers(1, 6), ranks=st.integers(1, 40), probe=st.integers(1, 40))
def test_a_plan_adds_up_and_every_remedy_works(groups: int, micro: int, ranks: int, probe: int) -> None:
    def planned(size: int, micro: int, ranks: int) -> BatchPlan:
        batch = {"global_size": size, "micro_batch_size_per_rank": micro}
        return plan(ranks, batch=batch, probe={"batch_size": probe})

    size = groups * micro
    try:
        result = planned(size, micro, ranks)
    except RecipeError as error:
        remedies = str(error).split("nearest that work: ")[1].split(", or ")
        for remedy in remedies:
            for number in map(int, re.findall(r"\d+", remedy)):
                if remedy.startswith("batch.global_size"):
                    planned(number, micro, ranks)
                elif remedy.startswith("batch.micro"):
                    planned(size, number, ranks)
                else:
                    assert remedy.startswith("data-parallel size")
                    planned(size, micro, number)
        assert size % (ranks * micro) != 0 and len(remedies) >= 2
    else:
        assert ranks * result.num_micro_batches_per_rank * result.micro_batch_size_per_rank == size
        assert result.probe_batch_size_global % ranks == 0 and probe <= result.probe_batch_size_global < probe + ranks


def test_a_plan_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        plan(0)


def test_packed_batches_need_not_divide() -> None:
    found = plan(3, batch={"global_size": 32, "packed_row_tokens": 16384})
    assert found.num_micro_batches_per_rank is None and found.packed_row_tokens == 16384
    assert found.describe().startswith(
        "32 sequences a step, packed into rows of at most 16,384 tokens on 3 ranks; probe "
    )
