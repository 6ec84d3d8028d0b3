"""Sequences to the tensors of one micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.method.tokens import Tokens
from vcore_ds.planning.packing import padded_length

IGNORED_LABEL = -100
"""Label of positions that are no target, as in Hugging Face models and `torch.nn.functional.cross_entropy`."""


@dataclass
class Batch:
    """One micro-batch of one rank, or of a sequence-parallel group: b rows, padded on the right to T tokens.

    A row is one sequence, or several that are packed one after the other and do not see each other. There is no
    attention mask: attention is causal, so no token sees the padding that follows it, and positions that start again at
    0 keep packed sequences apart.
    """

    sequence_ids: list[int]
    """[num_sequences], in the order of their numbers; none in an idle batch"""
    input_ids: torch.Tensor
    """int64 [b, T]"""
    labels: torch.Tensor
    """int64 [b, T], not shifted: input_ids[i, t] where token t is a target, else `IGNORED_LABEL`"""
    kept: torch.Tensor | None = None
    """bool [b, T], the targets that carry loss; None for all of them"""
    reference_log_probability: torch.Tensor | None = None
    """fp32 [num_sequences], nats, of each sequence's targets together under the reference model"""
    segments: torch.Tensor | None = None
    """int64 [b, T], the number of the sequence that each token belongs to, -1 for padding; None where row i is
    sequence i"""
    sequence_parallel: int = 1
    """ranks that hold this same batch and each compute a part of its columns; it divides T"""
    row_lengths: Sequence[int] | None = None
    """[b], tokens of each row without the padding behind them; None where no row is padded"""

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the ragged tensors of this batch: an idle row counts as one, without tokens."""
        return self.labels.shape[0] if self.segments is None else int(self.segments.max()) + 1

    def position_ids(self) -> torch.Tensor:
        """int64 [b, T], from 0 in every sequence, and in the padding behind packed ones."""
        columns = torch.arange(self.labels.shape[1])
        if self.segments is None:
            return columns.expand(self.labels.shape)
        begins = torch.ones_like(self.segments, dtype=torch.bool)
        begins[:, 1:] = self.segments[:, 1:] != self.segments[:, :-1]
        return columns - torch.where(begins, columns, 0).cummax(1).values

    def sequence_lengths(self) -> list[list[int]]:
        """Tokens of the sequences in each row, T together: padding behind packed ones is a sequence of its own, behind
        a single one a part of it."""
        num_rows, num_tokens = self.labels.shape
        if self.segments is None:
            return [[num_tokens]] * num_rows
        return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in self.segments]

    def is_token(self) -> torch.Tensor:
        """bool [b, T], False for padding."""
        if self.row_lengths is None:
            return torch.ones_like(self.labels, dtype=torch.bool)
        return torch.arange(self.labels.shape[1]) < torch.tensor(self.row_lengths)[:, None]

    def targets(self) -> torch.Tensor:
        """int64 [b, T], the token that follows each, `IGNORED_LABEL` where it is not supervised and at the end."""
        return torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORED_LABEL)

    def token_sequence_ids(self) -> torch.Tensor:
        """int64 [b, T], the id of the sequence that each token belongs to; -1 for padding of packed and idle rows."""
        ids = torch.tensor([*self.sequence_ids, -1], dtype=torch.int64)
        if self.segments is None:
            numbers = torch.arange(len(self.labels)) if self.sequence_ids else torch.full((len(self.labels),), -1)
            return ids[numbers][:, None].expand(self.labels.shape)
        return ids[self.segments]

    def supervised(self) -> torch.Tensor:
        """bool [b, T - 1]: the token after this position is a target. A sequence's first token never is: it has nothing
        before it to predict it."""
        return self.labels[:, 1:] != IGNORED_LABEL

    def num_supervised_tokens(self) -> torch.Tensor:
        """int64 [num_sequences]: `n_i`, the supervised tokens of each sequence."""
        return torch.bincount(self.sequence_index(), minlength=self.num_sequences)

    def kept_targets(self) -> torch.Tensor:
        """bool [N], which supervised tokens carry loss, in the order in which the model returns losses."""
        supervised = self.supervised()
        if self.kept is None:
            return torch.ones(int(supervised.sum()), dtype=torch.bool)
        return self.kept[:, 1:][supervised]

    def num_kept_tokens(self) -> torch.Tensor:
        """int64 [num_sequences], supervised tokens of each sequence that carry loss."""
        return torch.bincount(self.sequence_index()[self.kept_targets()], minlength=self.num_sequences)

    def sequence_index(self) -> torch.Tensor:
        """int64 [N], the sequence of each supervised token, in the order in which the model returns losses."""
        supervised = self.supervised()
        return supervised.nonzero()[:, 0] if self.segments is None else self.segments[:, 1:][supervised]

    def tokens(self, losses: Tensor, utilities: Tensor | None = None) -> Tokens:
        """The supervised tokens, with the losses and utilities `[N]` that a forward gave; on their device, without a
        graph."""
        device, reference = losses.device, self.reference_log_probability
        return Tokens(
            losses.detach(),
            to_device(self.sequence_index(), device),
            self.num_sequences,
            utilities,
            None if self.kept is None else to_device(self.kept_targets(), device),
            None if reference is None else to_device(reference, device),
        )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on another device, which the host does not wait for: out of pageable memory a GPU would have
    to finish what it is doing first."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def supervised_tokens(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states `[N, H]` that predict supervised tokens, and these tokens `[N]`, both row-major and on the
    device of `hidden`.

    Args:
        hidden: `[b, t, H]`.
        targets: `[b, t]` on the host, `IGNORED_LABEL` where nothing is supervised. A boolean mask on the device would
            be waited for: the number of its tokens is a shape.
    """
    rows, columns = (targets != IGNORED_LABEL).nonzero(as_tuple=True)
    places = to_device(rows, hidden.device), to_device(columns, hidden.device)
    return hidden[places], to_device(targets[rows, columns], hidden.device)


def collate(sequences: Sequence[TokenizedSequence], pad_token_id: int, sequence_parallel: int = 1) -> Batch:
    """One batch of at least one sequence, a row each; see `pack`."""
    return pack([[sequence] for sequence in sequences], pad_token_id, sequence_parallel)


def pack(rows: Sequence[Sequence[TokenizedSequence]], pad_token_id: int, sequence_parallel: int = 1) -> Batch:
    """One batch of rows with one or more sequences each; T is the longest row, rounded up to a multiple of 8 tokens for
    each rank that shares it."""
    sequences = [sequence for row in rows for sequence in row]
    row_lengths = [sum(len(sequence) for sequence in row) for row in rows]
    shape = (len(rows), padded_length(max(row_lengths), sequence_parallel))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
    segments = torch.full(shape, -1, dtype=torch.int64)
    kept = torch.zeros(shape, dtype=torch.bool)
    number = 0
    for i, row in enumerate(rows):
        start = 0
        for sequence in row:
            columns = slice(start, start + len(sequence))
            tokens = torch.from_numpy(sequence.input_ids).long()
            input_ids[i, columns] = tokens
            labels[i, columns] = tokens.masked_fill(torch.from_numpy(~sequence.supervised), IGNORED_LABEL)
            segments[i, columns] = number
            if sequence.kept is not None:
                kept[i, columns] = torch.from_numpy(sequence.kept)
            start, number = columns.stop, number + 1
    ids = [sequence.sequence_id for sequence in sequences]
    batch = Batch(ids, input_ids, labels, sequence_parallel=sequence_parallel, row_lengths=row_lengths)
    if len(sequences) > len(rows):
        batch.segments = segments
    if sequences[0].kept is not None:
        batch.kept = kept
    if sequences[0].reference_log_probability is not None:
        batch.reference_log_probability = torch.tensor([s.reference_log_probability for s in sequences])
    return batch


def idle_batch(pad_token_id: int, sequence_parallel: int = 1) -> Batch:
    """What ranks without sequences run, so that they take part in every collective: one row, no targets, no losses."""
    shape = (1, padded_length(1, sequence_parallel))
    ids, labels = torch.full(shape, pad_token_id), torch.full(shape, IGNORED_LABEL)
    return Batch([], ids, labels, sequence_parallel=sequence_parallel, row_lengths=[0])


def merge_batches(batches: Sequence[Batch]) -> Batch:
    """Tokens and labels of several batches in one, in order, padded to the longest: for passes that only measure."""
    longest = max(batch.input_ids.shape[1] for batch in batches)

    def join(tensors: list[torch.Tensor], fill: int) -> torch.Tensor:
        padded = [torch.nn.functional.pad(t, (0, longest - t.shape[1]), value=fill) for t in tensors]
        return torch.cat(padded)

    segments = None
    if any(batch.segments is not None for batch in batches):
        parts, offset = [], 0
        for batch in batches:
            own = batch.segments
            if own is None:
                own = torch.arange(batch.num_sequences)[:, None].expand_as(batch.labels)
            parts.append(torch.where(own < 0, own, own + offset))
            offset += batch.num_sequences
        segments = join(parts, -1)
    # Any id will do as padding: no real token sees it and no loss is taken there.
    return Batch(
        [i for batch in batches for i in batch.sequence_ids],
        join([batch.input_ids for batch in batches], 0),
        join([batch.labels for batch in batches], IGNORED_LABEL),
        segments=segments,
        sequence_parallel=batches[0].sequence_parallel,
        row_lengths=[n for batch in batches for n in batch.is_token().sum(1).tolist()],
    )


# What one rank works on in one optimizer step.


@dataclass(frozen=True)
class StepBatches:
    """What one rank works on in one optimizer step. Ranks have equally many micro-batches; some may be idle."""

    main: Sequence[Batch]
    probe: Sequence[Batch]
    """Empty where there is nothing to probe: the method has no probe, or an earlier step's direction serves again."""
    measured: Mapping[str, float | int | None] = field(default_factory=dict)
    """How the step's batches are spread over all ranks, by the names in the metrics; empty where not measured."""
    main_lengths: Sequence[int] = ()
    """Tokens of each sequence of the global main batch, over all ranks; empty where not measured."""
    probe_lengths: Sequence[int] = ()
    """The same of the probe batch."""
    followed: Sequence[Batch] = ()
    """Traces to measure beside the step, see `vcore_ds.train.followed`; empty in most steps."""
