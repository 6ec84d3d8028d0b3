"""Data sets of training: a token store, a view that extends its sequences or selects some of them, and the sequences of
each step."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_atomically
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import TokenizedSequence, TokenizedSequences
from vcore_ds.method.baselines import random_mask


class ChangedDataset(TokenizedSequences):
    """A data set whose sequences are changed when they are read, so that none is held in memory."""

    def __init__(self, dataset: "Dataset", change: Callable[[int, TokenizedSequence], TokenizedSequence]) -> None:
        """`change`: called with a position and its sequence; returns a sequence of the same length."""
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
    """A selection of a data set's sequences, with their order and ids."""

    def __init__(self, dataset: "Dataset", positions: np.ndarray, description: str, origin: Mapping[str, Any]) -> None:
        """Args:
        positions: int64 [k], at least one, of the kept sequences in `dataset`, ascending.
        description: of the selection, for the screen.
        origin: of the selection, for environment.json.
        """
        self.dataset, self.positions, self.description, self.origin = dataset, positions, description, origin
        self.lengths: np.ndarray = dataset.lengths[positions]
        """int32 [k], tokens of each sequence, without reading any."""
        self.sequence_ids: np.ndarray = dataset.sequence_ids[positions]
        """int64 [k], the position of each sequence among all rows read, from 0."""

    @property
    def digest(self) -> str:
        """SHA-256 of the data set's digest and the kept positions, which a resumed run compares."""
        return hashlib.sha256(self.dataset.digest.encode() + self.positions.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.positions)

    def sequence_at(self, i: int) -> TokenizedSequence:
        return self.dataset[int(self.positions[i])]


class JoinedDataset(TokenizedSequences):
    """Two data sets, one after the other. The second one's ids are shifted past those of the first, because dropout
    masks, messages and token records identify a sequence by its id."""

    def __init__(self, first: "Dataset", second: "Dataset") -> None:
        self.first, self.second = first, second
        # Not its length: ids are row numbers, and a store may have dropped rows.
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
    """Set `kept` to the answer's tokens and random others, `keep_share` of the supervised tokens in total (the method
    `random`)."""

    def keep(_: int, sequence: TokenizedSequence) -> TokenizedSequence:
        assert sequence.in_answer is not None  # every store has it
        kept = np.zeros(len(sequence), dtype=np.bool_)
        in_answer = sequence.in_answer[sequence.supervised]
        # The same in every epoch, on every rank, and after a resumption.
        drawn = generator(Stream.RANDOM_MASK, seed, sequence.sequence_id)
        kept[sequence.supervised] = random_mask(in_answer, keep_share, drawn)
        return replace(sequence, kept=kept)

    return ChangedDataset(dataset, keep)


# Both orders below are functions of the step number: resuming needs no state, and neither the number of ranks nor the
# size of a micro-batch changes which sequences form a step. Ids are positions in the data set.


class MainOrder:
    """The main batches: consecutive slices of shuffled epochs. A batch may span two epochs."""

    def __init__(self, num_sequences: int, batch_size: int, seed: int) -> None:
        """`batch_size`: sequences per optimizer step over all ranks and micro-batches."""
        self.num_sequences, self.batch_size, self.seed = num_sequences, batch_size, seed

    def step(self, k: int) -> list[int]:
        """Ids [batch_size] of the global batch of optimizer step k, from 0."""
        ids = []
        for position in range(k * self.batch_size, (k + 1) * self.batch_size):
            epoch, index = divmod(position, self.num_sequences)
            ids.append(int(_epoch_permutation(self.num_sequences, self.seed, epoch)[index]))
        return ids


class RandomDraws:
    """Random batches, independent of `MainOrder`: the probe batches B' (Algorithm 1 of the paper), and the trusted part
    of the main batches."""

    def __init__(self, num_sequences: int, batch_size: int, seed: int, stream: Stream) -> None:
        """`batch_size`: sequences per optimizer step over all ranks."""
        self.num_sequences, self.batch_size, self.seed, self.stream = num_sequences, batch_size, seed, stream

    def step(self, k: int) -> list[int]:
        """Ids [batch_size] of optimizer step k, from 0; none repeats before all were drawn."""
        drawn = generator(self.stream, self.seed, k)
        ids: list[int] = []
        while len(ids) < self.batch_size:
            size = min(self.batch_size - len(ids), self.num_sequences)
            ids += drawn.choice(self.num_sequences, size, replace=False).tolist()
        return ids


@lru_cache(maxsize=4)  # a step needs one or two epochs, for each data set
def _epoch_permutation(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return generator(Stream.MAIN_ORDER, seed, epoch).permutation(num_sequences)


def select_positions(
    utilities: np.ndarray,
    sources: np.ndarray,
    *,
    top: float | None,
    above: float | None,
    within: Literal["all", "source"],
) -> np.ndarray:
    """Positions of the traces with the highest utility in their token store, int64 [k], ascending.

    Ties go to the lower position. A utility that is not finite is never selected.

    Args:
        utilities: float [n], of every trace.
        sources: [n], file or data set of each trace.
        top: share of the traces to select, rounded to whole traces; None with `above`.
        above: select traces of higher utility; None with `top`.
        within: whether `top` is a share of all traces or of those of each source.
    """
    utilities = np.where(np.isfinite(utilities), utilities, -np.inf)
    if above is not None:
        return np.flatnonzero(utilities > above)
    assert top is not None  # one of the two is given
    groups = np.unique(sources, return_inverse=True)[1] if within == "source" else np.zeros(len(utilities), np.int64)
    descending = np.argsort(-utilities, kind="stable")
    selected = []
    for group in range(groups.max(initial=-1) + 1):
        members = descending[groups[descending] == group]
        best = members[: round(top * len(members))]
        selected.append(best[np.isfinite(utilities[best])])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *selected]))


# iw-SFT: the importance ratio needs one log-probability per sequence, computed before training, so that no second model
# is in memory. They are not in the token store, because models that share a tokenizer share a store.


def write_reference(path: Path, dataset: Dataset, log_probabilities: Sequence[float], model: str) -> None:
    """Write a `.npz`: `log_probability` fp64 [n] in nats, in the order of the data, the data's digest and the model's
    name."""
    # Into an open file: np.savez would add .npz to a name that lacks it.
    with write_atomically(path) as unfinished, unfinished.open("wb") as file:
        np.savez(
            file,
            log_probability=np.array(log_probabilities, dtype=np.float64),
            digest=np.array(dataset.digest),
            model=np.array(model),
        )


def add_reference(dataset: Dataset, path: str) -> ChangedDataset:
    """Set `reference_log_probability` of every sequence from a file of `write_reference`.

    Raises:
        UserError: the file cannot be read, or was made from other tokens.
    """
    remedy = "make it with `vcore-ds reference RECIPE --output FILE`"
    try:
        with np.load(path, allow_pickle=False) as stored:
            digest, log_probabilities = str(stored["digest"]), stored["log_probability"]
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise UserError(
            f"data.reference_log_probabilities: {path}: found no such reference log-probabilities "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from None
    if digest != dataset.digest:
        raise UserError(
            f"data.reference_log_probabilities: {path}: found log-probabilities of {len(log_probabilities):,} other "
            f"sequences; expected those of the {len(dataset):,} training sequences as they are tokenized now "
            f"(data, template, tokenizer, cutoff_length and overlong decide); {remedy} again"
        )

    def with_value(i: int, sequence: TokenizedSequence) -> TokenizedSequence:
        return replace(sequence, reference_log_probability=float(log_probabilities[i]))

    return ChangedDataset(dataset, with_value)
