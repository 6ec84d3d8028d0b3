"""Which degrees of tensor, expert and sequence parallelism are possible, and what is said of one that is not."""

import math
from collections.abc import Sequence
from typing import Literal

from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.rank_text import count, count_ranks, member_of
from vcore_ds.planning.spread import possible_degrees


def check_tensor_parallel(tensor: int, num_ranks: int, ranks_per_node: int, shape: ModelShape, model: str) -> None:
    """Raises RecipeError where `parallel.tensor` does not divide the ranks, those of a node, or the model's layers.

    Args:
        ranks_per_node: of a full node.
        shape: of the whole model.
        model: its path.
    """
    of_node, kv_heads, width = min(ranks_per_node, num_ranks), shape.num_kv_heads, shape.intermediate_size
    if num_ranks % tensor:
        found = f"on {count(num_ranks, 'rank')}; expected a divisor: a tensor-parallel group has as many ranks"
    elif of_node % tensor:
        found = (
            f"with {count(of_node, 'rank')} on a node; expected a divisor: tensor-parallel ranks exchange the "
            "activations of every layer, which only a node's own connections are fast enough for"
        )
    elif kv_heads % tensor and not shape.is_assumed:
        found = (
            f"together with model.path {model}, which has {kv_heads} key/value heads; expected a divisor "
            f"of {kv_heads}: a rank computes whole heads"
        )
    elif width % tensor and not shape.is_assumed:
        found = (
            f"together with model.path {model}, which has an intermediate size of {width}; expected a "
            "divisor of it: ranks have equal parts of the MLP"
        )
    else:
        return
    raise RecipeError([f"parallel.tensor: found {tensor} {found}"])


def check_expert_parallel(expert: int, num_ranks: int, shape: ModelShape, model: str) -> None:
    """Raises RecipeError where `parallel.expert` does not divide the ranks or the model's experts.

    Args:
        shape: of the whole model.
        model: its path.
    """
    experts, of_model = shape.experts, f"together with model.path {model}"
    if num_ranks % expert:
        found = f"on {count(num_ranks, 'rank')}; expected a divisor: an expert-parallel group has as many ranks"
    elif expert == 1 or shape.is_assumed:
        return
    elif experts is None:
        found = f"{of_model}, a dense model; expected 1: it has no experts to be divided"
    elif experts.num_experts % expert:
        found = (
            f"{of_model}, whose layers have {experts.num_experts} experts; expected a divisor of "
            f"{experts.num_experts}: a rank has whole experts"
        )
    else:
        return
    raise RecipeError([f"parallel.expert: found {expert} {found}"])


def other_expert_degrees(recipe: Recipe, num_ranks: int, shape: ModelShape) -> list[int]:
    """Degrees of expert parallelism beside the recipe's with which it could run, ascending: the powers of two, and all
    ranks."""
    is_on_experts = recipe.lora is not None and "experts" in recipe.lora.target_modules
    if shape.experts is None or recipe.model.provider != "huggingface" or is_on_experts:
        return []
    most = math.gcd(num_ranks, shape.experts.num_experts)
    degrees = {2**i for i in range(most.bit_length()) if most % 2**i == 0} | {most}
    return sorted(degrees - {recipe.parallel.expert})


def sequence_parallel_degrees(
    recipe: Recipe, section: Literal["batch", "probe"], num_ranks: int, shape: ModelShape
) -> tuple[int, ...]:
    """Sequence-parallel degrees that are possible in the passes over this section's batch, ascending.

    Args:
        num_ranks: a tensor-parallel group counts as one.
        shape: of a rank's part.

    Raises:
        RecipeError: the recipe's number does not fit, or the longest sequence would not fit into the largest row.
    """
    key, wanted = f"{section}.sequence_parallel", getattr(recipe, section).sequence_parallel
    one, on = member_of(recipe.parallel.tensor), f"on {count_ranks(num_ranks, recipe.parallel.tensor)}"
    # Any number of heads may be that of a model that cannot be seen.
    heads = num_ranks if shape.is_assumed and wanted != "auto" else shape.num_heads
    possible = possible_degrees(num_ranks, heads) if shape.no_sequence_parallelism is None else [1]
    if wanted == "auto":
        chosen = possible
    elif wanted in possible:
        chosen = [wanted]
    elif shape.no_sequence_parallelism is not None:
        is_replaced = recipe.model.attention == "auto"
        why = f"model.path {recipe.model.path}, {shape.no_sequence_parallelism}"
        why = why if is_replaced else f"model.attention {recipe.model.attention}"
        remedy = "1 or auto" if is_replaced else "1 or auto, or model.attention auto"
        raise RecipeError(
            [
                f"{key}: found {wanted} together with {why}; expected {remedy}: Ulysses sequence parallelism works "
                "through an attention that takes the place of the model's"
            ]
        )
    else:
        of_heads = "" if shape.is_assumed else f" and the {shape.num_heads} query heads of {recipe.model.path}"
        of_heads += " that a rank has" if of_heads and recipe.parallel.tensor > 1 else ""
        nearest = " or ".join(str(k) for k in _nearest(possible, wanted))
        raise RecipeError(
            [f"{key}: found {wanted} {on}; expected auto, or a divisor of the {num_ranks} {one}s{of_heads}: {nearest}"]
        )
    longest, row = recipe.data.cutoff_length, recipe.batch.packed_row_tokens
    if row is not None and chosen[-1] * row < longest:
        raise RecipeError([_explain_too_short(recipe, key, chosen[-1], possible, num_ranks)])
    return tuple(chosen)


def _explain_too_short(recipe: Recipe, key: str, degree: int, possible: Sequence[int], num_ranks: int) -> str:
    """That no row can hold the longest sequence, and what would."""
    longest, row = recipe.data.cutoff_length, recipe.batch.packed_row_tokens
    assert row is not None
    one = member_of(recipe.parallel.tensor)
    larger = [k for k in possible if k * row >= longest]
    remedies = [
        f"batch.packed_row_tokens {-(-longest // degree)} or more",
        f"data.cutoff_length {degree * row} or less",
    ]
    if larger:
        remedies.insert(0, f"{key} {larger[0]} or auto")
    return (
        f"batch.packed_row_tokens: found {row} together with data.cutoff_length {longest}, where at most "
        f"{count(degree, one)} of {num_ranks} can form a Ulysses group ({key}); expected room for the longest "
        f"sequence: {', or '.join(remedies)}"
    )


def _nearest(numbers: Sequence[int], target: int) -> list[int]:
    """The largest of ascending numbers below the target, and the smallest above it."""
    below, above = [n for n in numbers if n < target], [n for n in numbers if n > target]
    return [*below[-1:], *above[:1]]
