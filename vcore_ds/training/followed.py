"""Followed traces: a few traces, chosen once, that a run measures after every recorded step.

They show how a token's weight changes over the run, and which weights held-out data would get.
docs/reading-a-report.md lists the measurements.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

import torch

from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.config.data_section import DataConfig
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import RunConfig
from vcore_ds.data.batches import Batch
from vcore_ds.data.dataset import Dataset, keep_random_tokens, list_shares, shuffle_by_share
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.distributed.position import mark
from vcore_ds.engine.zero3 import Engine
from vcore_ds.training.feed import Feed, make_rank_batches
from vcore_ds.training.step_metrics import split_columns
from vcore_ds.training.token_records import HELD_OUT, MOST_TOKENS, SequenceTokens, TokenRecord
from vcore_ds.training.weighting import add_reference_log_probabilities, token_weights
from vcore_ds.utility.estimators import Estimator

Origin = tuple[str, int]
"""Source of a followed trace, and its sequence id; both as in `SequenceTokens`."""


@dataclass(frozen=True)
class FollowedTraces:
    """The traces that a run follows, the same at every step, at any world size and after resuming."""

    origins: Sequence[Origin]
    batches: Sequence[Batch]
    """This rank's micro-batches; sequence ids are indices into `origins`. Empty if nothing is followed."""


def choose_followed(
    run: RunConfig, data: DataConfig, method: MethodConfig, feed: Feed, validation: dict[str, Dataset]
) -> FollowedTraces:
    """Choose the traces, and lay them out on the ranks like a main batch. `validation`: held-out sequences by the name
    of their set."""
    chosen = choose_traces(run, data, method, feed.dataset, validation)
    if not chosen:
        return FollowedTraces([], [])
    sequences = [replace(sequence, sequence_id=i) for i, (_, sequence) in enumerate(chosen)]
    batch_layout = feed.plan.lay_out_main(range(len(sequences)), [len(sequence) for sequence in sequences])
    return FollowedTraces(
        [origin for origin, _ in chosen], make_rank_batches(batch_layout, sequences, feed.pad_token_id)
    )


def choose_traces(
    run: RunConfig, data: DataConfig, method: MethodConfig, training: Dataset, validation: dict[str, Dataset]
) -> list[tuple[Origin, TokenizedSequence]]:
    """Choose the traces as a function of the seed and the data: half from the held-out sets in turn, the others from
    the training data; fewer if data run out. All are training data if the weights need
    `data.reference_log_probabilities` or `data.token_weights`, which only training data have."""
    number = run.num_followed_traces if run.num_token_records > 0 else 0
    seed, held_out = run.seed, validation
    if data.reference_log_probabilities is not None or data.token_weights is not None:
        held_out = {}
    elif method.drops_tokens:
        held_out = {name: keep_random_tokens(d, method.keep_share, seed) for name, d in validation.items()}
    by_set = [
        _draw_traces(dataset, seed, i, f"{HELD_OUT}{name and ', '}{name}")
        for i, (name, dataset) in enumerate(held_out.items(), start=1)
    ]
    in_turn = (pair for turn in zip_longest(*by_set) for pair in turn if pair is not None)
    chosen = list(islice(in_turn, number // 2))
    return chosen + list(islice(_draw_traces(training, seed, 0, "training data"), number - len(chosen)))


def _draw_traces(dataset: Dataset, seed: int, place: int, source: str) -> Iterator[tuple[Origin, TokenizedSequence]]:
    """Yield sequences with supervised tokens, in random order; each file of training data has its share."""
    for i in shuffle_by_share(*list_shares(dataset), generator(Stream.FOLLOWED_TRACES, seed, place)).tolist():
        sequence = dataset[i]
        if sequence.supervised[1:].any():
            yield (source, sequence.sequence_id), sequence


def measure_followed(
    engine: Engine, method: MethodConfig, traces: FollowedTraces, estimator: Estimator, *, seed: int
) -> dict[int, SequenceTokens]:
    """Measure the followed traces with the present parameters, along the direction that the last step took; return this
    rank's, by index. A collective, which does not change training. `seed`: as for the step."""
    mark("followed traces")
    batches = traces.batches
    with engine.without_gradient():
        measured = [engine.losses_and_statistics(batch, "entropy") for batch in batches]
        statistic = method.prediction_statistic
        statistics = [statistic and engine.losses_and_statistics(batch, statistic)[1] for batch in batches]
    known = estimator.begin(batches, seed=seed, precompute=True).precomputed
    utilities = [values for _, values in known] if known else [None] * len(batches)
    if method.reads_reference and engine.has_adapters:
        batches = add_reference_log_probabilities(engine, batches)
    # Ranks of a sequence-parallel group hold the same traces; one of them reports.
    if layout.rank("sequence", batches[0].sequence_parallel) > 0:
        return {}
    local: dict[int, SequenceTokens] = {}
    for batch, (losses, entropies), s, values in zip(batches, measured, utilities, statistics, strict=True):
        weights = token_weights(method, batch.tokens(losses, s, values)).weights
        local |= split_traces(batch, traces.origins, losses, entropies, s, weights)
    return local


def split_traces(
    batch: Batch,
    origins: Sequence[Origin],
    losses: torch.Tensor,
    entropies: torch.Tensor,
    utilities: torch.Tensor | None,
    weights: torch.Tensor,
) -> dict[int, SequenceTokens]:
    """Split the tokens of a micro-batch into traces, by index. Synchronises with the device."""
    columns = split_columns(batch, losses=losses, entropies=entropies, utilities=utilities, weights=weights)
    local = {}
    for index, arrays in zip(batch.sequence_ids, columns, strict=True):
        (source, sequence_id), length = origins[index], len(arrays["token_ids"])
        local[index] = SequenceTokens(sequence_id, 1.0, 1.0, 1.0, source=source, num_supervised_tokens=length, **arrays)
    return local


def gather_followed(step: int, local: Mapping[int, SequenceTokens], num_traces: int) -> TokenRecord:
    """Gather the record of the followed traces after an optimizer step on every rank, each with so few tokens that the
    file is no larger than the record of a batch. A collective. `local`: this rank's traces, by index."""
    shown = {i: trace.truncate(MOST_TOKENS // num_traces) for i, trace in local.items()}
    by_rank = layout.gather_objects("shards", shown)
    traces = [trace for _, trace in sorted((i, trace) for traces in by_rank for i, trace in traces.items())]
    num_tokens = sum(trace.num_supervised_tokens or 0 for trace in traces)
    return TokenRecord(step, None, len(traces), num_tokens, traces)
