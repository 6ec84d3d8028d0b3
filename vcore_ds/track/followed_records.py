"""Followed traces: the same tokens at every recorded step, as a run writes them to `tokens/`, and how to read them.

`tokens/followed_00000012.npz` holds them as they were before the update of optimizer step 12; docs/tokens.md lists its
arrays. numpy only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.files.run_folder import TOKENS, followed_path
from vcore_ds.track.array_files import arrays_of, join_tokens, split_tokens, write_arrays
from vcore_ds.track.token_records import MOST_TOKENS

FORMAT = 1
_OF_TOKEN = ("positions", "token_ids", "losses", "entropies", "utilities", "weights")


@dataclass(frozen=True)
class Origin:
    """Where a followed trace comes from."""

    is_held_out: bool
    set_name: str
    """Name of its held-out set (`data.validation_path`); empty for training data, and for a set without a name."""
    sequence_id: int
    """Row of the trace in its data, from 0, as in messages."""

    @property
    def source(self) -> str:
        """In words: `training data`, `held out`, or `held out, NAME`."""
        return f"held out{self.set_name and ', '}{self.set_name}" if self.is_held_out else "training data"


@dataclass(frozen=True, eq=False)
class TraceTokens:
    """The first supervised tokens of one trace in one optimizer step, in order; all of them unless it is long."""

    num_supervised_tokens: int
    """`n_i`, of the whole trace."""
    positions: np.ndarray
    """int32 [n], of the token in its sequence, from 0"""
    token_ids: np.ndarray
    """int32 [n]"""
    losses: np.ndarray
    """fp32 [n], nats, before the update, without dropout"""
    entropies: np.ndarray
    """fp32 [n], nats, of the distribution that predicts the token"""
    utilities: np.ndarray | None
    """fp32 [n], along the direction of the step; None for methods without"""
    weights: np.ndarray
    """fp32 [n], `q[i,t]` within the whole trace: what the method would have given the token in this step"""

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, most: int) -> "TraceTokens":
        """The trace with `most` tokens at most."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _OF_TOKEN}
        return replace(self, **{name: values[:most] for name, values in arrays.items() if values is not None})

    @property
    def probabilities(self) -> np.ndarray:
        """fp32 [n], of the token itself."""
        return np.exp(-self.losses)

    @property
    def relative_weights(self) -> np.ndarray:
        """fp64 [n], `q[i,t] * n_i`: 1 is the uniform weight."""
        return self.weights.astype(np.float64) * self.num_supervised_tokens

    @property
    def is_finite(self) -> bool:
        """Whether all that was measured is a number: a held-out trace is in no loss that would have stopped the run."""
        measured = (self.losses, self.entropies, self.utilities, self.weights)
        return all(bool(np.isfinite(values).all()) for values in measured if values is not None)


@dataclass(frozen=True, eq=False)
class FollowedRecord:
    """The followed traces in one optimizer step."""

    step: int
    """Optimizer step, from 1, as in metrics.jsonl."""
    origins: Sequence[Origin]
    """The origin of each trace; the same in all records of a run, unless `run.num_followed_traces` or the data was
    changed."""
    traces: Sequence[TraceTokens]


def most_tokens_of_trace(num_traces: int) -> int:
    """Supervised tokens of each trace that a file holds, so that it is no larger than a record."""
    return MOST_TOKENS // num_traces


def write_followed(run: Path, record: FollowedRecord) -> Path:
    """Writes the followed traces of a step into a run's folder, and returns their file. Raises OSError."""
    origins, traces = record.origins, record.traces
    arrays = {
        "format": np.array(FORMAT),
        "step": np.array(record.step),
        "is_held_out": np.array([origin.is_held_out for origin in origins], dtype=np.bool_),
        "set_names": np.array([origin.set_name for origin in origins], dtype=np.str_),
        "sequence_ids": np.array([origin.sequence_id for origin in origins], dtype=np.int64),
        "num_supervised_tokens": np.array([trace.num_supervised_tokens for trace in traces], dtype=np.int64),
        **join_tokens(traces, _OF_TOKEN),
    }
    return write_arrays(followed_path(run, record.step), arrays)


def read_all_followed(run: Path) -> list[FollowedRecord]:
    """The followed traces of a run's folder by step; none where it has none.

    Raises:
        UserError: a file cannot be read.
    """
    return [read_followed(path) for path in sorted((run / TOKENS).glob("followed_*.npz"))]


def read_followed(path: Path) -> FollowedRecord:
    """One file of `tokens/`. Raises UserError where it cannot be read."""
    with arrays_of(path, "followed traces that a run has written", FORMAT) as arrays:
        origins = [
            Origin(*values)
            for values in zip(
                arrays["is_held_out"].tolist(),
                arrays["set_names"].tolist(),
                arrays["sequence_ids"].tolist(),
                strict=True,
            )
        ]
        counts = arrays["num_supervised_tokens"].tolist()
        traces = [
            TraceTokens(
                count,
                tokens["positions"],
                tokens["token_ids"],
                tokens["losses"],
                tokens["entropies"],
                tokens.get("utilities"),
                tokens["weights"],
            )
            for count, tokens in zip(counts, split_tokens(arrays, _OF_TOKEN), strict=True)
        ]
        if len(traces) != len(origins):
            raise ValueError("arrays of different lengths")
        return FollowedRecord(int(arrays["step"]), origins, traces)
