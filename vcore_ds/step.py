"""ONE optimizer step, in the order of the paper's Algorithm 1. The file to read first.

Everything sharded happens in `engine/`, all mathematics in `method/`; this file says what follows what.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Recipe
from .config.schema import MethodConfig
from .data import Batch
from .engine import (
    Direction,
    Engine,
    FiniteDifferenceUtilities,
    JvpUtilities,
    count_globally,
    distributed,
    finite_difference_utilities,
    jvp_utilities,
    probe_direction,
)
from .method import (
    GibbsWeights,
    gibbs_weights,
    gibbs_weights_for_budget,
    loss_ratio_alpha,
    segment_sum,
    sequence_shares,
    token_coefficients,
    uniform_weights,
)
from .track.step_metrics import StepMetrics, StepSums, Stopwatch, TokenWeights


class NonFiniteLoss(RuntimeError):
    """A loss of the batch, or the probe, is inf or nan. The optimizer was not stepped."""


@dataclass(frozen=True)
class StepBatches:
    """What one rank works on in one optimizer step. Ranks have equally many micro-batches; some may be idle."""

    main: Sequence[Batch]
    probe: Sequence[Batch]
    """Empty for methods without a probe."""


def train_step(
    engine: Engine,
    recipe: Recipe,
    batches: StepBatches,
    direction: Direction | None,
    *,
    learning_rate: float,
    batches_per_utility_pass: int = 1,
    measure_noise: bool = False,
) -> StepMetrics:
    """Trains on one global batch and says what happened. A collective.

    Args:
        direction: where the probe gradient is kept; None for methods without one.
        batches_per_utility_pass: main micro-batches in one gradient-free forward.
        measure_noise: with finite differences, measure their signal-to-noise ratio (two more forwards).

    Raises:
        NonFiniteLoss, NonFiniteGradient: on all ranks alike, before anything was updated.
    """
    watch = Stopwatch(engine.device)
    sums = StepSums()
    counts = count_globally(batches.main)

    # Lines 2-3: draw B', take the descent direction under uniform weights. Line 4: utilities of every token of B.
    utilities = None
    probe_loss = probe_gradient_norm = None
    if recipe.method.name == "vcore":
        assert direction is not None, "vcore needs a place for its probe direction"
        with watch.part("probe"):
            probe_loss, probe_gradient_norm = probe_direction(
                engine,
                batches.probe,
                direction,
                normalization=recipe.method.normalization,
                clip=recipe.probe.clip,
            )
        stop_if_the_probe_is_not_finite(probe_loss, probe_gradient_norm, batches.probe)
        with watch.part("utility"):
            utilities = estimate_utilities(
                engine, recipe, batches.main, direction, batches_per_utility_pass, measure_noise
            )

    # Line 5: weights. Line 7, first half: the gradient of the reweighted loss.
    example = None
    with watch.part("main"), engine.accumulation(len(batches.main)):
        for k, batch in enumerate(batches.main):
            losses = engine.token_losses(batch)
            index = batch.sequence_index().to(losses.device)
            s = None if utilities is None else utilities.of(k, losses.detach())
            q = token_weights(recipe.method, s, index, batch.num_rows)
            num_tokens = segment_sum(torch.ones_like(losses), index, batch.num_rows)
            shares = sequence_shares(num_tokens, counts, recipe.method.normalization)
            weighted_loss = (token_coefficients(q.weights, index, shares) * losses).sum()
            engine.backward(weighted_loss)
            sums.add(batch, losses.detach(), weighted_loss.detach(), s, q, index, num_tokens, shares)
            if example is None and batch.sequence_ids:
                example = TokenWeights.of_first_sequence(batch, losses.detach(), s, q.weights, index)
    totals = sums.over_ranks()
    stop_if_a_loss_is_not_finite(sums)

    # Line 6: alpha, known only now. The loss is linear in it, so scaling the gradient shards is exact.
    alpha = 1.0
    if recipe.method.name == "vcore" and recipe.method.alpha == "loss_ratio":
        alpha = loss_ratio_alpha(totals.loss, totals.weighted_loss, recipe.method.alpha_cap)
        if alpha != 1.0:
            engine.scale_gradient(alpha)

    # Line 7, second half: the update.
    with watch.part("step"):
        gradient_norm = engine.step(learning_rate)
    return StepMetrics.of(
        totals,
        counts,
        watch,
        alpha=alpha,
        probe_loss=probe_loss,
        probe_grad_norm=probe_gradient_norm,
        grad_norm=gradient_norm,
        learning_rate=learning_rate,
        finite_difference=utilities if isinstance(utilities, FiniteDifferenceUtilities) else None,
        example=example,
    )


def estimate_utilities(
    engine: Engine,
    recipe: Recipe,
    batches: Sequence[Batch],
    direction: Direction,
    batches_per_pass: int,
    measure_noise: bool,
) -> JvpUtilities | FiniteDifferenceUtilities:
    """`s[i,t] = <v, grad l[i,t]>` of every token, by the recipe's estimator. A collective."""
    if recipe.utility.estimator == "jvp":
        return jvp_utilities(engine, direction, batches, batches_per_pass)
    assert recipe.utility.epsilon is not None  # the recipe's rules
    return finite_difference_utilities(
        engine, direction, batches, batches_per_pass, epsilon=recipe.utility.epsilon, measure_noise=measure_noise
    )


def token_weights(method: MethodConfig, utilities: Tensor | None, index: Tensor, num_rows: int) -> GibbsWeights:
    """`q[i,t]` of the recipe's method for one micro-batch; uniform for plain fine-tuning."""
    if utilities is None:
        nothing = torch.zeros(num_rows, device=index.device)
        return GibbsWeights(uniform_weights(index, num_rows), nothing, nothing, nothing.bool())
    if method.kl_budget is not None:
        return gibbs_weights_for_budget(utilities, index, num_rows, method.kl_budget)
    assert method.temperature is not None  # the recipe's rules
    return gibbs_weights(utilities, index, num_rows, method.temperature)


def stop_if_the_probe_is_not_finite(loss: float, gradient_norm: float, probe: Sequence[Batch]) -> None:
    """Raises NonFiniteLoss on all ranks with the probe's sequences; with such a direction every utility is nan."""
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return
    what = "gradient" if math.isfinite(loss) else "loss"
    per_rank = distributed.gather_objects([i for batch in probe for i in batch.sequence_ids])
    blame = [f"rank {rank}: sequence ids {ids}" for rank, ids in enumerate(per_rank) if ids]
    raise NonFiniteLoss(f"the {what} of the probe batch is not finite; it is summed over " + "; ".join(blame))


def stop_if_a_loss_is_not_finite(sums: StepSums) -> None:
    """Raises NonFiniteLoss on all ranks with the sequences at fault. A collective only where there is a fault."""
    if sums.totals.num_non_finite == 0:
        return
    per_rank = distributed.gather_objects(sums.non_finite_sequence_ids())
    blame = [f"rank {rank}: sequence ids {ids}" for rank, ids in enumerate(per_rank) if ids]
    raise NonFiniteLoss("the loss is not finite; " + "; ".join(blame))
