"""Parquet files with a number for every token: utilities, and weights that are made of them for training.

`utilities.parquet` in a folder of `vcore-ds score --tokens all`, in the order of the token store:

    sequence          int64, position in the store
    input_ids         list of int32, all tokens of the trace
    supervised        list of bool, one per token
    utilities.NAME    list of float32, one per supervised token, for each set; rounded to 12 significant bits

The file of `vcore-ds keep --weights`, each list with one value per token:

    sequence          int64, position in the store
    input_ids         list of int32
    labels            list of int32, the token, or -100 where it is not supervised; not shifted
    loss_weights      list of float16, 1 on average over a trace's supervised tokens, 0 at other tokens

Row groups have about `ROW_GROUP_TOKENS` tokens. The metadata entry `vcore_ds` of both is JSON with the digests of
tokens, tokenizer and chat template, and for weights how they were made.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_atomically
from vcore_ds.common.text import count
from vcore_ds.data.dataset import Store
from vcore_ds.data.scores_folder import ScoredData, open_parquet
from vcore_ds.data.tokenization import TokenizedSequence

if TYPE_CHECKING:
    import pyarrow as pa

UTILITIES = "utilities.parquet"
LOSS_WEIGHTS = "loss_weights"
LABEL_OF_PROMPT = -100
ROW_GROUP_TOKENS = 1 << 20
_METADATA = b"vcore_ds"


@dataclass(frozen=True)
class TokenRows:
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
    import pyarrow.parquet as pq

    with write_atomically(path) as unfinished:
        writer = None
        try:
            for rows in groups:
                table = _make_table(rows).replace_schema_metadata({_METADATA: json.dumps(metadata)})
                if writer is None:
                    # Floats compress better if bytes of equal significance are adjacent.
                    floats = [f"{name}.list.element" for name, array in rows.values.items() if array.dtype.kind == "f"]
                    others = [f"{name}.list.element" for name, array in rows.values.items() if array.dtype.kind != "f"]
                    writer = pq.ParquetWriter(
                        unfinished,
                        table.schema,
                        compression="zstd",
                        use_dictionary=others,
                        use_byte_stream_split=floats,
                        write_statistics=False,
                    )
                writer.write_table(table, row_group_size=len(table))
        finally:
            if writer is not None:
                writer.close()


def _make_table(rows: TokenRows) -> "pa.Table":
    import pyarrow as pa

    columns = {"sequence": pa.array(rows.sequence)}
    for name, values in rows.values.items():
        columns[name] = pa.ListArray.from_arrays(pa.array(rows.offsets[name].astype(np.int32)), pa.array(values))
    return pa.table(columns)


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
            if not len(table):
                continue
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


class StoredWeights:
    """The weights of a token store's tokens (`method.name: stored`), in memory, 2 bytes each."""

    def __init__(self, path: Path, store: Store):
        """Read the file. Raises UserError if it cannot be read, is of other tokens, or has an invalid weight."""
        self._path, self._lengths = path, np.asarray(store.lengths, dtype=np.int64)
        if not path.is_file():
            raise UserError(f"data.token_weights: {path}: found no such file; expected {_WEIGHTS_EXPECTED}")
        self._check_belongs(read_metadata(path, _WEIGHTS_EXPECTED), store)
        self._starts = np.full(len(store), -1, dtype=np.int64)
        parts, num_tokens = [], 0
        for rows in read_token_rows(path, [LOSS_WEIGHTS], _WEIGHTS_EXPECTED):
            offsets, weights = rows.offsets[LOSS_WEIGHTS], rows.values[LOSS_WEIGHTS].astype(np.float16)
            if rows.sequence.min() < 0 or rows.sequence.max() >= len(store):
                raise UserError(f"data.token_weights: {path}: found traces that the data lacks. {_WEIGHTS_REMEDY}")
            self._refuse_first(
                np.diff(offsets) != self._lengths[rows.sequence], rows.sequence, "another number of tokens"
            )
            wrong = ~(np.isfinite(weights) & (weights >= 0))
            per_trace = np.add.reduceat(wrong, offsets[:-1]) > 0
            self._refuse_first(per_trace, rows.sequence, "a weight that is negative, inf or NaN")
            self._starts[rows.sequence] = offsets[:-1] + num_tokens
            parts.append(weights)
            num_tokens += len(weights)
        self._weights = np.concatenate([np.zeros(0, np.float16), *parts])
        self.digest = hashlib.sha256(self._weights.tobytes()).hexdigest()

    def add_to(self, i: int, sequence: TokenizedSequence) -> TokenizedSequence:
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

    def _check_belongs(self, made_with: dict[str, Any], store: Store) -> None:
        tokenizer = store.manifest["tokenizer"]
        for what, key, expected in (
            ("another tokenizer", "tokenizer", tokenizer["hash"]),
            ("another chat template", "chat_template", tokenizer["chat_template_hash"]),
            ("other tokens", "digest", store.digest),
        ):
            digest = str(made_with.get(key))
            if digest != expected:
                raise UserError(
                    f"data.token_weights: {self._path}: found weights for {what} ({digest[:12]}) than data.train_path "
                    f"has ({expected[:12]}); expected those of the same. {_WEIGHTS_REMEDY}"
                )

    def _refuse_first(self, is_wrong: np.ndarray, sequence: np.ndarray, what: str) -> None:
        if is_wrong.any():
            raise UserError(
                f"data.token_weights: {self._path}: found {what} for the trace at position "
                f"{sequence[np.argmax(is_wrong)]}; expected a finite number that is not negative for each of its "
                f"tokens. {_WEIGHTS_REMEDY}"
            )
