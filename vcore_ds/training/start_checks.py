"""Checks of the loaded model before a run's first step: losses, derivatives, the low-rank direction, memory.

Some architectures scale or cap logits after the output embedding, carry state from one sequence of a pack to the next,
or draw dropout from the process's generator. Each would train on wrong losses without an error, and no configuration
reveals it. So four forwards of short sequences compare losses that must be equal, on every rank, in training mode.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.statistics import rank_correlations_within
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import EngineConfig, ProbeConfig
from vcore_ds.data.batches import IGNORED_LABEL, Batch, collate, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import available_host_bytes, available_memory_bytes, device
from vcore_ds.distributed.position import mark
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.architecture_check import describe_alternatives_to_jvp
from vcore_ds.models.attention import comparing_masks
from vcore_ds.models.causal_lm import TokenLossModel, refuse_failing_code
from vcore_ds.planning.fit import Available, MemoryPlan, describe_shortage, describe_tightness
from vcore_ds.training import console
from vcore_ds.training.feed import Feed
from vcore_ds.training.step import take_direction
from vcore_ds.utility.derivative_check import NUM_COMPARED, compare_derivatives
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import Estimator, ForwardMode, compute_jvp_utilities

NUM_TOKENS = (32, 24)
"""Last tokens of two training sequences, since conversations often begin with the same system prompt. The lengths
differ: unpacked, the second is padded, which must not change its losses."""

SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Fields of config.json: a token id, several, or none."""

SAME_KERNELS = {torch.bfloat16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-9}
"""Largest mean difference, nats, of losses that the same kernels compute from the same numbers; by the least precise of
the parameters' dtypes. It allows for nondeterministic orders of summation on GPUs."""

OTHER_KERNELS = {torch.bfloat16: 0.1, torch.float32: 1e-4, torch.float64: 1e-8}
"""The same for matrix multiplications of other shapes or in another order, which round differently."""


@dataclass(frozen=True)
class Comparison:
    """Losses that must be equal."""

    problem: str  # message if they differ: what is wrong, and what to do
    difference: float  # mean absolute difference, nats
    tolerances: Mapping[torch.dtype, float]
    """Largest difference that rounding explains, by the parameters' dtype."""


def check_start(engine: Engine, feed: Feed) -> None:
    """Compare losses of two short sequences before the first step; random generators do not change. A collective.
    Raises UserError on all ranks alike, if losses that must be equal differ, or the architecture's code fails."""
    mark("checking losses")
    devices = [engine.device] if engine.device.type == "cuda" else []
    model_type = engine.module.base.config.model_type
    with torch.no_grad(), torch.random.fork_rng(devices), refuse_failing_code(model_type):
        comparisons = compare_losses(engine, feed)
    dtypes = {parameter.dtype for parameter in engine.module.parameters()}
    # Kernels may differ between ranks, and all ranks must agree.
    by_rank = layout.gather_objects("job", [comparison.difference for comparison in comparisons])
    for comparison, differences in zip(comparisons, zip(*by_rank, strict=True), strict=True):
        tolerance = max(comparison.tolerances[dtype] for dtype in dtypes)  # adapters may be in fp32 on a model in bf16
        wrong = [number for number in differences if not number <= tolerance]  # also NaN, if one of two losses is
        if wrong:
            raise UserError(
                f"model.path: {model_type}: {comparison.problem} (on two short sequences the "
                f"losses of a token differ by {wrong[0]:.2g} nats in the mean, expected at most {tolerance:g})"
            )
    largest = max(max(differences) for differences in by_rank)
    console.note(f"Checks of the model's losses: {len(comparisons)} passed, largest mean difference {largest:.1g} nats")


def compare_losses(engine: Engine, feed: Feed) -> list[Comparison]:
    """Make this rank's comparisons, each after those that would explain its failure. A collective."""
    first, second = (take_ending(engine, feed, number, num_tokens) for number, num_tokens in enumerate(NUM_TOKENS))
    backwards = replace(first, input_ids=first.input_ids[::-1].copy())
    # With packing, the second sequence comes after each of two others; without, both are unpacked.
    packs = [[first, second], [backwards, second]] if feed.plan.is_packed else [[first], [second]]
    together, alone = pack(packs, feed.pad_token_id), collate([second], feed.pad_token_id)
    engine.seed_dropout(0)
    with refuse_repeated_layers(engine), comparing_masks():
        losses = engine.token_losses(together)
    again, losses_alone = engine.token_losses(together), engine.token_losses(alone)
    numbers = together.sequence_index().to(losses.device)
    in_one = "one pack" if feed.plan.is_packed else "one forward"
    not_apart = (
        f"another sequence in {in_one} changes a sequence's losses: this architecture does not isolate sequences. Set "
        "batch.pack_tokens_per_rank to null and every micro_batch_size_per_rank to 1, or "
        "model.attention to auto if it has another value, or choose another model"
    )
    compared = [
        Comparison(
            "two forwards of the same batch and seed give different losses: in training, the architecture draws random "
            "numbers that no step can seed. Set its rates of dropout and noise in config.json to 0, or choose another "
            "model",
            _mean_difference(losses, again),
            SAME_KERNELS,
        ),
    ]
    if feed.plan.shares_forwards:
        compared.append(Comparison(not_apart, _mean_difference(losses[numbers == 1], losses_alone), OTHER_KERNELS))
    if feed.plan.is_packed:
        difference = _mean_difference(losses[numbers == 1], losses[numbers == 3])
        compared.append(Comparison(not_apart, difference, SAME_KERNELS))
    if isinstance(engine.module, TokenLossModel):
        if engine.has_dropout:
            with engine.without_dropout():
                losses_alone = engine.token_losses(alone)
        is_causal, has_our_losses = _compare_with_original_forward(engine, feed, second, losses_alone)
        # A model that is not causal attends to padding, and would also fail the later comparisons.
        compared = [compared[0], is_causal, *compared[1:], has_our_losses]
    return compared


@contextmanager
def refuse_repeated_layers(engine: Engine) -> Iterator[None]:
    """A context of one forward. Raises UserError, on all ranks alike, if a decoder layer runs more than once: ZeRO-3
    would reduce its gradient several times, which fails an assertion or, in large models, is silently wrong."""
    calls = Counter[nn.Module]()
    hooks = [layer.register_forward_pre_hook(lambda layer, _: calls.update([layer])) for layer in engine.module.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    most = max(calls.values(), default=0)
    if most > 1:
        raise UserError(
            f"model.path: {engine.module.base.config.model_type}: a decoder layer runs {most} times in a forward, "
            "which ZeRO-3 does not differentiate. Choose another model"
        )


def _compare_with_original_forward(
    engine: Engine, feed: Feed, sequence: TokenizedSequence, losses: Tensor
) -> tuple[Comparison, Comparison]:
    """Compare with a forward of the original architecture (attention, mask, logits) in evaluation mode: whether it is
    causal, and whether its losses of `sequence` are those `[N]` of training without dropout. A collective."""
    half = len(sequence) // 2
    ids = sequence.input_ids
    changed = replace(sequence, input_ids=np.concatenate([ids[:half], ids[half:][::-1]]))
    batches = [collate([one], feed.pad_token_id) for one in (sequence, changed)]  # each in a separate forward
    with engine.without_gradient():  # in training, its attention may have dropout that no step seeds
        original_losses, changed_losses = (cross_entropy(engine.original_logits(batch), batch) for batch in batches)
    num_equal = max(half - 1, 0)  # the first token is no target
    return (
        Comparison(
            "a token's loss depends on the tokens behind it: the architecture is not causal. Choose a decoder-only "
            "language model (Qwen3, Llama, ...)",
            _mean_difference(original_losses[:num_equal], changed_losses[:num_equal]),
            SAME_KERNELS,
        ),
        Comparison(
            "a token's loss is not the cross entropy of the architecture's own logits: it attends to other tokens than "
            "the attention of training, changes its logits in a way that the token loss does not know, or computes "
            "something else in training than in evaluation. Choose another model",
            _mean_difference(losses, original_losses),
            OTHER_KERNELS,
        ),
    )


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Losses in nats of the supervised tokens, `[N]`, from logits `[b, T, V]`; fp32, fp64 for fp64."""
    targets = batch.targets().to(logits.device)
    supervised = targets != IGNORED_LABEL
    logits = logits[supervised]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits, targets[supervised], reduction="none")


def take_ending(engine: Engine, feed: Feed, number: int, num_tokens: int) -> TokenizedSequence:
    """Take the last tokens of training sequence `number` (or of the last sequence), all supervised, after the special
    tokens that it contains: an architecture may treat those differently, as PyTorch does `padding_idx`."""
    config = engine.module.base.config.get_text_config()
    special = [x for name in SPECIAL_TOKENS if (x := getattr(config, name, None)) is not None]
    ids = feed.dataset[min(number, len(feed.dataset) - 1)].input_ids
    first = np.intersect1d(ids, np.hstack([[], *special])).astype(ids.dtype)
    ids = np.concatenate([first, ids[len(first) - num_tokens :]])
    return TokenizedSequence(number, ids, np.arange(len(ids)) > 0)


def _mean_difference(left: Tensor, right: Tensor) -> float:
    """Mean absolute difference of losses `[N]`; 0 for none. Skips positions where both are NaN: the first step reports
    them."""
    equal = (left == right) | (left.isnan() & right.isnan())
    return float((left - right).abs().masked_fill(equal, 0.0).mean(0)) if len(left) else 0.0


def check_derivatives(engine: Engine, estimator: Estimator, feed: Feed) -> None:
    """Compare forward and reverse mode on the end of the first training sequence (`utility.derivative_check`). A
    collective; does nothing without forward mode. Parameters, optimizer state and the estimator's direction do not
    change. Raises UserError on all ranks alike, if the modes differ."""
    if not isinstance(estimator, ForwardMode):
        return
    mark("checking derivatives")
    config = engine.module.base.config
    found = f"utility.estimator: found jvp together with {config.model_type}"
    instead = describe_alternatives_to_jvp(config)
    try:
        endings = [take_ending(engine, feed, 0, num_tokens) for num_tokens in (NUM_COMPARED, NUM_COMPARED - 1)]
        batch, similar = (collate([ending], feed.pad_token_id) for ending in endings)
        derivatives = compare_derivatives(engine, batch, similar, fused=estimator.fused)
    except RuntimeError as error:  # NotImplementedError is one
        if "jvp" not in str(error) and "forward AD" not in str(error):
            raise
        raise UserError(
            f"{found}, which has an operation without a forward-mode derivative ({first_line(error)}); {instead}"
        ) from None
    if not derivatives.agree:
        raise UserError(
            f"{found}, of which forward and reverse mode disagree: {derivatives}, expected a difference of at most "
            f"{derivatives.tolerance:g} of it; {instead}"
        )
    console.note(f"Check of the utilities: {derivatives}")


LEAST_RANK_CORRELATION = 0.99
"""Least Spearman correlation within sequences of approximate and exact utilities."""


def check_approximation(
    engine: Engine, estimator: Estimator, feed: Feed, method: MethodConfig, probe: ProbeConfig
) -> None:
    """Compare utilities along the low-rank direction of the first probe batch, or with FP8 tangents, with exact ones,
    on one micro-batch of each rank. A collective; does nothing if the run's utilities are exact. Parameters, optimizer
    state and the estimator's direction do not change."""
    direction = estimator.direction
    if direction is None or (direction.rank is None and not direction.fp8_tangents):
        return
    mark("checking approximate utilities")
    batches = feed.step(0)
    exact = Direction(engine, rank_passes=direction.rank_passes)
    take_direction(exact, method, probe, batches.probe)
    (expected,) = compute_jvp_utilities(engine, exact, batches.main[:1])
    approximate, what, remedies = exact.with_rank(direction.rank, fp8_tangents=direction.fp8_tangents), [], []
    if direction.rank is not None:
        what.append(f"probe.rank {direction.rank} keeps {approximate.measure_energy():.1%} of |v|^2")
        remedies.append(f"probe.rank to {2 * direction.rank} or null")
    if direction.fp8_tangents:
        what.append("tangents are in FP8")
        remedies.append("utility.tangent_precision to null")
    (utilities,) = compute_jvp_utilities(engine, approximate, batches.main[:1])
    index = batches.main[0].sequence_index()
    correlations = rank_correlations_within(expected.cpu().numpy(), utilities.cpu().numpy(), index.cpu().numpy())
    known = [x for rank_values in layout.gather_objects("job", correlations) for x in rank_values if x is not None]
    correlation = float(np.mean(known)) if known else 1.0
    agreement = (
        f"{' and '.join(what)}; these utilities and exact ones correlate with {correlation:.4f} (Spearman, mean over "
        f"{len(known)} sequences)"
    )
    console.note(f"Approximation: {agreement}")
    if correlation < LEAST_RANK_CORRELATION:
        console.warn(f"{agreement}, expected at least {LEAST_RANK_CORRELATION}. Set {' or '.join(remedies)}")
    else:
        console.say(f"Approximation: {agreement}")


def find_available_memory() -> Available:
    """Find the free memory of the rank that has least. A collective."""
    free = layout.gather_objects("job", (available_memory_bytes(), available_host_bytes()))
    device_bytes, host_bytes = map(min, zip(*free, strict=True))
    return Available(device_bytes, host_bytes, is_cpu=device().type == "cpu")


def check_memory(plan: MemoryPlan | None, available: Available, engine: EngineConfig) -> None:
    """Compare the estimate (None for a model of unknown size) with the memory, before the model is loaded; warn if it
    is close. Raises UserError on all ranks alike, if the run cannot fit, with the bytes by kind and how to need
    fewer."""
    if plan is None or not engine.memory_check:  # on all ranks alike
        return
    estimate = plan.estimate
    if not available.holds(estimate):
        raise UserError(describe_shortage(plan, available))
    if not available.holds_with_margin(estimate):
        console.warn(describe_tightness(plan, available))
