"""Files of raw rows: where a file, folder, pattern or hub id has them, and their rows one by one.

`datasets` resolves configurations and splits, Arrow reads tables and decompresses. JSON is read by `json`, so that
null, mixed types and half surrogates stay what they are, and a row that cannot be read is one malformed row.
"""

import csv
import glob
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcore_ds.common.errors import Problems, UserError, first_line
from vcore_ds.common.paths import (
    COMPRESSIONS,
    DATA_SUFFIXES,
    can_be_hub_id,
    compute_file_digest,
    expand_home,
    find_data_suffix,
    reading,
    split_source,
)
from vcore_ds.config.data_section import MANIFEST, WRITTEN_BY_COMMANDS, DataConfig
from vcore_ds.data.hub import check_on_hub

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch

_TABLE_ROWS = 64  # of a table, that are in memory at once
_PEEK_BYTES = 2**20
_SMALL_BYTES = 32 * 2**20  # smaller data are tokenized before further processes would have started
_BOM, _SPACE = b"\xef\xbb\xbf", b" \t\r\n"
_READABLE = "data that can be read"
_KINDS = f"{', '.join(DATA_SUFFIXES)}, also compressed ({', '.join(COMPRESSIONS)})"


@dataclass(frozen=True)
class UnreadableRow:
    """A row that cannot be read."""

    reason: str


BLANK = UnreadableRow("blank line")  # A line that counts for line numbers but is no row


@dataclass(frozen=True)
class RawFile:
    """A file of rows."""

    path: str  # on this machine, or in the hub's data set
    hub: dict[str, str | None] = field(default_factory=dict)  # of a file on the hub: id, configuration, split, commit

    @property
    def name(self) -> str:
        return f"{self.hub['hub']}/{self.path}" if self.hub else self.path

    @property
    def is_table(self) -> bool:
        """Whether nested objects have the keys of all rows, with null where a row lacks them."""
        return find_data_suffix(self.path) in (".parquet", ".arrow")

    def rows(self) -> Iterator[Any]:
        """Yield each row, `UnreadableRow` or `BLANK`."""
        return map(self.parse, self.encoded_rows())

    def parse(self, encoded: bytes) -> Any:
        return pickle.loads(encoded) if self.is_table else _parse_line(encoded)

    def encoded_rows(self) -> Iterator[bytes]:
        """Yield each row as JSON, empty for a blank line, or pickled if it is of a table. Raises UserError."""
        path = self._download() if self.hub else Path(self.path)
        suffix = find_data_suffix(self.path)
        read = {".parquet": _read_parquet, ".arrow": _read_arrow, ".csv": _read_csv}.get(suffix, _read_json)
        with reading("", path, _READABLE):
            if path.stat().st_size == 0:
                raise UserError(f"{path}: the file is empty")
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

        try:
            name, revision = str(self.hub["hub"]), self.hub["revision"]
            return Path(hf_hub_download(name, self.path, repo_type="dataset", revision=revision))
        except Exception as error:  # of a dozen classes: offline, gated, no room
            raise UserError(f"{self.name}: cannot be downloaded: {first_line(error)}") from None


def number_rows(files: Iterable[RawFile]) -> Iterator[tuple[RawFile, int, Any]]:
    """Yield each row that is not blank, with its file and its number there, from 0."""
    return ((file, i, row) for file in files for i, row in enumerate(file.rows()) if row is not BLANK)


def find_files(sources: Sequence[str], split: str) -> list[RawFile]:
    """List the files of each source: a file, folder or pattern of files, or a hub id; of a folder or hub id also
    NAME::CONFIGURATION. Raises UserError if a source does not exist, has no data, or has several configurations."""
    files: list[RawFile] = []
    for source in sources:
        with reading("", Path(source), _READABLE):
            local = find_local_files(source, split)
        files += _list_hub_files(*split_source(source), split) if local is None else local
    return files


def check_source(path: str, split: str = "train") -> bool:
    """Return whether `path` is a token store. Raises UserError unless it is one, data with the split, or possibly an id
    on the hub, which is not contacted."""
    with reading("", Path(path), "data, or a token store, that can be read"):
        is_store = (Path(path) / MANIFEST).is_file()
        if not is_store:
            find_local_files(path, split)
    return is_store


def is_small(path: str, split: str) -> bool:
    """Whether `path` is a token store, or raw data on this machine that are converted to one in seconds."""
    if check_source(path, split):
        return True
    files = find_local_files(path, split)
    return files is not None and sum(Path(file.path).stat().st_size for file in files) < _SMALL_BYTES


def check_inputs(model: str, data: DataConfig) -> None:
    """Check that the model and the files that a recipe names are here, or may be on the hub, which is not contacted;
    imports no torch. Raises UserError for all that are not."""
    problems = Problems()
    for key, path in data.paths().items():
        with problems.collect():
            if key not in WRITTEN_BY_COMMANDS:
                check_source(path, data.split)
                continue
            with reading(f"data.{key}", Path(path), "what the command wrote that makes it"):
                expand_home(path).stat()
    with problems.collect():
        check_on_hub(model, "model", "model.path: ", asks=False)
    problems.raise_all()


def describe_source(files: Iterable[RawFile]) -> list[dict[str, Any]]:
    """Make the manifest's entry for each file: its digest, or the commit of its data set on the hub."""
    described = []
    for file in files:
        with reading("", Path(file.path), _READABLE):
            digest = file.hub or {"fingerprint": compute_file_digest(Path(file.path))}
        described.append({"file": file.path, **digest})
    return described


def find_local_files(source: str, split: str) -> list[RawFile] | None:
    """List the files of a source as `find_files`; None for a hub id, which is not contacted."""
    name, configuration = split_source(source)
    path = expand_home(name)
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
        made = "; python launch_scripts/quickstart_data.py runs/quickstart_data makes it"
        missing = f"there is no such file (looked from {Path.cwd()}), and it is no hub id (owner/name)"
        raise UserError(f"{name}: {missing}{made * name.startswith('runs/quickstart_data/')}")
    _check_suffixes(paths)
    return [RawFile(str(file)) for file in paths]


def _check_suffixes(paths: Iterable[str | Path]) -> None:
    for path in paths:
        if not find_data_suffix(path):
            raise UserError(f"{path}: found a file ending in {Path(path).suffix!r}, expected {_KINDS}")


def _list_folder(folder: Path, configuration: str | None, split: str) -> list[Path]:
    """List the files of a folder: by `save_to_disk`, of a hub data set with configurations, or any."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        _check_split(str(folder), split, splits)
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


def _check_split(name: str, split: str, splits: Iterable[object]) -> None:
    if split not in splits:
        found = f"found no split {split!r}, only {', '.join(map(str, splits))}"
        raise UserError(f"{name}: {found}; name one with data.split (prepare --split)")


def _has_configurations(folder: Path) -> bool:
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    try:
        return card.is_file() and bool((metadata_load(card) or {}).get("configs"))
    except Exception:  # no YAML
        return False


def _list_hub_files(name: str, configuration: str | None, split: str) -> list[RawFile]:
    files = []
    for url in _resolve(name, configuration, split):  # hf://datasets/OWNER/NAME@COMMIT/PATH
        revision, _, path = url.partition("@")[2].partition("/")
        hub = {"hub": name, "configuration": configuration, "split": split, "revision": revision}
        files.append(RawFile(path, hub))
    _check_suffixes(file.path for file in files)
    return files


def _resolve(name: str, configuration: str | None, split: str) -> list[str]:
    """List the data files of a split of a hub data set, or of a folder in the hub's layout."""
    from datasets import get_dataset_config_names, get_dataset_default_config_name, load_dataset_builder

    check_on_hub(name, "dataset")
    try:
        names = get_dataset_config_names(name)
        # Some data sets have a configuration per split (OpenCodeReasoning-2 has had both layouts).
        chosen = configuration or (split if split in names else get_dataset_default_config_name(name))
        if chosen not in names:
            found = f"no configuration {chosen!r}" if chosen else "several configurations"
            raise UserError(f"{name}: found {found}, expected {name}::NAME with one of {', '.join(names)}")
        files = load_dataset_builder(name, chosen).config.data_files or {}
    except UserError:
        raise
    except Exception as error:  # of a dozen classes of three packages: offline, gated, misspelt
        raise UserError(f"{name}: no data set that can be loaded: {first_line(error)}") from None
    _check_split(name, split, files)
    return [str(file) for file in files[split]]


def _open(path: Path) -> BufferedReader:
    import pyarrow as pa

    return BufferedReader(pa.input_stream(str(path), compression="detect"), _PEEK_BYTES)


def _read_json(path: Path) -> Iterator[bytes]:
    """Read one list of rows, or a row on each line."""
    with _open(path) as file:
        beginning = file.peek(_PEEK_BYTES).removeprefix(_BOM).lstrip()
        if beginning.startswith(b"["):
            try:
                rows = json.loads(file.read().decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}: begins like a list and is not JSON: {first_line(error)}") from None
            yield from (json.dumps(row).encode() for row in rows)
            return
        if beginning.partition(b"\n")[0].strip() == b"{":
            raise UserError(
                f"{path}: found JSON over several lines, expected one row, an object, on each line, or a list of rows"
            )
        yield from ((line.removeprefix(_BOM) if i == 0 else line).strip(_SPACE) for i, line in enumerate(file))


def _read_csv(path: Path) -> Iterator[bytes]:
    """Read every cell as text: a type that is guessed from other rows would change it."""
    csv.field_size_limit(2**31 - 1)
    with TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
        # Cells that a row lacks are null; cells that the header lacks are a column "null".
        yield from (json.dumps(row).encode() for row in csv.DictReader(file, strict=True))


def _read_parquet(path: Path) -> Iterator[bytes]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_TABLE_ROWS):
            yield from _pickle_rows(batch)


def _read_arrow(path: Path) -> Iterator[bytes]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        try:
            batches: Iterable[RecordBatch] = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(file)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, _TABLE_ROWS):
                yield from _pickle_rows(batch.slice(start, _TABLE_ROWS))


class JsonObject(dict[str, Any]):
    """An object of a column of JSON: unlike others of a table, it has no key that its row does not have."""


def _decode(value: Any, kind: "DataType") -> Any:
    """Parse the JSON in a value of an Arrow type, as `datasets` does."""
    import pyarrow as pa

    if isinstance(kind, pa.JsonType) and value is not None:
        return json.loads(value, object_hook=JsonObject)
    if isinstance(kind, pa.StructType) and value is not None:
        return {field.name: _decode(value[field.name], field.type) for field in kind}
    is_list = isinstance(value, list) and hasattr(kind, "value_type")
    return [_decode(item, kind.value_type) for item in value] if is_list else value


def _pickle_rows(batch: "RecordBatch") -> Iterator[bytes]:
    import pyarrow as pa

    kind = pa.struct(list(batch.schema))
    try:
        rows = batch.to_pylist()
        if "arrow.json" in str(kind):
            rows = [_decode(row, kind) for row in rows]
    except (ValueError, OverflowError, RecursionError) as error:  # invalid text, times or JSON
        if batch.num_rows > 1:
            for i in range(batch.num_rows):
                yield from _pickle_rows(batch.slice(i, 1))
            return
        rows = [UnreadableRow(f"not readable ({first_line(error)})")]
    yield from map(pickle.dumps, rows)


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode()) if line else BLANK
    except (ValueError, RecursionError) as error:
        return UnreadableRow(f"not JSON ({first_line(error)})")


def read_problem_rows(source: str, split: str) -> Iterator[tuple[str, dict[str, Any] | UnreadableRow]]:
    """Yield (location for messages, columns or `UnreadableRow`) of each row that is not blank, for evaluation and RL.
    `source`, `split`: as in `find_files`. Raises UserError if the source cannot be read, or is empty."""
    for file, number, row in number_rows(find_files([source], split)):
        if not isinstance(row, dict | UnreadableRow):
            row = UnreadableRow(f"found {type(row).__name__}, expected an object")
        yield f"{file.name}: row {number + 1}", row


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
