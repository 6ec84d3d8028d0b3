"""Rows per second of `vcore-ds prepare math`, the tokenizer's share of them, and time and memory to open a large store.

    python -m tests.benchmarks.prepare --tokenizer MODEL [--rows 4000] [--sequences 1000000] [--processes 1 2]
    python -m tests.benchmarks.prepare --tokenizer MODEL --rows 0 --sequences 50000 --sequence-tokens 4096    # 1 GB

The rows have the schema of OpenMathReasoning and traces of its length (mean about 3,000 tokens): English words, numbers
and LaTeX, all tokenized, with answers for math-verify. MODEL is a folder with a tokenizer.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.conversations import tokenize
from vcore_ds.data.answers import AnswerChecker
from vcore_ds.data.conversations import Conversation
from vcore_ds.data.messages import Dropped
from vcore_ds.data.prepare import curation
from vcore_ds.data.prepare.curation import PrepareRequest
from vcore_ds.data.prepare.pipeline import prepare
from vcore_ds.data.prepare.sources import find_shards
from vcore_ds.data.store import TokenStore, _import_indexed_dataset, write_store
from vcore_ds.data.store_checks import check_contents
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer

WORDS = (
    "Okay so let me think about this problem carefully we need to find the value of and then wait maybe it is better "
    "to substitute first because the equation has two roots hmm which means that the sum equals therefore by symmetry"
).split()


def write_rows(folder: Path, num_rows: int) -> None:
    """Write Parquet files of 1,000 rows. Each cheap filter drops a seventh; a fifth of the rest has a wrong answer."""
    random = np.random.default_rng(0)
    for start in range(0, num_rows, 1000):
        rows = [make_math_row(random, i) for i in range(start, min(start + 1000, num_rows))]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"cot-{start:07d}.parquet")


def make_math_row(random: np.random.Generator, i: int) -> dict:
    a, b = (int(n) for n in random.integers(2, 1000, 2))
    answer = f"\\frac{{{a}}}{{{b}}}" if i % 5 else f"\\frac{{{a + 1}}}{{{b}}}"
    words = random.choice(WORDS, int(min(12_000, 1_400 * np.exp(0.7 * random.standard_normal())))).tolist()
    for k in range(0, len(words), 12):
        words[k] = f"$x_{{{k}}} = {int(random.integers(1000))}$,\n"
    return {
        "expected_answer": f"{2 * a}/{2 * b}",
        "problem_type": "has_answer_extracted" if i % 7 else "no_answer_extracted",
        "problem_source": "aops_c4_high_school_math",
        "generation_model": "DeepSeek-R1" if i % 7 != 1 else "QwQ-32B",
        "pass_rate_72b_tir": "0.5",
        "problem": f"Simplify $\\frac{{{3 * a}}}{{{3 * b}}}$.",
        "generated_solution": f"<think>\n{' '.join(words)}\n</think>\n\nThe answer is \\boxed{{{answer}}}.",
        "inference_mode": "cot",
        "used_in_kaggle": False,
    }


def measure_command(folder: Path, tokenizer: str, num_rows: int, processes: list[int]) -> dict:
    """Seconds of the command. It keeps all rows that pass the filters, so that each is tokenized."""
    seconds, report = {}, None
    for n in processes:
        request = PrepareRequest("math", (str(folder / "raw"),), tokenizer, "cot")
        started = time.perf_counter()
        report = prepare(request, folder / f"store_{n}", processes=n, say=lambda text: None)
        seconds[n] = time.perf_counter() - started
    assert report is not None and report.lengths is not None
    return {
        "num_rows": num_rows,
        "num_kept": report.num_kept,
        "mean_length": report.lengths.mean,
        "rows_per_second": {n: num_rows / value for n, value in seconds.items()},
        "tokens_per_second": {n: report.num_kept * report.lengths.mean / value for n, value in seconds.items()},
    }


def measure_parts(folder: Path, tokenizer_name: str) -> dict:
    """Seconds of each part of the work, in this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(tokenizer_name)
    shards = find_shards([str(folder / "raw")], "cot")
    started = time.perf_counter()
    rows = [row for shard in shards for _, row in shard.rows()]
    seconds = {"reading": time.perf_counter() - started}
    seconds["rules and math-verify"], conversations = curate(rows)
    started = time.perf_counter()
    sequences = tokenize(conversations, tokenizer)
    seconds["template and tokenizer"] = time.perf_counter() - started
    _import_indexed_dataset()  # its imports take seconds, whatever the size of the data
    started = time.perf_counter()
    write_store(folder / "parts", sequences, tokenizer)
    seconds["writing"] = time.perf_counter() - started
    total = sum(seconds.values())
    return {name: {"seconds": value, "share": value / total} for name, value in seconds.items()}


def curate(rows: list[dict]) -> tuple[float, list[Conversation]]:
    checker, conversations = AnswerChecker(5), []
    checker.check("1", "1")  # its imports
    started = time.perf_counter()
    for row in rows:
        try:
            conversations.append(Conversation(len(conversations) + 1, curation.convert_math_row(row, checker.check)))
        except Dropped:
            continue
    seconds = time.perf_counter() - started
    checker.close()
    return seconds, conversations


def measure_opening(folder: Path, tokenizer_name: str, num_sequences: int, sequence_tokens: int) -> dict:
    """Write a store of equal sequences and open it in a new process; returns seconds, and memory after the imports."""
    tokenizer = load_tokenizer(tokenizer_name)
    ids, supervised = np.arange(sequence_tokens, dtype=np.int32), np.arange(sequence_tokens) > 3
    started = time.perf_counter()
    write_store(folder / "large", (TokenizedSequence(i, ids, supervised) for i in range(num_sequences)), tokenizer)
    written = time.perf_counter() - started
    command = [sys.executable, "-m", "tests.benchmarks.prepare", "--open", str(folder / "large")]
    opened = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"num_sequences": num_sequences, "seconds_writing": written, **opened}


def open_store(folder: Path) -> None:
    def count_private_bytes() -> int:
        """Memory of this process without mapped files."""
        return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

    _import_indexed_dataset()  # its imports take seconds, whatever is opened
    before, started = count_private_bytes(), time.perf_counter()
    store = TokenStore(folder)
    opened, private = time.perf_counter() - started, count_private_bytes() - before
    positions = np.random.default_rng(0).integers(0, len(store), 2000).tolist()
    started = time.perf_counter()
    for position in positions:
        store[position]
    read = (time.perf_counter() - started) / len(positions)
    checks = []
    for _ in range(2):
        started = time.perf_counter()
        check_contents(folder, folder.parent / "cache", lambda text: None)
        checks.append(time.perf_counter() - started)
    del store.manifest["max_token_id"]  # as in older stores
    started = time.perf_counter()
    store.max_token_id()
    counted = time.perf_counter() - started
    print(
        json.dumps(
            {
                "gigabytes": sum(store.manifest["files"].values()) / 1e9,
                "seconds_checksums": checks[0],
                "seconds_checksums_again": checks[1],
                "seconds_largest_token_id": counted,
                "seconds_opening": opened,
                "bytes_own": private,
                "microseconds_per_sequence_read": 1e6 * read,
                "bytes_peak_of_process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="folder with a tokenizer")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--sequences", type=int, default=1_000_000, help="of the store that is opened")
    parser.add_argument("--sequence-tokens", type=int, default=16, help="tokens of each of these sequences")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open is not None:
        open_store(arguments.open)
        return
    folder = Path(tempfile.mkdtemp())
    try:
        result = {}
        if arguments.rows:
            (folder / "raw").mkdir()
            write_rows(folder / "raw", arguments.rows)
            result["parts, one process"] = measure_parts(folder, arguments.tokenizer)
            result["command"] = measure_command(folder, arguments.tokenizer, arguments.rows, arguments.processes)
        sizes = arguments.sequences, arguments.sequence_tokens
        result["opening"] = measure_opening(folder, arguments.tokenizer, *sizes)
        print(json.dumps(result, indent=2))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
