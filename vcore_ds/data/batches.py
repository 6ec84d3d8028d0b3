"""Sequences to the tensors of one micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.method.weights import Tokens
from vcore_ds.planning.batch_layout import padded_length

IGNORED_LABEL = -100
"""Label of positions that are no target, as in Hugging Face models and `torch.nn.functional.cross_entropy`."""


@dataclass
class Batch:
    """One micro-batch of one rank, or of a sequence-parallel group: b rows, padded on the right to T tokens.

    A row of the batch is a pack or an unpacked sequence. Sequences of a pack do not attend to each other. There is no
    attention mask: attention is causal, so no token attends to the padding that follows it, and position ids restart at
    0 with each sequence of a pack.
    """

    sequence_ids: list[int]  # [num_sequences]; empty in an idle batch
    input_ids: torch.Tensor  # int64 [b, T]
    labels: torch.Tensor
    """int64 [b, T], not shifted: input_ids[i, t] where token t is supervised, else `IGNORED_LABEL`"""
    kept: torch.Tensor | None = None  # bool [b, T], the supervised tokens that carry loss; None for all of them
    reference_log_probability: torch.Tensor | None = None
    """fp32 [num_sequences], nats, summed over each sequence's supervised tokens, under the reference model"""
    loss_weights: torch.Tensor | None = None  # fp32 [b, T], stored factor of each token's loss
    segments: torch.Tensor | None = None
    """int64 [b, T], index of each token's sequence in this batch, -1 for padding; None where row i is sequence i"""
    sequence_parallel: int = 1  # ranks that hold this batch and split its columns; divides T
    row_lengths: Sequence[int] | None = None
    """[b], tokens of each row without padding; None if no row is padded"""

    @property
    def num_sequences(self) -> int:
        """Sequences in the ragged tensors of this batch; an idle batch counts as one without tokens."""
        return self.labels.shape[0] if self.segments is None else int(self.segments.max()) + 1

    def position_ids(self) -> torch.Tensor:
        """int64 [b, T], from 0 in every sequence; the padding of a pack counts as a sequence."""
        columns = torch.arange(self.labels.shape[1])
        if self.segments is None:
            return columns.expand(self.labels.shape)
        begins = torch.ones_like(self.segments, dtype=torch.bool)
        begins[:, 1:] = self.segments[:, 1:] != self.segments[:, :-1]
        return columns - torch.where(begins, columns, 0).cummax(1).values

    def sequence_lengths(self) -> list[list[int]]:
        """Tokens of the sequences in each row, which sum to T: the padding of a pack counts as one more sequence, that
        of an unpacked sequence as part of it."""
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
        """int64 [b, T], the token after each position; `IGNORED_LABEL` where that is not supervised, and at the end."""
        return torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORED_LABEL)

    def token_sequence_ids(self) -> torch.Tensor:
        """int64 [b, T], sequence id of each token; -1 for the padding of packs and idle batches."""
        ids = torch.tensor([*self.sequence_ids, -1], dtype=torch.int64)
        if self.segments is None:
            numbers = torch.arange(len(self.labels)) if self.sequence_ids else torch.full((len(self.labels),), -1)
            return ids[numbers][:, None].expand(self.labels.shape)
        return ids[self.segments]

    def supervised(self) -> torch.Tensor:
        """bool [b, T - 1]: the token after this position is supervised. The first token of a sequence never is."""
        return self.labels[:, 1:] != IGNORED_LABEL

    def num_supervised_tokens(self) -> torch.Tensor:
        """int64 [num_sequences]: `n_i`, the supervised tokens of each sequence."""
        return torch.bincount(self.sequence_index(), minlength=self.num_sequences)

    def kept_targets(self) -> torch.Tensor:
        """bool [N], which supervised tokens carry loss, in the order of the model's losses."""
        supervised = self.supervised()
        if self.kept is None:
            return torch.ones(int(supervised.sum()), dtype=torch.bool)
        return self.kept[:, 1:][supervised]

    def num_kept_tokens(self) -> torch.Tensor:
        """int64 [num_sequences], supervised tokens of each sequence that carry loss."""
        return torch.bincount(self.sequence_index()[self.kept_targets()], minlength=self.num_sequences)

    def sequence_index(self) -> torch.Tensor:
        """int64 [N], index of each supervised token's sequence, in the order of the model's losses."""
        supervised = self.supervised()
        return supervised.nonzero()[:, 0] if self.segments is None else self.segments[:, 1:][supervised]

    def prompts(self) -> list[torch.Tensor]:
        """int64 [p] of each sequence with an id: its tokens before the first supervised one, if it has one."""
        prompts = []
        for number in range(len(self.sequence_ids)):
            mask = torch.arange(len(self.labels)) == number if self.segments is None else self.segments == number
            is_target = self.labels[mask].flatten() != IGNORED_LABEL
            prompts.append(self.input_ids[mask].flatten()[: int(is_target.int().argmax())])
        return prompts

    def tokens(self, losses: Tensor, utilities: Tensor | None = None, statistics: Tensor | None = None) -> Tokens:
        """Supervised tokens with the losses, utilities and statistics `[N]` of a forward pass; detached, on the losses'
        device."""
        device, reference, weights = losses.device, self.reference_log_probability, self.loss_weights
        return Tokens(
            losses.detach(),
            to_device(self.sequence_index(), device),
            self.num_sequences,
            utilities,
            None if self.kept is None else to_device(self.kept_targets(), device),
            None if reference is None else to_device(reference, device),
            statistics,
            None if weights is None else to_device(weights[:, 1:][self.supervised()], device),
        )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor without a host-device synchronisation, which a copy from pageable memory would cause."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # Contiguous: memory that several elements of an expanded tensor share cannot be pinned.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def supervised_tokens(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the hidden states `[N, H]` (of `hidden` `[b, t, H]`) that predict supervised tokens, and these tokens
    `[N]`; row-major, on the device of `hidden`. `targets` `[b, t]` is on the host: a boolean mask on the device would
    synchronise, since the result's shape depends on it."""
    rows, columns = (targets != IGNORED_LABEL).nonzero(as_tuple=True)
    positions = to_device(rows, hidden.device), to_device(columns, hidden.device)
    return hidden[positions], to_device(targets[rows, columns], hidden.device)


def collate(sequences: Sequence[TokenizedSequence], pad_token_id: int, sequence_parallel: int = 1) -> Batch:
    """Make a batch of unpacked sequences; see `pack`."""
    return pack([[sequence] for sequence in sequences], pad_token_id, sequence_parallel)


def pack(packs: Sequence[Sequence[TokenizedSequence]], pad_token_id: int, sequence_parallel: int = 1) -> Batch:
    """Make a batch of packs with one or more sequences each; T is the length of the longest pack, rounded up to a
    multiple of 8 tokens for each rank of the sequence-parallel group."""
    sequences = [sequence for members in packs for sequence in members]
    row_lengths = [sum(len(sequence) for sequence in members) for members in packs]
    shape = (len(packs), padded_length(max(row_lengths), sequence_parallel))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
    segments = torch.full(shape, -1, dtype=torch.int64)
    kept = torch.zeros(shape, dtype=torch.bool)
    loss_weights = torch.zeros(shape, dtype=torch.float32)
    number = 0
    for i, members in enumerate(packs):
        start = 0
        for sequence in members:
            columns = slice(start, start + len(sequence))
            tokens = torch.from_numpy(sequence.input_ids).long()
            input_ids[i, columns] = tokens
            labels[i, columns] = tokens.masked_fill(torch.from_numpy(~sequence.supervised), IGNORED_LABEL)
            segments[i, columns] = number
            if sequence.kept is not None:
                kept[i, columns] = torch.from_numpy(sequence.kept)
            if sequence.loss_weights is not None:
                loss_weights[i, columns] = torch.from_numpy(sequence.loss_weights).float()
            start, number = columns.stop, number + 1
    ids = [sequence.sequence_id for sequence in sequences]
    batch = Batch(ids, input_ids, labels, sequence_parallel=sequence_parallel, row_lengths=row_lengths)
    if len(sequences) > len(packs):
        batch.segments = segments
    if sequences[0].kept is not None:
        batch.kept = kept
    if sequences[0].loss_weights is not None:
        batch.loss_weights = loss_weights
    if sequences[0].reference_log_probability is not None:
        batch.reference_log_probability = torch.tensor([s.reference_log_probability for s in sequences])
    return batch


def idle_batch(pad_token_id: int, sequence_parallel: int = 1) -> Batch:
    """Make a batch of padding, for ranks without sequences, which must still take part in every collective."""
    shape = (1, padded_length(1, sequence_parallel))
    ids, labels = torch.full(shape, pad_token_id), torch.full(shape, IGNORED_LABEL)
    return Batch([], ids, labels, sequence_parallel=sequence_parallel, row_lengths=[0])


def merge_batches(batches: Sequence[Batch]) -> Batch:
    """Join the tokens and labels of several batches, padded to the longest; for passes that only measure."""
    longest = max(batch.input_ids.shape[1] for batch in batches)

    def join(tensors: list[torch.Tensor], fill: int) -> torch.Tensor:
        padded = [torch.nn.functional.pad(t, (0, longest - t.shape[1]), value=fill) for t in tensors]
        return torch.cat(padded)

    segments = None
    if any(batch.segments is not None for batch in batches):
        parts, offset = [], 0
        for batch in batches:
            part = batch.segments
            if part is None:
                part = torch.arange(batch.num_sequences)[:, None].expand_as(batch.labels)
            parts.append(torch.where(part < 0, part, part + offset))
            offset += batch.num_sequences
        segments = join(parts, -1)
    # Any id does as padding: no real token attends to it, and no loss is taken there.
    return Batch(
        [i for batch in batches for i in batch.sequence_ids],
        join([batch.input_ids for batch in batches], 0),
        join([batch.labels for batch in batches], IGNORED_LABEL),
        segments=segments,
        sequence_parallel=batches[0].sequence_parallel,
        row_lengths=[n for batch in batches for n in batch.is_token().sum(1).tolist()],
    )


@dataclass(frozen=True)
class StepBatches:
    """One rank's micro-batches of an optimizer step. All ranks have the same number; some of them may be idle."""

    main: Sequence[Batch]
    probe: Sequence[Batch]  # empty where the method has no probe, or an earlier step's direction is used again
    measured: Mapping[str, float | int | None] = field(default_factory=dict)
    """Metrics of how the batches are spread over all ranks, by name; empty where not measured."""
    main_lengths: Sequence[int] = ()
    """Tokens of each sequence of the global main batch; empty where not measured."""
    probe_lengths: Sequence[int] = ()  # the same of the probe batch
