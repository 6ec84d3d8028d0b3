"""From the micro-batches of a step on all ranks to one record of its tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.distributed.positions import mark
from vcore_ds.method.tokens import Tokens
from vcore_ds.random_streams import Stream, generator
from vcore_ds.track.console import Console
from vcore_ds.track.token_records import MOST_TOKENS, SequenceTokens, TokenRecord, write_record


def sequences_of(
    batch: Batch,
    tokens: Tokens,
    weights: Tensor,
    *,
    shares: Tensor,
    uniform_shares: Tensor,
    alpha: Tensor | float,
) -> Iterator[SequenceTokens]:
    """The sequences of a micro-batch that have supervised tokens. Waits for the device.

    Args:
        weights: `q` `[N]`.
        shares, uniform_shares: `[num_sequences]`, see `SequenceTokens`.
        alpha: of the global batch or of this micro-batch, or `[num_sequences]`.
    """
    supervised = batch.supervised()
    positions = batch.position_ids()[:, 1:][supervised].to(torch.int32)
    token_ids = batch.labels[:, 1:][supervised].to(torch.int32)
    index = tokens.sequence_index.cpu()
    losses, own_weights = tokens.losses.float().cpu(), weights.float().cpu()
    utilities = None if tokens.utilities is None else tokens.utilities.float().cpu()
    alphas = torch.as_tensor(alpha).double().cpu().expand(tokens.num_sequences).tolist()
    shared = zip(batch.sequence_ids, shares.double().tolist(), uniform_shares.double().tolist(), alphas, strict=False)
    for number, of_sequence in enumerate(shared):  # an idle batch has a row, and no id
        own = index == number
        if own.any():
            yield SequenceTokens(
                *of_sequence,
                positions[own].numpy(),
                token_ids[own].numpy(),
                losses[own].numpy(),
                None if utilities is None else utilities[own].numpy(),
                own_weights[own].numpy(),
            )


def record_tokens(
    folder: Path,
    step: int,
    own: Sequence[SequenceTokens],
    console: Console,
    *,
    sequence_parallel: int,
    first_trusted_id: int | None,
    seed: int,
) -> None:
    """Writes the record of an optimizer step into the run's folder, on rank 0. A collective.

    A record that cannot be written is a warning: rank 0 must not end while the others train.

    Args:
        own: this rank's sequences of the main batch.
        sequence_parallel: the degree; a group of as many ranks holds the same sequences.
        first_trusted_id: see `TokenRecord`.
        seed: of the run.
    """
    mark("token record")
    record = gather_record(step, own, sequence_parallel, first_trusted_id, seed)
    if not layout.is_first() or not record.sequences:
        return
    try:
        write_record(folder, record)
    except OSError as error:
        console.warn(f"the tokens of step {step} cannot be written to {folder} ({error.strerror}): it has no record")


def gather_record(
    step: int,
    own: Sequence[SequenceTokens],
    sequence_parallel: int,
    first_trusted_id: int | None,
    seed: int,
) -> TokenRecord:
    """The record on every rank, the same at any world size. A collective; see `record_tokens` and `choose`."""
    # Ranks of a sequence-parallel group hold the same sequences: the first of them speaks.
    own = own if layout.rank("sequence", sequence_parallel) == 0 else []
    sizes = layout.gather_objects("shards", [(sequence.sequence_id, len(sequence)) for sequence in own])
    found = sorted((i, n, rank, k) for rank, part in enumerate(sizes) for k, (i, n) in enumerate(part))
    lengths = [n for _, n, _, _ in found]
    chosen = {found[place][2:] for place in choose(lengths, generator(Stream.TOKEN_RECORDS, seed, step), MOST_TOKENS)}
    here = layout.rank("shards")
    # What is left out is not sent: a large batch has many times the tokens of a record.
    parts = layout.gather_objects("shards", [sequence for k, sequence in enumerate(own) if (here, k) in chosen])
    sequences = sorted((sequence for part in parts for sequence in part), key=lambda sequence: sequence.sequence_id)
    return TokenRecord(step, first_trusted_id, len(lengths), sum(lengths), sequences)


def choose(lengths: Sequence[int], drawn: np.random.Generator, most_tokens: int) -> list[int]:
    """Places of the sequences of a record: in random order, as long as the next one fits into `most_tokens`, but at
    least one."""
    places: list[int] = []
    total = 0
    for place in drawn.permutation(len(lengths)).tolist():
        total += lengths[place]
        if places and total > most_tokens:
            break
        places.append(place)
    return places
