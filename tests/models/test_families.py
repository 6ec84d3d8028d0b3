"""A few architectures against plain transformers, and the page on all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK
from tests.models import families
from tests.models.measurement import DIFFERENCE, JVP, SFT, ModelResult, make_recipe, measure
from tests.models.survey import PAGE, list_types, read_refusals, shorten_refusal
from vcore_ds.common.errors import UserError
from vcore_ds.models.architecture_check import check_configuration
from vcore_ds.models.description import read_model
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.settings import derive_plan_settings

REPOSITORY = Path(__file__).resolve().parents[2]

DENSE = ("gemma4_text", *(("llama", "gemma3_text, untied", "granite, tied") if IS_SOAK else ()))
MOE_MODELS = ("gpt_oss", "qwen3_vl_moe", *(("qwen3_moe, tied", "deepseek_v3, tied", "glm4_moe") if IS_SOAK else ()))
AT_START = "(in the check before the first step) "
REFUSALS = read_refusals((REPOSITORY / PAGE).read_text(encoding="utf-8"))
WITHOUT_RULES = [
    name for text, names in REFUSALS.items() if AT_START in text for name in names[: None if IS_SOAK else 1]
]
"""Types that no rule covers, which the check before the first step refuses: one of each line of the page."""
WITH_RULES = [name for text, names in REFUSALS.items() if AT_START not in text for name in names]
HYBRIDS = ("qwen3_next, tied", "granitemoehybrid, untied", *(("qwen3_5_text", "lfm2, untied") if IS_SOAK else ()))

WITHOUT_JVP = "deepseek_v4"
"""Without utilities, in a folder whose names transformers renames under ZeRO-3 alone."""

TWO_RANKS = ("qwen3_moe, tied", *(("qwen3_moe", "lfm2") if IS_SOAK else ()))

WITHOUT_ADAPTERS = () if IS_SOAK else ("gpt_oss", "granitemoehybrid, untied")
"""Others of their kind are measured with adapters too."""


def measure_all(names: Sequence[str], parts: Sequence[str]) -> dict[str, ModelResult]:
    return {name: measure(name, parts[:1] if name in WITHOUT_ADAPTERS else parts) for name in names}


@pytest.fixture(scope="module")
def alone() -> dict[str, ModelResult]:
    return run_ranks(measure_all, 1, (*DENSE, *MOE_MODELS, *HYBRIDS, WITHOUT_JVP, *WITHOUT_RULES), ("full", "lora"))[0]


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, ModelResult]:
    return run_ranks(measure_all, 2, TWO_RANKS, ("full",))[0]


@pytest.mark.dist
@pytest.mark.parametrize("name", [*DENSE, *MOE_MODELS, *HYBRIDS])
def test_one_rank_computes_the_same_as_transformers(alone: dict[str, ModelResult], name: str) -> None:
    assert_right(alone[name])
    assert "full API utility" in alone[name].numbers
    assert ("lora fused utility" in alone[name].numbers) == (name not in WITHOUT_ADAPTERS)


@pytest.mark.dist
def test_a_model_without_utilities_has_the_losses_and_gradients_of_transformers(alone: dict[str, ModelResult]) -> None:
    result = alone[WITHOUT_JVP]
    assert result.verdict == "right" and "lora probe gradient" in result.numbers, result


@pytest.mark.dist
@pytest.mark.parametrize("name", WITHOUT_RULES)
def test_unsupported_types_without_a_rule_are_refused_before_the_first_step(
    alone: dict[str, ModelResult], name: str
) -> None:
    result = alone[name]
    assert "sft" not in result.refused and result.verdict == "refused", result
    assert name in REFUSALS[shorten_refusal(result)]


def find_refusal(folder: Path, sections: dict[str, Any]) -> str:
    """Message with which a recipe for a configuration is refused; empty if it is not."""
    settings = derive_plan_settings(make_recipe(folder, **sections))
    try:
        check_configuration(settings)
        plan_batch(settings, 1, read_model(str(folder)).shape)
    except UserError as error:
        return str(error).replace(str(folder), "MODEL")
    return ""


@pytest.mark.parametrize("name", WITH_RULES)
def test_types_that_the_page_lists_as_refused_are_refused_by_their_configuration(name: str, tmp_path: Path) -> None:
    """For every method; an attention that a message names passes."""
    try:
        config = families.make_tiny_config(name)
    except Exception:  # of transformers, which has no tiny one of some types
        config = CONFIG_MAPPING[name]()
    config.save_pretrained(tmp_path)
    message = find_refusal(tmp_path, SFT)
    assert name in REFUSALS[shorten_refusal(ModelResult(name, refused={"sft": message}))]
    assert find_refusal(tmp_path, JVP) == message
    if "model.attention eager" in message:
        assert find_refusal(tmp_path, SFT | {"model": {"attention": "eager"}}) == ""


@pytest.mark.parametrize("name", ["bloom", "cpmant", "hy_v4", "llama4_text"])
def test_estimators_and_methods_that_a_refusal_names_pass(name: str, tmp_path: Path) -> None:
    families.make_tiny_config(name).save_pretrained(tmp_path)
    message = find_refusal(tmp_path, JVP)
    assert message.startswith("utility.estimator: found jvp") and "methods/sft.yaml" in message
    assert find_refusal(tmp_path, SFT) == ""
    without_jvp = find_refusal(tmp_path, DIFFERENCE)
    assert ("epsilon=auto" in message) == (without_jvp == "") and "estimator=jvp" not in without_jvp


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
