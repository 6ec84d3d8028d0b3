"""Records of single tokens: what a run writes to `tokens/` at a few of its steps, and how to read it. numpy only.

`tokens/step_00000012.npz` holds whole sequences of the main batch of optimizer step 12; docs/tokens.md lists its
arrays. The commands, the experiments and reports read it with `read_records`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vcore_ds.files.run_folder import TOKENS, token_record_path
from vcore_ds.track.array_files import arrays_of, join_tokens, split_tokens, write_arrays

FORMAT = 1
MOST_TOKENS = 131_072
"""Tokens of a record, unless its only sequence has more: about 2 MB, so that a run's records stay near 20 MB."""


@dataclass(frozen=True, eq=False)
class SequenceTokens:
    """The supervised tokens of one sequence in one optimizer step, in order."""

    sequence_id: int
    """Row of the trace in its data, from 0, as in messages; those of the trusted pool are moved behind them, see
    `TokenRecord.first_trusted_id`."""
    share: float
    """`w_i`, the sequence's share in the global batch's loss, with its factor where `method.scope` is
    sequence_and_batch."""
    uniform_share: float
    """The share under uniform weights: `1/|B|`, or `n_i / N` with `method.normalization: token`."""
    alpha: float
    """What the sequence's loss was scaled by, the same for all sequences where alpha belongs to the global batch."""
    positions: np.ndarray
    """int32 [n_i], of the token in its sequence, from 0"""
    token_ids: np.ndarray
    """int32 [n_i]"""
    losses: np.ndarray
    """fp32 [n_i], nats, before the update"""
    utilities: np.ndarray | None
    """fp32 [n_i]; None for methods without"""
    weights: np.ndarray
    """fp32 [n_i], `q[i,t]`: the loss of the token was multiplied by `alpha * share * weights`"""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def relative_weights(self) -> np.ndarray:
        """fp64 [n_i], what the token's loss was multiplied by, alpha aside, over what it is under uniform weights:
        `q[i,t] * n_i`, times the sequence's factor where the method weights sequences too."""
        return self.weights.astype(np.float64) * len(self) * (self.share / self.uniform_share)


@dataclass(frozen=True, eq=False)
class TokenRecord:
    """Tokens of one optimizer step, over all ranks."""

    step: int
    """Optimizer step, from 1, as in metrics.jsonl."""
    first_trusted_id: int | None
    """Sequences with this id or a larger one are of the trusted pool (`data.trusted_share`), row
    `id - first_trusted_id` of it; None where the batches hold none."""
    num_sequences_global: int
    """Sequences with supervised tokens in the step's batch; the record holds some of them."""
    num_supervised_tokens_global: int
    sequences: Sequence[SequenceTokens]
    """By id; a batch may hold a sequence twice."""

    @property
    def num_tokens(self) -> int:
        """Recorded tokens of all sequences."""
        return sum(map(len, self.sequences))

    def is_trusted(self, sequence: SequenceTokens) -> bool:
        """Whether a sequence of the record is of the trusted pool."""
        return self.first_trusted_id is not None and sequence.sequence_id >= self.first_trusted_id


_OF_SEQUENCE = {"sequence_ids": "sequence_id", "shares": "share", "uniform_shares": "uniform_share", "alphas": "alpha"}
_OF_TOKEN = ("positions", "token_ids", "losses", "utilities", "weights")
_OF_RECORD = ("step", "num_sequences_global", "num_supervised_tokens_global")
_NONE = -1
"""How a file says that it has no `first_trusted_id`."""


def record_steps(num_steps: int, num_records: int) -> list[int]:
    """Optimizer steps, from 1, that get a record: spread evenly on a log scale, the first and the last among them;
    every step where there are at most `num_records`; the last alone for 1 record."""
    num_records = min(num_records, num_steps)
    if num_records < 2:
        return [num_steps] * num_records
    steps: list[int] = []
    for i in range(num_records):
        wanted = round(num_steps ** (i / (num_records - 1)))
        # No step twice: small ones are moved up, so that there are exactly as many records as asked for.
        steps.append(max(wanted, steps[-1] + 1 if steps else 1))
    return steps


def write_record(run: Path, record: TokenRecord) -> Path:
    """Writes a record into a run's folder, and returns its file. Raises OSError."""
    sequences = record.sequences
    arrays: dict[str, np.ndarray] = {"format": np.array(FORMAT)}
    arrays |= {name: np.array(getattr(record, name), dtype=np.int64) for name in _OF_RECORD}
    arrays["first_trusted_id"] = np.array(_NONE if record.first_trusted_id is None else record.first_trusted_id)
    for name, field in _OF_SEQUENCE.items():
        kind = np.int64 if field == "sequence_id" else np.float64
        arrays[name] = np.array([getattr(sequence, field) for sequence in sequences], dtype=kind)
    return write_arrays(token_record_path(run, record.step), arrays | join_tokens(sequences, _OF_TOKEN))


def read_records(run: Path) -> list[TokenRecord]:
    """The records of a run's folder by step; none where it has none.

    Raises:
        UserError: a record cannot be read.
    """
    return [read_record(path) for path in sorted((run / TOKENS).glob("step_*.npz"))]


def read_record(path: Path) -> TokenRecord:
    """One file of `tokens/`. Raises UserError where it cannot be read."""
    with arrays_of(path, "a record of tokens that a run has written", FORMAT) as arrays:
        sequences = [
            SequenceTokens(
                **{field: arrays[name][i].item() for name, field in _OF_SEQUENCE.items()},
                positions=tokens["positions"],
                token_ids=tokens["token_ids"],
                losses=tokens["losses"],
                utilities=tokens.get("utilities"),
                weights=tokens["weights"],
            )
            for i, tokens in enumerate(split_tokens(arrays, _OF_TOKEN))
        ]
        first_trusted_id = int(arrays["first_trusted_id"])
        return TokenRecord(
            **{name: int(arrays[name]) for name in _OF_RECORD},
            first_trusted_id=None if first_trusted_id == _NONE else first_trusted_id,
            sequences=sequences,
        )
