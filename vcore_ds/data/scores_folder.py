"""The folder of `vcore-ds score`: the influence of each trace of a token store on sets of trusted traces; and token
weights that are made of it for training.

    scores.json         what was scored, with which weights, along which gradients
    scores.parquet      one row per trace, in the order of the store
    tokens.parquet      for each set, the tokens of the traces with the highest and the lowest mean utility
    utilities.parquet   with --tokens all: the utility of every token
    scores.html         the same as a page

The columns of scores.parquet: `sequence` (int64, position in the store), `source` (string, the file or data set it came
from), `row` (int64, row or line within that, from 0), `num_supervised_tokens` (int64), `loss` (float32, nats, mean over
the trace's supervised tokens), and for each set NAME `utility_sum.NAME` and `utility_mean.NAME` (float32, over the
trace's supervised tokens), `rank.NAME` (int64, 1 for the highest mean) and `percentile.NAME` (float32, 100 for the
highest mean, 0 for the lowest).

Those of tokens.parquet: `set` (string), `sequence` (int64), `tokens` (list of int32, the full trace), `supervised`
(list of bool, one per token), `utilities` and `losses` (lists of float32, one per supervised token). A trace that is
among both the highest and the lowest is listed once.

Those of utilities.parquet: `sequence`, `input_ids` and `supervised` (the full trace), and for each set
`utilities.NAME` (list of float32, one per supervised token, rounded to 12 significant bits). Those of the file of
`vcore-ds keep --weights`: `sequence`, and with a value for each token `input_ids`, `labels` (list of int32, -100 where
the token is not supervised; not shifted) and `loss_weights` (list of float16, 1 on average over a trace's supervised
tokens, 0 at others). In both, row groups have about `ROW_GROUP_TOKENS` tokens, and the metadata entry `vcore_ds` is
JSON with the digests of tokens, tokenizer and chat template, and for weights how they were made.

A utility is `<gradient of the token's loss, gradient of the set's loss>`: positive where a step of gradient descent on
the token's loss lowers the set's loss.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import read_json, reading, write_atomically, write_text
from vcore_ds.common.text import count

if TYPE_CHECKING:
    from vcore_ds.data.dataset import Store
    from vcore_ds.data.tokenization import TokenizedSequence

SCORES, TRACES, TOKENS, PAGE = "scores.json", "scores.parquet", "tokens.parquet", "scores.html"
UTILITIES = "utilities.parquet"
NUM_SHOWN = 20  # number of traces with the highest, and with the lowest, mean utility whose tokens are written

LOSS_WEIGHTS = "loss_weights"
LABEL_OF_PROMPT = -100
ROW_GROUP_TOKENS = 1 << 20
_METADATA = b"vcore_ds"

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
    adapter: str | None = field(default=None, kw_only=True)
    """Folder of the trained adapter that was scored, or from which the run of the checkpoints began."""
    adapter_digest: str | None = field(default=None, kw_only=True)  # of its weights; empty if they were gone
    result_digest: str | None = field(default=None, kw_only=True)
    """Digest of the result of the run, an adapter's file or a model, if it is that of the last checkpoint."""
    format: Literal[1] = 1  # version of this format

    @property
    def weights(self) -> str:
        """The weights that were scored, for messages."""
        if self.checkpoints:
            return f"{self.checkpoints[0].run} after step {', '.join(f'{one.step:,}' for one in self.checkpoints)}"
        return self.model if self.adapter is None else f"{self.adapter} on {self.model}"


_SCORES = TypeAdapter(Scores)


def utility_columns(name: str) -> tuple[str, str, str, str]:
    """Columns of scores.parquet for the set `name`: sum, mean, rank and percentile."""
    return f"utility_sum.{name}", f"utility_mean.{name}", f"rank.{name}", f"percentile.{name}"


def write_scores(folder: Path, scores: Scores) -> None:
    """Write scores.json. Raises OSError."""
    text = json.dumps({"format": scores.format, **asdict(scores)}, indent=2, ensure_ascii=False) + "\n"
    write_text(folder / SCORES, text)


def write_traces(folder: Path, columns: Mapping[str, np.ndarray | Sequence[str]]) -> None:
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

    lists = {"tokens": pa.int32(), "supervised": pa.bool_(), "utilities": pa.float32(), "losses": pa.float32()}
    types = {"set": pa.string(), "sequence": pa.int64(), **{name: pa.list_(kind) for name, kind in lists.items()}}
    _write_table(folder / TOKENS, pa.Table.from_pylist(rows, pa.schema(types)))


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


def read_traces(folder: Path, columns: Sequence[str]) -> dict[str, np.ndarray]:
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


def find_difference(store: "Store", tokenizer: str | None, chat_template: str | None, digest: str | None) -> str:
    """Describe the first of three digests that is not that of a store, data.train_path; empty if all are."""
    made_with = store.manifest["tokenizer"]
    for what, actual, expected in (
        ("another tokenizer", tokenizer, made_with["hash"]),
        ("another chat template", chat_template, made_with["chat_template_hash"]),
        ("other tokens", digest, store.digest),
    ):
        if actual != expected:
            return f"{what} ({str(actual)[:12]}) than data.train_path has ({expected[:12]})"
    return ""


def group_by_source(sources: np.ndarray, most: int) -> list[tuple[str, np.ndarray]]:
    """Group traces by source: name and members (bool) of all together, if several, then of the `most` largest."""
    names, index = np.unique(sources.astype(str), return_inverse=True)
    groups = [("all", np.ones(len(index), dtype=np.bool_))] * (len(names) > 1)
    return groups + [(str(names[i]), index == i) for i in np.argsort(-np.bincount(index), kind="stable")[:most]]


# ---- a number for every token --------------------------------------------------------------------------------------


class TokenRows(NamedTuple):
    """Consecutive rows with lists as flat arrays."""

    sequence: np.ndarray  # int64 [n]
    offsets: Mapping[str, np.ndarray]
    """int64 [n + 1] by list column: bounds of the rows in `values[column]`"""
    values: Mapping[str, np.ndarray]


def describe_tokens(data: ScoredData) -> dict[str, Any]:
    """Make the metadata entry `vcore_ds` for tokens of scored data."""
    return {
        "format": 1,
        "digest": data.digest,
        "tokenizer": data.tokenizer_hash,
        "chat_template": data.chat_template_hash,
        "num_sequences": data.num_sequences,
    }


def write_token_table(path: Path, groups: Iterable[TokenRows], metadata: Mapping[str, Any]) -> None:
    """Write row groups as they come, then rename the file. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with write_atomically(path) as unfinished, ExitStack() as stack:
        writer = None
        for rows in groups:
            columns = {"sequence": pa.array(rows.sequence)}
            for name, values in rows.values.items():
                offsets = pa.array(rows.offsets[name].astype(np.int32))
                columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
            table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps(metadata)})
            if writer is None:
                # Floats compress better if bytes of equal significance are adjacent.
                is_float = {f"{name}.list.element": values.dtype.kind == "f" for name, values in rows.values.items()}
                writer = pq.ParquetWriter(
                    unfinished,
                    table.schema,
                    compression="zstd",
                    use_dictionary=[name for name in is_float if not is_float[name]],
                    use_byte_stream_split=[name for name in is_float if is_float[name]],
                    write_statistics=False,
                )
                stack.enter_context(writer)
            writer.write_table(table, row_group_size=len(table))


def read_metadata(path: Path, expected: str) -> dict[str, Any]:
    """Read the metadata of a file. Raises UserError if it is missing, or was not written by vcore_ds. `expected`: the
    contents, for messages."""
    with open_parquet(path, expected) as file:
        entry = (file.schema_arrow.metadata or {}).get(_METADATA)
    if entry is None:
        raise UserError(f"{path}: found a Parquet file without our metadata; expected {expected}")
    return json.loads(entry)


def read_token_rows(path: Path, columns: Sequence[str], expected: str) -> Iterator[TokenRows]:
    """Read list columns, one row group after another. Raises UserError if the file is damaged, lacks a column, or has a
    null in one."""
    import pyarrow as pa

    with open_parquet(path, expected, ["sequence", *columns]) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=["sequence", *columns]).combine_chunks()
            offsets, values = {}, {}
            for name in columns:
                chunk = table.column(name).chunk(0)
                if not isinstance(chunk, pa.ListArray | pa.LargeListArray):
                    raise UserError(f"{path}: found {chunk.type} in column {name}; expected {expected}")
                if chunk.null_count or chunk.flatten().null_count:
                    raise UserError(f"{path}: found missing values in column {name}; expected a number for each token")
                starts = chunk.offsets.to_numpy().astype(np.int64)
                offsets[name] = starts - starts[0]
                values[name] = chunk.flatten().to_numpy(zero_copy_only=False)
            yield TokenRows(table.column("sequence").to_numpy(), offsets, values)


def round_to_12_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to 12 significant bits, one more than float16 has: half of the bytes compress away."""
    step = np.uint32(1 << 12)
    return ((values.astype(np.float32).view(np.uint32) + step // 2) & ~(step - 1)).view(np.float32)


def split_rows(lengths: np.ndarray) -> Iterator[range]:
    """Split into consecutive rows of about `ROW_GROUP_TOKENS` tokens."""
    start, num_tokens = 0, 0
    for i, length in enumerate(lengths.tolist()):
        num_tokens += length
        if num_tokens >= ROW_GROUP_TOKENS or i == len(lengths) - 1:
            yield range(start, i + 1)
            start, num_tokens = i + 1, 0


_WEIGHTS_EXPECTED = "the file that `vcore-ds keep SCORES --weights kl_budget=NUMBER --output FILE` writes"
_WEIGHTS_REMEDY = "Score data.train_path as it is now with --tokens all, and write the weights again"


class TokenWeights:
    """The weights of a token store's tokens (`method.name: stored`), in memory, 2 bytes each."""

    def __init__(self, path: Path, store: "Store"):
        """Read the file. Raises UserError if it cannot be read, is of other tokens, or has an invalid weight."""
        self._path, lengths = path, np.asarray(store.lengths, dtype=np.int64)
        if not path.is_file():
            raise UserError(f"data.token_weights: {path}: found no such file; expected {_WEIGHTS_EXPECTED}")
        made_with = read_metadata(path, _WEIGHTS_EXPECTED)
        if difference := find_difference(store, *map(made_with.get, ("tokenizer", "chat_template", "digest"))):
            raise UserError(
                f"data.token_weights: {path}: found weights for {difference}; expected those of the same. "
                f"{_WEIGHTS_REMEDY}"
            )
        self._starts = np.full(len(store), -1, dtype=np.int64)
        parts, num_tokens = [], 0
        for rows in read_token_rows(path, [LOSS_WEIGHTS], _WEIGHTS_EXPECTED):
            offsets, weights = rows.offsets[LOSS_WEIGHTS], rows.values[LOSS_WEIGHTS].astype(np.float16)
            places, is_valid = rows.sequence.clip(0, len(store) - 1), np.isfinite(weights) & (weights >= 0)
            for what, is_wrong in {
                "another number of tokens": (np.diff(offsets) != lengths[places]) | (places != rows.sequence),
                "a weight that is negative, inf or NaN": np.add.reduceat(~is_valid, offsets[:-1]) > 0,
            }.items():
                if is_wrong.any():
                    raise UserError(
                        f"data.token_weights: {path}: found {what} for the trace at position "
                        f"{rows.sequence[np.argmax(is_wrong)]}; expected a finite number that is not negative for each "
                        f"of its tokens. {_WEIGHTS_REMEDY}"
                    )
            self._starts[places] = offsets[:-1] + num_tokens
            parts.append(weights)
            num_tokens += len(weights)
        self._weights = np.concatenate([np.zeros(0, np.float16), *parts])
        self.digest = hashlib.sha256(self._weights.tobytes()).hexdigest()

    def add_to(self, i: int, sequence: "TokenizedSequence") -> "TokenizedSequence":
        """Set `loss_weights` of the sequence at position i."""
        start = self._starts[i]
        return replace(sequence, loss_weights=self._weights[start : start + len(sequence)].copy())

    def check_has(self, positions: np.ndarray) -> None:
        """Raise UserError unless there are weights for the sequences at `positions`."""
        missing = positions[self._starts[positions] < 0]
        if len(missing):
            raise UserError(
                f"data.token_weights: {self._path}: found no weights for {len(missing):,} of "
                f"{count(len(positions), 'training trace')}, first for the one at position {missing[0]}; expected all. "
                "Write weights of all traces, or select the same ones with data.keep"
            )
