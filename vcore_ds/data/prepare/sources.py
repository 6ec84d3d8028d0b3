"""Files of raw rows: where a file, folder, pattern or hub id has them, and their rows one by one.

`datasets` resolves configurations and splits, Arrow reads tables and decompresses. JSON is read by `json`, so that
null, mixed types and half surrogates stay what they are, and a row that cannot be read is one malformed row.
"""

import csv
import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vcore_ds.common.digests import compute_file_digest
from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import COMPRESSIONS, DATA_SUFFIXES, can_be_hub_id, find_data_suffix, reading, split_source

if TYPE_CHECKING:
    from pyarrow import Table

Chunk: TypeAlias = "list[bytes] | Table"
"""Consecutive rows: lines of JSON, or a table."""

CHUNK_ROWS, CHUNK_BYTES = 512, 16 * 2**20  # largest chunk; a longer row is a chunk by itself
_PEEK_BYTES = 2**20
_BOM, _SPACE = b"\xef\xbb\xbf", b" \t\r\n"
_READABLE = "data that can be read"
_KINDS = f"{', '.join(DATA_SUFFIXES)}, also compressed ({', '.join(COMPRESSIONS)})"
_ROWS = "a row, a JSON object, on each line, or in a .json file one list of rows"


@dataclass(frozen=True)
class Broken:
    """A row that cannot be read."""

    reason: str


BLANK = Broken("blank line")  # A line that counts for line numbers but is no row


@dataclass(frozen=True)
class RawFile:
    """A file of rows."""

    path: str
    """on this machine; of a hub data set within it"""
    source: str
    """the path, or the hub id; rows are numbered within their source"""
    is_first: bool = True  # of its source; a source named twice has two (upsampling)
    hub: tuple[tuple[str, str | None], ...] = ()
    """of a file on the hub: id, configuration, split and commit"""

    @property
    def is_table(self) -> bool:
        """Whether nested objects have the keys of all rows, with null where a row lacks them."""
        return find_data_suffix(self.path) in (".parquet", ".arrow")

    def rows(self) -> Iterator[Any]:
        """Yield each row, `Broken` or `BLANK`."""
        for chunk in self.chunks():
            yield from parse_chunk(chunk)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows in chunks, which depend on the file's contents alone. Raises UserError."""
        path = self._download() if self.hub else Path(self.path)
        with reading("", path, _READABLE):
            size = path.stat().st_size
        if size == 0:
            raise UserError(f"{path}: the file is empty")
        suffix = find_data_suffix(self.path)
        read = {".parquet": _read_parquet, ".arrow": _read_arrow, ".csv": _read_csv}.get(suffix, _read_json)
        with reading("", path, _READABLE):
            try:
                yield from read(path)
            except (UserError, PermissionError, IsADirectoryError):
                raise
            except (OSError, ValueError, csv.Error) as error:  # Arrow's errors are ValueErrors or OSErrors
                raise UserError(
                    f"{path}: not readable to its end as {suffix} ({first_line(error)}); is the download complete?"
                ) from None

    def _download(self) -> Path:
        from huggingface_hub import hf_hub_download

        hub = dict(self.hub)
        try:
            return Path(hf_hub_download(self.source, self.path, repo_type="dataset", revision=hub["revision"]))
        except Exception as error:  # of a dozen classes: offline, gated, no room
            raise UserError(f"{self.source}: {self.path}: cannot be downloaded: {first_line(error)}") from None


def find_files(sources: Sequence[str], split: str) -> list[RawFile]:
    """List the files of each source: a file, folder or pattern of files, or a hub id; of a folder or hub id also
    NAME::CONFIGURATION. Raises UserError if a source does not exist, has no data, or has several configurations."""
    files: list[RawFile] = []
    for source in sources:
        with reading("", Path(source), _READABLE):
            local = find_local_files(source, split)
        files += _list_hub_files(*split_source(source), split) if local is None else local
    return files


def describe_source(files: Iterable[RawFile]) -> list[dict[str, Any]]:
    """Make the manifest's entries: each file with its digest, each hub data set with its commit; repeated ones too."""
    described: list[dict[str, Any]] = []
    for file in files:
        if file.hub and file.is_first:
            described.append(dict(file.hub))
        elif not file.hub:
            with reading("", Path(file.path), _READABLE):
                described.append({"file": file.path, "fingerprint": compute_file_digest(Path(file.path))})
    return described


def find_local_files(source: str, split: str) -> list[RawFile] | None:
    """List the files of a source as `find_files`; None for a hub id, which is not contacted."""
    name, configuration = split_source(source)
    path = Path(name).expanduser()
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = _list_folder(path, configuration, split)
    elif any(character in name for character in "*?["):
        # A set, because glob repeats a file for each way in which two ** match it.
        paths = sorted({Path(match) for match in glob.glob(str(path), recursive=True)})
        if not paths:
            raise UserError(f"{source}: found no file of this pattern (looked from {Path.cwd()})")
    elif can_be_hub_id(name):
        return None
    else:
        raise UserError(f"{name}: there is no such file (looked from {Path.cwd()}), and it is no hub id (owner/name)")
    for file in paths:
        if not find_data_suffix(file):
            raise UserError(f"{file}: found a file ending in {file.suffix!r}, expected {_KINDS}")
    return [RawFile(str(file), str(file)) for file in paths]


def _list_folder(folder: Path, configuration: str | None, split: str) -> list[Path]:
    """List the files of a folder: by `save_to_disk`, of a hub data set with configurations, or any."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        if split not in splits:
            raise UserError(f"{folder}: found no split {split!r}, only {', '.join(splits)}; name one with --split")
        folder = folder / split
    if (folder / "state.json").is_file():
        return [folder / file["filename"] for file in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    if configuration is not None or _has_configurations(folder):
        return [Path(file) for file in _resolve(str(folder), configuration, split)]
    files = sorted(file for file in folder.rglob("*") if find_data_suffix(file))
    if not files:
        next(folder.iterdir(), None)  # raises if the folder cannot be listed, which rglob does not
        raise UserError(f"{folder}: found no file in this folder that ends in {_KINDS}")
    return [file for file in files if file.name.startswith(f"{split}-")] or files


def _has_configurations(folder: Path) -> bool:
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    try:
        return card.is_file() and bool((metadata_load(card) or {}).get("configs"))
    except Exception:  # no YAML
        return False


def _list_hub_files(name: str, configuration: str | None, split: str) -> list[RawFile]:
    from huggingface_hub import HfApi

    try:
        revision = HfApi().dataset_info(name).sha
    except Exception as error:  # of a dozen classes of three packages: offline, gated, misspelt
        raise UserError(
            f"{name}: no such file, and no data set of that name can be reached on the hub ({first_line(error)}); "
            "download it on a machine with a connection (`hf download --repo-type dataset`) and give the folder"
        ) from None
    hub = tuple({"hub": name, "configuration": configuration, "split": split, "revision": revision}.items())
    paths = [url.partition(f"@{revision}/")[2] for url in _resolve(name, configuration, split, revision)]
    if other := [path for path in paths if not find_data_suffix(path)]:
        raise UserError(f"{name}: found the data file {other[0]}, expected files ending in {_KINDS}")
    return [RawFile(path, name, is_first=i == 0, hub=hub) for i, path in enumerate(paths)]


def _resolve(name: str, configuration: str | None, split: str, revision: str | None = None) -> list[str]:
    """List the data files of a split of a hub data set, or of a folder in the hub's layout."""
    from datasets import get_dataset_config_names, load_dataset_builder

    try:
        names = get_dataset_config_names(name, revision=revision)
        # Some data sets have a configuration per split (OpenCodeReasoning-2 has had both layouts).
        chosen = split if configuration is None and split in names else configuration
        if chosen is not None and chosen not in names:
            raise UserError(
                f"{name}: found no configuration {chosen!r}, expected {name}::CONFIGURATION with one of "
                f"{', '.join(names)}"
            )
        try:
            files = load_dataset_builder(name, chosen, revision=revision).config.data_files or {}
        except ValueError:
            if chosen is not None or len(names) < 2:
                raise
            raise UserError(
                f"{name}: found the configurations {', '.join(names)}; name one: {name}::{names[0]}"
            ) from None
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: the split {split!r} cannot be loaded: {first_line(error)}") from None
    if split not in files:
        raise UserError(f"{name}: found no split {split!r}, only {', '.join(map(str, files))}; name one with --split")
    return [str(file) for file in files[split]]


def _open(path: Path) -> BufferedReader:
    import pyarrow as pa

    return BufferedReader(pa.input_stream(str(path), compression="detect"), _PEEK_BYTES)


def _read_json(path: Path) -> Iterator[Chunk]:
    with _open(path) as file:
        beginning = file.peek(_PEEK_BYTES).removeprefix(_BOM).lstrip()
        if beginning.startswith(b"[") and find_data_suffix(path) == ".json":
            yield from _split(json.dumps(row).encode() for row in _read_list(path, file.read()))
            return
        _check_form(path, beginning)
        yield from _split(line.removeprefix(_BOM) if i == 0 else line for i, line in enumerate(file))


def _split(lines: Iterable[bytes]) -> Iterator[Chunk]:
    chunk: list[bytes] = []
    num_bytes = 0
    for line in lines:
        if chunk and (len(chunk) == CHUNK_ROWS or num_bytes + len(line) > CHUNK_BYTES):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(line)
        num_bytes += len(line)
    yield chunk


def _read_list(path: Path, text: bytes) -> list[Any]:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: begins like a list and is {_describe_json_error(error)}: {first_line(error)}"
        ) from None


def _check_form(path: Path, beginning: bytes) -> None:
    """Raise UserError for JSON that is not a row on each line: a list, an object of rows, rows over several lines."""
    line, _, rest = beginning.partition(b"\n")
    try:
        first, is_over_lines = json.loads(line), False
    except (ValueError, RecursionError):
        try:
            first, end = json.JSONDecoder().raw_decode(beginning.decode(errors="replace"))
            is_over_lines = end > len(line)
        except (ValueError, RecursionError):
            first, is_over_lines = None, line.strip() in (b"{", b"[")
    is_list = (
        line.startswith(b"[") if first is None else isinstance(first, list) and first and isinstance(first[0], dict)
    )
    columns = first.items() if isinstance(first, dict) and (is_over_lines or not rest.strip()) else ()
    lists = [name for name, rows in columns if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    if is_list and (is_over_lines or first is not None):
        form = "one list"
    elif lists and not {"messages", "conversations", "prompt"} & first.keys():
        form = f"one object with rows under `{lists[0]:.60}`"
    elif is_over_lines:
        form = "rows of JSON over several lines each"
    else:
        return
    raise UserError(f"{path}: found {form}, expected {_ROWS}")


def _read_csv(path: Path) -> Iterator[Chunk]:
    """Read every cell as text: a type that is guessed from other rows would change it."""
    csv.field_size_limit(2**31 - 1)
    with TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
        # Cells that a row lacks are null; cells that the header lacks are a column "null".
        yield from _split(json.dumps(row).encode() for row in csv.DictReader(file, strict=True))


def _read_parquet(path: Path) -> Iterator["Table"]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(CHUNK_ROWS):
            yield from _cut(pa.table(batch))


def _read_arrow(path: Path) -> Iterator["Table"]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        try:
            batches: Iterable[pa.RecordBatch] = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(file)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        for batch in batches:
            yield from _cut(pa.table(batch))


def _cut(table: "Table") -> Iterator["Table"]:
    """Divide a table into chunks of about equal size."""
    num_rows = max(1, min(CHUNK_ROWS, int(table.num_rows * CHUNK_BYTES / max(1, table.nbytes))))
    return (table.slice(start, num_rows) for start in range(0, table.num_rows, num_rows))


def count_rows(chunk: Chunk) -> int:
    """Count the rows of a chunk that are not blank."""
    return sum(1 for line in chunk if line.strip(_SPACE)) if isinstance(chunk, list) else len(chunk)


def parse_chunk(chunk: Chunk) -> Iterator[Any]:
    """Yield the rows of a chunk as Python values, `Broken` or `BLANK`."""
    if isinstance(chunk, list):
        yield from map(_parse_line, chunk)
        return
    try:
        yield from chunk.to_pylist()
    except (ValueError, OverflowError):  # invalid text or times
        for i in range(chunk.num_rows):
            try:
                yield from chunk.slice(i, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                yield Broken(f"not readable ({first_line(error)})")


def _parse_line(line: bytes) -> Any:
    try:
        text = line.strip(_SPACE)
        return json.loads(text.decode()) if text else BLANK
    except (ValueError, RecursionError) as error:
        return Broken(_describe_json_error(error))


def _describe_json_error(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error.reason} at byte {error.start})"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, RecursionError):
        return "not JSON (nested too deeply)"
    return f"not usable JSON ({first_line(error)})"  # such as an integer of thousands of digits


def read_problem_rows(source: str, split: str) -> Iterator[tuple[str, dict[str, Any] | Broken]]:
    """Yield (location for messages, columns or `Broken`) of each row that is not blank, for evaluation and RL.
    `source`, `split`: as in `find_files`. Raises UserError if the source cannot be read, or is empty."""
    for file in find_files([source], split):
        for number, row in enumerate(file.rows(), start=1):
            if row is BLANK:
                continue
            if not isinstance(row, dict | Broken):
                row = Broken(f"found {type(row).__name__}, expected an object")
            yield f"{file.path}: row {number}", row


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
