"""Training data sets: token stores, weighted mixtures of them, views that extend or select sequences, and the sequences
of each step."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, chain
from math import gcd, lcm
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_atomically
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import TokenizedSequence, TokenizedSequences


class Shares:
    """Assigns draws 0, 1, 2, ... to files in proportion to their weights, as a function of the draw's number. The files
    are halved by weight until one remains; of the draws of a part, each half gets its share rounded to whole draws.
    Each prefix of the draws differs from the exact shares by at most 1.5 draws per file; multiples of `sum(weights)`
    draws have the exact shares."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: above 0, as decimals: 0.7 is 7/10 and not the nearest binary fraction."""
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        scaled = [int(weight * scale) for weight in exact]
        divisor = gcd(*scaled)
        self.weights = [weight // divisor for weight in scaled]
        """The weights as whole numbers without a common divisor."""
        self._sums = [0, *accumulate(self.weights)]

    def locate(self, draw: int) -> tuple[int, int]:
        """Find the file of a draw, and the number of earlier draws from that file."""
        first, last = 0, len(self.weights)
        while last - first > 1:
            middle, left, total = self._split(first, last)
            before, after = _round(draw * left, total), _round((draw + 1) * left, total)
            first, last, draw = (first, middle, before) if after > before else (middle, last, draw - before)
        return first, draw

    def count(self, num_draws: int) -> list[int]:
        """Count the draws from each file among the first `num_draws`."""
        return self._count(0, len(self.weights), num_draws)

    def _count(self, first: int, last: int, num_draws: int) -> list[int]:
        if last - first == 1:
            return [num_draws]
        middle, left, total = self._split(first, last)
        num_left = _round(num_draws * left, total)
        return self._count(first, middle, num_left) + self._count(middle, last, num_draws - num_left)

    def _split(self, first: int, last: int) -> tuple[int, int, int]:
        """Find where the files `first` to `last` are halved, and the weights of the left half and of all of them."""
        sums = self._sums
        middle = min(range(first + 1, last), key=lambda i: abs(2 * sums[i] - sums[first] - sums[last]))
        return middle, sums[middle] - sums[first], sums[last] - sums[first]


def _round(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


class JoinedDataset(TokenizedSequences):
    """Concatenated data sets. The ids of each are shifted past those of the previous ones, because dropout masks,
    messages and token records identify a sequence by its id."""

    def __init__(self, parts: Sequence["Dataset"]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)])
        """int64 [parts + 1], position of each part's first sequence, and the number of all sequences."""
        # Not its length: ids are row numbers, and a store may have dropped rows.
        ends = [int(part.sequence_ids.max()) + 1 for part in parts]
        self.first_ids = [0, *accumulate(ends)][: len(parts)]  # offsets of the ids of each part
        self.lengths = np.concatenate([part.lengths for part in parts])

    def __getitem__(self, i: int) -> TokenizedSequence:
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        sequence = self.parts[part][i - int(self.starts[part])]
        return replace(sequence, sequence_id=sequence.sequence_id + self.first_ids[part])


class JoinedStores(JoinedDataset):
    """The concatenated token stores of several files, with the interface of a `TokenStore`."""

    parts: Sequence[TokenStore]

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float]) -> None:
        """`stores`: made with one tokenizer; `weights`: see `Shares`."""
        super().__init__(stores)
        self.weights = weights
        shifted = [store.sequence_ids + first for store, first in zip(stores, self.first_ids, strict=True)]
        self.sequence_ids = np.concatenate(shifted)
        self.num_supervised_tokens = np.concatenate([store.num_supervised_tokens for store in stores])
        manifests = [store.manifest for store in stores]
        self.manifest: dict[str, Any] = {
            "tokenizer": manifests[0]["tokenizer"],
            "source": [source for manifest in manifests for source in manifest.get("source", [])],
            "num_supervised_tokens": sum(manifest["num_supervised_tokens"] for manifest in manifests),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the stores' digests, in order; does not depend on the weights."""
        return hashlib.sha256("".join(store.digest for store in self.parts).encode()).hexdigest()

    def origins(self) -> tuple[list[str], np.ndarray]:
        names, rows = zip(*(store.origins() for store in self.parts), strict=True)
        return list(chain(*names)), np.concatenate(rows)

    def count_dropped_rows(self) -> tuple[int | None, dict[str, int]]:
        """`TokenStore.count_dropped_rows` of all stores together."""
        rows, dropped = zip(*(store.count_dropped_rows() for store in self.parts), strict=True)
        return None if None in rows else sum(rows), dict(sum(map(Counter, dropped), Counter()))


class ChangedDataset(TokenizedSequences):
    """A data set whose sequences are changed on reading, so that none is held in memory."""

    def __init__(
        self, dataset: "Dataset", change: Callable[[int, TokenizedSequence], TokenizedSequence], digest: str = ""
    ) -> None:
        """`change`: maps a position and its sequence to one of the same length; `digest`: of the added data, which a
        resumed run compares."""
        self.dataset, self.change, self._change_digest = dataset, change, digest
        self.lengths, self.sequence_ids = dataset.lengths, dataset.sequence_ids

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens and their supervision, in order, and of the added data."""
        digest = self.dataset.digest
        return hashlib.sha256((digest + self._change_digest).encode()).hexdigest() if self._change_digest else digest

    def __getitem__(self, i: int) -> TokenizedSequence:
        return self.change(i, self.dataset[i])


class SubsetDataset(TokenizedSequences):
    """A selection of a data set's sequences, with their order and ids."""

    def __init__(
        self,
        dataset: "Dataset",
        positions: np.ndarray,
        *,
        description: str = "",
        origin: Mapping[str, Any] | None = None,
        num_trusted: int = 0,
        held_out: np.ndarray | None = None,
    ) -> None:
        """`positions`: int64 [k], at least one, ascending; `description` and `origin`: of the selection by data.keep,
        for the screen and for environment.json; `num_trusted`: sequences dropped because they are trusted data too;
        `held_out`: positions that are held out (data.validation_share), int64 [m]."""
        self.dataset, self.positions, self.description, self.origin = dataset, positions, description, origin
        self.num_trusted, self.held_out = num_trusted, held_out
        self.lengths, self.sequence_ids = dataset.lengths[positions], dataset.sequence_ids[positions]

    @property
    def digest(self) -> str:
        """SHA-256 of the data set's digest and the kept positions, which a resumed run compares."""
        return hashlib.sha256(self.dataset.digest.encode() + self.positions.astype("<i8").tobytes()).hexdigest()

    def __getitem__(self, i: int) -> TokenizedSequence:
        return self.dataset[int(self.positions[i])]


Store = TokenStore | JoinedStores
Dataset = Store | ChangedDataset | SubsetDataset


def find_token_store(dataset: Dataset) -> Store:
    """Return the token store, or the joined stores, behind a data set's views."""
    while isinstance(dataset, ChangedDataset | SubsetDataset):
        dataset = dataset.dataset
    return dataset


def list_files(dataset: Dataset) -> list[tuple[TokenStore, np.ndarray]]:
    """List the store of each training file, and the positions in it of the data set's sequences, int64, ascending."""
    store = find_token_store(dataset)
    positions = dataset.positions if isinstance(dataset, SubsetDataset) else np.arange(len(dataset))
    if not isinstance(store, JoinedStores):
        return [(store, positions)]
    by_file = np.split(positions, np.searchsorted(positions, store.starts[1:-1]))
    return [(part, chosen - start) for part, chosen, start in zip(store.parts, by_file, store.starts, strict=False)]


def list_shares(dataset: Dataset) -> tuple[list[int], Sequence[float]]:
    """List the number of a data set's sequences of each training file, and the files' weights."""
    store = find_token_store(dataset)
    weights = store.weights if isinstance(store, JoinedStores) else (1.0,)
    return [len(positions) for _, positions in list_files(dataset)], weights


def hold_out(dataset: Dataset, share: float, seed: int) -> np.ndarray:
    """Draw the positions that `data.validation_share` holds out: of each training file this share, at least one and not
    all, int64 [k], ascending."""
    sizes, _ = list_shares(dataset)
    drawn = [
        start + generator(Stream.HELD_OUT, seed, file).permutation(size)[: min(max(1, round(share * size)), size - 1)]
        for file, (start, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False))
    ]
    return np.sort(np.concatenate(drawn))


def keep_random_tokens(dataset: Dataset, keep_share: float, seed: int) -> ChangedDataset:
    """Set `kept` to the answer's tokens and random others, `keep_share` of the supervised tokens in total (the method
    `random`)."""
    from vcore_ds.method.baselines import random_mask  # imports torch: seconds

    def keep(_: int, sequence: TokenizedSequence) -> TokenizedSequence:
        assert sequence.in_answer is not None  # every store has it
        kept = np.zeros(len(sequence), dtype=np.bool_)
        in_answer = sequence.in_answer[sequence.supervised]
        # The same in every epoch, on every rank, and after a resumption.
        rng = generator(Stream.RANDOM_MASK, seed, sequence.sequence_id)
        kept[sequence.supervised] = random_mask(in_answer, keep_share, rng)
        return replace(sequence, kept=kept)

    return ChangedDataset(dataset, keep)


# Both orders below are functions of the step number: resuming needs no state, and neither the number of ranks nor the
# size of a micro-batch changes which sequences form a step. Ids are positions in the data set.


class MainOrder:
    """The order of the main batches: consecutive slices of an endless sequence of draws from the files in proportion to
    their weights (`Shares`). The epochs of each file are shuffled separately; a batch may span epochs."""

    def __init__(
        self, num_sequences: Sequence[int], batch_size: int, seed: int, weights: Sequence[float] = (1.0,)
    ) -> None:
        """`num_sequences` and `weights`: of each training file, which follow each other in the data set; `batch_size`:
        sequences per step, globally."""
        self.num_sequences, self.batch_size, self.seed = num_sequences, batch_size, seed
        self.shares = Shares(weights)
        self._starts = [0, *accumulate(num_sequences)]
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}

    def step(self, k: int) -> list[int]:
        """Draw the ids [batch_size] of the global batch of optimizer step k, from 0."""
        ids = []
        for number in range(k * self.batch_size, (k + 1) * self.batch_size):
            file, draw = self.shares.locate(number)
            epoch, index = divmod(draw, self.num_sequences[file])
            ids.append(self._starts[file] + int(self._permutation(file, epoch)[index]))
        return ids

    def epochs(self, num_steps: int) -> list[float]:
        """Passes over each file in the first `num_steps` steps."""
        counts = self.shares.count(num_steps * self.batch_size)
        return [count / size for count, size in zip(counts, self.num_sequences, strict=True)]

    def _permutation(self, file: int, epoch: int) -> np.ndarray:
        if self._permutations.get(file, (None,))[0] != epoch:
            rng = generator(Stream.MAIN_ORDER, self.seed, epoch, file)
            self._permutations[file] = epoch, rng.permutation(self.num_sequences[file])
        return self._permutations[file][1]


class RandomDraws:
    """Random batches, independent of `MainOrder`: the probe batches B' (Algorithm 1 of the paper), and the trusted part
    of the main batches. Over all batches each file has its share of the draws, in one batch to within three."""

    def __init__(
        self,
        num_sequences: Sequence[int],
        batch_size: int,
        seed: int,
        stream: Stream,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        """`num_sequences` and `weights`: as in `MainOrder`; `batch_size`: sequences per optimizer step over all
        ranks."""
        self.num_sequences, self.batch_size, self.seed, self.stream = num_sequences, batch_size, seed, stream
        self.shares = Shares(weights)

    def step(self, k: int) -> list[int]:
        """Draw the ids [batch_size] of optimizer step k, from 0; none repeats before all of its file were drawn."""
        rng = generator(self.stream, self.seed, k)
        # A window of the draws in proportion, from a random one, since a batch may be too small for a rare file.
        first = int(rng.random() * sum(self.shares.weights)) if len(self.num_sequences) > 1 else 0
        counts = zip(self.shares.count(first), self.shares.count(first + self.batch_size), strict=True)
        ids: list[int] = []
        for (before, after), size, start in zip(
            counts, self.num_sequences, accumulate(self.num_sequences, initial=0), strict=False
        ):
            for left in range(after - before, 0, -size):
                ids += (start + rng.choice(size, min(left, size), replace=False)).tolist()
        return ids


def shuffle_by_share(num_sequences: Sequence[int], weights: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """All positions in random order, int64 [n], each file in proportion to its weight as long as it lasts.
    `num_sequences` and `weights`: as in `MainOrder`."""
    starts = accumulate(num_sequences, initial=0)
    shuffled = [start + rng.permutation(size) for start, size in zip(starts, num_sequences, strict=False)]
    places = [(np.arange(size) + 0.5) / weight for size, weight in zip(num_sequences, weights, strict=True)]
    return np.concatenate(shuffled)[np.argsort(np.concatenate(places), kind="stable")]


# iw-SFT: the importance ratio needs one log-probability per sequence, computed before training, so that no second model
# is in memory. They are not in the token store, because models that share a tokenizer share a store.


def write_reference(path: Path, dataset: Dataset, log_probabilities: Sequence[float], model: str) -> None:
    """Write a `.npz`: `log_probability` fp64 [n] in nats, in the order of the data, the data's digest and the model's
    name."""
    values = np.array(log_probabilities, np.float64)
    # To an open file: np.savez would add .npz to a name without it.
    with write_atomically(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, log_probability=values, digest=dataset.digest, model=model)


def add_reference(dataset: Dataset, path: str) -> ChangedDataset:
    """Set `reference_log_probability` of every sequence from a file of `write_reference`. Raises UserError if the file
    cannot be read, or was made from other tokens."""
    where, remedy = (
        f"data.reference_log_probabilities: {path}",
        "make it with `vcore-ds reference RECIPE --output FILE`",
    )
    try:
        with np.load(path, allow_pickle=False) as stored:
            digest, log_probabilities = str(stored["digest"]), stored["log_probability"]
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise UserError(
            f"{where}: found no such reference log-probabilities ({type(error).__name__}: {error}); {remedy}"
        ) from None
    if digest != dataset.digest:
        raise UserError(
            f"{where}: found log-probabilities of {len(log_probabilities):,} other sequences; expected those of the "
            f"{len(dataset):,} training sequences as they are tokenized now; {remedy} again"
        )

    def add_value(i: int, sequence: TokenizedSequence) -> TokenizedSequence:
        return replace(sequence, reference_log_probability=float(log_probabilities[i]))

    return ChangedDataset(dataset, add_value)
