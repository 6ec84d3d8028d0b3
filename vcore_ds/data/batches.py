"""Sequences to the tensors of one micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vcore_ds.data.tokenization import TokenizedSequence

IGNORED_LABEL = -100
"""Label of positions that are no target, as in Hugging Face models and `torch.nn.functional.cross_entropy`."""

_LENGTH_MULTIPLE = 8  # tokens; matrix units are at their best on such sizes


@dataclass
class Batch:
    """One micro-batch of one rank: b sequences, padded on the right to T tokens.

    There is no attention mask: attention is causal, so no token sees the padding that follows it.
    """

    sequence_ids: list[int]
    """[b]"""
    input_ids: torch.Tensor
    """int64 [b, T]"""
    labels: torch.Tensor
    """int64 [b, T], not shifted: input_ids[i, t] where token t is a target, else `IGNORED_LABEL`"""
    kept: torch.Tensor | None = None
    """bool [b, T], the targets that carry loss; None for all of them"""
    reference_log_probability: torch.Tensor | None = None
    """fp32 [b], nats, of each row's targets together under the reference model"""

    @property
    def num_rows(self) -> int:
        return self.labels.shape[0]

    def supervised(self) -> torch.Tensor:
        """bool [b, T - 1]: the token after this position is a target. Token 0 has nothing before it to predict it."""
        return self.labels[:, 1:] != IGNORED_LABEL

    def num_supervised_tokens(self) -> torch.Tensor:
        """int64 [b], `n_i` of each row."""
        return self.supervised().sum(1)

    def kept_targets(self) -> torch.Tensor:
        """bool [N], which supervised tokens carry loss, in the order in which the model returns losses."""
        supervised = self.supervised()
        if self.kept is None:
            return torch.ones(int(supervised.sum()), dtype=torch.bool)
        return self.kept[:, 1:][supervised]

    def num_kept_tokens(self) -> torch.Tensor:
        """int64 [b], supervised tokens of each row that carry loss."""
        supervised = self.supervised()
        return (supervised if self.kept is None else supervised & self.kept[:, 1:]).sum(1)

    def sequence_index(self) -> torch.Tensor:
        """int64 [N], the row of each supervised token, in the order in which the model returns losses."""
        return self.supervised().nonzero()[:, 0]


def collate(sequences: Sequence[TokenizedSequence], pad_token_id: int) -> Batch:
    """One batch of at least one sequence; T is the longest length, rounded up to a multiple of 8 tokens."""
    longest = max(len(sequence) for sequence in sequences)
    shape = (len(sequences), -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
    for i, sequence in enumerate(sequences):
        ids = torch.from_numpy(sequence.input_ids).long()
        input_ids[i, : len(ids)] = ids
        labels[i, : len(ids)] = ids.masked_fill(torch.from_numpy(~sequence.supervised), IGNORED_LABEL)
    batch = Batch([sequence.sequence_id for sequence in sequences], input_ids, labels)
    if sequences[0].kept is not None:
        batch.kept = torch.zeros(shape, dtype=torch.bool)
        for i, sequence in enumerate(sequences):
            batch.kept[i, : len(sequence)] = torch.from_numpy(sequence.kept)
    if sequences[0].reference_log_probability is not None:
        batch.reference_log_probability = torch.tensor([s.reference_log_probability for s in sequences])
    return batch


def idle_batch(pad_token_id: int) -> Batch:
    """What a rank without sequences runs, so that it takes part in every collective: one row, no targets, no losses."""
    shape = (1, _LENGTH_MULTIPLE)
    return Batch([], torch.full(shape, pad_token_id), torch.full(shape, IGNORED_LABEL))


def merge_batches(batches: Sequence[Batch]) -> Batch:
    """Tokens and labels of several batches in one, in order, padded to the longest: for passes that only measure."""
    longest = max(batch.input_ids.shape[1] for batch in batches)

    def join(tensors: list[torch.Tensor], fill: int) -> torch.Tensor:
        padded = [torch.nn.functional.pad(t, (0, longest - t.shape[1]), value=fill) for t in tensors]
        return torch.cat(padded)

    # Any id will do as padding: no real token sees it and no loss is taken there.
    return Batch(
        [i for batch in batches for i in batch.sequence_ids],
        join([batch.input_ids for batch in batches], 0),
        join([batch.labels for batch in batches], IGNORED_LABEL),
    )
