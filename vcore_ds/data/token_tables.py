"""Parquet files with a number for every token: utilities, and the weights made of them.

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

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import reading, write_atomically
from vcore_ds.data.scores_folder import ScoredData

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

    sequence: np.ndarray
    """int64 [n]"""
    offsets: Mapping[str, np.ndarray]
    """int64 [n + 1] by column: where the rows of a list column begin and end in `values[column]`"""
    values: Mapping[str, np.ndarray]


def describe_tokens(data: ScoredData) -> dict[str, Any]:
    """The entry `vcore_ds` for tokens of scored data."""
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
                    # The bytes of floats compress when those of equal significance stand together.
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
    """The metadata of a file.

    Args:
        expected: what the file should be, for the message.

    Raises:
        UserError: there is no such file, or it was not written by vcore_ds.
    """
    with _opened(path, expected) as file:
        entry = (file.schema_arrow.metadata or {}).get(_METADATA)
    if entry is None:
        raise UserError(f"{path}: found a Parquet file without our metadata; expected {expected}")
    return json.loads(entry)


def read_token_rows(path: Path, columns: Sequence[str], expected: str) -> Iterator[TokenRows]:
    """Read list columns, one row group after another.

    Raises:
        UserError: the file is damaged, lacks a column, or has a null in one.
    """
    import pyarrow as pa

    with _opened(path, expected) as file:
        missing = [name for name in ("sequence", *columns) if name not in file.schema_arrow.names]
        if missing:
            names = ", ".join(file.schema_arrow.names)
            raise UserError(f"{path}: found no column {missing[0]} among {names}; expected {expected}")
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


@contextmanager
def _opened(path: Path, expected: str) -> Iterator[Any]:
    """A context with an open Parquet file, in which pyarrow's errors are UserErrors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with reading("", path, expected), pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowException as error:
        raise UserError(f"{path}: is damaged ({first_line(error)}); expected {expected}") from None


def round_significand(values: np.ndarray, bits: int = 12) -> np.ndarray:
    """Round float32 to `bits` significant bits, one more than float16 has: half of its bytes compress away."""
    step = np.uint32(1 << (24 - bits))
    rounded = (values.astype(np.float32).view(np.uint32) + step // 2) & ~(step - 1)
    return rounded.view(np.float32)


def split_rows(lengths: np.ndarray) -> Iterator[range]:
    """Consecutive rows of about `ROW_GROUP_TOKENS` tokens."""
    start, num_tokens = 0, 0
    for i, length in enumerate(lengths.tolist()):
        num_tokens += length
        if num_tokens >= ROW_GROUP_TOKENS or i == len(lengths) - 1:
            yield range(start, i + 1)
            start, num_tokens = i + 1, 0
