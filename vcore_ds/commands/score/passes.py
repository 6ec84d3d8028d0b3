"""Losses and utilities of all tokens, as they are computed: files that survive a kill.

    OUTPUT.unfinished/request.json          what is scored; another request starts over
    OUTPUT.unfinished/pass_000/set.json     loss and gradient norm of the pass's trusted set
    OUTPUT.unfinished/pass_000/000000.npz   losses and utilities of some sequences; no sequence is in two files

A pass is one trusted set at one checkpoint.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vcore_ds.files.json_files import write_json
from vcore_ds.track.array_files import write_arrays

SET = "set.json"


@dataclass(frozen=True)
class ScoredSequence:
    """The supervised tokens of a sequence."""

    position: int
    """In the store."""
    losses: np.ndarray
    """float32 [n], nats"""
    utilities: np.ndarray
    """float32 [n]"""


class PassFiles:
    """The files of one pass, for rank 0 alone."""

    def __init__(self, folder: Path, number: int):
        self._folder = folder / f"pass_{number:03d}"
        self._folder.mkdir(exist_ok=True)

    def write_set(self, loss: float, gradient_norm: float) -> None:
        """Keeps what was measured while the direction was taken."""
        write_json(self._folder / SET, {"loss": loss, "gradient_norm": gradient_norm})

    def read_set(self) -> tuple[float, float]:
        """Loss in nats, and gradient norm, of the pass's trusted set."""
        found = json.loads((self._folder / SET).read_text(encoding="utf-8"))
        return found["loss"], found["gradient_norm"]

    def add(self, sequences: Sequence[ScoredSequence]) -> None:
        """Writes a further file, whole or not at all; at least one sequence."""
        number = sum(1 for _ in self._folder.glob("*.npz"))
        write_arrays(
            self._folder / f"{number:06d}.npz",
            {
                "position": np.array([sequence.position for sequence in sequences], dtype=np.int64),
                "num_tokens": np.array([len(sequence.losses) for sequence in sequences], dtype=np.int64),
                "losses": np.concatenate([sequence.losses for sequence in sequences]),
                "utilities": np.concatenate([sequence.utilities for sequence in sequences]),
            },
        )

    def positions(self) -> set[int]:
        """Of the sequences whose files are there; empty where the set's own is not."""
        if not (self._folder / SET).is_file():
            return set()
        found: set[int] = set()
        for path in self._folder.glob("*.npz"):
            with np.load(path) as stored:
                found.update(stored["position"].tolist())
        return found

    def sequences(self) -> Iterator[ScoredSequence]:
        """All that were written, a file in memory at a time."""
        for path in sorted(self._folder.glob("*.npz")):
            with np.load(path) as stored:
                ends = np.cumsum(stored["num_tokens"])[:-1]
                parts = (np.split(stored[name], ends) for name in ("losses", "utilities"))
                for position, losses, utilities in zip(stored["position"].tolist(), *parts, strict=True):
                    yield ScoredSequence(position, losses, utilities)
