"""Rates of a step, against numbers that can be computed by hand."""

from dataclasses import replace

import pytest

from tests.helpers.recipes import smallest_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import LoraConfig
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import derive_needed_passes
from vcore_ds.planning.settings import MemorySettings, derive_plan_settings
from vcore_ds.training.loop import Throughput

SHAPE = ModelShape(2, 4, 2, 8, 1000, hidden_size=10, intermediate_size=20, vocabulary_size=50)
"""A forward takes 2 x (2 x 1,000 + 500) FLOP a token, and 2 x 2 layers x 4 heads x 8 for the square of a sequence."""
MAIN, PROBE = [16, 8], [8]
LINEAR, SQUARES = 5000 * 24, 128 * (16**2 + 8**2)
LINEAR_PROBE, SQUARES_PROBE = 5000 * 8, 128 * 8**2
SFT = MemorySettings(num_ranks=1, main_tokens=100, number_bytes=2)
JVP = replace(SFT, probe_tokens=100, estimator="jvp", is_fused=True)
LORA = LoraConfig(rank=4, alpha=8)


def make_recipe(method: str, **sections: dict) -> Recipe:
    recipe = smallest_recipe() | sections
    recipe["method"] = {"name": method} | ({"kl_budget": 0.05} if method == "vcore" else {})
    return Recipe.model_validate(recipe)


@pytest.mark.parametrize(
    "method, settings, training, extra",
    [
        ("sft", SFT, 3 * (LINEAR + SQUARES), 0),
        # Recomputed activations do not count as needed.
        ("sft", replace(SFT, is_checkpointed=True), 3 * (LINEAR + SQUARES), 0),
        # Weights that are not trained have no gradient: one matrix multiplication less in the backward.
        ("sft", replace(SFT, lora=LORA), 2 * LINEAR + 3 * SQUARES, 0),
        ("vcore", JVP, 3 * (LINEAR + SQUARES), 2 * (LINEAR + SQUARES) + 3 * (LINEAR_PROBE + SQUARES_PROBE)),
        (
            "vcore",
            replace(JVP, lora=LORA, is_checkpointed=True),
            2 * LINEAR + 3 * SQUARES,
            LINEAR + 2 * SQUARES + 2 * LINEAR_PROBE + 3 * SQUARES_PROBE,
        ),
        (
            "vcore",
            replace(JVP, is_fused=False, estimator="finite_difference"),
            3 * (LINEAR + SQUARES),
            LINEAR + SQUARES + 3 * (LINEAR_PROBE + SQUARES_PROBE),
        ),
    ],
)
def test_flops_by_hand(method: str, settings: MemorySettings, training: int, extra: int) -> None:
    lora = {"lora": {"rank": 4, "alpha": 8.0}} if settings.lora is not None else {}
    rates = Throughput(
        SHAPE, derive_needed_passes(derive_plan_settings(make_recipe(method, **lora)), settings), peak_flops=2e6
    )
    measured = rates.compute_rates(MAIN, PROBE if method == "vcore" else [], seconds=4.0)
    assert measured == {
        "tokens": 24,
        "tokens_per_second": 6.0,
        "flops_training": training,
        "flops_extra": extra,
        "utilization": pytest.approx((training + extra) / 8e6),
        "utilization_training": pytest.approx(training / 8e6),
    }


@pytest.mark.parametrize("method", ["iw_sft", "asft"])
def test_a_forward_of_the_base_model_is_extra(method: str) -> None:
    settings = replace(SFT, lora=LORA)
    passes = derive_needed_passes(derive_plan_settings(make_recipe(method, lora={"rank": 4, "alpha": 8.0})), settings)
    assert Throughput(SHAPE, passes, None).compute_rates(MAIN, [], 1.0)["flops_extra"] == LINEAR + SQUARES
    # Without adapters the reference is read from a file; and recomputation is no extra.
    reference = {"train_path": "t", "reference_log_probabilities": "r"}
    full = derive_plan_settings(make_recipe("iw_sft", data=reference))
    passes = derive_needed_passes(full, replace(SFT, is_checkpointed=True))
    assert passes.utility is None and passes.main.linear == 3


def test_a_step_without_a_probe_counts_no_probe() -> None:
    recipe = make_recipe("vcore", probe={"every": 2})
    passes = derive_needed_passes(derive_plan_settings(recipe), JVP)
    rates = Throughput(SHAPE, passes, None)
    with_probe, without = (rates.compute_rates(MAIN, probe, 1.0) for probe in (PROBE, []))
    assert with_probe["flops_extra"] - without["flops_extra"] == 3 * (LINEAR_PROBE + SQUARES_PROBE)


def test_unknown_rates_are_null() -> None:
    passes = derive_needed_passes(derive_plan_settings(make_recipe("sft")), SFT)
    on_cpu = Throughput(SHAPE, passes, None).compute_rates(MAIN, [], 1.0)
    assert on_cpu["flops_training"] == 3 * (LINEAR + SQUARES)
    assert on_cpu["utilization"] is None and on_cpu["utilization_training"] is None
    unknown = Throughput(SHAPE, None, 1e15).compute_rates(MAIN, [], 0.5)
    assert unknown["tokens_per_second"] == 48.0
    assert [unknown[key] for key in ("flops_training", "flops_extra", "utilization")] == [None, None, None]
