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
from vcore_ds.config.problems import RecipeError, show
from vcore_ds.planning.batch_plan import BatchPlan
from vcore_ds.planning.settings import PlanSettings

_MISSING = object()


def deepspeed_config(settings: PlanSettings, plan: BatchPlan) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`: the JSON plus the recipe's keys.

    Raises RecipeError with all contradictions (JSON file, JSON key, both values, remedy) at once.
    """
    path, config = _read_json(settings.engine.deepspeed_config)
    problems = [
        *_find_auto_values(config),
        *_find_contradictions(config, settings),
        *_find_placement_problems(config, plan),
    ]
    if problems:
        raise RecipeError(f"{path}: {problem}" for problem in problems)
    for key, (value, _) in _list_recipe_values(settings).items():
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


def _list_recipe_values(settings: PlanSettings) -> dict[str, tuple[Any, str]]:
    """JSON key -> (the recipe's value, the recipe's key)."""
    micro = settings.batch.micro_batch_size_per_rank
    return {
        "train_micro_batch_size_per_gpu": (1 if micro == "auto" else micro, "batch.micro_batch_size_per_rank"),
        "train_batch_size": (settings.batch.global_size, "batch.global_size"),
        "bf16.enabled": (settings.model.precision == "bf16", "model.precision"),
        "fp16.enabled": (False, "model.precision"),
        "gradient_clipping": (settings.optimizer.gradient_clipping or 0.0, "optimizer.gradient_clipping"),
    }


def _find_auto_values(value: Any, key: str = "") -> Iterator[str]:
    """Hugging Face's placeholder "auto", anywhere."""
    if value == "auto":
        yield (
            f'{key}: found "auto"; expected a value, or no such key '
            '("auto" is filled in by the Hugging Face Trainer, which does not run here)'
        )
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from _find_auto_values(child, f"{key}.{name}" if key else str(name))


def _find_contradictions(config: dict[str, Any], settings: PlanSettings) -> Iterator[str]:
    """Keys that contradict the recipe, or that its steps cannot work with."""
    for section in ("zero_optimization", "data_types", "bf16", "fp16", "timers", "timers.throughput"):
        if not isinstance(_get(config, section, {}), dict):
            yield f"{section}: {_describe_value(config, section)}; expected an object"
    for key, (value, recipe_key) in _list_recipe_values(settings).items():
        if _get(config, key, value) not in (value, "auto"):
            yield (
                f"{key}: {_describe_value(config, key)}, but the recipe's {recipe_key} gives {show(value)}; expected "
                f"no such key in the JSON (remove it, and set {recipe_key} in the recipe)"
            )
    for section, recipe_section in (("optimizer", "optimizer"), ("scheduler", "schedule")):
        if section in config:
            yield (
                f"{section}: {_describe_value(config, section)}, but the recipe has a section {recipe_section}; "
                f"expected no such section in the JSON (remove it, and set {recipe_section}.* in the recipe)"
            )
    precision = settings.model.precision
    allowed: dict[str, tuple[tuple[Any, ...], str]] = {
        "gradient_accumulation_steps": (
            (_MISSING,),
            "no such key in the JSON (remove it: how many micro-batches a step has follows from its sequences and the "
            "world size)",
        ),
        "zero_optimization.stage": ((3,), "3 (shards of parameters are what the probe works on)"),
        "zero_optimization.memory_efficient_linear": (
            (False,) if settings.estimator == "jvp" else (_MISSING, False, True),
            "false with the recipe's utility.estimator jvp (DeepSpeed's default is true, and that function has no "
            "forward-mode derivative)",
        ),
        "data_types.grad_accum_dtype": (
            (_MISSING, "fp32"),
            "fp32 (16-bit accumulation rounds the gradients of late micro-batches away)",
        ),
        # In this dtype ranks sum their gradients; DeepSpeed's default is that of the parameters.
        "communication_data_type": (
            (_MISSING, None, "fp32", precision),
            f"fp32, or no such key for the parameters' own dtype, {precision} (in another 16-bit format sums of "
            "gradients overflow, or lose digits)",
        ),
        **dict.fromkeys(
            ("zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"),
            (
                (_MISSING, None, "cpu", "none"),
                '"cpu" or "none" (the probe and the perturbation read and write the shards in memory)',
            ),
        ),
        **{
            f"zero_optimization.zero_quantized_{part}": (
                (_MISSING, None, False),
                "false (losses and utilities would be those of weights or gradients silently rounded to 8 or 4 bits)",
            )
            for part in ("weights", "nontrainable_weights", "gradients")
        },
    }
    for key, (values, expected) in allowed.items():
        if _get(config, key) not in (*values, "auto"):
            yield f"{key}: {_describe_value(config, key)}; expected {expected}"


def _find_placement_problems(config: dict[str, Any], plan: BatchPlan) -> Iterator[str]:
    """Problems with hierarchical partitioning, whose groups are neighbouring ranks."""
    key, num_ranks = "zero_optimization.zero_hpz_partition_size", plan.num_ranks
    size = _get(config, key)
    if not isinstance(size, int) or size <= 1:
        return
    if num_ranks % min(size, num_ranks) != 0:
        yield f"{key}: found {size} on {num_ranks} ranks; expected a divisor of {num_ranks} (the GPUs of one node)"
    for name, group_size, who in (
        ("tensor", plan.tensor, "are in one tensor-parallel group"),
        ("expert", plan.time_model.expert, "have different experts"),
    ):
        if group_size > 1:
            yield (
                f"{key}: found {size} together with parallel.{name} {group_size}; expected no such key: DeepSpeed "
                f"groups neighbouring ranks, and these {who}"
            )


def _read_json(file: str) -> tuple[Path, dict[str, Any]]:
    """The JSON and its path. `file`: absolute, or the name of a shipped one."""
    path = SHIPPED_DEEPSPEED_CONFIGS.parent / file
    duplicates: set[str] = set()

    def collect_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.update(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        config = json.loads(read_text(path), object_pairs_hook=collect_duplicates)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise RecipeError([f"{where}: found text that is not JSON: {error.msg}; expected a DeepSpeed JSON"]) from None
    except FileNotFoundError:
        raise RecipeError([f"{path}: found no such file; expected a DeepSpeed JSON"]) from None
    except UnreadableFile as error:
        raise RecipeError([f"{path}: {error}; expected a DeepSpeed JSON"]) from None
    if not isinstance(config, dict):
        raise RecipeError([f"{path}: found {show(config)}; expected a JSON object with DeepSpeed's settings"])
    if duplicates:
        raise RecipeError(f"{path}: {name}: found twice in one object; expected once" for name in sorted(duplicates))
    return path, config


def _get(config: dict[str, Any], dotted: str, default: Any = _MISSING) -> Any:
    value: Any = config
    for name in dotted.split("."):
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value


def _set(config: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, name = dotted.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[name] = value


def _describe_value(config: dict[str, Any], dotted: str) -> str:
    value = _get(config, dotted)
    return "found nothing" if value is _MISSING else f"found {show(value)}"
