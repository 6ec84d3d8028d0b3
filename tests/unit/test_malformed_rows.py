"""Malformed rows: each is counted with its file and line, and no other row is lost."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.conversations import make_row, prepare_rows
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import parse
from vcore_ds.common.errors import UserError
from vcore_ds.data.prepare.rows import read_chat_rows
from vcore_ds.data.prepare.sources import find_files
from vcore_ds.data.store import TokenStore

GOOD = make_row("one?", "1")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    # A template that looks into a key that nobody checks, and writes calls and tools as JSON.
    make_tokenizer(
        "{% for m in messages %}{% for t in m.x or [] %}{{ t }}{% endfor %}{{ m.role + ' ' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"
    ).save_pretrained(folder)
    return folder


def read_back(source: Path, tokenizer: Path, **options) -> tuple[list[int], list[str]]:
    """Rows that became sequences, and the report of the malformed ones."""
    output = source.with_name("store")
    prepare_rows(source, output, tokenizer, **options)
    report = output.with_name("store.malformed.txt")
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return TokenStore(output).sequence_ids.tolist(), lines


LINES = {
    "integer of 5,000 digits": (b'{"messages": ' + b"9" * 5000 + b"}", "not JSON (Exceeds the limit"),
    "100,000 brackets": (b"[" * 100_000, "not JSON (maximum recursion depth exceeded"),
    "100,000 objects": (b'{"a": ' * 100_000, "not JSON (maximum recursion depth exceeded"),
    "no UTF-8": (b'{"messages": "\xff"}', "not JSON ('utf-8' codec can't decode byte 0xff in position 14"),
    "NUL": (b"\0" * 10, "not JSON (Expecting value: line 1 column 1"),
    "cut off": (b'{"messages": [', "not JSON"),
    "NaN": (b'{"messages": NaN}', "`messages` is a number (NaN)"),
    "half of a surrogate pair": (
        b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}',
        "half of a surrogate pair",
    ),
    "a million keys' characters": (b'{"' + b"k" * 10**6 + b'": 1}', "found the keys kkk"),
    "speaker of a million characters": (
        b'{"conversations": [{"from": "' + b"x" * 10**6 + b'", "value": "a"}]}',
        "turn 1 is from 'xxx",
    ),
    "key that breaks the template": (
        b'{"messages": [{"role": "user", "content": "a", "x": 3}, {"role": "assistant", "content": "a"}]}',
        "refuses this conversation (roles user, assistant): TypeError: 'int' object is not iterable",
    ),
}


def test_malformed_lines_are_reported_and_other_rows_kept(tmp_path: Path, tokenizer: Path) -> None:
    source, good = tmp_path / "rows.jsonl", json.dumps(GOOD).encode()
    source.write_bytes(b"\n".join([good, *(line + b"\n" + good for line, _ in LINES.values())]))
    kept, report = read_back(source, tokenizer)
    assert kept == list(range(0, 2 * len(LINES) + 1, 2))
    faults = dict(fault.split(": ", 1) for fault in report)
    assert len(report) == len(faults) == len(LINES) and max(map(len, report)) < 1500
    for number, (_, reason) in enumerate(LINES.values()):
        assert reason in faults[f"{source}:{2 * number + 2}"]


READ_LONG_LINE = """
import resource, sys
from tests.unit.test_malformed_rows import read_back
from pathlib import Path
import pyarrow, transformers.models.auto.tokenization_auto
source, tokenizer = map(Path, sys.argv[1:])
short = source.parent / "short" / "rows.jsonl"
short.parent.mkdir()
short.write_text(source.read_text().splitlines()[1])
read_back(short, tokenizer)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*read_back(source, tokenizer)[0])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_line_of_60_megabytes_takes_a_few_times_its_size(tmp_path: Path, tokenizer: Path) -> None:
    long = json.dumps(make_row("one?", "word " * 12_000_000))
    (tmp_path / "rows.jsonl").write_text(f"{long}\n{json.dumps(GOOD)}")
    command = [sys.executable, "-c", READ_LONG_LINE, str(tmp_path / "rows.jsonl"), str(tokenizer)]
    kept, kilobytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert kept == "1" and int(kilobytes) * 1024 < 6 * len(long)


def make_invalid_text(rows: Sequence[bytes]) -> pa.Array:
    """A column of strings that says that its bytes are UTF-8."""
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(rows), pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(rows)))


def test_parquet_row_that_is_no_text_is_malformed(tmp_path: Path, tokenizer: Path) -> None:
    content = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"] * 3), make_invalid_text([b"a", b"b", b"c", b"\xff", b"e", b"f"])],
        ["role", "content"],
    )
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 2, 4, 6], content)}), source)
    kept, report = read_back(source, tokenizer)
    assert kept == [0, 2]
    assert [fault.partition(" (")[0] for fault in report] == [f"{source}:2: not readable"]


COLUMNS = {
    "bytes": (pa.array([b"\xff", b"a"]), "`messages` is bytes ("),
    "times": (pa.array([10**18, 1], pa.int64()).cast(pa.timestamp("us")), "not readable (date value out of range)"),
    "numbers": (pa.array([1.5, 2.5]), "`messages` is a number (1.5)"),
    "nulls": (pa.nulls(2), "found the keys none"),
}


@pytest.mark.parametrize(("column", "reason"), COLUMNS.values(), ids=COLUMNS.keys())
def test_parquet_of_other_columns_is_malformed(column, reason: str, tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"messages": column}), source)
    with pytest.raises(UserError, match="2 of 2 rows are malformed") as error:
        read_back(source, tokenizer, max_malformed=0.9)
    assert f"first {source}:1: " in str(error.value) and reason in str(error.value)


def test_time_within_a_message_is_ignored(tmp_path: Path, tokenizer: Path) -> None:
    time = pa.array([0], pa.int64()).cast(pa.timestamp("us")).to_pylist()[0]
    messages = [[{**message, "at": at} for message in GOOD["messages"]] for at in (time, None)]
    pq.write_table(pa.table({"messages": messages}), tmp_path / "rows.parquet")
    assert read_back(tmp_path / "rows.parquet", tokenizer) == ([0, 1], [])


@pytest.mark.parametrize("share", ["nan", "-0.1", "1.5", "inf", "x"])
def test_a_limit_that_is_no_share_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["prepare", "a.jsonl", "--tokenizer", "t", "--output", "o", f"--max-malformed={share}"])
    assert f"--max-malformed: found {share}, expected a number from 0 to 1" in capsys.readouterr().err


def test_null_arguments_in_a_table_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    """Whether the row had the argument, a table does not tell: {"a": null, "b": 2} and {"b": 2} are the same in it."""

    def make_call_row(arguments: object) -> dict:
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return {"messages": [GOOD["messages"][0], call, {"role": "tool", "content": "3"}, GOOD["messages"][1]]}

    rows = [make_call_row({"a": 1, "b": 2}), make_call_row({"a": None, "b": 2})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist([make_call_row(json.dumps({"a": None}))]), tmp_path / "text.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, expected, has_null in (
        ("rows.parquet", [{"a": 1, "b": 2}, {"b": 2}], [False, True]),
        ("rows.jsonl", [{"a": 1, "b": 2}, {"a": None, "b": 2}], [False, False]),
        ("text.parquet", [{"a": None}], [False]),
    ):
        (file,) = find_files([str(tmp_path / name)], "train")
        chats = list(read_chat_rows(file))
        assert [chat.messages[1]["tool_calls"][0]["function"]["arguments"] for chat in chats] == expected
        assert [chat.has_null_arguments for chat in chats] == has_null
    report = prepare_rows(tmp_path / "rows.parquet", tmp_path / "store", tokenizer)
    assert report is not None and report.num_kept == 2
    assert any("null arguments" in text and number == 1 for text, number in report.noticed.items())
