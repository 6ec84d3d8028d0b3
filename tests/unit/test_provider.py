"""Recipes with megatron-core's layers: contradictions, the plan's division of ranks and model, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import Qwen2Config

from tests.helpers.recipes import smallest_recipe
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe
from vcore_ds.models.architecture_check import count_parameters
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import plan_memory
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.passes import ParameterCounts
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.run_folder import can_resume

REPOSITORY = Path(__file__).resolve().parents[2]
MEGATRON: dict[str, Any] = {"model": {"path": "m", "provider": "megatron"}}


def make_recipe(tensor: int = 1, **sections: Any) -> Recipe:
    config = {"deepspeed_config": str(REPOSITORY / "ds_configs" / "zero3_bf16.json")}
    base = smallest_recipe() | MEGATRON | {"parallel": {"tensor": tensor}, "engine": config}
    return Recipe.model_validate(base | sections)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "m"}}, "parallel.tensor: found 2 together with model.provider huggingface; expected 1"),
        (
            {"model": {**MEGATRON["model"], "attention": "sdpa"}},
            "model.attention: found sdpa together with model.provider megatron; expected auto",
        ),
        (
            {"lora": {"rank": 4, "alpha": 8}},
            "model.provider: found megatron together with lora.rank 4; expected huggingface",
        ),
    ],
)
def test_contradicting_settings_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_recipe(2, **sections)


@pytest.mark.parametrize("tensor", [0, 3, 16])
def test_unsupported_tensor_parallel_sizes_are_refused(tensor: int) -> None:
    with pytest.raises(ValidationError, match="parallel.tensor"):
        make_recipe(tensor)


def test_a_tensor_parallel_group_counts_as_one_rank() -> None:
    plan = plan_batch(derive_plan_settings(make_recipe(4)), 32, QWEN3_32B, ranks_per_node=8)
    assert (plan.num_ranks, plan.time_model.ranks_per_node) == (8, 2)
    part = plan.time_model.shape
    assert (part.num_heads, part.num_kv_heads, part.hidden_size) == (16, 2, QWEN3_32B.hidden_size)
    assert part.layer_parameters == QWEN3_32B.layer_parameters // 4
    # Sequence-parallel ranks divide the heads of a rank's shard of the layer.
    assert plan.main_parallel_sizes == (1, 2, 4, 8)
    assert plan_batch(derive_plan_settings(make_recipe(8)), 128, QWEN3_32B).main_parallel_sizes == (1, 2, 4, 8)


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(RecipeError, match="parallel.tensor: found 4 on 6 ranks"):
        plan_batch(derive_plan_settings(make_recipe(4)), 6, QWEN3_32B)


def test_a_tensor_parallel_group_must_fit_a_node() -> None:
    with pytest.raises(RecipeError, match="parallel.tensor: found 8 with 4 ranks on a node"):
        plan_batch(derive_plan_settings(make_recipe(8)), 16, QWEN3_32B, ranks_per_node=4)
    assert plan_batch(derive_plan_settings(make_recipe(2)), 2, QWEN3_32B, ranks_per_node=8).num_ranks == 1


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"num_kv_heads": 4}, "which has 4 key/value heads; expected a divisor of 4"),
        ({"intermediate_size": 100}, "whose MLP has the width 100; expected a divisor"),
    ],
)
def test_a_size_that_does_not_divide_the_layers_is_refused(changed: dict[str, int], words: str) -> None:
    with pytest.raises(RecipeError, match=f"parallel.tensor: found 8 .*{words}"):
        plan_batch(derive_plan_settings(make_recipe(8)), 8, replace(QWEN3_32B, **changed))


def test_hierarchical_partitioning_is_refused() -> None:
    shipped = str(REPOSITORY / "ds_configs" / "zero3_bf16_hierarchical.json")
    settings = derive_plan_settings(make_recipe(2, engine={"deepspeed_config": shipped}))
    with pytest.raises(RecipeError, match="zero_hpz_partition_size: found 8 .*parallel.tensor 2"):
        deepspeed_config(settings, plan_batch(settings, 32, QWEN3_32B))


def test_memory_counts_the_shard_of_every_layer() -> None:
    def estimate_peak(tensor: int, counts: ParameterCounts | None) -> int:
        settings = derive_plan_settings(make_recipe(tensor))
        plan = plan_batch(settings, 64, QWEN3_32B)
        memory = plan_memory(settings, plan, deepspeed_config(settings, plan), {}, counts, on_gpu=True)
        assert memory is not None
        return memory.estimate.persistent_bytes

    # An eighth of the linear layers and embeddings, and all norms: 2 x 5,120 and 2 x 128 of each layer, and the last.
    linear, embedding, norms = 64 * 487_587_840, 151_936 * 5_120, 64 * (2 * 5_120 + 2 * 128) + 5_120
    assert linear + 2 * embedding + norms == 32_762_123_264
    rank_parameters = linear // 8 + 2 * embedding // 8 + norms
    assert estimate_peak(8, ParameterCounts(rank_parameters, rank_parameters)) == estimate_peak(8, None)
    assert estimate_peak(8, None) == 20 * rank_parameters // 8 + estimate_peak(1, None) - 20 * 32_762_123_264 // 64
    assert estimate_peak(8, None) > estimate_peak(1, None)


def test_the_start_of_a_run_counts_the_parameters_of_a_shard(tmp_path: Path) -> None:
    """3 layers of a Qwen2 with biases for queries, keys and values, and a vocabulary that 2 ranks do not divide."""
    sizes = dict(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    Qwen2Config(**sizes, intermediate_size=96, vocab_size=501, tie_word_embeddings=True).save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "provider": "megatron"}
    part = 3 * ((2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 64 + 2 * 32) // 2 + 2 * 64) + 64 + 251 * 64
    assert count_parameters(make_recipe(2, model=model).model.path, None, 2) == ParameterCounts(part, part)


def test_resuming_with_another_tensor_parallel_size_is_refused_with_the_remedy(tmp_path: Path) -> None:
    there, here = (make_recipe(tensor, run={"output_dir": str(tmp_path / "run")}) for tensor in (2, 4))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(there))
    with pytest.raises(UserError, match=r"(?s)parallel.tensor: 2 there, 4 here.*model.path="):
        can_resume(here)
