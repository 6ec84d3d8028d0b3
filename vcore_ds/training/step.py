"""One optimizer step, in the order of the paper's Algorithm 1: the file to read first.

Sharded operations are in `engine/` and `utility/`, the mathematics in `method/`.
"""

from collections.abc import Sequence

from torch import Tensor

from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import ProbeConfig
from vcore_ds.data.batches import Batch, StepBatches
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine, NonFiniteLoss, describe_sequences
from vcore_ds.method.objective import sequence_shares, token_coefficients
from vcore_ds.method.weights import segment_sum, uniform_weights
from vcore_ds.models.experts import measure_expert_load, reset_token_counts
from vcore_ds.training.step_metrics import MicroBatchResult, StepMetrics, StepRecorder
from vcore_ds.training.weighting import (
    add_reference_log_probabilities,
    alpha_of_global_batch,
    alpha_of_micro_batch,
    sequence_factors,
    token_weights,
)
from vcore_ds.utility.direction import Direction, Probe
from vcore_ds.utility.estimators import Estimator


def train_step(
    engine: Engine,
    method: MethodConfig,
    probe: ProbeConfig,
    batches: StepBatches,
    estimator: Estimator,
    recorder: StepRecorder,
    *,
    learning_rate: float,
    measure_noise: bool = False,
    seed: int = 0,
) -> StepMetrics:
    """Train on one global batch, and return the metrics. A collective. `estimator` keeps the probe direction between
    steps; `recorder` is new for this step. `measure_noise`: with finite differences, measure their signal-to-noise
    ratio (two more forwards), and search for epsilon again with `epsilon: auto`. `seed`: of the step's random numbers
    (dropout, stochastic rounding), the same on all ranks. Raises NonFiniteLoss, NonFiniteGradient on all ranks alike,
    before anything was updated."""
    direction, main = estimator.direction, batches.main
    counts = engine.count_globally(main)
    counts_kept = engine.count_globally(main, kept_only=True) if method.drops_tokens else counts
    recorder.begin(method, counts)
    engine.seed_dropout(seed)

    # Lines 2-3: draw B', take the descent direction under uniform weights.
    measured: dict[str, float | None] = {}
    if direction is not None and batches.probe:
        with recorder.measuring("probe"):
            measured |= take_direction(direction, method, probe, batches.probe, seed=seed).as_metrics()
    measured["direction_norm"] = None if direction is None else direction.norm

    # Line 4: the utility of every token of B.
    with recorder.measuring("utility"):
        precompute = method.weights_sequences
        forward = estimator.begin(main, seed=seed, measure_noise=measure_noise, precompute=precompute)
        factors, tilt = sequence_factors(method, counts, main, forward.precomputed) if precompute else (None, {})
        measured |= {**forward.metrics, **tilt}
        if method.reads_reference and engine.has_adapters:
            main = add_reference_log_probabilities(engine, main)
        entropies: list[Tensor] = []
        if method.uses_utilities and method.prediction_statistic is not None:  # forward mode computes no statistics
            with engine.without_gradient(keep_dropout=True):  # that of the main forward, whose losses they belong to
                entropies = [engine.losses_and_statistics(batch, method.prediction_statistic)[1] for batch in main]

    reset_token_counts(engine.module)  # discards those of other passes
    with recorder.measuring("main"), engine.accumulation(len(main)):
        for k, batch in enumerate(main):
            result = forward.run(k)
            statistics = entropies[k] if entropies else result.statistics
            tokens = batch.tokens(result.losses, result.utilities, statistics)
            # Line 5: weights.
            q = token_weights(method, tokens)
            shares = sequence_shares(tokens.num_kept(), counts_kept, method.normalization)
            shares = shares if factors is None else shares * factors[k]
            # Line 6: alpha, if it belongs to a sequence or a micro-batch.
            alpha = alpha_of_micro_batch(method, tokens, q.weights, shares)
            # Line 7, first half: the gradient of the reweighted loss.
            weighted = token_coefficients(q.weights, tokens.sequence_index, shares) * result.losses
            loss = segment_sum(weighted, tokens.sequence_index, tokens.num_sequences) * alpha
            base_kl = None
            if result.divergences is not None:  # this micro-batch's term of the mean over the global batch
                uniform = uniform_weights(tokens.sequence_index, tokens.num_sequences, result.divergences.dtype)
                base_kl = (token_coefficients(uniform, tokens.sequence_index, shares) * result.divergences).sum()
            engine.backward(loss.sum() if base_kl is None else loss.sum() + method.kl_weight * base_kl)
            losses = (weighted.detach().sum(), loss.detach().sum(), None if base_kl is None else base_kl.detach())
            recorder.add(MicroBatchResult(batch, tokens, q, shares, alpha, *losses))
    totals, moments = recorder.totals()
    if method.is_anchored:
        measured["base_kl"] = totals["base_kl"]
    measured |= measure_expert_load(engine.module, layout.size("expert"))
    if totals["num_non_finite"] > 0:
        sequences = describe_sequences(recorder.non_finite_sequence_ids(), main[0].sequence_parallel)
        cause = " (or a factor of method.function is not, or is negative)" if method.name == "custom" else ""
        raise NonFiniteLoss(f"the loss is not finite{cause}; {sequences}")

    # Line 6: alpha of the global batch, known only now. The loss is linear in it: scaling the gradient is exact.
    alpha_global = alpha_of_global_batch(method, totals["loss"], totals["weighted_loss"], moments)
    if alpha_global is not None and alpha_global != 1.0:
        engine.shards.scale_gradient(alpha_global)

    # Line 7, second half: the update.
    with recorder.measuring("step"):
        gradient_norm = engine.step(learning_rate)
    return recorder.metrics(totals, alpha_global, **measured, grad_norm=gradient_norm, learning_rate=learning_rate)


def take_direction(
    direction: Direction, method: MethodConfig, probe: ProbeConfig, probe_batches: Sequence[Batch], *, seed: int = 0
) -> Probe:
    """Compute the direction of a probe batch. A collective. `seed`: of a low-rank direction's random start."""
    return direction.compute(
        probe_batches,
        normalization=method.normalization,
        clip=probe.clip,
        optimizer=probe.direction,
        loss_weights=probe.loss,
        seed=seed,
    )
