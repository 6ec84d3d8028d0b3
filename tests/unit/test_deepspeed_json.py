"""The DeepSpeed JSON and the recipe: what is added, and that no contradiction passes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.recipes import smallest_recipe
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.settings import derive_plan_settings

DEEPSPEED = {
    "zero_optimization": {"stage": 3, "memory_efficient_linear": False, "reduce_bucket_size": 1000},
    "data_types": {"grad_accum_dtype": "fp32"},
}


def merge(folder: Path, deepspeed: Any, *, num_ranks: int = 2, **sections: dict[str, Any]) -> dict[str, Any]:
    """The JSON (a value, its text, or None for no file) merged with a recipe of 32 sequences a step."""
    path = folder / "ds.json"
    if deepspeed is not None:
        path.write_text(deepspeed if isinstance(deepspeed, str) else json.dumps(deepspeed))
    recipe = Recipe.model_validate(smallest_recipe() | {"engine": {"deepspeed_config": str(path)}} | sections)
    settings = derive_plan_settings(recipe)
    return deepspeed_config(settings, plan_batch(settings, num_ranks, QWEN3_32B))


def test_settings_of_the_recipe_are_added_to_the_json(tmp_path: Path) -> None:
    without_dtype = {"zero_optimization": DEEPSPEED["zero_optimization"], "steps_per_print": 7}
    clipped = {"learning_rate": 0.1, "gradient_clipping": 0.5}
    config = merge(tmp_path, without_dtype, batch={"micro_batch_size_per_rank": 4}, optimizer=clipped)
    assert config == without_dtype | {
        "data_types": {"grad_accum_dtype": "fp32"},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 8,  # numbers that multiply, for DeepSpeed's own arithmetic
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},
    }
    unclipped = {"learning_rate": 0.1, "gradient_clipping": None}
    fp32 = merge(tmp_path, DEEPSPEED, model={"path": "m", "precision": "fp32"}, optimizer=unclipped)
    assert fp32["bf16"] == {"enabled": False} and fp32["gradient_clipping"] == 0.0


def test_the_same_value_twice_is_no_contradiction_and_siblings_stay(tmp_path: Path) -> None:
    same = {"train_batch_size": 32, "gradient_clipping": 1.0, "bf16": {"enabled": True, "check_grad_overflow": False}}
    config = merge(tmp_path, DEEPSPEED | same)
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": False}


def zero3(**changes: Any) -> dict[str, Any]:
    return {"zero_optimization": DEEPSPEED["zero_optimization"] | changes}


CONTRADICTIONS = [
    (
        {"train_micro_batch_size_per_gpu": 3},
        "train_micro_batch_size_per_gpu",
        "batch.micro_batch_size_per_rank gives 1",
    ),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", "no such key"),
    ({"train_batch_size": 31}, "train_batch_size", "batch.global_size gives 32"),
    ({"gradient_clipping": 0.3}, "gradient_clipping", "optimizer.gradient_clipping gives 1"),
    ({"bf16": {"enabled": False}}, "bf16.enabled", "model.precision gives true"),
    ({"fp16": {"enabled": True}}, "fp16.enabled", "model.precision gives false"),
    ({"bf16": True}, "bf16", "an object"),
    ({"data_types": "fp32"}, "data_types", "an object"),
    ({"optimizer": {"type": "AdamW"}}, "optimizer", "optimizer.*"),
    ({"scheduler": {}}, "scheduler", "schedule.*"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "fp32"),
    ({"communication_data_type": "fp16"}, "communication_data_type", "fp32"),
    ({"communication_data_type": 16}, "communication_data_type", "fp32"),
    ({"timers": True}, "timers", "an object"),
    ({"timers": {"throughput": 1}}, "timers.throughput", "an object"),
    (zero3(stage=2), "zero_optimization.stage", "3"),
    (zero3(memory_efficient_linear=True), "zero_optimization.memory_efficient_linear", "false"),
    (zero3(zero_quantized_weights=True), "zero_optimization.zero_quantized_weights", "false"),
    (zero3(zero_quantized_nontrainable_weights=True), "zero_optimization.zero_quantized_nontrainable_weights", "false"),
    (zero3(zero_quantized_gradients=True), "zero_optimization.zero_quantized_gradients", "false"),
    (zero3(offload_param={"device": "nvme"}), "zero_optimization.offload_param.device", '"cpu"'),
    (zero3(offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.device", '"cpu"'),
    (zero3(reduce_bucket_size="auto"), "zero_optimization.reduce_bucket_size", "a value"),
    ({"train_batch_size": "auto"}, "train_batch_size", "a value"),
    ({"some": [{"deep": "auto"}]}, "some.0.deep", "a value"),
]


def test_contradictions_of_the_recipe_are_refused(tmp_path: Path) -> None:
    for changes, key, expected in CONTRADICTIONS:
        with pytest.raises(RecipeError) as error:
            merge(tmp_path, DEEPSPEED | changes)
        (problem,) = error.value.problems
        assert problem.startswith(f"{tmp_path / 'ds.json'}: {key}: found ")
        assert expected in problem.partition("; expected ")[2]


def test_gradients_are_summed_in_the_parameters_dtype_or_in_fp32(tmp_path: Path) -> None:
    for precision, dtype in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")):
        config = merge(
            tmp_path, DEEPSPEED | {"communication_data_type": dtype}, model={"path": "m", "precision": precision}
        )
        assert config["communication_data_type"] == dtype
    with pytest.raises(RecipeError, match='communication_data_type: found "bf16"; expected fp32'):
        merge(tmp_path, DEEPSPEED | {"communication_data_type": "bf16"}, model={"path": "m", "precision": "fp32"})


def test_hierarchical_partitioning_needs_complete_groups_of_ranks(tmp_path: Path) -> None:
    for num_ranks, size in ((2, 8), (8, 8), (16, 8), (8, 1)):  # more than all ranks is all of them
        config = merge(tmp_path, zero3(zero_hpz_partition_size=size), num_ranks=num_ranks)
        assert config["zero_optimization"]["zero_hpz_partition_size"] == size
    with pytest.raises(RecipeError, match="zero_hpz_partition_size: found 3 on 4 ranks"):
        merge(tmp_path, zero3(zero_hpz_partition_size=3), num_ranks=4)


def test_all_contradictions_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        merge(tmp_path, {"train_batch_size": 1, "scheduler": {}, "zero_optimization": {}})
    keys = [problem.split(": ")[1] for problem in error.value.problems]
    zero_keys = ["zero_optimization.stage", "zero_optimization.memory_efficient_linear"]
    assert keys == ["train_batch_size", "scheduler", *zero_keys]
    assert "found nothing; expected 3" in error.value.problems[2]
    assert "found nothing; expected false" in error.value.problems[3]


def test_memory_efficient_linear_is_free_without_forward_mode(tmp_path: Path) -> None:
    finite_difference = {"utility": {"estimator": "finite_difference", "epsilon": 1e-4}}
    for sections in ({"method": {"name": "sft"}}, finite_difference):
        config = merge(tmp_path, {"zero_optimization": {"stage": 3, "memory_efficient_linear": True}}, **sections)
        assert config["zero_optimization"]["memory_efficient_linear"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n  b}', r"ds\.json: found .*line 2 column 3"),
        ("[1]", r"found \[1\]; expected a JSON object"),
        ('{"a": {"b": 1, "b": 2}}', "found b twice in one object"),
        (None, r"ds\.json: cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_deepspeed_json_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        merge(tmp_path, text)
