"""Records of single tokens: writing and reading the files in `tokens/`, one or two for each of a few steps.

`step_00000012.npz` holds complete sequences of the main batch of optimizer step 12 before its update,
`followed_00000012.npz` the followed traces after it; docs/reading-a-report.md lists the arrays. Imports no torch.
"""

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import reading, write_atomically
from vcore_ds.training.run_folder import TOKENS

FORMAT = 1
MOST_TOKENS = 131_072
"""Tokens of a file, unless its only sequence has more: about 2 MB, so that a run's files stay near 20 MB each."""
MOST_PROMPT_TOKENS = 2_048  # maximum prompt tokens of a sequence in a file


@dataclass(frozen=True, eq=False)
class SequenceTokens:
    """Supervised tokens of one sequence in one optimizer step, in order: all of a sequence of the main batch, the first
    ones of a followed trace. In training, the loss of a token was multiplied by `alpha * share * weights`."""

    sequence_id: int
    """Row of the sequence in its data, from 0, as in messages; those of the trusted pool follow, see
    `TokenRecord.first_trusted_id`."""
    share: float
    """`w_i`, the sequence's share in the global batch's loss, including its factor if `method.scope` is
    sequence_and_batch; 1 for a followed trace, as the next two."""
    uniform_share: float  # the share under uniform weights: `1/|B|`, or `n_i / N` with `method.normalization: token`
    alpha: float  # factor of the sequence's loss, the same for all sequences if alpha belongs to the global batch
    positions: np.ndarray = field(kw_only=True)  # int32 [n], of the token in its sequence, from 0
    token_ids: np.ndarray = field(kw_only=True)  # int32 [n]
    losses: np.ndarray = field(kw_only=True)  # fp32 [n], nats
    entropies: np.ndarray | None = field(default=None, kw_only=True)
    """fp32 [n], nats, of the prediction of the token; None if not measured"""
    utilities: np.ndarray | None = field(default=None, kw_only=True)
    """fp32 [n], along the direction of the step; None for methods without utilities"""
    weights: np.ndarray = field(kw_only=True)  # fp32 [n], `q[i,t]`, within the full sequence
    prompt_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32), kw_only=True)
    """int32 [p], the last `MOST_PROMPT_TOKENS` tokens before the first supervised one"""
    source: str = field(default="", kw_only=True)
    """Of a followed trace: `training data`, `held out`, or `held out, NAME`; empty in the record of a main batch."""
    num_supervised_tokens: int | None = field(default=None, kw_only=True)
    """Supervised tokens of a followed trace (`n_i`), if the file has only the first of them; None if it has all."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def truncate(self, max_tokens: int) -> "SequenceTokens":
        """Return the sequence with its first `max_tokens` tokens."""
        arrays = {name: values for name in _TOKEN_ARRAYS if (values := getattr(self, name)) is not None}
        return replace(self, **{name: values[:max_tokens] for name, values in arrays.items()})

    @property
    def is_held_out(self) -> bool:
        """Whether this is a followed trace of a held-out set."""
        return self.source.startswith(HELD_OUT)

    @property
    def relative_weights(self) -> np.ndarray:
        """fp64 [n], factor of the token's loss without alpha, relative to uniform weights: `q[i,t] * n_i`, times the
        sequence's factor if the method weights sequences too."""
        whole = len(self) if self.num_supervised_tokens is None else self.num_supervised_tokens
        return self.weights.astype(np.float64) * whole * (self.share / self.uniform_share)

    @property
    def is_finite(self) -> bool:
        """Whether all measurements are finite: a non-finite loss of a held-out trace does not stop a run."""
        measured = (self.losses, self.entropies, self.utilities, self.weights)
        return all(bool(np.isfinite(values).all()) for values in measured if values is not None)


HELD_OUT = "held out"


@dataclass(frozen=True, eq=False)
class TokenRecord:
    """Tokens of one optimizer step, over all ranks."""

    step: int  # optimizer step, from 1, as in metrics.jsonl
    first_trusted_id: int | None
    """A sequence from this id on is row `id - first_trusted_id` of the trusted pool (`data.trusted_share`); None if the
    batches hold none."""
    num_sequences_global: int
    """Sequences with supervised tokens in the step's batch; the record holds some of them, or all followed traces."""
    num_supervised_tokens_global: int
    sequences: Sequence[SequenceTokens]
    """By id, of a batch that may hold a sequence twice; followed traces in an order that all records of a run share,
    unless `run.num_followed_traces` or the data was changed."""

    @property
    def num_tokens(self) -> int:
        """Recorded tokens of all sequences."""
        return sum(map(len, self.sequences))

    def is_trusted(self, sequence: SequenceTokens) -> bool:
        """Whether a sequence of the record is of the trusted pool."""
        return self.first_trusted_id is not None and sequence.sequence_id >= self.first_trusted_id


Kind = Literal["step", "followed"]
"""The first part of a file's name: tokens of the main batch, or of followed traces."""

_TOKEN_ARRAYS = ("positions", "token_ids", "losses", "entropies", "utilities", "weights")
_MAY_BE_ABSENT = ("entropies", "utilities")
_FIELDS = {"sequence_ids": "sequence_id", "shares": "share", "uniform_shares": "uniform_share", "alphas": "alpha"}
_TRACE_FIELDS = {"sources": "source", "num_supervised_tokens": "num_supervised_tokens"}  # in files of followed traces
_RECORD_FIELDS = ("step", "num_sequences_global", "num_supervised_tokens_global")
_NONE = -1  # how a file says that it has no `first_trusted_id`


def record_steps(num_steps: int, num_records: int) -> list[int]:
    """List the optimizer steps, from 1, that get a record: evenly spaced on a log scale, with the first and the last;
    every step if there are at most `num_records`; only the last for 1 record."""
    num_records = min(num_records, num_steps)
    if num_records < 2:
        return [num_steps] * num_records
    steps: list[int] = []
    for i in range(num_records):
        # Small steps are moved up, so that none repeats.
        steps.append(max(round(num_steps ** (i / (num_records - 1))), steps[-1] + 1 if steps else 1))
    return steps


def write_record(run: Path, record: TokenRecord, kind: Kind = "step") -> Path:
    """Write a record into a run's folder; return its file. Raises OSError."""
    sequences, prompts = record.sequences, [sequence.prompt_ids for sequence in record.sequences]
    arrays: dict[str, np.ndarray] = {"format": np.array(FORMAT)}
    arrays |= {name: np.array(getattr(record, name), dtype=np.int64) for name in _RECORD_FIELDS}
    arrays["first_trusted_id"] = np.array(_NONE if record.first_trusted_id is None else record.first_trusted_id)
    for name, attribute in _FIELDS.items():
        dtype = np.int64 if attribute == "sequence_id" else np.float64
        arrays[name] = np.array([getattr(sequence, attribute) for sequence in sequences], dtype=dtype)
    if kind == "followed":
        arrays |= {name: np.array([getattr(one, field) for one in sequences]) for name, field in _TRACE_FIELDS.items()}
    # The tokens of all sequences are joined; an array that a sequence lacks is left out.
    arrays["num_tokens"] = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    arrays["num_prompt_tokens"] = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    arrays["prompt_ids"] = np.concatenate(prompts)
    for name in _TOKEN_ARRAYS:
        parts = [getattr(sequence, name) for sequence in sequences]
        if all(part is not None for part in parts):
            arrays[name] = np.concatenate(parts)
    return write_arrays(record_path(run, record.step, kind), arrays)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a compressed `.npz`, the same bytes for the same arrays; return its path. Raises OSError."""
    # In memory first, so that a full disk raises OSError, in one place.
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # one may be called allow_pickle; none is
    with write_atomically(path) as unfinished:
        unfinished.write_bytes(content.getbuffer())
    return path


def record_path(run: Path, step: int, kind: Kind = "step") -> Path:
    """The file with a record of an optimizer step, from 1."""
    return run / TOKENS / f"{kind}_{step:08d}.npz"


def read_records(run: Path, kind: Kind = "step") -> list[TokenRecord]:
    """Read the records in a run's folder, by step. Raises UserError if one cannot be read."""
    return [read_record(path) for path in sorted((run / TOKENS).glob(f"{kind}_*.npz"))]


def read_record(path: Path) -> TokenRecord:
    """Read a record. Raises UserError if it cannot be read, is damaged, or has another format."""
    expected = "a record of tokens that a run has written"
    try:
        with reading("", path, expected), np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        if int(arrays["format"]) != FORMAT:
            raise UserError(f"{path}: found format {int(arrays['format'])}; expected {FORMAT}, of this version")
        return _parse_record(arrays)
    except (ValueError, TypeError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: is damaged: {error}; expected {expected}. Remove it: the other records of the run can be read"
        ) from None


def _parse_record(arrays: Mapping[str, np.ndarray]) -> TokenRecord:
    """Make a record of the arrays of a file. Raises ValueError if lengths do not add up, KeyError if an array is
    missing."""
    first_trusted_id = int(arrays["first_trusted_id"])
    names = _FIELDS | (_TRACE_FIELDS if "sources" in arrays else {})
    columns: dict[str, Sequence[Any]] = {field: arrays[name].tolist() for name, field in names.items()}
    for name in (*_TOKEN_ARRAYS, "prompt_ids"):
        if name in arrays or name not in _MAY_BE_ABSENT:
            lengths = arrays["num_prompt_tokens" if name == "prompt_ids" else "num_tokens"]
            if len(arrays[name]) != lengths.sum():
                raise ValueError("arrays of different lengths")
            columns[name] = np.split(arrays[name], np.cumsum(lengths)[:-1])
    return TokenRecord(
        **{name: int(arrays[name]) for name in _RECORD_FIELDS},
        first_trusted_id=None if first_trusted_id == _NONE else first_trusted_id,
        sequences=[
            SequenceTokens(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)
        ],
    )
