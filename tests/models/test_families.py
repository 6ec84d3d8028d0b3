"""A few architectures against plain transformers, and the page on all of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK, soak
from tests.models import families
from tests.models.measurement import ModelResult, measure
from tests.models.survey import PAGE, list_types

REPOSITORY = Path(__file__).resolve().parents[2]

DENSE = ("gemma4_text", *(("llama", "gemma3_text, untied", "granite, tied") if IS_SOAK else ()))
MOE_MODELS = ("qwen3_moe, tied", "gpt_oss", *(("deepseek_v3, tied", "glm4_moe") if IS_SOAK else ()))
WITHOUT_RULES = {
    "cpmant": "this architecture does not isolate sequences",
    "hrm_text": "a decoder layer runs ",
    "rwkv": "the architecture's own code fails",
} | soak({"xlstm": "the architecture's own code fails", "marian": "the architecture's own code fails"})
"""Types that no rule covers, and the message at the start of a run."""
HYBRIDS = ("qwen3_next, tied", "granitemoehybrid, untied", *(("qwen3_5_text", "lfm2, untied") if IS_SOAK else ()))

TWO_RANKS = ("qwen3_moe", *(("lfm2",) if IS_SOAK else ()))


def measure_all(names: Sequence[str], parts: Sequence[str]) -> dict[str, ModelResult]:
    return {name: measure(name, parts) for name in names}


@pytest.fixture(scope="module")
def alone() -> dict[str, ModelResult]:
    return run_ranks(measure_all, 1, (*DENSE, *MOE_MODELS, *HYBRIDS, *WITHOUT_RULES), ("full", "lora"))[0]


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, ModelResult]:
    return run_ranks(measure_all, 2, TWO_RANKS, ("full",))[0]


@pytest.mark.dist
@pytest.mark.parametrize("name", [*DENSE, *MOE_MODELS, *HYBRIDS])
def test_one_rank_computes_the_same_as_transformers(alone: dict[str, ModelResult], name: str) -> None:
    assert_right(alone[name])
    assert "full API utility" in alone[name].numbers


@pytest.mark.dist
@pytest.mark.parametrize("name", WITHOUT_RULES)
def test_unsupported_types_without_a_rule_are_refused_before_the_first_step(
    alone: dict[str, ModelResult], name: str
) -> None:
    result = alone[name]
    assert "sft" not in result.refused and result.verdict == "refused", result
    assert WITHOUT_RULES[name] in result.refused["start"]


@pytest.mark.dist
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_compute_the_same_as_transformers(on_two_ranks: dict[str, ModelResult], name: str) -> None:
    assert_right(on_two_ranks[name])


def assert_right(result: ModelResult) -> None:
    print(result)
    assert result.verdict == "right", (result.errors, result.late, result.beyond_bounds())
    assert "full fused utility" in result.numbers


def test_the_page_lists_every_decoder_of_transformers() -> None:
    listed = list_types((REPOSITORY / PAGE).read_text(encoding="utf-8"))
    assert sorted(listed) == sorted([*families.list_model_types(), *families.VARIANTS]), (
        f"measure them: python -m tests.models.survey --markdown {PAGE}"
    )
