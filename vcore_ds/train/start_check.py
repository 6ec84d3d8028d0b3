"""Whether losses are what they have to be, asked of the loaded model itself before a run's first step.

Architectures differ in ways that no configuration tells: logits that are scaled or capped after the output embedding,
states that one sequence of a row leaves to the next, dropout that is a function and draws from the process's own
generator. Each would train without an error, on wrong losses. So four forwards of short sequences compare losses that
have to be equal, on every rank, in the mode in which the run trains.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from vcore_ds.data.batches import IGNORED_LABEL, Batch, collate, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.distributed.positions import mark
from vcore_ds.engine.zero3 import Engine
from vcore_ds.errors import UserError
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.loading import refuse_failing_code
from vcore_ds.track.console import Console
from vcore_ds.train.feed import Feed

NUM_TOKENS = (32, 24)
"""Of two training sequences, their last ones: conversations often begin with the same system prompt. Not the same
number: in rows of their own the second has padding behind it, which must not change its losses."""

SAME_PRODUCTS = {torch.bfloat16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-9}
"""Largest mean difference, nats, of losses that the same kernels compute of the same numbers; by the least precise of
the parameters' dtypes. It leaves room for sums whose order a GPU does not fix."""

OTHER_PRODUCTS = {torch.bfloat16: 0.1, torch.float32: 1e-4, torch.float64: 1e-8}
"""The same where products have other shapes or another order, and are rounded differently."""


@dataclass(frozen=True)
class Comparison:
    """Losses that have to be equal."""

    problem: str
    """What is wrong where they are not, and what to do about it."""
    difference: float
    """Mean absolute difference, nats."""
    tolerances: Mapping[torch.dtype, float]
    """Largest difference that rounding explains, by the parameters' dtype."""


def check_start(engine: Engine, feed: Feed, console: Console) -> None:
    """Compares losses of two short sequences before the first step. A collective.

    Nothing of a run depends on it: no gradient is taken, and the process's random numbers go on where they were.

    Raises:
        UserError: on all ranks alike, where two losses differ that have to be equal, or the architecture's own code
            fails.
    """
    mark("checking losses")
    started = time.perf_counter()
    devices = [engine.device] if engine.device.type == "cuda" else []
    model_type = engine.module.base.config.model_type
    with torch.no_grad(), torch.random.fork_rng(devices), refuse_failing_code(model_type):
        comparisons = compare_losses(engine, feed)
    dtypes = {parameter.dtype for parameter in engine.module.parameters()}
    # Kernels may differ between ranks, and all ranks must come to the same end.
    of_ranks = layout.gather_objects("job", [comparison.difference for comparison in comparisons])
    for comparison, differences in zip(comparisons, zip(*of_ranks, strict=True), strict=True):
        tolerance = max(comparison.tolerances[dtype] for dtype in dtypes)  # adapters may be in fp32 on a model in bf16
        wrong = [number for number in differences if not number <= tolerance]  # nan, where only one of two is, too
        if wrong:
            raise UserError(
                f"model.path: {model_type}: {comparison.problem} (on two short sequences the "
                f"losses of a token differ by {wrong[0]:.2g} nats in the mean, expected at most {tolerance:g})"
            )
    largest = max(max(differences) for differences in of_ranks)
    console.note(
        f"Checks of the model's losses: {len(comparisons)} passed, largest mean difference {largest:.1g} nats, in "
        f"{time.perf_counter() - started:.1f} s"
    )


def compare_losses(engine: Engine, feed: Feed) -> list[Comparison]:
    """The losses of this rank, each comparison after those that would explain it. A collective."""
    first, second = (ending(feed, number, num_tokens) for number, num_tokens in enumerate(NUM_TOKENS))
    backwards = replace(first, input_ids=first.input_ids[::-1].copy())
    # Where sequences are packed, the second one behind two others; where they are not, the two in rows of their own.
    rows = [[first, second], [backwards, second]] if feed.plan.is_packed else [[first], [second]]
    together, alone = pack(rows, feed.pad_token_id), collate([second], feed.pad_token_id)
    engine.seed_dropout(0)
    with refuse_repeated_layers(engine):
        losses = engine.token_losses(together)
    again, of_alone = engine.token_losses(together), engine.token_losses(alone)
    numbers = together.sequence_index().to(losses.device)
    in_one = "one row" if feed.plan.is_packed else "one forward"
    not_apart = (
        f"a sequence has other losses beside another one in {in_one} than without it: the architecture does not keep "
        "sequences apart. Set batch.packed_row_tokens to null and every micro_batch_size_per_rank to 1, or "
        "model.attention to auto if it has another value, or choose another model"
    )
    compared = [
        Comparison(
            "two forwards of the same batch and seed give different losses: in training, the architecture draws random "
            "numbers that no step can seed. Set its rates of dropout and noise in config.json to 0, or choose another "
            "model",
            _difference(losses, again),
            SAME_PRODUCTS,
        ),
        Comparison(not_apart, _difference(losses[numbers == 1], of_alone), OTHER_PRODUCTS),
    ]
    if feed.plan.is_packed:
        compared.append(Comparison(not_apart, _difference(losses[numbers == 1], losses[numbers == 3]), SAME_PRODUCTS))
    if isinstance(engine.module, TokenLossModel):
        if engine.has_dropout:
            with engine.without_dropout():
                of_alone = engine.token_losses(alone)
        is_causal, has_our_losses = _compare_with_own_forward(engine, feed, second, of_alone)
        # A model that is not causal sees padding, so that its sequences are not kept apart either.
        compared = [compared[0], is_causal, *compared[1:], has_our_losses]
    return compared


@contextmanager
def refuse_repeated_layers(engine: Engine) -> Iterator[None]:
    """A context of one forward. Raises UserError, on all ranks alike, where a decoder layer ran more than once: ZeRO-3
    would reduce its gradient several times, which is an assertion's failure or, in large models, silently wrong."""
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


def _compare_with_own_forward(
    engine: Engine, feed: Feed, sequence: TokenizedSequence, losses: Tensor
) -> tuple[Comparison, Comparison]:
    """One forward of the architecture with its own attention, mask and logits, in evaluation mode: whether it is
    causal, and whether its losses of `sequence` are those `[N]` that training computes without dropout. A
    collective."""
    half = len(sequence) // 2
    ids = sequence.input_ids
    with_other_end = replace(sequence, input_ids=np.concatenate([ids[:half], ids[half:][::-1]]))
    both = collate([sequence, with_other_end], feed.pad_token_id)
    with engine.without_gradient():  # in training, its own attention may drop probabilities, which no step seeds
        own_losses, losses_with_other_end = cross_entropy(engine.own_logits(both), both).tensor_split(2)
    num_equal = max(half - 1, 0)  # the first token is no target
    return (
        Comparison(
            "a token's loss depends on the tokens behind it: the architecture is not causal. Choose a decoder-only "
            "language model (Qwen3, Llama, ...)",
            _difference(own_losses[:num_equal], losses_with_other_end[:num_equal]),
            OTHER_PRODUCTS,
        ),
        Comparison(
            "a token's loss is not the cross entropy of the architecture's own logits: it attends to other tokens than "
            "the attention of training, changes its logits in a way that the token loss does not know, or computes "
            "something else in training than in evaluation. Choose another model",
            _difference(losses, own_losses),
            OTHER_PRODUCTS,
        ),
    )


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Losses in nats of the supervised tokens, `[N]`, of logits `[b, T, V]`; fp32, fp64 for fp64."""
    targets = batch.targets().to(logits.device)
    supervised = targets != IGNORED_LABEL
    logits = logits[supervised]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits, targets[supervised], reduction="none")


def ending(feed: Feed, number: int, num_tokens: int, *, left_out: int | None = None) -> TokenizedSequence:
    """The last tokens of a training sequence, all supervised; the last sequence, where there are not so many.

    Args:
        left_out: a token id that is not taken.
    """
    ids = feed.dataset[min(number, len(feed.dataset) - 1)].input_ids
    ids = ids[ids != left_out][-num_tokens:]
    return TokenizedSequence(number, ids, np.arange(len(ids)) > 0)


def _difference(left: Tensor, right: Tensor) -> float:
    """Mean absolute difference of losses `[N]`; 0 of none. Where neither is a number, the first step says it better."""
    equal = (left == right) | (left.isnan() & right.isnan())
    return float((left - right).abs().masked_fill(equal, 0.0).mean(0)) if len(left) else 0.0
