"""`vcore-ds prepare` as a user runs it: killed and run again, or refused."""

import re
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.commands import HANG_SECONDS
from tests.helpers.conversations import make_row, write_lines
from tests.helpers.jobs import ForkedJob
from tests.helpers.soak import IS_SOAK
from tests.helpers.tokenizer import make_tokenizer
from tests.unit.test_prepare import read_contents
from vcore_ds.commands.cli import main
from vcore_ds.data.store import TokenStore

pytestmark = pytest.mark.e2e

NUM_ROWS, NUM_LONG = 520, 1_024  # of each of two files, and of one with long rows; two processes share them


def test_a_killed_prepare_leaves_no_process_and_resumes_to_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "raw").mkdir()
    for part in range(2):
        texts = {n: "<think>\nt" if n % 3 == 2 else "x y " * 500 for n in range(part, 2 * NUM_ROWS, 2)}
        table = pa.Table.from_pylist([make_row(f"q{n}", text) for n, text in texts.items()])
        pq.write_table(table, tmp_path / "raw" / f"train-0000{part}-of-00002.parquet")
    words = f"prepare {tmp_path}/raw --tokenizer {tmp_path}/model --output {tmp_path}".split()
    words, output = words[:-1], words[-1]
    assert main([*words, f"{output}/straight", "--processes", "1"]) == 0
    straight = capsys.readouterr().out
    assert "rows read" in straight and f"{'kept':<10}" in straight

    with ForkedJob(main, [*words, f"{output}/store", "--processes", "2"], tmp_path / "log") as job:
        command = job.rank(0)
        deadline = time.monotonic() + HANG_SECONDS
        descendants: list[psutil.Process] = []
        # Until the second file is converted: by two workers, and the process that has forked them.
        while not (tmp_path / "store.unfinished" / "files.json").exists() or len(descendants) < 3:
            assert command.is_running() and time.monotonic() < deadline, job.output
            descendants = command.children(recursive=True)
            time.sleep(0.01)
        command.kill()  # only this process
        _, left = psutil.wait_procs(descendants, HANG_SECONDS)
        assert not left
    assert main([*words, f"{output}/store", "--processes", "1"]) == 0
    again = capsys.readouterr().out
    converted = re.search(r"([\d,]+) rows were converted before", again)
    assert "resuming where an earlier run ended" in again
    assert converted and NUM_ROWS <= int(converted[1].replace(",", "")) < 2 * NUM_ROWS
    assert read_contents(tmp_path / "store") == read_contents(tmp_path / "straight")
    assert len(TokenStore(tmp_path / "store", make_tokenizer())) == sum(n % 3 < 2 for n in range(2 * NUM_ROWS))


def test_a_killed_worker_ends_the_command_with_one_message(tmp_path: Path) -> None:
    """A worker that converts rows, and the process that has forked it; in `make soak` also an idle worker, whose end is
    found in the same way. Each run goes on from the last."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    # The first of several pieces is done at once.
    rows = [make_row("q", "answer" if n < 256 else "x y " * 500) for n in range(NUM_LONG)]
    source, output = write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "store"
    words = f"prepare {source} --tokenizer {tmp_path}/model --output {output} --processes 2".split()
    for victim in ("busy", "parent", *(["idle"] if IS_SOAK else [])):
        with ForkedJob(main, words, tmp_path / victim) as job:
            deadline, workers = time.monotonic() + HANG_SECONDS, list[psutil.Process]()
            while len(workers) < 2 or not list(tmp_path.glob("store.unfinished/results/*.arrow")):
                assert job.rank(0).is_running() and time.monotonic() < deadline, job.output
                workers = [grandchild for child in job.rank(0).children() for grandchild in child.children()]
                time.sleep(0.01)
            workers.sort(key=lambda worker: worker.pid)
            {"idle": workers[0], "busy": workers[1], "parent": workers[0].parent()}[victim].kill()
            assert job.wait(HANG_SECONDS) == 2
            messages = [line for line in job.output.splitlines() if "--processes" in line]
            assert len(messages) == 1 and "killed" in messages[0] and "Traceback" not in job.output
    assert main([*words[:-1], "1"]) == 0  # a process for two takes seconds to import everything
    assert TokenStore(output).sequence_ids.tolist() == list(range(NUM_LONG))


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    assert main(f"prepare --tokenizer {tmp_path}/model --output {tmp_path}/store".split()) == 2
    output = capsys.readouterr()
    assert "prepare: found no SOURCE" in output.out + output.err and "Traceback" not in output.err
    assert not (tmp_path / "store").exists()
