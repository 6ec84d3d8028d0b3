"""What a scoring takes of the memory of its ranks: a backward over trusted sets, a forward with tangents over data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vcore_ds.config.schema import Recipe
from vcore_ds.data.store import TokenStore
from vcore_ds.models.parameter_counts import count_parameters
from vcore_ds.planning.batch_plan import BatchPlan, Part
from vcore_ds.planning.memory_plan import MemoryPlan, plan_memory
from vcore_ds.planning.utilization import Utilization, summarize


def plan_scoring_memory(
    recipe: Recipe,
    plan: BatchPlan,
    deepspeed_config: Mapping[str, Any],
    store: TokenStore,
    longest: Sequence[int],
    trusted: Sequence[TokenStore],
) -> MemoryPlan | None:
    """None for a model whose sizes are unknown.

    Args:
        recipe: as `request` makes it of the user's.
        deepspeed_config: complete.
        store: the data.
        longest: positions in it of the sequences that are scored first, which have the longest rows.
        trusted: the trusted sets.
    """
    main = plan.spread_main(longest, store.lengths[list(longest)].tolist(), plan.utility_micro_batch_size_per_rank)
    probes = [plan.spread_probe(range(len(one)), one.lengths.tolist()) for one in trusted]
    passes: dict[Part, Utilization] = {"main": summarize([main]), "probe": summarize(probes)}
    counts = count_parameters(recipe.model.path, recipe.lora, recipe.parallel.tensor)
    found = plan_memory(recipe, plan, deepspeed_config, passes, counts)
    if found is None:
        return None
    in_training = found.settings
    # Nothing is learnt from the data: their pass has no graph, and the one with a graph is that over a trusted set.
    settings = replace(
        in_training,
        is_fused=False,
        main_tokens=in_training.probe_tokens,
        utility_tokens=in_training.main_tokens,
    )
    return replace(found, settings=settings)
