"""The datasets that training reads: a token store, one whose sequences are extended as they are read, or some of the
sequences of either."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vcore_ds.data.sequences import TokenizedSequences
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.method.baselines import random_mask
from vcore_ds.random_streams import Stream, generator


class ChangedDataset(TokenizedSequences):
    """A dataset whose sequences are changed as they are read, so that none is held in memory."""

    def __init__(self, dataset: "Dataset", change: Callable[[int, TokenizedSequence], TokenizedSequence]) -> None:
        """`change`: takes a position and the sequence there, and returns a sequence of the same length."""
        self.dataset, self.change = dataset, change

    @property
    def lengths(self) -> np.ndarray:
        """int32 [n], tokens of each sequence, without reading any."""
        return self.dataset.lengths

    @property
    def sequence_ids(self) -> np.ndarray:
        """int64 [n], the position of each sequence among all rows read, from 0."""
        return self.dataset.sequence_ids

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens and of which of them are supervised, in order."""
        return self.dataset.digest

    def __len__(self) -> int:
        return len(self.dataset)

    def sequence_at(self, i: int) -> TokenizedSequence:
        return self.change(i, self.dataset[i])


class KeptDataset(TokenizedSequences):
    """Some sequences of a data set, in their order, under the ids that they have there."""

    def __init__(self, dataset: "Dataset", positions: np.ndarray, description: str, origin: Mapping[str, Any]) -> None:
        """Keeps at least one.

        Args:
            positions: int64 [k], of the kept sequences in `dataset`, ascending.
            description: which ones they are, in words.
            origin: the same for environment.json.
        """
        self.dataset, self.positions, self.description, self.origin = dataset, positions, description, origin
        self.lengths: np.ndarray = dataset.lengths[positions]
        """int32 [k], tokens of each sequence, without reading any."""
        self.sequence_ids: np.ndarray = dataset.sequence_ids[positions]
        """int64 [k], the position of each sequence among all rows read, from 0."""

    @property
    def digest(self) -> str:
        """SHA-256 of the digest of all sequences and of which of them are kept: a run is resumed on the same ones."""
        return hashlib.sha256(self.dataset.digest.encode() + self.positions.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.positions)

    def sequence_at(self, i: int) -> TokenizedSequence:
        return self.dataset[int(self.positions[i])]


class JoinedDataset(TokenizedSequences):
    """A dataset followed by another. The ids of the second one's sequences are moved behind those of the first, so that
    ids stay different: dropout, messages and records of tokens know a sequence by its id."""

    def __init__(self, first: "Dataset", second: "Dataset") -> None:
        self.first, self.second = first, second
        # Ids are numbers of rows, of which a store may have dropped some.
        self.first_id_of_second = int(first.sequence_ids.max()) + 1
        self.lengths: np.ndarray = np.concatenate([first.lengths, second.lengths])
        """int32 [n], tokens of each sequence, without reading any."""

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def sequence_at(self, i: int) -> TokenizedSequence:
        num_first = len(self.first)
        if i < num_first:
            return self.first[i]
        sequence = self.second[i - num_first]
        return replace(sequence, sequence_id=sequence.sequence_id + self.first_id_of_second)


Dataset = TokenStore | ChangedDataset | KeptDataset


def keep_random_tokens(dataset: Dataset, keep_share: float, seed: int) -> ChangedDataset:
    """The dataset with `kept` set: all of the answer and a random part of the rest, `keep_share` of the supervised
    tokens in total (the method `random`)."""

    def keep(_: int, sequence: TokenizedSequence) -> TokenizedSequence:
        assert sequence.in_answer is not None  # a store has it
        kept = np.zeros(len(sequence), dtype=np.bool_)
        in_answer = sequence.in_answer[sequence.supervised]
        # The same in every epoch, on any rank, after any resumption.
        drawn = generator(Stream.RANDOM_MASK, seed, sequence.sequence_id)
        kept[sequence.supervised] = random_mask(in_answer, keep_share, drawn)
        return replace(sequence, kept=kept)

    return ChangedDataset(dataset, keep)
