"""ONE optimizer step, in the order of the paper's Algorithm 1. The file to read first.

What follows what stands here. Everything sharded happens in `engine/` and `utility/`, all mathematics in `method/`.
"""

from collections.abc import Sequence

from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch
from vcore_ds.data.step_batches import StepBatches
from vcore_ds.engine.counts import count_globally
from vcore_ds.engine.log_probabilities import with_reference_of_adapters
from vcore_ds.engine.non_finite import NonFiniteLoss, sequences_by_rank
from vcore_ds.engine.zero3 import Engine
from vcore_ds.method.objective import sequence_shares, token_coefficients
from vcore_ds.method.weights import segment_sum
from vcore_ds.track.step_metrics import MicroBatchResult, StepMetrics, StepRecorder
from vcore_ds.train.batch_scope import sequence_factors
from vcore_ds.train.followed import measure_followed
from vcore_ds.train.weighting import alpha_of_global_batch, alpha_of_micro_batch, has_batch_scope, token_weights
from vcore_ds.utility.direction import Direction, Probe
from vcore_ds.utility.estimators import Estimator


def train_step(
    engine: Engine,
    recipe: Recipe,
    batches: StepBatches,
    estimator: Estimator,
    recorder: StepRecorder,
    *,
    learning_rate: float,
    measure_noise: bool = False,
    seed: int = 0,
) -> StepMetrics:
    """Trains on one global batch and says what happened. A collective.

    Args:
        estimator: gives losses and utilities; keeps the probe direction between steps.
        recorder: new; collects what this step measures.
        measure_noise: with finite differences, measure their signal-to-noise ratio (two more forwards), and search
            for the step again where the recipe says `epsilon: auto`.
        seed: of what is drawn in this step (dropout, stochastic rounding); the same on all ranks.

    Raises:
        NonFiniteLoss, NonFiniteGradient: on all ranks alike, before anything was updated.
    """
    method, main = recipe.method, batches.main
    counts = count_globally(main)
    counts_kept = count_globally(main, kept_only=True) if method.name == "random" else counts
    recorder.begin(method, counts)
    engine.seed_dropout(seed)

    # Lines 2-3: draw B', take the descent direction under uniform weights.
    measured: dict[str, float | None] = {}
    if estimator.direction is not None and batches.probe:
        with recorder.part("probe"):
            measured |= take_direction(estimator.direction, recipe, batches.probe).as_metrics()
    measured["direction_norm"] = None if estimator.direction is None else estimator.direction.norm

    # Line 4: the utility of every token of B.
    with recorder.part("utility"):
        weights_sequences = has_batch_scope(method)
        forward = estimator.begin(main, seed=seed, measure_noise=measure_noise, ahead=weights_sequences)
        measured |= forward.measured
        factors = None
        if weights_sequences:
            factors, tilt = sequence_factors(method, counts, main, forward.known)
            measured |= tilt
        if method.name == "iw_sft" and recipe.lora is not None:
            main = with_reference_of_adapters(engine, main)
    measure_followed(engine, recipe, batches.followed, estimator, recorder, seed=seed)

    with recorder.part("main"), engine.accumulation(len(main)):
        for k, batch in enumerate(main):
            losses, utilities = forward(k)
            tokens = batch.tokens(losses, utilities)
            # Line 5: weights.
            q = token_weights(method, tokens)
            shares = sequence_shares(tokens.num_kept(), counts_kept, method.normalization)
            shares = shares if factors is None else shares * factors[k]
            # Line 6: alpha, where a sequence or a micro-batch has its own.
            alpha = alpha_of_micro_batch(method, tokens, q.weights, shares)
            # Line 7, first half: the gradient of the reweighted loss.
            weighted = token_coefficients(q.weights, tokens.sequence_index, shares) * losses
            loss = segment_sum(weighted, tokens.sequence_index, tokens.num_sequences) * alpha
            engine.backward(loss.sum())
            sums = weighted.detach().sum(), loss.detach().sum()
            recorder.add(MicroBatchResult(batch, tokens, q, shares, alpha, *sums))
    totals = recorder.totals()
    if totals.num_non_finite > 0:
        sequences = sequences_by_rank(recorder.non_finite_sequence_ids(), main[0].sequence_parallel)
        raise NonFiniteLoss(f"the loss is not finite; {sequences}")

    # Line 6: alpha of the global batch, known only now. The loss is linear in it: scaling the gradient is exact.
    alpha_global = alpha_of_global_batch(
        method, loss=totals.loss, weighted_loss=totals.weighted_loss, utility_moments=totals.utility_moments
    )
    if alpha_global is not None and alpha_global != 1.0:
        engine.scale_gradient(alpha_global)

    # Line 7, second half: the update.
    with recorder.part("step"):
        if estimator.direction is not None and recipe.probe.source == "previous_step":
            probe = recipe.probe  # of the next step
            estimator.direction.take_gradient(clip=probe.clip, optimizer=probe.direction, decay=probe.decay)
        gradient_norm = engine.step(learning_rate)
    measured |= dict(grad_norm=gradient_norm, learning_rate=learning_rate)
    return recorder.metrics(totals, alpha=alpha_global, **measured)


def take_direction(direction: Direction, recipe: Recipe, probe_batches: Sequence[Batch]) -> Probe:
    """Takes the direction of a probe batch, as the recipe says. A collective."""
    return direction.take(
        probe_batches,
        normalization=recipe.method.normalization,
        clip=recipe.probe.clip,
        optimizer=recipe.probe.direction,
        loss_weights=recipe.probe.loss,
        decay=recipe.probe.decay,
    )
