"""Recipes: schema, YAML, overrides, batch arithmetic, the DeepSpeed JSON. Nothing here imports torch."""

from vcore_ds.config.batch_plan import BatchPlan, Part, num_trusted, plan_batch
from vcore_ds.config.deepspeed_json import deepspeed_config
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.memory import Available, MemoryPlan, plan_memory
from vcore_ds.config.memory_text import describe_memory, describe_shortage, describe_tightness
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.resume import differing_keys, read_resolved_recipe
from vcore_ds.config.schema import Recipe

__all__ = [
    "Available",
    "BatchPlan",
    "MemoryPlan",
    "Part",
    "Recipe",
    "RecipeError",
    "deepspeed_config",
    "describe_memory",
    "describe_shortage",
    "describe_tightness",
    "differing_keys",
    "dump_recipe",
    "load_recipe",
    "num_trusted",
    "plan_batch",
    "plan_memory",
    "read_resolved_recipe",
]
