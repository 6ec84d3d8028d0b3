"""Reading of raw rows from files and Hugging Face data sets, in shards that processes read independently.

Shards depend on the source only, so a row's shard and its number in it identify the row for any number of processes.
"""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcore_ds.common.digests import compute_file_digest
from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import DATA_SUFFIXES, can_be_hub_id, reading

if TYPE_CHECKING:
    from datasets import IterableDataset
    from pyarrow import RecordBatch

_JSONL_SHARD_BYTES = 32 * 2**20
_PARQUET_SHARD_ROWS = 10_000  # smallest shard; row groups are not split

_READABLE = "data that can be read"


@dataclass(frozen=True)
class Broken:
    """A row that cannot be read."""

    reason: str


BLANK = Broken("blank line")  # A line that counts for line numbers but is no row


@dataclass(frozen=True)
class Shard:
    """A part of one source, which one process reads."""

    kind: str
    """`lines` (that begin in bytes `start` to `stop` of a file), `array` (a JSON file that is one list), `parquet`
    (row groups `start` to `stop`), `hub` (data file `start` of `stop`)"""
    source: str
    start: int = 0
    stop: int = 0
    split: str = ""
    revision: str | None = None  # commit of a hub data set, so that a resumed run reads the same data

    @property
    def is_first(self) -> bool:
        """Whether this is the first shard of its source; a source named twice has two (upsampling)."""
        return self.start == 0

    @property
    def is_table(self) -> bool:
        """Whether nested objects have the keys of all rows, with null where a row lacks them."""
        return self.kind in ("parquet", "hub")

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield (number within the shard from 0, row or `Broken` or `BLANK`)."""
        with reading("", Path(self.source), _READABLE):
            yield from _READERS[self.kind](self)


def find_shards(sources: Sequence[str], split: str) -> list[Shard]:
    """List the shards of files, folders and patterns of files (`.jsonl`, `.json`, `.parquet`), and of hub data sets,
    which are streamed, one shard per data file. In a folder with files named `SPLIT-*` only those are read. Raises
    UserError if a source does not exist, or is empty."""
    shards: list[Shard] = []
    for source in sources:
        with reading("", Path(source), _READABLE):
            files = find_files(source, split)
        if files is None:
            shards += _list_hub_shards(source, split)
        for path in files or []:
            with reading("", path, _READABLE):
                shards += _list_file_shards(path)
    return shards


def describe_source(shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """Make the manifest's entries: each file with a fingerprint, each hub data set with its commit; repeated ones
    too."""
    described = []
    for shard in shards:
        if not shard.is_first:
            continue
        if shard.kind == "hub":
            described.append({"hub": shard.source, "split": shard.split, "revision": shard.revision})
        else:
            with reading("", Path(shard.source), _READABLE):
                described.append({"file": shard.source, "fingerprint": compute_file_digest(Path(shard.source))})
    return described


def find_files(source: str, split: str) -> list[Path] | None:
    """List the files of a source; None for a hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() not in DATA_SUFFIXES:
            raise UserError(f"{path}: found a file ending in {path.suffix!r}, expected .jsonl, .json or .parquet")
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in DATA_SUFFIXES)
        if not files:
            next(path.iterdir(), None)  # raises if the folder cannot be listed, which rglob does not
            raise UserError(f"{path}: found no .jsonl, .json or .parquet file in this folder")
        return [file for file in files if file.name.startswith(f"{split}-")] or files
    if any(character in source for character in "*?["):
        # A set, because glob repeats a file for each way in which two ** match it.
        files = sorted({Path(name) for name in glob.glob(str(path), recursive=True)})
        if not files:
            raise UserError(f"{source}: found no file of this pattern (looked from {Path.cwd()})")
        return files
    if not can_be_hub_id(source):
        raise UserError(f"{source}: there is no such file (looked from {Path.cwd()}), and it is no hub id (owner/name)")
    return None


def _list_file_shards(path: Path) -> list[Shard]:
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path}: the file is empty")
    if path.suffix.lower() == ".parquet":
        return _list_parquet_shards(path)
    with path.open("rb") as file:
        if path.suffix.lower() == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return [Shard("array", str(path))]
    starts = range(0, size, _JSONL_SHARD_BYTES)
    return [Shard("lines", str(path), start, min(start + _JSONL_SHARD_BYTES, size)) for start in starts]


def _read_lines(shard: Shard) -> Iterator[tuple[int, Any]]:
    with open(shard.source, "rb") as file:
        if shard.start > 0:
            file.seek(shard.start - 1)
            file.readline()  # the rest of the previous shard's last line, at least its line break
        number = 0
        while file.tell() < shard.stop and (line := file.readline()):
            is_first = shard.start == 0 and number == 0
            try:
                text = line.decode("utf-8-sig" if is_first else "utf-8").strip()
                yield number, json.loads(text) if text else BLANK
            except (ValueError, RecursionError) as error:
                begins_list = is_first and line.lstrip(b"\xef\xbb\xbf \t").startswith(b"[")
                hint = "; every line is a row by itself: name a file that is one list .json" if begins_list else ""
                yield number, Broken(_describe_json_error(error) + hint)
            number += 1


def _describe_json_error(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error.reason} at byte {error.start})"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, RecursionError):
        return "not JSON (nested too deeply)"
    return f"not usable JSON ({first_line(error)})"  # such as an integer of thousands of digits


def _read_array(shard: Shard) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(Path(shard.source).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{shard.source}: begins like a list and is {_describe_json_error(error)}: {first_line(error)}"
        ) from None
    yield from enumerate(rows)


def _list_parquet_shards(path: Path) -> list[Shard]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({first_line(error)})") from None
    shards, start, num_rows = [], 0, 0
    for group in range(metadata.num_row_groups):
        num_rows += metadata.row_group(group).num_rows
        if num_rows >= _PARQUET_SHARD_ROWS or group == metadata.num_row_groups - 1:
            shards.append(Shard("parquet", str(path), start, group + 1))
            start, num_rows = group + 1, 0
    return shards


def _read_parquet(shard: Shard) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(shard.source) as file:
            for batch in file.iter_batches(256, row_groups=range(shard.start, shard.stop)):
                for row in _iter_batch_rows(batch):
                    yield number, row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        problem = first_line(error)
        raise UserError(f"{shard.source}: not readable to its end ({problem}); is the download complete?") from None


def _iter_batch_rows(batch: "RecordBatch") -> Iterator[Any]:
    """Yield rows as Python values; `Broken` for a row with invalid text or times."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for i in range(batch.num_rows):
            try:
                yield from batch.slice(i, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                yield Broken(f"not readable ({first_line(error)})")


def _list_hub_shards(name: str, split: str) -> list[Shard]:
    from huggingface_hub import HfApi

    try:
        revision = HfApi().dataset_info(name).sha
    except Exception as error:  # of a dozen classes of three packages: offline, gated, misspelt
        raise UserError(
            f"{name}: no such file, and no data set of that name can be reached on the hub ({first_line(error)}); "
            "download it on a machine with a connection (`hf download --repo-type dataset`) and give the folder"
        ) from None
    num_shards = load_hub(name, split, revision).num_shards
    return [Shard("hub", name, number, num_shards, split, revision) for number in range(num_shards)]


def load_hub(name: str, split: str, revision: str | None) -> "IterableDataset":
    """Open a hub data set for streaming; `name` may be a folder in the hub's layout."""
    from datasets import get_dataset_config_names, load_dataset

    try:
        configs = get_dataset_config_names(name, revision=revision)
        # Some data sets have a configuration per split (OpenCodeReasoning-2 has had both layouts).
        config = split if split in configs else None
        return load_dataset(name, config, split=split, streaming=True, revision=revision)
    except Exception as error:
        raise UserError(f"{name}: the split {split!r} cannot be loaded: {first_line(error)}") from None


def _read_hub(shard: Shard) -> Iterator[tuple[int, Any]]:
    dataset = load_hub(shard.source, shard.split, shard.revision)
    if dataset.num_shards != shard.stop:
        raise UserError(
            f"{shard.source}: found {dataset.num_shards} data files, expected {shard.stop}; delete the unfinished "
            "folder and start again"
        )
    yield from enumerate(dataset.shard(num_shards=shard.stop, index=shard.start))


_READERS = {"lines": _read_lines, "array": _read_array, "parquet": _read_parquet, "hub": _read_hub}


def read_problem_rows(source: str, split: str) -> Iterator[tuple[str, dict[str, Any] | Broken]]:
    """Yield (location for messages, columns or `Broken`) of each row that is not blank, for evaluation and RL.
    `source`, `split`: as in `find_shards`. Raises UserError if the source cannot be read, or is empty."""
    for path, shards in groupby(find_shards([source], split), key=lambda shard: shard.source):
        rows = chain.from_iterable(shard.rows() for shard in shards)
        for number, (_, row) in enumerate(rows, start=1):
            if row is BLANK:
                continue
            if not isinstance(row, dict | Broken):
                row = Broken(f"found {type(row).__name__}, expected an object")
            yield f"{path}: row {number}", row


def find_text(row: dict[str, Any], *names: str) -> str | None:
    """Return the first of the columns that has text or a number, as stripped text; None if none has."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    return None


def require_text(row: dict[str, Any], *names: str) -> str:
    """Like `find_text`, but raise ValueError if none of the columns has text."""
    text = find_text(row, *names)
    if text is None:
        columns = ", ".join(map(str, row)) or "none"
        raise ValueError(f"found no {' or '.join(f'`{name}`' for name in names)} (its columns: {columns:.200})")
    return text
