"""The folder of `vcore-ds score`: the influence of each trace of a token store on sets of trusted traces.

    scores.json       what was scored, with which weights, along which gradients
    scores.parquet    one row per trace, in the order of the store
    tokens.parquet    for each set, the tokens of the traces with the highest and the lowest mean utility
    scores.html       the same as a page

The columns of scores.parquet: `sequence` (int64, position in the store), `source` (string, the file or data set it came
from), `row` (int64, row or line within that, from 0), `num_supervised_tokens` (int64), `loss` (float32, nats, mean over
the trace's supervised tokens), and for each set NAME `utility_sum.NAME` and `utility_mean.NAME` (float32, over the
trace's supervised tokens), `rank.NAME` (int64, 1 for the highest mean) and `percentile.NAME` (float32, 100 for the
highest mean, 0 for the lowest).

Those of tokens.parquet: `set` (string), `sequence` (int64), `tokens` (list of int32, the full trace), `supervised`
(list of bool, one per token), `utilities` and `losses` (lists of float32, one per supervised token). A trace that is
among both the highest and the lowest is listed once.

A utility is `<gradient of the token's loss, gradient of the set's loss>`: positive where a step of gradient descent on
the token's loss lowers the set's loss.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import read_json, reading, write_atomically, write_text

if TYPE_CHECKING:
    import numpy as np

SCORES, TRACES, TOKENS, PAGE = "scores.json", "scores.parquet", "tokens.parquet", "scores.html"
NUM_SHOWN = 20  # number of traces with the highest, and with the lowest, mean utility whose tokens are written

_EXPECTED = "a folder that vcore-ds score has written"
_REMEDY = "Score again, with this version"
_EXACT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_EXACT)
class DataSet:
    """A token store, of scored data or of a trusted set."""

    path: str  # as the user gave it: a store, or raw data
    digest: str  # SHA-256 of the tokens and their marks, in order (`TokenStore.digest`)
    num_sequences: int
    num_rows: int | None = field(default=None, kw_only=True)
    """Rows that the store was made from; None if unknown."""
    dropped: dict[str, int] = field(default_factory=dict, kw_only=True)
    """Reason, such as a length limit -> number of rows dropped for it."""


@dataclass(frozen=True, config=_EXACT)
class ScoredData(DataSet):
    """The data that was scored."""

    tokenizer_hash: str
    chat_template_hash: str
    num_supervised_tokens: int
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Source file -> hash of its size, beginning and end: shows whether its rows are still those that were scored."""


@dataclass(frozen=True, config=_EXACT)
class TrustedSet(DataSet):
    """A set of trusted traces (the target or validation set of LESS), along whose gradient utilities were computed."""

    loss: float  # nats; at the last checkpoint if there are several
    gradient_norm: float  # 2-norm over all trained parameters, at the same checkpoint
    length_correlation_sum: float | None
    """Spearman's correlation, over the traces, of `utility_sum` with the number of supervised tokens; None if one of
    the two is constant."""
    length_correlation_mean: float | None  # the same for `utility_mean`


@dataclass(frozen=True, config=_EXACT)
class ScoredCheckpoint:
    """A checkpoint at which utilities were computed."""

    run: str
    step: int
    weight: float
    """Factor of its utilities in the sum over checkpoints: 1 for a single one, else its mean learning rate."""
    digest: str = ""  # SHA-256 of its manifest; empty in scores of version 0.7 and before


@dataclass(frozen=True, config=_EXACT)
class Scores:
    """The content of scores.json."""

    data: ScoredData
    model: str  # model.path: the base model, also of the run of the checkpoints
    model_digest: str  # its `compute_model_digest`
    checkpoints: list[ScoredCheckpoint]  # empty for scores at the base model
    direction: Literal["sgd", "adam", "muon"]
    """`sgd`: the gradient of a set's loss; `adam` and `muon`: that times the Jacobian of the optimizer's update."""
    normalization: Literal["sequence", "token"]
    sets: dict[str, TrustedSet]
    version: str
    date: str  # UTC, ISO 8601
    probe_rank: int | None = field(default=None, kw_only=True)
    """Rank of the approximations of the gradient's matrices; None for exact utilities."""
    format: Literal[1] = 1  # version of this format


_SCORES = TypeAdapter(Scores)


def utility_columns(name: str) -> tuple[str, str, str, str]:
    """Columns of scores.parquet for the set `name`: sum, mean, rank and percentile."""
    return f"utility_sum.{name}", f"utility_mean.{name}", f"rank.{name}", f"percentile.{name}"


def write_scores(folder: Path, scores: Scores) -> None:
    """Write scores.json. Raises OSError."""
    text = json.dumps({"format": scores.format, **asdict(scores)}, indent=2, ensure_ascii=False) + "\n"
    write_text(folder / SCORES, text)


def write_traces(folder: Path, columns: Mapping[str, "np.ndarray | Sequence[str]"]) -> None:
    """Write scores.parquet from columns by name, one value per trace. Raises OSError."""
    import pyarrow as pa

    arrays = {
        name: pa.array(values, pa.string()).dictionary_encode() if name == "source" else pa.array(values)
        for name, values in columns.items()
    }
    _write_table(folder / TRACES, pa.table(arrays))


def write_tokens(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write tokens.parquet from rows, each a mapping of column names. Raises OSError."""
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
    """Read scores.json. `where`: the key or option that names the folder, for messages; empty if they begin with the
    folder. Raises UserError if it is missing, damaged or of another format."""
    path = folder / SCORES
    with reading(where, folder, _EXPECTED):
        if not path.is_file():
            place = f"{where}: {folder}" if where else str(folder)
            raise UserError(f"{place}: found no {SCORES}; expected {_EXPECTED}. Score first, or name another folder")
    return read_json(path, _SCORES, "what vcore-ds score writes there", _REMEDY)


def read_traces(folder: Path, columns: Sequence[str]) -> dict[str, "np.ndarray"]:
    """Read columns of scores.parquet by name, one value per trace; strings as an array of `str` objects. Raises
    UserError if the file is missing or damaged, or lacks one of the columns."""
    with open_parquet(folder / TRACES, _EXPECTED, columns) as file:
        table = file.read(columns=list(columns))
    return {name: table.column(name).to_numpy() for name in columns}


def read_tokens(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of tokens.parquet, with lists as Python lists. Raises UserError if the file is missing or
    damaged."""
    with open_parquet(folder / TOKENS, _EXPECTED) as file:
        return file.read().to_pylist()


@contextmanager
def open_parquet(path: Path, expected: str, columns: Sequence[str] = ()) -> Iterator[Any]:
    """A context with an open Parquet file. Raises UserError if it cannot be read, is damaged, or lacks one of the
    columns; `expected`: its contents, for messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with reading("", path, expected), pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [name for name in columns if name not in names]:
                raise UserError(f"{path}: found no column {missing[0]} among {', '.join(names)}; expected {expected}")
            yield file
    except pa.ArrowException as error:
        raise UserError(f"{path}: is damaged ({first_line(error)}); expected {expected}") from None


def group_by_source(sources: "np.ndarray", most: int) -> list[tuple[str, "np.ndarray"]]:
    """Group traces by source: name and members (bool) of all together, if several, then of the `most` largest."""
    import numpy as np

    names, index = np.unique(sources.astype(str), return_inverse=True)
    groups = [("all", np.ones(len(index), dtype=np.bool_))] * (len(names) > 1)
    return groups + [(str(names[i]), index == i) for i in np.argsort(-np.bincount(index), kind="stable")[:most]]
