"""`vcore-ds prepare`: raw rows to a token store, file by file, in pieces of their rows.

    OUTPUT.unfinished/request.json        the request; another one is refused
    OUTPUT.unfinished/rows.arrow          the rows of the file that is being converted
    OUTPUT.unfinished/results/*.arrow     results of a piece: no finished piece is converted again
    OUTPUT.unfinished/files.json          of each finished file the number of rows, and of rows and blank lines

The store does not depend on the number of processes or on interruptions: a sample consists of the rows with the
smallest keys that pass all rules, and a key is a hash of the seed and the row's position.
"""

import ctypes
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vcore_ds.common import __version__
from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import describe_differences, discard_parts, resume_or_begin, unfinished_work
from vcore_ds.common.paths import check_folder, flush, refuse_existing, write_atomically, write_json, write_text
from vcore_ds.common.text import Progress
from vcore_ds.config.data_section import MANIFEST
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.prepare import convert
from vcore_ds.data.prepare.convert import PrepareRequest
from vcore_ds.data.prepare.report import PrepareReport, refuse_malformed
from vcore_ds.data.prepare.sources import RawFile, check_source, find_files
from vcore_ds.data.store import IN_ANSWER, SUPERVISED, read_manifest, write_store
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer

if TYPE_CHECKING:
    from pyarrow import Table
    from transformers import PreTrainedTokenizerBase

_ROUND_ROWS, _PIECE_ROWS = 2**15, 256  # between two messages on progress, and of a piece, for any number of processes
_BATCH_ROWS, _BATCH_BYTES = 64, 16 * 2**20  # rows that are tokenized together; one of more bytes is alone
_WRITTEN_ROWS = 1024  # to rows.arrow at once
_REMEDY = "name another --output, or delete it"


class Piece(NamedTuple):
    """Rows of a file that are converted together."""

    numbers: np.ndarray
    largest: int  # bytes of the largest row
    results: Path


def convert_pieces(request: PrepareRequest, file: RawFile, rows: Path, processes: int, pieces: Sequence[Piece]) -> None:
    """Convert rows of a file; `rows`: Arrow file with all its rows."""
    convert.open_tokenizer(request.tokenizer)  # once, before the processes are forked
    convert_piece, used = partial(_convert_piece, request, file, rows), min(processes, len(pieces))
    if used == 1:
        list(map(convert_piece, pieces))
        return
    with _open_pool(used, "fork") as pool:
        list(pool.map(convert_piece, pieces))


def _convert_piece(request: PrepareRequest, file: RawFile, rows: Path, piece: Piece) -> None:
    import pyarrow as pa

    schema, numbers = convert.make_schema(), piece.numbers.tolist()
    size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // piece.largest))
    encoded = _read_table(rows)["row"]
    with write_atomically(piece.results) as unfinished, pa.ipc.new_stream(str(unfinished), schema) as writer:
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            columns = convert.convert_batch([encoded[n].as_py() for n in batch], batch, request, file)
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema))


@contextmanager
def open_process(processes: int) -> Iterator[Callable[..., None]]:
    """A context that yields `convert_pieces` in this process, or for several in a new one, because it forks, and a run
    that prepares data has the threads of its process group. Raises UserError if a process is killed."""
    if processes == 1:
        yield convert_pieces
        return
    try:
        with _open_pool(1, "spawn") as executor:
            yield lambda *arguments: executor.submit(convert_pieces, *arguments).result()
    except BrokenProcessPool:
        raise UserError(
            "prepare: a worker process was killed, perhaps by Linux for lack of memory. The same command goes on where "
            "this one ended; fewer --processes of `vcore-ds prepare` need less memory"
        ) from None


def _open_pool(processes: int, method: str) -> ProcessPoolExecutor:
    context = multiprocessing.get_context(method)
    return ProcessPoolExecutor(processes, context, initializer=_end_with_parent, initargs=(os.getpid(),))


def _end_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def write_rows(path: Path, rows: Iterable[bytes]) -> np.ndarray:
    """Write encoded rows. Returns the bytes of each, int64 [n], 0 for a blank line."""
    import pyarrow as pa

    schema, sizes = pa.schema({"row": pa.large_binary()}), array("q")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        batch: list[bytes] = []
        num_bytes = 0
        for row in rows:
            batch.append(row)
            sizes.append(len(row))
            num_bytes += len(row)
            if len(batch) == _WRITTEN_ROWS or num_bytes > _BATCH_BYTES:
                writer.write(pa.record_batch([batch], schema))
                batch, num_bytes = [], 0
        writer.write(pa.record_batch([batch], schema))
    return np.array(sizes)


class Conversion:
    """The conversion of all files, in the folder of unfinished work."""

    def __init__(self, request: PrepareRequest, files: Sequence[RawFile], folder: Path) -> None:
        self.request, self.files, self.folder = request, files, folder
        self.counts: list[tuple[int, int]] = []
        """of each finished file, the number of rows, and of rows and blank lines"""
        self._num_examined = self._num_kept = 0
        self._best_keys = np.empty(0, np.uint64)  # the smallest keys of kept rows, at most one per row of the sample

    @property
    def first_rows(self) -> list[tuple[str, int]]:
        """Of each file, its name and the position of its first row among all rows and blank lines."""
        ends = accumulate((num_lines for _, num_lines in self.counts), initial=0)
        return [(file.name, end) for file, end in zip(self.files, ends, strict=False)]

    @property
    def largest_key(self) -> np.uint64:
        """Of the sample; rows with larger keys are not part of it."""
        return self._best_keys[-1] if len(self._best_keys) == self.request.sample else np.uint64(2**64 - 1)

    def run(self, processes: int, say: Callable[[str], None]) -> None:
        """Convert the rows that have no result yet."""
        finished, rows = self.folder / "files.json", self.folder / "rows.arrow"
        if finished.exists():
            self.counts = [tuple(counts) for counts in json.loads(finished.read_text(encoding="utf-8"))]
        if num_rows := len(self._read_results("")):
            say(f"{num_rows:,} rows were converted before")
        for i in range(len(self.counts)):
            self._count_results(i, self._read_results(f"{i:05d}-"))
        try:
            with (
                Progress("Preparing", len(self.files), done=len(self.counts), say=say) as progress,
                open_process(processes) as convert_here,
            ):
                for i in range(len(self.counts), len(self.files)):
                    sizes = write_rows(rows, self.files[i].encoded_rows())
                    num_rows, left = int((sizes > 0).sum()), 1.0
                    for pieces in self._choose_pieces(i, sizes):
                        if missing := [piece for piece in pieces if not piece.results.exists()]:
                            convert_here(self.request, self.files[i], rows, processes, missing)
                        share = sum(len(piece.numbers) for piece in pieces) / num_rows
                        progress.advance(share)
                        left -= share
                    progress.advance(left)
                    self.counts.append((num_rows, len(sizes)))
                    write_json(finished, self.counts)
        finally:
            rows.unlink(missing_ok=True)  # on a full disk it takes the room that is missing

    def _choose_pieces(self, i: int, sizes: np.ndarray) -> Iterator[list[Piece]]:
        """Choose rows of a file, of these bytes each, and yield them in pieces. Those are to be converted before the
        next ones are chosen, and are the same after an interruption."""
        numbers, num_pieces = np.flatnonzero(sizes), 0
        keys = self._make_keys(i, numbers)
        order = np.argsort(keys, stable=True)
        numbers, keys = numbers[order], keys[order]
        while len(numbers := numbers[: np.searchsorted(keys, self.largest_key, side="right")]):
            size = _ROUND_ROWS
            if missing := max(0, (self.request.sample or 0) - len(self._best_keys)):
                # As many as the sample lacks, by the share of rows that have passed.
                size = min(size, missing * (self._num_examined + 1) // (self._num_kept + 1) + _BATCH_ROWS)
            chosen, numbers, keys = np.sort(numbers[:size]), numbers[size:], keys[size:]
            pieces: list[Piece] = []
            for start in range(0, len(chosen), _PIECE_ROWS):
                part = chosen[start : start + _PIECE_ROWS]
                results = self.folder / "results" / f"{i:05d}-{num_pieces + len(pieces):07d}.arrow"
                pieces.append(Piece(part, int(sizes[part].max()), results))
            yield pieces
            num_pieces += len(pieces)
            self._count_results(i, _read_tables(piece.results for piece in pieces))

    def _make_keys(self, i: int, numbers: np.ndarray) -> np.ndarray:
        """Make the keys of rows of a file, uint64 [n]: a sample is the rows with the smallest keys."""
        if self.request.sample is None:
            return np.zeros(len(numbers), np.uint64)
        return np.array([make_sample_key(self.request.seed, i + 1, n) for n in numbers.tolist()], np.uint64)

    def _read_results(self, beginning: str) -> "Table":
        return _read_tables(sorted((self.folder / "results").glob(f"{beginning}*.arrow")))

    def _count_results(self, i: int, results: "Table") -> None:
        """Update the sample's keys and the counts of rows from results of a file."""
        import pyarrow.compute as pc

        kept = results["number"].to_numpy()[pc.list_value_length(results["input_ids"]).to_numpy() > 0]
        self._num_examined += len(results)
        self._num_kept += len(kept)
        if self.request.sample is not None:
            self._best_keys = np.sort(np.append(self._best_keys, self._make_keys(i, kept)))[: self.request.sample]

    def _results(self) -> Iterator[tuple[int, "Table", int]]:
        """Yield file, results and place there, of each row that the sample is drawn from, in the order of the rows."""
        for i in range(len(self.files)):
            results = self._read_results(f"{i:05d}-")
            numbers = results["number"].to_numpy()
            order = np.argsort(numbers)
            for place in order[self._make_keys(i, numbers[order]) <= self.largest_key].tolist():
                yield i, results, place

    def report(self) -> PrepareReport:
        """Count the outcomes of all rows."""
        report = PrepareReport(self.request, sum(num_rows for num_rows, _ in self.counts))
        for i, results, place in self._results():
            report.count(pickle.loads(results["result"][place].as_py()), self.files[i].name)
        return report

    def sequences(self) -> Iterator[TokenizedSequence]:
        """Yield the kept sequences in the order of the rows, which is the order of their ids."""
        first_rows = self.first_rows
        for i, results, place in self._results():
            ids, marks = (results[name][place].values.to_numpy() for name in ("input_ids", "marks"))
            if len(ids):
                number = first_rows[i][1] + results["number"][place].as_py()
                yield TokenizedSequence(number, ids, (marks & SUPERVISED) > 0, (marks & IN_ANSWER) > 0)


def _read_tables(paths: Iterable[Path]) -> "Table":
    import pyarrow as pa

    return pa.concat_tables([convert.make_schema().empty_table(), *map(_read_table, paths)])


def _read_table(path: Path) -> "Table":
    """Map a table into memory."""
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def make_sample_key(seed: int, file_number: int, number: int) -> int:
    """Make the key of a row, uniform in 64 bits."""
    digest = hashlib.blake2b(f"{seed} {file_number} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def prepare(
    request: PrepareRequest,
    output: Path,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    processes: int = 1,
    max_malformed: float = 0.01,
    again: bool = False,
    say: Callable[[str], None] = print,
    note: Callable[[str], None] | None = None,
) -> PrepareReport | None:
    """Make the store `output`. Returns None if the same request has made it before. `tokenizer`: the request's, if it
    is loaded. `max_malformed`: largest share of malformed rows. `again`: delete the unfinished work of an earlier
    attempt. `say` is called with progress, `note` (None for `say`) with the final table. Raises UserError if the
    request or the data cannot be used, or another process is making `output`, and OSError if it cannot be written;
    results are kept, unless the same request can never succeed."""
    if output.exists() and not (output / MANIFEST).is_file():
        raise UserError(f"{output}: is there already and is no token store; {_REMEDY}")
    for source in request.sources:  # before transformers is imported
        check_source(source, request.split)
    tokenizer = load_tokenizer(request.tokenizer, "--tokenizer") if tokenizer is None else tokenizer
    check_tokenizer(tokenizer)
    files = find_files(request.sources, request.split)
    origin = request.describe_origin(files, tokenizer)
    if output.exists():
        _check_finished(output, origin)
        say(f"{output}: is there already, made from the same data with the same tokenizer, template, filters and seed")
        return None
    check_folder(output)  # before the work: only the name with `.unfinished` may be allowed
    with unfinished_work(output, say) as folder:
        refuse_existing(output, "a new folder")  # another process may have made it since
        resume_or_begin(folder, {"version": __version__, **origin}, say, again=again)
        conversion = Conversion(request, files, folder)
        conversion.run(processes, say)
        report = conversion.report()
        listed = output.with_name(f"{output.name}.malformed.txt")
        if report.faults:
            write_text(listed, "\n".join([*dict.fromkeys(report.faults), ""]))
        sources, listing = ", ".join(request.sources), f". All of them: {listed}"
        refuse_malformed(sources, report.faults, report.num_drawn, max_malformed, listing)
        if not report.num_kept:
            discard_parts(folder)  # the same request would fail again, and another one cannot use them
            raise UserError(f"{', '.join(request.sources)}: no row is left.\n{report.describe()}")
        store = folder / "store"
        shutil.rmtree(store, ignore_errors=True)  # one that was finished just before a kill
        entries = {**origin, **report.manifest(), "first_rows": conversion.first_rows}
        del entries["tokenizer"]  # write_store adds it
        write_store(store, conversion.sequences(), tokenizer, **entries)
        store.rename(output)  # already flushed
        flush(output.parent)
        if report.faults:
            say(f"malformed rows: {listed}")
    (note or say)(report.describe())
    return report


def _check_finished(output: Path, origin: dict[str, object]) -> None:
    """Raise UserError unless `output` is a store of this origin."""
    manifest = read_manifest(output)
    if differences := describe_differences({key: manifest.get(key) for key in origin}, origin):
        raise UserError(f"{output}: found a store that was made otherwise; {_REMEDY}:\n{differences}")
