"""`vcore-ds prepare`: raw rows to a token store, in two passes over shards that resume after a kill.

    OUTPUT.unfinished/request.json    the request; another one is refused
    OUTPUT.unfinished/curated/        for each shard of raw rows: the conversations that passed, and a report
    OUTPUT.unfinished/tokenized/      for each block of conversations: their tokens

The next run continues with the unfinished shards. The store does not depend on the number of processes or on
interruptions: a sample consists of the rows with the smallest keys, and a key is a hash of the seed and the row's
position.
"""

import importlib.util
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict
from functools import partial
from heapq import nsmallest
from itertools import islice
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from vcore_ds import __version__
from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import discard_parts, resume_or_begin, unfinished_work
from vcore_ds.common.paths import check_folder, flush, refuse_existing
from vcore_ds.common.text import Progress
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare import selection
from vcore_ds.data.prepare import shards as work
from vcore_ds.data.prepare.curation import PrepareRequest, check_finished, describe_origin
from vcore_ds.data.prepare.rows import list_names, read_chat_row
from vcore_ds.data.prepare.shards import Curated, FirstRow, ShardReport
from vcore_ds.data.prepare.sources import BLANK, Broken, Shard, find_shards
from vcore_ds.data.store import write_store
from vcore_ds.data.tokenization import load_tokenizer


class Pool:
    """Worker processes, which end with this one; with one process, the work is done in this one."""

    def __init__(self, processes: int, preload: list[str]) -> None:
        """`preload`: modules to import once, before the processes are forked."""
        self.processes = processes
        self._executor = None
        if processes > 1:
            context = multiprocessing.get_context("forkserver")
            # The server has imported everything and has no threads, so forking is safe and fast.
            context.set_forkserver_preload(preload)
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


_BLOCK = 128  # conversations in a block, the unit of tokenization
_ALL_KEYS = 2**64


class TooManyFaults(UserError):
    """More rows are malformed than allowed, but not all."""

    def __init__(self, message: str, share: float):
        super().__init__(message)
        self.share = share


def prepare(
    request: PrepareRequest,
    output: str | Path,
    *,
    processes: int = 1,
    max_malformed_share: float = 0.01,
    again: bool = False,
    say: Callable[[str], None] = print,
    note: Callable[[str], None] | None = None,
) -> selection.PrepareReport | None:
    """Make the store `output`. Returns None if the same request has made it before.

    Args:
        max_malformed_share: largest allowed share of malformed rows.
        again: delete the unfinished work of an earlier attempt.
        say: called with progress.
        note: called with the formats of the rows and the final table; None for `say`.

    Raises:
        UserError: the request or the data cannot be used, or another process is making `output`. Finished shards are
            kept, unless the same request can never succeed.
        OSError: `output` cannot be written.
    """
    output, note = Path(output), note or say
    tokenizer = load_tokenizer(request.tokenizer, "--tokenizer")
    check_tokenizer(tokenizer)
    if request.kind == "math" and importlib.util.find_spec("math_verify") is None:
        raise UserError("prepare math: found no math-verify; expected the extra `math`: pip install 'vcore_ds[math]'")
    raw_shards = find_shards(request.sources, request.split)
    if request.kind == "chat":
        _say_shapes(raw_shards, note)
    origin = describe_origin(request, raw_shards, tokenizer)
    if output.exists():
        check_finished(output, origin)
        say(f"{output}: is there already, made from the same data with the same tokenizer, template, filters and seed")
        return None
    check_folder(output)  # before the work: only the name with `.unfinished` may be allowed
    with unfinished_work(output, say) as folder:
        refuse_existing(output, "a new folder")  # another process may have made it since
        identity = {key: value for key, value in origin.items() if key != "filters_hash"}  # redundant
        resume_or_begin(folder, {"version": __version__, **identity}, say, again=again)

        with Pool(processes, [work.__name__]) as pool:
            reports = _curate(request, raw_shards, folder / "curated", pool, say)
            first_rows = _number_first_rows(raw_shards, reports)
            report = selection.PrepareReport(request.kind, request.sample, request.cutoff_length, request.overlong)
            report.count_shards(reports)
            faults = [
                f"{first_rows[i].locate(number)}: {reason}"
                for i, shard_report in enumerate(reports)
                for number, reason in shard_report.faults
            ]
            _refuse_faults(folder, faults, report.num_malformed, report.num_rows, max_malformed_share, "malformed")
            candidates = selection.select(request, reports, folder / "curated")
            if not candidates:
                discard_parts(folder)  # the same request would fail again, and another one cannot use them
                raise UserError(f"{', '.join(request.sources)}: no row is left.\n{report.describe()}")
            blocks = _tokenize(request, candidates, first_rows, folder, pool, say)

        chosen = selection.choose(request, blocks, report)
        faults = [str(fault) for block in blocks for fault in block["faults"]]
        num_tokenized = sum(len(block["outcomes"]) for block in blocks)
        _refuse_faults(folder, faults, len(faults), num_tokenized, max_malformed_share, "unusable with this tokenizer")
        if not chosen:
            discard_parts(folder)
            raise UserError(f"{', '.join(request.sources)}: no sequence is left.\n{report.describe()}")
        if request.sample is not None and len(chosen) < request.sample and len(candidates) < report.num_curated:
            discard_parts(folder)
            raise UserError(
                f"only {len(chosen):,} of {len(candidates):,} rows drawn at random fit --cutoff-length "
                f"{request.cutoff_length:,}, expected {request.sample:,}; raise it, truncate (--overlong truncate), or "
                f"lower --sample\n{report.describe()}"
            )
        report.lengths = selection.LengthSummary.summarize(sorted(sequence.length for sequence in chosen))

        # Back to the order of the rows, which is the order of their ids.
        chosen.sort(key=lambda sequence: sequence.sequence_id)
        counts = {"rows": report.num_rows, "malformed": report.num_malformed, "dropped": report.dropped}
        staged = folder / "store"
        shutil.rmtree(staged, ignore_errors=True)  # a store that was finished just before a kill
        write_store(
            staged,
            selection.read_sequences(folder / "tokenized", chosen),
            tokenizer,
            # write_store adds the tokenizer.
            **{key: value for key, value in origin.items() if key != "tokenizer"},
            counts={
                **counts,
                "kept": len(chosen),
                "noticed": report.noticed,
                "shapes": report.shapes,
                "reading": report.describe_reading(),
            },
            longest=report.longest,
            lengths=asdict(report.lengths),
            first_rows=[
                (shard.source, first.overall)
                for shard, first in zip(raw_shards, first_rows, strict=True)
                if shard.is_first
            ],
        )
        staged.rename(output)  # already flushed
        flush(output.parent)
        if faults or report.num_malformed:
            kept = (folder / "malformed.txt").rename(output.with_name(f"{output.name}.malformed.txt"))
            say(f"malformed rows: {kept}")
    note(report.describe())
    return report


def _curate(
    request: PrepareRequest, raw_shards: Sequence[Shard], folder: Path, pool: Pool, say: Callable[[str], None]
) -> list[ShardReport]:
    folder.mkdir(exist_ok=True)
    spare = None if request.sample is None else selection.SPARE * request.sample
    best_keys: list[int] = []

    def learn_keys(shard_number: int) -> None:
        nonlocal best_keys
        if spare is not None:
            keys = [row.key for row in work.read_curated(folder, shard_number)]
            best_keys = nsmallest(spare, best_keys + keys)

    finished = {i for i in range(len(raw_shards)) if work.is_finished(folder, i)}
    for i in finished:
        learn_keys(i)
    if finished:
        say(f"{len(finished):,} of {len(raw_shards):,} shards were finished before")

    def calls() -> Iterator[Callable[[], int]]:
        for i, shard in enumerate(raw_shards):
            if i not in finished:
                # Rows with larger keys cannot be in the sample, and are not written.
                is_full = spare is not None and len(best_keys) == spare
                key_limit = best_keys[-1] + 1 if is_full else _ALL_KEYS
                yield partial(work.curate_shard, request, shard, i, folder, key_limit)

    with Progress("Reading and filtering rows", len(raw_shards) - len(finished), say=say) as progress:
        for shard_number in progress.over(pool.run(calls())):
            learn_keys(shard_number)
    return [work.read_report(folder, i) for i in range(len(raw_shards))]


def _number_first_rows(raw_shards: Sequence[Shard], reports: Sequence[ShardReport]) -> list[FirstRow]:
    first_rows, in_source, overall = [], 0, 0
    for shard, report in zip(raw_shards, reports, strict=True):
        in_source = 0 if shard.is_first else in_source
        first_rows.append(FirstRow(shard.source, in_source, overall))
        in_source += report.num_numbers
        overall += report.num_numbers
    return first_rows


def _tokenize(
    request: PrepareRequest,
    candidates: Sequence[Curated],
    first_rows: Sequence[FirstRow],
    folder: Path,
    pool: Pool,
    say: Callable[[str], None],
) -> list[Any]:
    """Tokenize all blocks, or those that the sample needs; return them in order."""
    target = folder / "tokenized"
    target.mkdir(exist_ok=True)
    blocks: list[Any] = []
    num_blocks = -(-len(candidates) // _BLOCK)
    wanted = len(candidates) if request.sample is None else min(request.sample, len(candidates))

    def call(block_number: int) -> Callable[[], None]:
        rows = candidates[block_number * _BLOCK : (block_number + 1) * _BLOCK]
        return partial(work.tokenize_block, request, block_number, rows, first_rows, folder)

    with Progress("Tokenizing", num_blocks, say=say) as progress:
        while len(blocks) < num_blocks and (lacking := wanted - sum(len(block["lengths"]) for block in blocks)) > 0:
            numbers = range(len(blocks), min(num_blocks, len(blocks) - (-lacking // _BLOCK)))
            unfinished = [i for i in numbers if not (target / f"{i:05d}.npz").is_file()]
            progress.advance(len(numbers) - len(unfinished))
            for _ in progress.over(pool.run(map(call, unfinished))):
                pass
            blocks += [selection.read_block(target, i) for i in numbers]
    return blocks


def _say_shapes(raw_shards: Sequence[Shard], say: Callable[[str], None]) -> None:
    """Report the shape of each source's first well-formed row; later rows may have others."""
    for source, first in {shard.source: shard for shard in reversed(raw_shards)}.items():
        for _, row in islice(first.rows(), 100):
            if row is BLANK or isinstance(row, Broken):
                continue
            try:
                shape = read_chat_row(row, from_table=first.is_table).shape
            except (Malformed, Dropped):
                continue
            say(f"{source}: format {shape}, by the keys of its rows ({list_names(row)})")
            break


def _refuse_faults(
    folder: Path, faults: list[str], num_faults: int, num_rows: int, max_share: float, adjective: str
) -> None:
    """Append to the list of faults; raise UserError if there are too many."""
    if not num_faults:
        return
    path = folder / "malformed.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    path.write_text("\n".join(dict.fromkeys(lines + faults)) + "\n", encoding="utf-8")
    if num_faults > max_share * num_rows:
        expected = f"at most {max_share:.2%} (--max-malformed)" if max_share else "none"
        advice = "Fix the data" if not max_share else "Fix the data and add --again, or raise --max-malformed to go on"
        message = (
            f"{num_faults:,} of {num_rows:,} rows are {adjective} ({num_faults / num_rows:.2%}), expected {expected}. "
            f"The first: {faults[0]}\nMore of them: {path}. {advice}."
        )
        raise UserError(message) if num_faults == num_rows else TooManyFaults(message, num_faults / num_rows)
