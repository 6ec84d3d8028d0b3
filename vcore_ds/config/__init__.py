"""Recipes: schema, YAML, overrides, batch arithmetic, the DeepSpeed JSON. Nothing here imports torch."""

from vcore_ds.config.batch_plan import BatchPlan, Part, num_trusted, plan_batch
from vcore_ds.config.deepspeed_json import deepspeed_config
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.memory import Available, MemoryPlan, plan_memory
from vcore_ds.config.memory_text import describe_memory, describe_shortage, describe_tightness
from vcore_ds.config.plan_text import describe_plan, describe_refusal, plan_verdict
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.resume import differing_keys, flat_values, read_resolved_recipe
from vcore_ds.config.run_plan import (
    COALESCING_SHARE,
    RunPlan,
    Way,
    cheapest_ways,
    find_model,
    find_shape,
    named_gpu,
    needed_passes,
    plan_run,
    shape_or_assumed,
    smallest_cluster,
)
from vcore_ds.config.schema import Recipe, TrackerName
from vcore_ds.config.sweep import Sweep, load_sweep

__all__ = [
    "COALESCING_SHARE",
    "Available",
    "BatchPlan",
    "MemoryPlan",
    "Part",
    "Recipe",
    "RecipeError",
    "RunPlan",
    "Sweep",
    "TrackerName",
    "Way",
    "cheapest_ways",
    "deepspeed_config",
    "describe_memory",
    "describe_plan",
    "describe_refusal",
    "describe_shortage",
    "describe_tightness",
    "differing_keys",
    "dump_recipe",
    "find_model",
    "find_shape",
    "flat_values",
    "load_recipe",
    "load_sweep",
    "named_gpu",
    "needed_passes",
    "num_trusted",
    "plan_batch",
    "plan_memory",
    "plan_run",
    "plan_verdict",
    "read_resolved_recipe",
    "shape_or_assumed",
    "smallest_cluster",
]
