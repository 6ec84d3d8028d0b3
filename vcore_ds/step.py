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
from .data import Batch, Waste
from .engine import (
    Direction,
    Engine,
    FiniteDifferenceUtilities,
    JvpUtilities,
    choose_epsilon,
    count_globally,
    distributed,
    finite_difference_utilities,
    jvp_utilities,
    probe_direction,
    reference_log_probabilities,
)
from .method import (
    GibbsWeights,
    dft_weights,
    effective_sample_size_alpha,
    gibbs_weights,
    gibbs_weights_for_budget,
    iw_sft_weights,
    loss_ratio_alpha,
    random_weights,
    segment_sum,
    sequence_shares,
    token_coefficients,
    uniform_weights,
    utility_moments,
    utility_variances,
    variance_alpha,
)
from .track.step_metrics import MicroBatchResult, StepMetrics, StepSums, StepTotals, Stopwatch, TokenWeights


class NonFiniteLoss(RuntimeError):
    """A loss of the batch, or the probe, is inf or nan. The optimizer was not stepped."""


@dataclass(frozen=True)
class StepBatches:
    """What one rank works on in one optimizer step. Ranks have equally many micro-batches; some may be idle."""

    main: Sequence[Batch]
    probe: Sequence[Batch]
    """Empty where there is nothing to probe: the method has no probe, or an earlier step's direction serves again."""
    waste: Waste | None = None
    """What of `main` is padding and waiting, over all ranks; None where nobody has measured it."""


def train_step(
    engine: Engine,
    recipe: Recipe,
    batches: StepBatches,
    direction: Direction | None,
    *,
    learning_rate: float,
    batches_per_utility_pass: int = 1,
    check_difference: bool = False,
    seed: int = 0,
) -> StepMetrics:
    """Trains on one global batch and says what happened. A collective.

    Args:
        direction: where the probe gradient is kept; None for methods without one.
        batches_per_utility_pass: main micro-batches in one gradient-free forward.
        check_difference: with finite differences, measure their signal-to-noise ratio (two more forwards), and search
            for the step again where the recipe says `epsilon: auto`.
        seed: of what is drawn in this step (stochastic rounding); the same on all ranks.

    Raises:
        NonFiniteLoss, NonFiniteGradient: on all ranks alike, before anything was updated.
    """
    method = recipe.method
    watch = Stopwatch(engine.device)
    sums = StepSums()
    counts = count_globally(batches.main)
    kept_counts = count_globally(batches.main, kept_only=True) if method.name == "random" else counts

    # Lines 2-3: draw B', take the descent direction under uniform weights. Line 4: utilities of every token of B.
    utilities = reference = None
    probe_loss = probe_gradient_norm = None
    if method.name == "vcore":
        assert direction is not None, "vcore needs a place for its probe direction"
        if batches.probe:
            with watch.part("probe"):
                probe_loss, probe_gradient_norm = probe_direction(
                    engine,
                    batches.probe,
                    direction,
                    normalization=method.normalization,
                    clip=recipe.probe.clip,
                    optimizer=recipe.probe.direction,
                )
            stop_if_the_probe_is_not_finite(probe_loss, probe_gradient_norm, batches.probe)
        with watch.part("utility"):
            utilities = estimate_utilities(
                engine, recipe, batches.main, direction, batches_per_utility_pass, check_difference, seed
            )
    elif method.name == "iw_sft":
        with watch.part("utility"):
            reference = reference_log_probabilities(engine, batches.main, lora=recipe.lora is not None)

    # Line 5: weights. Line 7, first half: the gradient of the reweighted loss.
    example = None
    with watch.part("main"), engine.accumulation(len(batches.main)):
        for k, batch in enumerate(batches.main):
            losses = engine.token_losses(batch)
            index = batch.sequence_index().to(losses.device)
            gibbs = s = None
            if utilities is not None:
                s = utilities.of(k, losses.detach())
                gibbs = vcore_weights(method, s, index, batch.num_sequences)
                q = gibbs.weights
            else:
                reference_here = None if reference is None else reference[k]
                q = baseline_weights(method, batch, losses.detach(), index, reference_here)
            num_kept = batch.num_kept_tokens().to(losses.device)
            shares = sequence_shares(num_kept, kept_counts, method.normalization)
            token_losses_weighted = token_coefficients(q, index, shares) * losses
            alpha_here = 1.0 if gibbs is None else alpha_before_backward(method, losses.detach(), s, q, index, shares)
            loss = segment_sum(token_losses_weighted, index, batch.num_sequences) * alpha_here
            engine.backward(loss.sum())
            sums.add(
                batch,
                MicroBatchResult(
                    losses.detach(), index, s, q, gibbs, token_losses_weighted.detach().sum(), loss.detach().sum()
                ),
                counts,
                method.normalization,
            )
            if example is None and batch.sequence_ids:
                example = TokenWeights.of_first_sequence(batch, losses.detach(), s, q, index)
    totals = sums.over_ranks()
    stop_if_a_loss_is_not_finite(sums)

    # Line 6: alpha, known only now. The loss is linear in it, so scaling the gradient shards is exact.
    alpha = alpha_of_the_global_batch(method, totals)
    if alpha != 1.0:
        engine.scale_gradient(alpha)

    # Line 7, second half: the update.
    with watch.part("step"):
        gradient_norm = engine.step(learning_rate)
    return StepMetrics.of(
        totals,
        counts,
        watch,
        method=method.name,
        alpha=alpha,
        probe_loss=probe_loss,
        probe_grad_norm=probe_gradient_norm,
        direction_norm=None if direction is None else direction.norm,
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
    check_difference: bool,
    seed: int,
) -> JvpUtilities | FiniteDifferenceUtilities:
    """`s[i,t] = <v, grad l[i,t]>` of every token, by the recipe's estimator. A collective."""
    assert direction.norm is not None, "the first step has to probe"
    if recipe.utility.estimator == "jvp":
        return jvp_utilities(engine, direction, batches, batches_per_pass)
    rounding_seed = seed if recipe.utility.rounding == "stochastic" else None
    epsilon = recipe.utility.epsilon
    if epsilon == "auto":
        if check_difference or direction.displacement is None:
            epsilon = choose_epsilon(engine, direction, batches, rounding_seed)
            direction.displacement = epsilon * direction.norm
        else:
            epsilon = direction.displacement / direction.norm if direction.norm else 1.0
    assert epsilon is not None  # the recipe's rules
    return finite_difference_utilities(
        engine,
        direction,
        batches,
        batches_per_pass,
        epsilon=epsilon,
        measure_noise=check_difference,
        stochastic_rounding_seed=rounding_seed,
    )


def vcore_weights(method: MethodConfig, utilities: Tensor, index: Tensor, num_sequences: int) -> GibbsWeights:
    """`q[i,t]` of the tokens of one micro-batch."""
    if method.kl_budget is not None:
        return gibbs_weights_for_budget(utilities, index, num_sequences, method.kl_budget)
    assert method.temperature is not None  # the recipe's rules
    return gibbs_weights(utilities, index, num_sequences, method.temperature)


def baseline_weights(
    method: MethodConfig, batch: Batch, losses: Tensor, index: Tensor, reference: Tensor | None
) -> Tensor:
    """Weights `[N]` of the tokens of one micro-batch for the methods without utilities."""
    num_sequences = batch.num_sequences
    if method.name == "dft":
        return dft_weights(losses, index, num_sequences)
    if method.name == "iw_sft":
        assert reference is not None
        return iw_sft_weights(losses, reference, index, num_sequences)
    if method.name == "random":
        return random_weights(batch.kept_targets().to(losses.device), index, num_sequences)
    return uniform_weights(index, num_sequences)


def alpha_before_backward(
    method: MethodConfig, losses: Tensor, utilities: Tensor, weights: Tensor, index: Tensor, shares: Tensor
) -> Tensor | float:
    """The alpha that a micro-batch knows by itself: of each sequence `[num_sequences]`, or one for all; 1 where alpha
    belongs to the global batch."""
    num_sequences = len(shares)
    if method.alpha == "effective_sample_size":
        return effective_sample_size_alpha(weights, index, num_sequences, method.alpha_cap)
    if method.alpha_scope == "global_batch" or method.alpha == "none":
        return 1.0
    if method.alpha == "variance":
        moments = utility_moments(utilities, weights, index, num_sequences)
        return variance_alpha(*utility_variances(moments), method.alpha_cap).to(losses.dtype)
    uniform = token_coefficients(uniform_weights(index, num_sequences), index, shares)
    weighted = token_coefficients(weights, index, shares)
    return loss_ratio_alpha((uniform * losses).sum(), (weighted * losses).sum(), method.alpha_cap).to(losses.dtype)


def alpha_of_the_global_batch(method: MethodConfig, totals: StepTotals) -> float:
    """Alpha of the whole step; 1 where it was applied before the backward, and for methods without one."""
    if method.name != "vcore" or method.alpha_scope == "micro_batch":
        return 1.0
    if method.alpha == "loss_ratio":
        return float(loss_ratio_alpha(totals.loss, totals.weighted_loss, method.alpha_cap))
    if method.alpha == "variance":
        moments = torch.tensor(totals.utility_moments, dtype=torch.float64)
        return float(variance_alpha(*utility_variances(moments), method.alpha_cap))
    return 1.0


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
