"""Expert parallelism in a recipe and its plan: what goes together, what is refused, bytes and seconds by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.helpers.recipes import smallest_recipe
from tests.unit.test_step_cost import FAST, IDEAL
from vcore_ds.commands.cli import main
from vcore_ds.commands.plan.prediction import plan_run
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe, differing_keys
from vcore_ds.planning.batch_layout import MicroBatchLimit, lay_out_batch
from vcore_ds.planning.batch_plan import find_other_expert_sizes, plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.hardware import GPUS, Cluster, Traffic
from vcore_ds.planning.known_models import KNOWN_MODELS, QWEN3_32B
from vcore_ds.planning.memory import estimate_memory
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import StepPasses, TimeModel, estimate_fullest_load, parameter_counts
from vcore_ds.planning.settings import MemorySettings, ZeroSettings, derive_plan_settings
from vcore_ds.planning.step_cost import StepCost, StepModel
from vcore_ds.training import console

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = KNOWN_MODELS["Qwen3-30B-A3B"]
LARGE = REPOSITORY / "launch_scripts" / "recipes" / "qwen3_235b_a22b_math_full.yaml"


def make_recipe(expert: int = 2, **sections: Any) -> Recipe:
    config = {"deepspeed_config": str(REPOSITORY / "ds_configs" / "zero3_bf16.json")}
    return Recipe.model_validate(smallest_recipe() | {"parallel": {"expert": expert}, "engine": config} | sections)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"path": "m", "provider": "megatron"}},
            "parallel.expert: found 2 together with model.provider megatron; expected 1",
        ),
        (
            {"lora": {"rank": 2, "alpha": 4, "target_modules": ["all-linear", "experts"]}},
            "parallel.expert: found 2 together with lora.target_modules .*experts.*; expected 1",
        ),
    ],
)
def test_settings_that_contradict_expert_parallelism_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_recipe(**sections)
    make_recipe(1, **sections)


@pytest.mark.parametrize(
    ("expert", "num_ranks", "shape", "message"),
    [
        (8, 12, SHAPE, "parallel.expert: found 8 on 12 ranks; expected a divisor"),
        (3, 12, SHAPE, "parallel.expert: found 3 .* have 128 experts; expected a divisor of 128"),
        (2, 8, QWEN3_32B, "parallel.expert: found 2 .* a dense model; expected 1"),
    ],
)
def test_sizes_that_divide_neither_ranks_nor_experts_are_refused(
    expert: int, num_ranks: int, shape: ModelShape, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        plan_batch(derive_plan_settings(make_recipe(expert)), num_ranks, shape)


def test_a_model_of_unknown_shape_may_have_any_number_of_experts() -> None:
    plan_batch(derive_plan_settings(make_recipe(2)), 8, replace(QWEN3_32B, is_assumed=True))


def test_a_second_copy_of_the_parameters_is_refused(tmp_path: Path) -> None:
    config = json.loads((REPOSITORY / "ds_configs" / "zero3_bf16.json").read_text(encoding="utf-8"))
    config["zero_optimization"]["zero_hpz_partition_size"] = 8
    (tmp_path / "ds.json").write_text(json.dumps(config))
    settings = derive_plan_settings(make_recipe(2, engine={"deepspeed_config": str(tmp_path / "ds.json")}))
    with pytest.raises(RecipeError, match="zero_hpz_partition_size: found 8 together with parallel.expert 2"):
        deepspeed_config(settings, plan_batch(settings, 16, SHAPE))


def test_a_run_may_be_resumed_with_another_expert_parallel_size() -> None:
    assert differing_keys(make_recipe(2), make_recipe(4)) == {}


@pytest.mark.parametrize(
    ("num_ranks", "changed", "sizes"),
    [(64, {}, [1, 4, 8, 16, 32, 64]), (12, {}, [1, 4]), (16, {"lora": {"rank": 2, "alpha": 4}}, [1, 4, 8, 16])],
)
def test_a_plan_tries_other_expert_parallel_sizes(num_ranks: int, changed: dict[str, Any], sizes: list[int]) -> None:
    assert find_other_expert_sizes(derive_plan_settings(make_recipe(2, **changed)), num_ranks, SHAPE) == sizes
    on_experts = {"lora": {"rank": 2, "alpha": 4, "target_modules": ["experts"]}}
    assert find_other_expert_sizes(derive_plan_settings(make_recipe(1, **on_experts)), num_ranks, SHAPE) == []
    assert find_other_expert_sizes(derive_plan_settings(make_recipe(1)), num_ranks, QWEN3_32B) == []


# ---- bytes and seconds -----------------------------------------------------------------------------------------------

SMALL = replace(
    SHAPE, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, layer_parameters=1000 + 720, hidden_size=10,
    intermediate_size=20, vocabulary_size=50, experts=replace(SHAPE.experts, num_layers=2, num_experts=8, per_token=2,
                                                              width=12) if SHAPE.experts else None,
)  # fmt: skip
"""A layer has 1,000 parameters and 8 experts of 3 x 10 x 12, of which a token goes through 2."""
EXPERTS = 2 * 8 * 360


def compute_cost(settings: MemorySettings, num_gpus: int, gpus_per_node: int = 8) -> StepCost:
    """A sequence of 16 tokens for each GPU, as main and as probe batch."""
    lengths = [16] * num_gpus
    batch_layout = lay_out_batch(
        range(num_gpus),
        lengths,
        parallel_sizes=[1],
        limit=MicroBatchLimit(None, 1),
        time_model=TimeModel(SMALL, num_gpus, 8),
    )
    cluster = Cluster(FAST, num_gpus, gpus_per_node, achieved=IDEAL)
    time_model = TimeModel(SMALL, num_gpus, min(gpus_per_node, num_gpus), expert=settings.expert)
    model = StepModel(time_model, parameter_counts(SMALL), settings, cluster)
    return model.estimate_step(StepPasses.derive(settings), [(lengths, batch_layout)], [(lengths, batch_layout)])


JVP = MemorySettings(
    16, main_tokens=16, probe_tokens=16, estimator="jvp", is_fused=True, zero=ZeroSettings(reuse_distance=0)
)


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_all_gather_traffic_by_hand(expert: int) -> None:
    """On 2 nodes of 8 GPUs: a rank's experts are sharded over 16 / N ranks, 8 / N of them in its node."""
    assert SMALL.expert_parameters == EXPERTS
    cost, others = compute_cost(replace(JVP, expert=expert), 16), parameter_counts(SMALL).all - EXPERTS
    in_node = 8 // expert
    expected = Traffic(2 * others * 7 / 8, 2 * others / 2 / 8) + Traffic(
        2 * EXPERTS / expert * (in_node - 1) / in_node, 2 * EXPERTS / expert / 2 / in_node
    )
    assert cost.traffic["gradients"] == expected * 2
    assert cost.traffic["tangents"] == expected


def test_one_group_of_all_ranks_gathers_no_experts() -> None:
    assert TimeModel(SMALL, 16, 8, expert=16).estimate_gather(0.0, 1e9) == Traffic()
    # In groups over several nodes, each rank gathers its experts from one rank of each other group.
    assert TimeModel(SMALL, 64, 8, expert=16).estimate_gather(0.0, 1e9) == Traffic(0.0, 1e9 / 16 * 3 / 4)


@pytest.mark.parametrize(("is_checkpointed", "num_passes"), [(False, 2 + 2 + 1), (True, 3 + 3 + 1)])
def test_token_exchange_traffic_by_hand(is_checkpointed: bool, num_passes: int) -> None:
    """16 tokens, 2 experts, 10 numbers of 2 bytes, 2 layers, there and back; once in a forward, in a backward and in a
    forward that is computed again, of the probe and of the main pass, and once for tangents. Of 4 ranks a quarter
    stays."""
    cost = compute_cost(replace(JVP, expert=4, is_checkpointed=is_checkpointed), 16)
    sent = num_passes * 16 * 2 * 10 * 2 * 2 * 2
    assert cost.traffic["expert-parallel tokens"] == Traffic(inside=sent * 3 / 4)
    over_nodes = compute_cost(replace(JVP, expert=16, is_checkpointed=is_checkpointed), 16)
    assert over_nodes.traffic["expert-parallel tokens"] == Traffic(sent * 7 / 16, sent * 8 / 16)


def test_a_step_waits_for_the_fullest_rank() -> None:
    even = compute_cost(replace(JVP, expert=4), 16)
    uneven = compute_cost(replace(JVP, expert=4, expert_load=1.5), 16)
    # Half as many tokens more: 3 passes of the probe, 5 of the main batch, 2 x 2 layers x 2 experts x 360.
    assert uneven.seconds_step - even.seconds_step == pytest.approx(0.5 * 8 * 16 * 2 * 2 * 2 * 360 / 1e6)
    assert uneven.traffic == even.traffic
    assert estimate_fullest_load(SHAPE, 1) == 1
    assert estimate_fullest_load(SHAPE, 64) == pytest.approx(1 + 0.25 / math.sqrt(2) * math.sqrt(2 * math.log(64)))


def test_memory_of_sharded_experts_by_hand() -> None:
    """Persistent memory is unchanged; a gathered layer has a shard of its experts, or none in one group of all."""
    settings = MemorySettings(
        num_ranks=16, main_tokens=64, utility_tokens=64, zero=ZeroSettings(max_live_parameters=0), estimator="jvp"
    )
    counts = parameter_counts(SHAPE)
    experts, layer = 3 * 2048 * 768 * 128, (counts.all - 2 * 151936 * 2048) // 48
    for expert, gathered in (1, layer), (4, layer - experts * 3 // 4), (16, layer - experts):
        estimate = estimate_memory(SHAPE, replace(settings, expert=expert))
        assert estimate.persistent == estimate_memory(SHAPE, settings).persistent
        phase = estimate.phases["utility"]
        embedding = 151936 * 2048
        assert phase["gathered parameters"] == pytest.approx(2 * (max(2 * gathered, embedding) + gathered), rel=1e-3)
        held = phase.get("tangents of the parameters")
        assert held == pytest.approx(2 * 3 * gathered, rel=1e-3) or held == 2 * 2 * embedding
    phases = {
        expert: estimate_memory(SHAPE, replace(settings, expert=expert, coalesces_gradients=True)).phases["main"]
        for expert in (1, 4)
    }
    fewer = phases[1]["whole gradients"] - phases[4]["whole gradients"]
    assert fewer == pytest.approx(6 * 48 * experts * 3 / 4, rel=0.02)  # and a little of the layer at work


def test_expert_parallelism_is_offered_where_a_run_does_not_fit() -> None:
    """SFT of Qwen3-235B-A22B on 32 H200, where three layers with all of their experts are too much."""
    sft = {"method": {"name": "sft"}, "model": {"path": "m", "gradient_checkpointing": True}}
    plan = plan_run(
        derive_plan_settings(make_recipe(1, **sft)), Cluster(GPUS["H200"], 32), KNOWN_MODELS["Qwen3-235B-A22B"]
    )
    assert not plan.fits
    estimates = plan.memory.find_memory_changes(plan.available)
    assert [change for change in estimates if change.startswith("parallel")] == [
        "parallel.expert=8",
        "parallel.expert=32",
    ]
    for expert in (8, 32):
        assert plan.available.holds(estimates[f"parallel.expert={expert}"])
        assert plan_run(derive_plan_settings(make_recipe(expert, **sft)), plan.cluster, plan.shape).fits
        settings = replace(plan.memory.settings, expert=expert, expert_load=estimate_fullest_load(plan.shape, expert))
        assert estimates[f"parallel.expert={expert}"] == estimate_memory(plan.shape, settings)


def test_a_large_moe_model_gains_from_groups_over_nodes() -> None:
    """235B on 64 H200: ZeRO-3 alone brings all weights to every node; groups within a node change that by nothing."""
    costs = {}
    for expert in (1, 8, 32, 64):
        chosen = make_recipe(expert, model={"path": "m", "gradient_checkpointing": True}, data={"train_path": "t"})
        costs[expert] = plan_run(
            derive_plan_settings(chosen), Cluster(GPUS["H200"], 64), KNOWN_MODELS["Qwen3-235B-A22B"]
        ).cost
    weights = {expert: cost.traffic["parameters"].between / 1e9 for expert, cost in costs.items()}
    assert weights[8] == pytest.approx(weights[1], rel=0.01) and weights[64] < weights[1] / 20
    assert costs[32].seconds_step < 0.75 * costs[1].seconds_step


# ---- commands --------------------------------------------------------------------------------------------------------


def test_the_plan_assumes_a_load_of_the_fullest_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(LARGE), "--gpus", "64", "--gpu", "H200"]) == 0
    printed = capsys.readouterr().out
    assert f"is sent {estimate_fullest_load(SHAPE, 32):.2f} times the mean GPU's tokens" in printed


def test_the_console_shows_the_expert_load_of_an_moe_model(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["loss", "weighted_loss", "grad_norm", "learning_rate", "supervised_tokens_per_second"]
    values: dict[str, Any] = dict.fromkeys(numbers, 1.0) | {
        "tau": None,
        "utilization": None,
        "peak_memory_bytes": 2**30,
    }
    console.show_step(1, 2, values, 0.0, log=True)
    console.show_step(2, 2, values | {"expert_load_mean": 1.84, "expert_load_max": 3.0}, 0.0, log=True)
    dense, moe = capsys.readouterr().out.splitlines()
    assert "fullest expert 1.8x" in moe and "expert" not in dense


def test_check_assumes_one_expert_parallel_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(LARGE), f"run.output_dir={tmp_path}/run"]) == 0
    printed = capsys.readouterr().out
    assert "Expert parallelism: groups of 32 ranks" in printed and "a step on 32 ranks" in printed
