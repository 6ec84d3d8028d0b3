"""`vcore-ds prepare`: raw rows to a token store, in chunks of rows, so that it resumes after a kill.

    OUTPUT.unfinished/request.json    the request; another one is refused
    OUTPUT.unfinished/chunks/         the results of each finished chunk, NUMBER OF THE FILE-NUMBER OF THE CHUNK.arrow

The store does not depend on the number of processes or on interruptions: a sample consists of the rows with the
smallest keys that pass all rules, and a key is a hash of the seed and the row's position. Once a sample is complete,
rows with larger keys are not looked at.
"""

import importlib.util
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict
from functools import partial
from heapq import heappop, heappush
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import discard_parts, resume_or_begin, unfinished_work
from vcore_ds.common.paths import check_folder, flush, refuse_existing, write_text
from vcore_ds.common.text import Progress
from vcore_ds.common.version import __version__
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.prepare import convert
from vcore_ds.data.prepare.convert import KEPT, make_sample_key, read_results
from vcore_ds.data.prepare.curation import PrepareRequest, check_finished, describe_origin
from vcore_ds.data.prepare.report import PrepareReport
from vcore_ds.data.prepare.sources import RawFile, count_rows, find_files
from vcore_ds.data.store import IN_ANSWER, SUPERVISED, write_store
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer

_ALL_KEYS = 2**64
_MAX_LISTED = 10_000  # malformed rows that are listed


class Pool:
    """Worker processes, which end with this one; with one process, the work is done in this one.

    Not the processes of `datasets`: `map` forks this process, which in a run has the threads of its process group, and
    its workers and the manager of their queue survive a kill.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._executor = None
        if processes > 1:
            context = multiprocessing.get_context("forkserver")
            # The server has imported everything and has no threads, so forking is safe and fast. Arrow imports pandas.
            context.set_forkserver_preload([convert.__name__, "pandas", "transformers.models.auto.tokenization_auto"])
            self._executor = ProcessPoolExecutor(processes, context, initializer=_end_with_parent)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
        """Yield results as they complete. `calls` is consumed lazily, at most two calls per process ahead."""
        if self._executor is None:
            yield from (call() for call in calls)
            return
        running = set()
        for call in calls:
            running.add(self._executor.submit(call))
            if len(running) >= 2 * self.processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in as_completed(running))


def _end_with_parent() -> None:
    """Exit when the parent was killed, which pool processes otherwise survive."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # several processes already run at once
    parent = parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Conversion:
    """The conversion of all files, in a folder of finished chunks."""

    def __init__(self, request: PrepareRequest, files: Sequence[RawFile], folder: Path) -> None:
        self.request, self.files, self.folder = request, files, folder
        self.num_rows = 0  # that are not blank
        self.first_rows: list[tuple[str, int]] = []
        """of each source, its name and the position of its first row among all rows and blank lines"""
        self._best: list[int] = []  # negative keys of the sample so far, a heap

    @property
    def largest_key(self) -> int:
        """Of the sample; rows with larger keys are not part of it."""
        return -self._best[0] if len(self._best) == self.request.sample else _ALL_KEYS

    def run(self, pool: Pool, say: Callable[[str], None]) -> None:
        """Convert the chunks that are not finished."""
        self.folder.mkdir(exist_ok=True)
        finished = self._paths()
        for path in finished:
            results = read_results(path, ["key", "outcome"]).to_pydict()
            self._learn([key for key, outcome in zip(*results.values(), strict=True) if outcome == KEPT])
        if finished:
            say(f"{len(finished):,} chunks were finished before")
        with Progress("Preparing", len(self.files), say=say) as progress:
            for keys in pool.run(self._calls(progress)):
                self._learn(keys)

    def _learn(self, keys: Iterable[int]) -> None:
        if self.request.sample is None:
            return
        for key in keys:
            heappush(self._best, -key)
            if len(self._best) > self.request.sample:
                heappop(self._best)

    def _calls(self, progress: Progress) -> Iterator[Callable[[], list[int]]]:
        number = position = 0
        for i, file in enumerate(self.files):
            if file.is_first:
                self.first_rows.append((file.source, position))
                number = 0
            size, done = 0 if file.hub else Path(file.path).stat().st_size, 0.0
            for j, chunk in enumerate(file.chunks()):
                numbers = range(number, number := number + len(chunk))
                position += len(chunk)
                self.num_rows += count_rows(chunk)
                share = sum(map(len, chunk)) / size if size and isinstance(chunk, list) else 0.0
                progress.advance(min(share, 1.0 - done))  # of compressed files it is too large
                done = min(1.0, done + share)
                path = self.folder / f"{i:05d}-{j:07d}.arrow"
                keys = [make_sample_key(self.request.seed, len(self.first_rows), number) for number in numbers]
                drawn = [k for k, key in enumerate(keys) if key <= self.largest_key]
                if drawn and not path.exists():
                    taken = [chunk[k] for k in drawn] if isinstance(chunk, list) else chunk.take(drawn)
                    places = [numbers[k] for k in drawn], [keys[k] for k in drawn]
                    yield partial(convert.convert_chunk, self.request, file, taken, *places, path)
            progress.advance(1.0 - done)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.arrow"))

    def report(self) -> PrepareReport:
        """Count the outcomes of all rows."""
        request = self.request
        report = PrepareReport(request.kind, request.sample, request.cutoff_length, self.num_rows)
        columns = [name for name in convert.make_schema().names if name not in ("input_ids", "marks")]
        for path in self._paths():
            for result in read_results(path, columns).to_pylist():
                if result["key"] <= self.largest_key:
                    report.count(result, self._find_source(path).source)
        return report

    def sequences(self) -> Iterator[TokenizedSequence]:
        """Yield the kept sequences in the order of the rows, which is the order of their ids."""
        for path in self._paths():
            results = read_results(path, ["number", "key", "outcome", "input_ids", "marks"])
            first = self.first_rows[self._count_sources(path) - 1][1]
            for i, key in enumerate(results["key"].to_pylist()):
                if key <= self.largest_key and results["outcome"][i].as_py() == KEPT:
                    ids, marks = (results[name][i].values.to_numpy() for name in ("input_ids", "marks"))
                    number = first + results["number"][i].as_py()
                    yield TokenizedSequence(number, ids, (marks & SUPERVISED) > 0, (marks & IN_ANSWER) > 0)

    def _find_source(self, path: Path) -> RawFile:
        return self.files[int(path.name[:5])]

    def _count_sources(self, path: Path) -> int:
        return sum(file.is_first for file in self.files[: int(path.name[:5]) + 1])


def prepare(
    request: PrepareRequest,
    output: str | Path,
    *,
    processes: int = 1,
    max_malformed: float = 0.01,
    again: bool = False,
    say: Callable[[str], None] = print,
    note: Callable[[str], None] | None = None,
) -> PrepareReport | None:
    """Make the store `output`. Returns None if the same request has made it before.

    Args:
        max_malformed: largest allowed share of malformed rows.
        again: delete the unfinished work of an earlier attempt.
        say: called with progress.
        note: called with the formats of the rows and the final table; None for `say`.

    Raises:
        UserError: the request or the data cannot be used, or another process is making `output`. Finished chunks are
            kept, unless the same request can never succeed.
        OSError: `output` cannot be written.
    """
    output, note = Path(output), note or say
    tokenizer = load_tokenizer(request.tokenizer, "--tokenizer")
    check_tokenizer(tokenizer)
    if request.kind == "math" and importlib.util.find_spec("math_verify") is None:
        raise UserError("prepare math: found no math-verify; expected the extra `math`: pip install 'vcore_ds[math]'")
    files = find_files(request.sources, request.split)
    origin = describe_origin(request, files, tokenizer)
    if output.exists():
        check_finished(output, origin)
        say(f"{output}: is there already, made from the same data with the same tokenizer, template, filters and seed")
        return None
    for source, number in Counter(file.source for file in files if file.is_first).items():
        if number > 1:
            note(f"{source}: named {number} times, so each of its rows counts {number} times")
    check_folder(output)  # before the work: only the name with `.unfinished` may be allowed
    with unfinished_work(output, say) as folder:
        refuse_existing(output, "a new folder")  # another process may have made it since
        identity = {key: value for key, value in origin.items() if key != "filters_hash"}  # redundant
        resume_or_begin(folder, {"version": __version__, **identity}, say, again=again)
        conversion = Conversion(request, files, folder / "chunks")
        try:
            with Pool(processes) as pool:
                conversion.run(pool, say)
        finally:
            convert.make_checker(request.answer_seconds).close()
        report = conversion.report()
        path = _list_malformed(folder, report.faults)
        refuse_malformed(", ".join(request.sources), report.num_malformed, report.num_drawn, max_malformed, str(path))
        if not report.num_kept:
            discard_parts(folder)  # the same request would fail again, and another one cannot use them
            raise UserError(f"{', '.join(request.sources)}: no row is left.\n{report.describe()}")
        staged = folder / "store"
        shutil.rmtree(staged, ignore_errors=True)  # a store that was finished just before a kill
        write_store(
            staged,
            conversion.sequences(),
            tokenizer,
            # write_store adds the tokenizer.
            **{key: value for key, value in origin.items() if key != "tokenizer"},
            counts={
                "rows": report.num_rows,
                "malformed": report.num_malformed,
                "drawn": report.num_drawn,
                "dropped": report.dropped,
                "kept": report.num_kept,
                "noticed": report.noticed,
                "shapes": report.shapes,
                "reading": report.describe_reading(),
            },
            longest=report.longest,
            lengths=report.lengths and asdict(report.lengths),
            first_rows=conversion.first_rows,
        )
        staged.rename(output)  # already flushed
        flush(output.parent)
        if report.faults:
            kept = path.rename(output.with_name(f"{output.name}.malformed.txt"))
            say(f"malformed rows: {kept}")
    note(report.describe())
    return report


def _list_malformed(folder: Path, faults: Sequence[str]) -> Path:
    path = folder / "malformed.txt"
    if faults:
        more = [f"and {len(faults) - _MAX_LISTED:,} more"] if len(faults) > _MAX_LISTED else []
        write_text(path, "\n".join([*dict.fromkeys(faults[:_MAX_LISTED]), *more]) + "\n")
    return path


def refuse_malformed(source: str, number: int, num_rows: int, max_malformed: float, listed: str) -> None:
    """Raise UserError if the share of malformed rows is too large; `listed`: the file that names them."""
    if number > max_malformed * num_rows:
        first = Path(listed).read_text(encoding="utf-8").partition("\n")[0]
        advice = ", or raise the share to leave them out" if number < num_rows else ""
        raise UserError(
            f"{source}: {number:,} of {num_rows:,} rows are malformed ({number / num_rows:.2%}), expected at most "
            f"{max_malformed:.2%} (prepare --max-malformed, in a recipe data.max_malformed). The first: {first}\n"
            f"More of them: {listed}. Fix the data{advice}."
        )
