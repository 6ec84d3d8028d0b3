"""The folder of `vcore-ds score`: utilities of all traces of a token store for trusted sets.

    scores.json       data, checkpoints and trusted sets of the scores
    scores.parquet    a row for each trace, in the order of the store
    tokens.parquet    tokens of the traces with the highest and the lowest mean utility for each set
    scores.html       the page

The columns of scores.parquet: `sequence` (int64, position in the store), `source` (string, the file or data set it came
from), `row` (int64, row or line within that, from 0), `num_supervised_tokens` (int64), `loss` (float32, nats, mean over
the trace's supervised tokens), and for each set NAME `utility_sum.NAME` and `utility_mean.NAME` (float32, over the
trace's supervised tokens), `rank.NAME` (int64, 1 for the highest mean) and `percentile.NAME` (float32, 100 for the
highest mean, 0 for the lowest).

The columns of tokens.parquet: `set` (string), `sequence` (int64), `tokens` (list of int32, all of the trace),
`supervised` (list of bool, of the same length), `utilities` and `losses` (lists of float32, for supervised tokens
only). A trace among the highest and the lowest has one row.

A utility is `<gradient of the token's loss, gradient of the set's loss>`: positive where a step of gradient descent on
the token's loss lowers the set's loss.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import read_json, reading, write_atomically

if TYPE_CHECKING:
    import numpy as np

SCORES, TRACES, TOKENS, PAGE = "scores.json", "scores.parquet", "tokens.parquet", "scores.html"
NUM_SHOWN = 20
"""Traces with the highest mean utility, and with the lowest, whose tokens are kept."""

_EXPECTED = "a folder that vcore-ds score has written"
_REMEDY = "Score again, with this version"
_EXACT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_EXACT)
class ScoredData:
    """The token store that was scored."""

    path: str
    """As the user gave it: a store, or raw data."""
    digest: str
    """SHA-256 of the tokens and their marks, in order (`TokenStore.digest`)."""
    tokenizer_hash: str
    chat_template_hash: str
    num_sequences: int
    num_supervised_tokens: int
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Source file -> hash of its size, beginning and end, to notice changes since the scoring."""
    num_rows: int | None = None
    """Rows read to make the store; None where its manifest does not say."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason, such as the length -> rows that are not in the store."""


@dataclass(frozen=True, config=_EXACT)
class TrustedSet:
    """A trusted set (the validation or target set of LESS): utilities are along its gradient."""

    path: str
    digest: str
    """As in `ScoredData`."""
    num_sequences: int
    loss: float
    """Nats; at the last checkpoint where there are several."""
    gradient_norm: float
    """2-norm over all trained parameters; of the same checkpoint."""
    length_correlation_sum: float | None
    """Spearman's correlation, over the traces, of `utility_sum` and the number of supervised tokens; None where one of
    them is constant."""
    length_correlation_mean: float | None
    """The same of `utility_mean`."""
    num_rows: int | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    """As in `ScoredData`."""


@dataclass(frozen=True, config=_EXACT)
class ScoredCheckpoint:
    """A checkpoint that the data were scored with."""

    run: str
    step: int
    weight: float
    """Factor of its utilities in the sum over checkpoints: 1 for a single one, else its learning rate."""
    digest: str = ""
    """SHA-256 of its manifest; empty in scores of version 0.7 and before."""


@dataclass(frozen=True, config=_EXACT)
class Scores:
    """The content of scores.json."""

    data: ScoredData
    model: str
    """model.path of the recipe or run."""
    model_digest: str
    """Its `compute_model_digest`."""
    checkpoints: list[ScoredCheckpoint]
    """Empty where the data were scored with the base model."""
    direction: Literal["sgd", "adam"]
    """`sgd` along the gradient of a set's loss, `adam` along that times the Jacobian of Adam's update."""
    normalization: Literal["sequence", "token"]
    """Weight of a sequence in a set's loss (method.normalization)."""
    sets: dict[str, TrustedSet]
    """By name."""
    version: str
    """Of vcore_ds."""
    date: str
    """UTC, ISO 8601."""
    format: Literal[1] = 1
    """Version of the format described here."""


_SCORES = TypeAdapter(Scores)


def utility_columns(name: str) -> tuple[str, str, str, str]:
    """Columns of scores.parquet for the set `name`: sum, mean, rank and percentile."""
    return f"utility_sum.{name}", f"utility_mean.{name}", f"rank.{name}", f"percentile.{name}"


def write_scores(folder: Path, scores: Scores) -> None:
    """Write scores.json. Raises OSError."""
    text = json.dumps({"format": scores.format, **asdict(scores)}, indent=2, ensure_ascii=False) + "\n"
    with write_atomically(folder / SCORES) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_traces(folder: Path, columns: Mapping[str, "np.ndarray | Sequence[str]"]) -> None:
    """Write scores.parquet: the columns by their names, a value for each trace. Raises OSError."""
    import pyarrow as pa

    arrays = {
        name: pa.array(values, pa.string()).dictionary_encode() if name == "source" else pa.array(values)
        for name, values in columns.items()
    }
    _write_table(folder / TRACES, pa.table(arrays))


def write_tokens(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write tokens.parquet, from rows with the columns by their names. Raises OSError."""
    import pyarrow as pa

    schema = pa.schema(
        {
            "set": pa.string(),
            "sequence": pa.int64(),
            "tokens": pa.list_(pa.int32()),
            "supervised": pa.list_(pa.bool_()),
            "utilities": pa.list_(pa.float32()),
            "losses": pa.list_(pa.float32()),
        }
    )
    _write_table(folder / TOKENS, pa.table({name: [row[name] for row in rows] for name in schema.names}, schema))


def _write_table(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq

    with write_atomically(path) as unfinished:
        pq.write_table(table, unfinished)


def read_scores(folder: Path, where: str = "") -> Scores:
    """Read scores.json.

    Args:
        where: the recipe's key or the command's option that names the folder, for messages; may be empty.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    path = folder / SCORES
    with reading(where, folder, _EXPECTED):
        if not path.is_file():
            place = f"{where}: {folder}" if where else str(folder)
            raise UserError(f"{place}: found no {SCORES}; expected {_EXPECTED}. Score first, or name another folder")
    return read_json(path, _SCORES, "what vcore-ds score writes there", _REMEDY)


def read_traces(folder: Path, columns: Sequence[str]) -> dict[str, "np.ndarray"]:
    """Columns of scores.parquet by name, a value for each trace; texts as an array of `str` objects.

    Raises:
        UserError: the file is missing or damaged, or lacks one of the columns.
    """
    table = _read_table(folder / TRACES, columns)
    return {name: table.column(name).to_numpy() for name in columns}


def read_tokens(folder: Path) -> list[dict[str, Any]]:
    """The rows of tokens.parquet, with lists as Python lists.

    Raises:
        UserError: the file is missing or damaged.
    """
    return _read_table(folder / TOKENS, None).to_pylist()


def _read_table(path: Path, columns: Sequence[str] | None) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with reading("", path, _EXPECTED), pq.ParquetFile(path) as file:
            missing = [name for name in columns or () if name not in file.schema_arrow.names]
            if missing:
                names = ", ".join(file.schema_arrow.names)
                raise UserError(f"{path}: found no column {missing[0]}; expected one of {names}")
            return file.read(columns=None if columns is None else list(columns))
    except pa.ArrowException as error:
        raise UserError(f"{path}: is damaged ({first_line(error)}); expected {_EXPECTED}. {_REMEDY}") from None
