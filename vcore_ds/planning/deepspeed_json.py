"""The DeepSpeed JSON and the recipe, merged into one configuration; a contradiction between them is refused.

The JSON says how ZeRO-3 stores and communicates data. The recipe owns what determines the result: batch sizes,
precision, clipping, optimizer and learning rate.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vcore_ds.config.load import SHIPPED_DEEPSPEED_CONFIGS, read_text
from vcore_ds.config.problems import RecipeError, show
from vcore_ds.planning.batch_plan import BatchPlan
from vcore_ds.planning.settings import PlanSettings, ZeroSettings

_MISSING = object()


def deepspeed_config(settings: PlanSettings, plan: BatchPlan) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`: the JSON plus the recipe's keys.

    Raises RecipeError with all contradictions (JSON file, JSON key, what was found and expected) at once.
    """
    path = SHIPPED_DEEPSPEED_CONFIGS.parent / settings.engine.deepspeed_config  # absolute, or the name of a shipped one
    config = _read_json(path)
    problems = [*_find_auto_values(config), *_find_refused_values(config, settings), *_find_hpz_problems(config, plan)]
    if problems:
        raise RecipeError(f"{path}: {problem}" for problem in problems)
    added = {
        **{key: value for key, (value, _) in _list_recipe_values(settings).items()},
        # DeepSpeed requires batch sizes that multiply, and does not use them here: the engine counts micro-batches
        # itself, and their number differs from step to step.
        "gradient_accumulation_steps": 1,
        "data_types.grad_accum_dtype": "fp32",
        # torch's SGD is not on DeepSpeed's list of optimizers that were tried under ZeRO. Ours are tested.
        "zero_allow_untested_optimizer": True,
        # Its timer makes the host wait for the device before every training forward and after every step.
        "timers.throughput.enabled": False,
        # With an offloaded optimizer it insists on an Adam that it compiles at first use; PyTorch's works on CPUs too.
        "zero_force_ds_cpu_optimizer": False,
    }
    added["train_batch_size"] = added["train_micro_batch_size_per_gpu"] * plan.num_ranks
    for key, value in added.items():
        *parents, name = key.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
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
        yield f'{key}: found "auto", which Hugging Face\'s Trainer fills in; expected a value, or no such key'
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from _find_auto_values(child, f"{key}.{name}" if key else str(name))


def _find_refused_values(config: dict[str, Any], settings: PlanSettings) -> Iterator[str]:
    """Keys that contradict the recipe, or that its steps cannot work with."""
    for section in ("zero_optimization", "data_types", "bf16", "fp16", "timers", "timers.throughput"):
        if not isinstance(_get(config, section, {}), dict):
            yield f"{section}: {_describe_value(config, section)}; expected an object"
    precision = settings.model.precision
    memory_efficient = (False,) if settings.estimator == "jvp" else (_MISSING, False, True)
    allowed: dict[str, tuple[tuple[Any, ...], str]] = {
        **{
            key: ((_MISSING, value), f"no such key, since the recipe's {recipe_key} gives {show(value)}")
            for key, (value, recipe_key) in _list_recipe_values(settings).items()
        },
        "optimizer": ((_MISSING,), "no such section, but the recipe's optimizer.*"),
        "scheduler": ((_MISSING,), "no such section, but the recipe's schedule.*"),
        "gradient_accumulation_steps": (
            (_MISSING,),
            "no such key (it follows from the sequences of a step and the world size)",
        ),
        "zero_optimization.stage": ((3,), "3 (the probe works on shards of parameters)"),
        "zero_optimization.memory_efficient_linear": (
            memory_efficient,
            "false (DeepSpeed's default is true, whose function has no forward-mode derivative for jvp)",
        ),
        "data_types.grad_accum_dtype": (
            (_MISSING, "fp32"),
            "fp32 (16-bit accumulation rounds the gradients of late micro-batches away)",
        ),
        "communication_data_type": (
            (_MISSING, None, "fp32", precision),
            f"fp32, or no such key for the parameters' dtype, {precision} (in another one sums overflow or lose "
            "digits)",
        ),
        **dict.fromkeys(
            ("zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"),
            ((_MISSING, None, "cpu", "none"), '"cpu" or "none" (utilities read and write the shards in memory)'),
        ),
        **dict.fromkeys(
            (f"zero_optimization.zero_quantized_{part}" for part in ("weights", "nontrainable_weights", "gradients")),
            ((_MISSING, None, False), "false (utilities would be those of rounded weights)"),
        ),
    }
    for key, (values, expected) in allowed.items():
        if _get(config, key) not in (*values, "auto"):
            yield f"{key}: {_describe_value(config, key)}; expected {expected}"


def _find_hpz_problems(config: dict[str, Any], plan: BatchPlan) -> Iterator[str]:
    """Problems with hierarchical partitioning, whose groups are neighbouring ranks."""
    key = "zero_optimization.zero_hpz_partition_size"
    size = _get(config, key)
    if not isinstance(size, int) or size <= 1:
        return
    if plan.num_ranks % min(size, plan.num_ranks) != 0:
        yield f"{key}: found {size} on {plan.num_ranks} ranks; expected a divisor of {plan.num_ranks}"
    for name, group_size in (("tensor", plan.tensor), ("expert", plan.time_model.expert)):
        if group_size > 1:
            yield f"{key}: found {size} together with parallel.{name} {group_size}; expected no such key"


def _read_json(path: Path) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, number in Counter(name for name, _ in pairs).items():
            if number > 1:
                raise ValueError(f"{name} twice in one object")
        return dict(pairs)

    expected = "a JSON object with DeepSpeed's settings"
    try:
        config = json.loads(read_text(path, expected), object_pairs_hook=refuse_duplicates)
        found = show(config)
    except ValueError as error:
        config, found = None, str(error)
    if not isinstance(config, dict):
        raise RecipeError([f"{path}: found {found}; expected {expected}"])
    return config


def _get(config: dict[str, Any], dotted: str, default: Any = _MISSING) -> Any:
    value: Any = config
    for name in dotted.split("."):
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value


def _describe_value(config: dict[str, Any], dotted: str) -> str:
    value = _get(config, dotted)
    return "found nothing" if value is _MISSING else f"found {show(value)}"


_SIZES = {
    "stage3_max_live_parameters": "max_live_parameters",
    "reduce_bucket_size": "bucket_numel",
    "stage3_prefetch_bucket_size": "prefetch_numel",
    "stage3_max_reuse_distance": "reuse_distance",
    "stage3_allgather_sequential": "gathers_in_place",
}
"""DeepSpeed's keys for sizes in elements, and a switch, and their fields in `ZeroSettings`."""


def read_zero_settings(config: Mapping[str, Any], num_ranks: int) -> ZeroSettings:
    """Read what a DeepSpeed configuration says about the memory and time of a run on `num_ranks` ranks that shard."""
    zero = config["zero_optimization"]
    hpz = zero.get("zero_hpz_partition_size", 1)
    offloads: dict[str, Any] = {
        name: isinstance(section := zero.get(key), Mapping) and section.get("device") == "cpu"
        for key, name in (("offload_param", "offloads_parameters"), ("offload_optimizer", "offloads_optimizer"))
    }
    sizes: dict[str, Any] = {
        field: int(zero[key]) for key, field in _SIZES.items() if isinstance(zero.get(key), int | float)
    }
    return ZeroSettings(**offloads, **sizes, ranks_of_second_copy=min(hpz, num_ranks) if isinstance(hpz, int) else 1)
