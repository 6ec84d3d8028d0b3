"""`vcore-ds prepare` as a user runs it: killed and run again, or refused."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.commands import HANG_SECONDS
from tests.helpers.jobs import ForkedJob
from tests.helpers.tokenizer import make_tokenizer
from tests.unit.test_prepare import make_math_row, read_contents
from vcore_ds.commands.cli import main
from vcore_ds.data.prepare.pipeline import Pool
from vcore_ds.data.store import TokenStore

pytestmark = pytest.mark.e2e


def prepare_and_stall(words: Sequence[str]) -> int:
    """Run the command up to its first finished chunk and wait there to be killed."""
    run = Pool.run

    def run_and_stall(self, calls):
        yield next(run(self, calls))
        time.sleep(600)

    Pool.run = run_and_stall
    return main(words)


@pytest.fixture
def prepare_words(tmp_path: Path) -> list[str]:
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [make_math_row(n, expected_answer=str(n + n % 3 // 2)) for n in range(300)]
    (tmp_path / "raw").mkdir()
    for part in range(6):
        table = pa.Table.from_pylist(rows[part::6])
        pq.write_table(table, tmp_path / "raw" / f"cot-0000{part}-of-00006.parquet")
    return f"prepare math {tmp_path}/raw --tokenizer {tmp_path}/model --sample 75".split()


def test_a_killed_prepare_resumes_to_the_same_bytes(
    prepare_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*prepare_words, "--output", f"{tmp_path}/straight", "--processes", "1"]) == 0
    straight = capsys.readouterr().out
    assert "rows read" in straight and "the paper (CoT, Qwen3)" in straight and f"{'kept':<10}" in straight

    chunks = tmp_path / "store.unfinished" / "chunks"
    words = [*prepare_words, "--output", f"{tmp_path}/store", "--processes", "2"]
    with ForkedJob(prepare_and_stall, words, tmp_path / "log") as job:
        process = job.rank(0)
        deadline = time.monotonic() + HANG_SECONDS
        while not list(chunks.glob("*.arrow")):
            assert process.is_running() and time.monotonic() < deadline, job.output
            time.sleep(0.01)
        process.kill()  # only this process: its children must notice
    deadline = time.monotonic() + HANG_SECONDS
    while _is_alive(process.pid):
        assert time.monotonic() < deadline, "processes outlive the command that was killed"
        time.sleep(0.1)
    num_finished = len(list(chunks.glob("*.arrow")))

    assert main([*prepare_words, "--output", f"{tmp_path}/store", "--processes", "1"]) == 0
    again = capsys.readouterr().out
    assert "resuming where an earlier run ended" in again
    assert f"{num_finished} chunks were finished before" in again
    assert read_contents(tmp_path / "store") == read_contents(tmp_path / "straight")
    assert len(TokenStore(tmp_path / "store", make_tokenizer())) == 75


def _is_alive(group: int) -> bool:
    """Whether a process of this process group is still running."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    # killpg also succeeds for zombies, which have ended.
    states = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            states.append(fields[0])
    return any(state != "Z" for state in states)


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    assert main(f"prepare chat --tokenizer {tmp_path}/model --output {tmp_path}/store".split()) == 2
    output = capsys.readouterr()
    assert "prepare chat: found no SOURCE" in output.out + output.err and "Traceback" not in output.err
    assert not (tmp_path / "store").exists()
