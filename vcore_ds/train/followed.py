"""Followed traces: a few traces, chosen once, that a run measures at every recorded step.

They show how a token's weight changes over the run, and which weights held-out data would get.
docs/reading-a-report.md lists the measurements.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path

import torch

from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.config.sections import DataConfig, MethodConfig, RunConfig
from vcore_ds.data.batches import Batch
from vcore_ds.data.dataset import Dataset, keep_random_tokens
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.distributed.watchdog import mark
from vcore_ds.engine.zero3 import Engine
from vcore_ds.train.console import Console
from vcore_ds.train.feed import Feed, batches_of_rank
from vcore_ds.train.settings import StepSettings
from vcore_ds.train.step_metrics import StepRecorder
from vcore_ds.train.token_records import (
    MOST_PROMPT_TOKENS,
    FollowedRecord,
    Origin,
    TraceTokens,
    most_tokens_of_trace,
    write_followed,
)
from vcore_ds.train.weighting import add_reference_log_probabilities, token_weights
from vcore_ds.utility.estimators import Estimator


@dataclass(frozen=True)
class FollowedTraces:
    """The traces that a run follows, the same at every step, at any world size and after resuming."""

    origins: Sequence[Origin]
    batches: Sequence[Batch]
    """This rank's micro-batches; sequence ids are indices into `origins`. Empty where nothing is followed."""


def choose_followed(
    run: RunConfig, data: DataConfig, method: MethodConfig, feed: Feed, validation: dict[str, Dataset]
) -> FollowedTraces:
    """Choose the traces, and spread them over the ranks like a main batch. `validation`: held-out sequences by the name
    of their set."""
    chosen = choose_traces(run, data, method, feed.dataset, validation)
    if not chosen:
        return FollowedTraces([], [])
    sequences = [replace(sequence, sequence_id=place) for place, (_, sequence) in enumerate(chosen)]
    spread = feed.plan.spread_main(range(len(sequences)), [len(sequence) for sequence in sequences])
    return FollowedTraces([origin for origin, _ in chosen], batches_of_rank(spread, sequences, feed.pad_token_id))


def choose_traces(
    run: RunConfig, data: DataConfig, method: MethodConfig, training: Dataset, validation: dict[str, Dataset]
) -> list[tuple[Origin, TokenizedSequence]]:
    """Half of them held-out traces, from each set in turn, the others training data; fewer where data run out. A
    function of the seed and the data. All are training data where weights need `data.reference_log_probabilities` or
    `data.token_weights`, which only training data have."""
    number = run.num_followed_traces if run.num_token_records > 0 else 0
    seed, held_out = run.seed, validation
    if data.reference_log_probabilities is not None or data.token_weights is not None:
        held_out = {}
    elif method.drops_tokens:
        held_out = {name: keep_random_tokens(d, method.keep_share, seed) for name, d in validation.items()}
    by_set = [_drawn(dataset, seed, place, name) for place, (name, dataset) in enumerate(held_out.items(), start=1)]
    in_turn = (one for turn in zip_longest(*by_set) for one in turn if one is not None)
    chosen = list(islice(in_turn, number // 2))
    return chosen + list(islice(_drawn(training, seed, 0), number - len(chosen)))


def _drawn(
    dataset: Dataset, seed: int, place: int, held_out: str | None = None
) -> Iterator[tuple[Origin, TokenizedSequence]]:
    """Sequences with supervised tokens, in random order; `held_out` names their set, None for training data."""
    for i in generator(Stream.FOLLOWED_TRACES, seed, place).permutation(len(dataset)).tolist():
        sequence = dataset[i]
        if sequence.supervised[1:].any():
            yield Origin(held_out is not None, held_out or "", sequence.sequence_id), sequence


def measure_followed(
    engine: Engine,
    settings: StepSettings,
    batches: Sequence[Batch],
    estimator: Estimator,
    recorder: StepRecorder,
    *,
    seed: int,
) -> None:
    """Measure the followed traces (this rank's `batches`, the same number on every rank) with the parameters and the
    direction of this step, before its update. A collective; does nothing without batches, and does not change training.
    Comes after the utilities of the main batch, because a finite difference chooses epsilon there. `seed`: as for the
    main batch."""
    if not batches:
        return
    k = batches[0].sequence_parallel
    with recorder.part("followed"):
        with engine.without_gradient():
            measured = [engine.losses_and_statistics(batch, "entropy") for batch in batches]
            statistic = settings.method.prediction_statistic
            statistics = [statistic and engine.losses_and_statistics(batch, statistic)[1] for batch in batches]
        known = estimator.begin(batches, seed=seed, precompute=True).precomputed
        utilities = [values for _, values in known] if known else [None] * len(batches)
        if settings.reference_is_base:
            batches = add_reference_log_probabilities(engine, batches)
        # Ranks of a sequence-parallel group hold the same traces; one of them reports.
        if layout.rank("sequence", k) == 0:
            for batch, (losses, entropies), values, read in zip(batches, measured, utilities, statistics, strict=True):
                weights = token_weights(settings.method, batch.tokens(losses, values, read)).weights
                recorder.followed |= _tokens_of(batch, losses, entropies, values, weights)


def _tokens_of(
    batch: Batch, losses: torch.Tensor, entropies: torch.Tensor, utilities: torch.Tensor | None, weights: torch.Tensor
) -> dict[int, TraceTokens]:
    """The traces of a micro-batch by their indices. Waits for the device."""
    supervised, index = batch.supervised(), batch.sequence_index()
    positions = batch.position_ids()[:, 1:][supervised].to(torch.int32)
    token_ids = batch.labels[:, 1:][supervised].to(torch.int32)
    losses, entropies, weights = losses.float().cpu(), entropies.float().cpu(), weights.float().cpu()
    utilities = None if utilities is None else utilities.float().cpu()
    traces = {}
    for number, (place, prompt) in enumerate(zip(batch.sequence_ids, batch.prompts(), strict=True)):
        mask = index == number
        traces[place] = TraceTokens(
            int(mask.sum()),
            positions=positions[mask].numpy(),
            token_ids=token_ids[mask].numpy(),
            losses=losses[mask].numpy(),
            entropies=entropies[mask].numpy(),
            utilities=None if utilities is None else utilities[mask].numpy(),
            weights=weights[mask].numpy(),
            prompt_ids=prompt[-MOST_PROMPT_TOKENS:].int().numpy(),
        )
    return traces


def record_followed(
    folder: Path, step: int, own: Mapping[int, TraceTokens], origins: Sequence[Origin], console: Console
) -> None:
    """Write the followed traces of an optimizer step into the run's folder, on rank 0. A collective. A file that cannot
    be written is a warning: rank 0 must not exit while the others train. `own`: this rank's traces, by index into
    `origins`."""
    mark("followed traces")
    most = most_tokens_of_trace(len(origins))
    parts = layout.gather_objects("shards", {place: trace.first(most) for place, trace in own.items()})
    if not layout.is_first():
        return
    traces = {place: trace for part in parts for place, trace in part.items()}
    try:
        write_followed(folder, FollowedRecord(step, origins, [traces[place] for place in range(len(origins))]))
    except OSError as error:
        console.warn(f"the followed traces of step {step} cannot be written to {folder} ({error.strerror})")
