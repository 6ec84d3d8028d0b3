"""The DeepSpeed JSON and the recipe, merged into one configuration; where they contradict each other, neither wins.

The JSON says how ZeRO-3 stores and communicates data. The recipe owns what determines the result: batch sizes,
precision, clipping, optimizer and learning rate.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vcore_ds.config.files import SHIPPED_DEEPSPEED_CONFIGS, UnreadableFile, read_text
from vcore_ds.config.problems import RecipeError, shorten, show
from vcore_ds.config.schema import Recipe
from vcore_ds.config.yaml_text import MAX_DEPTH
from vcore_ds.planning.batch_plan import BatchPlan

_MISSING = object()


def deepspeed_config(recipe: Recipe, plan: BatchPlan) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`: the JSON plus the recipe's keys.

    Raises RecipeError with all contradictions (JSON file, JSON key, both values, remedy) at once.
    """
    path, config = _read_json(recipe.engine.deepspeed_config)
    owned = _owned_by_recipe(recipe)
    problems = [
        *_auto_problems(config),
        *_shape_problems(config),
        *_owned_problems(config, owned),
        *_accumulation_problems(config),
        *_zero_problems(config, recipe.method.uses_utilities and recipe.utility.estimator == "jvp"),
        *_communication_problems(config, recipe.model.precision),
        *_placement_problems(config, plan),
    ]
    if problems:
        raise RecipeError(f"{path}: {problem}" for problem in problems)
    for key, (value, _) in owned.items():
        _set(config, key, value)
    # DeepSpeed requires batch sizes that multiply, and does not use them here: the engine counts micro-batches itself,
    # and their number differs from step to step.
    _set(config, "gradient_accumulation_steps", 1)
    _set(config, "train_batch_size", config["train_micro_batch_size_per_gpu"] * plan.num_ranks)
    _set(config, "data_types.grad_accum_dtype", "fp32")
    # DeepSpeed keeps a list of optimizers it has tried under ZeRO, and torch's SGD is not on it. Ours are tested.
    _set(config, "zero_allow_untested_optimizer", True)
    # DeepSpeed's own timer of throughput would hold the host until the device has finished, before every training
    # forward and after every step.
    _set(config, "timers.throughput.enabled", False)
    # With an offloaded optimizer it insists on its own Adam, compiled at first use; PyTorch's fused one updates on the
    # CPU as well.
    _set(config, "zero_force_ds_cpu_optimizer", False)
    return config


def _owned_by_recipe(recipe: Recipe) -> dict[str, tuple[Any, str]]:
    """JSON key -> (the recipe's value, the recipe's key)."""
    is_bf16 = recipe.model.precision == "bf16"
    return {
        "train_micro_batch_size_per_gpu": (
            1 if recipe.batch.micro_batch_size_per_rank == "auto" else recipe.batch.micro_batch_size_per_rank,
            "batch.micro_batch_size_per_rank",
        ),
        "train_batch_size": (recipe.batch.global_size, "batch.global_size"),
        "bf16.enabled": (is_bf16, "model.precision"),
        "fp16.enabled": (False, "model.precision"),
        "gradient_clipping": (recipe.optimizer.gradient_clipping or 0.0, "optimizer.gradient_clipping"),
    }


def _shape_problems(config: dict[str, Any]) -> Iterator[str]:
    for section in ("zero_optimization", "data_types", "bf16", "fp16", "timers", "timers.throughput"):
        found = _get(config, section)
        if found is not _MISSING and not isinstance(found, dict):
            yield f"{section}: found {show(found)}; expected an object"


def _owned_problems(config: dict[str, Any], owned: dict[str, tuple[Any, str]]) -> Iterator[str]:
    for key, (value, recipe_key) in owned.items():
        found = _get(config, key)
        if found not in (_MISSING, value, "auto"):
            yield (
                f"{key}: found {show(found)}, but the recipe's {recipe_key} gives {show(value)}; "
                f"expected no such key in the JSON (remove it, and set {recipe_key} in the recipe)"
            )
    for section, recipe_section in (("optimizer", "optimizer"), ("scheduler", "schedule")):
        if section in config:
            yield (
                f"{section}: found {show(config[section])}, but the recipe has its own section {recipe_section}; "
                f"expected no such section in the JSON (remove it, and set {recipe_section}.* in the recipe)"
            )


def _accumulation_problems(config: dict[str, Any]) -> Iterator[str]:
    found = _get(config, "gradient_accumulation_steps")
    if found not in (_MISSING, "auto"):
        yield (
            f"gradient_accumulation_steps: found {show(found)}; expected no such key in the JSON (remove it: how many "
            "micro-batches a step has follows from its sequences and the world size)"
        )


def _zero_problems(config: dict[str, Any], uses_forward_mode: bool) -> Iterator[str]:
    stage = _get(config, "zero_optimization.stage")
    if stage != 3:
        yield f"zero_optimization.stage: {_found(stage)}; expected 3 (shards of parameters are what the probe works on)"
    if uses_forward_mode:
        linear = _get(config, "zero_optimization.memory_efficient_linear")
        if linear is not False:
            yield (
                f"zero_optimization.memory_efficient_linear: {_found(linear)} together with the recipe's "
                "utility.estimator jvp; expected false (DeepSpeed's default is true, and that function has no "
                "forward-mode derivative)"
            )
    accumulation = _get(config, "data_types.grad_accum_dtype")
    if accumulation not in (_MISSING, "fp32", "auto"):
        yield (
            f"data_types.grad_accum_dtype: {_found(accumulation)}; expected fp32 "
            "(16-bit accumulation rounds the gradients of late micro-batches away)"
        )


def _communication_problems(config: dict[str, Any], precision: str) -> Iterator[str]:
    """Problems with the dtype in which ranks sum their gradients; DeepSpeed's default is that of the parameters."""
    found = _get(config, "communication_data_type")
    if found in (_MISSING, None, "fp32", "auto") or found == precision:
        return
    yield (
        f"communication_data_type: {_found(found)}; expected fp32, or no such key for the parameters' own dtype, "
        f"{precision} (in another 16-bit format sums of gradients overflow, or lose digits)"
    )


def _placement_problems(config: dict[str, Any], plan: BatchPlan) -> Iterator[str]:
    """Problems with where shards are kept, and in what form they are communicated."""
    for offload in ("offload_param", "offload_optimizer"):
        if _get(config, f"zero_optimization.{offload}.device") == "nvme":
            yield (
                f'zero_optimization.{offload}.device: found "nvme"; expected "cpu" or "none" '
                "(the probe and the perturbation read and write the shards in memory)"
            )
    hpz, num_ranks = _get(config, "zero_optimization.zero_hpz_partition_size"), plan.num_ranks
    if isinstance(hpz, int) and hpz > 1 and num_ranks % min(hpz, num_ranks) != 0:
        yield (
            f"zero_optimization.zero_hpz_partition_size: found {hpz} on {num_ranks} ranks; expected a divisor of "
            f"{num_ranks} (the GPUs of one node)"
        )
    if isinstance(hpz, int) and hpz > 1 and plan.tensor > 1:
        yield (
            f"zero_optimization.zero_hpz_partition_size: found {hpz} together with parallel.tensor "
            f"{plan.tensor}; expected no such key: DeepSpeed makes these groups of neighbouring ranks, "
            "of a tensor-parallel group"
        )
    if isinstance(hpz, int) and hpz > 1 and plan.time_model.expert > 1:
        yield (
            f"zero_optimization.zero_hpz_partition_size: found {hpz} together with parallel.expert "
            f"{plan.time_model.expert}; expected no such key: its groups of neighbouring ranks have different experts"
        )
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if _get(config, f"zero_optimization.{key}") is True:
            yield (
                f"zero_optimization.{key}: found true; expected false (losses and utilities would be those of weights "
                "or gradients silently rounded to 8 or 4 bits)"
            )


def _auto_problems(value: Any, key: str = "") -> Iterator[str]:
    """Hugging Face's placeholder "auto", anywhere."""
    if value == "auto":
        yield (
            f'{shorten(key)}: found "auto"; expected a value, or no such key '
            '("auto" is filled in by the Hugging Face Trainer, which does not run here)'
        )
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from _auto_problems(child, f"{key}.{name}" if key else str(name))


def _read_json(file: str) -> tuple[Path, dict[str, Any]]:
    """The JSON and its path. `file`: absolute, or the name of a shipped one."""
    path = SHIPPED_DEEPSPEED_CONFIGS.parent / file
    duplicates: set[str] = set()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.update(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        config = json.loads(read_text(path), object_pairs_hook=unique)
        _check_depth(config, 1)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise RecipeError([f"{where}: found text that is not JSON: {error.msg}; expected a DeepSpeed JSON"]) from None
    except FileNotFoundError:
        raise RecipeError([f"{path}: found no such file; expected a DeepSpeed JSON"]) from None
    except UnreadableFile as error:
        raise RecipeError([f"{path}: {error}; expected a DeepSpeed JSON"]) from None
    except RecursionError:
        problem = f"found values nested more than {MAX_DEPTH} levels deep"
        raise RecipeError([f"{path}: {problem}; expected a DeepSpeed JSON"]) from None
    except ValueError:  # the one thing that is JSON and that Python does not convert
        raise RecipeError([f"{path}: found an integer of more than 4,300 digits; expected a DeepSpeed JSON"]) from None
    if not isinstance(config, dict):
        raise RecipeError([f"{path}: found {show(config)}; expected a JSON object with DeepSpeed's settings"])
    if duplicates:
        raise RecipeError(
            f"{path}: {shorten(name)}: found twice in one object; expected once" for name in sorted(duplicates)
        )
    return path, config


def _check_depth(value: Any, depth: int) -> None:
    """Raises RecursionError for values nested more than `MAX_DEPTH` levels deep."""
    if depth > MAX_DEPTH:
        raise RecursionError
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(child, depth + 1)


def _get(config: dict[str, Any], dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _set(config: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, name = dotted.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[name] = value


def _found(value: Any) -> str:
    return "found nothing" if value is _MISSING else f"found {show(value)}"
