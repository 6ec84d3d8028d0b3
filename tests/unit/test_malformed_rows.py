"""Malformed rows: each is counted with its file and line, and no other row is lost."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.setups import make_tokenizer
from vcore_ds.commands.cli import parse
from vcore_ds.common.errors import UserError
from vcore_ds.config.data_section import DataConfig
from vcore_ds.data.answers import _BOXED, _BRACE, find_answer_spans
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.prepare.curation import PrepareRequest
from vcore_ds.data.prepare.pipeline import prepare
from vcore_ds.data.prepare.rows import read_chat_rows
from vcore_ds.data.prepare.sources import find_files
from vcore_ds.data.store import TokenStore

GOOD = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}]}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    # A template that looks into a key that nobody checks, as those with tools do.
    template = make_tokenizer().chat_template
    make_tokenizer(
        f"{{% for m in messages %}}{{% for t in m.tools or [] %}}{{{{ t }}}}{{% endfor %}}{{% endfor %}}{template}"
    ).save_pretrained(folder)
    return folder


def prepare_rows(kind: str, source: Path, tokenizer: Path) -> tuple[list[int], list[str]]:
    """Rows that became sequences, and the report of the malformed ones."""
    output = source.with_name("store")
    shutil.rmtree(output, ignore_errors=True)
    request = PrepareRequest(kind, (str(source),), str(tokenizer), "train")
    prepare(request, output, max_malformed=0.9, say=lambda text: None)
    report = output.with_name("store.malformed.txt")
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return TokenStore(output).sequence_ids.tolist(), lines


LINES = {
    "integer of 5,000 digits": (b'{"messages": ' + b"9" * 5000 + b"}", "not JSON (Exceeds the limit"),
    "100,000 brackets": (b"[" * 100_000, "not JSON (maximum recursion depth exceeded"),
    "100,000 objects": (b'{"a": ' * 100_000, "not JSON (maximum recursion depth exceeded"),
    "no UTF-8": (b'{"messages": "\xff"}', "not JSON ('utf-8' codec can't decode byte 0xff in position 14"),
    "NUL": (b"\0" * 10, "not JSON (Expecting value: line 1 column 1"),
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
    "history that is a number": (b'{"instruction": "a", "output": "b", "history": 3}', "`history` is int"),
    "key that breaks the template": (
        b'{"messages": [{"role": "user", "content": "a", "tools": 3}, {"role": "assistant", "content": "a"}]}',
        "refuses this conversation (roles user, assistant): TypeError: 'int' object is not iterable",
    ),
}


def test_malformed_lines_are_reported_and_other_rows_kept(tmp_path: Path, tokenizer_folder: Path) -> None:
    source, good = tmp_path / "rows.jsonl", json.dumps(GOOD).encode()
    source.write_bytes(b"\n".join([good, *(line + b"\n" + good for line, _ in LINES.values())]))
    kept, report = prepare_rows("chat", source, tokenizer_folder)
    assert kept == list(range(0, 2 * len(LINES) + 1, 2))
    faults = dict(fault.split(": ", 1) for fault in report)
    assert len(report) == len(faults) == len(LINES) and max(map(len, report)) < 1500
    for number, (_, reason) in enumerate(LINES.values()):
        assert reason in faults[f"{source}:{2 * number + 2}"]


READ_LONG_LINE = """
import resource, sys
from tests.unit.test_malformed_rows import prepare_rows
from pathlib import Path
import pyarrow, transformers.models.auto.tokenization_auto
source, tokenizer = map(Path, sys.argv[1:])
short = source.with_name("short.jsonl")
short.write_text(source.read_text().splitlines()[1])
prepare_rows("chat", short, tokenizer)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*prepare_rows("chat", source, tokenizer)[0])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_line_of_60_megabytes_takes_a_few_times_its_size(tmp_path: Path, tokenizer_folder: Path) -> None:
    long = json.dumps({"messages": [GOOD["messages"][0], {"role": "assistant", "content": "word " * 12_000_000}]})
    (tmp_path / "rows.jsonl").write_text(f"{long}\n{json.dumps(GOOD)}")
    command = [sys.executable, "-c", READ_LONG_LINE, str(tmp_path / "rows.jsonl"), str(tokenizer_folder)]
    kept, kilobytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert kept == "1" and int(kilobytes) * 1024 < 6 * len(long)


@pytest.mark.parametrize("name", ["no UTF-8", "key that breaks the template"])  # found while reading, and rendering
def test_line_in_a_recipes_data_is_refused(name: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    from vcore_ds.data.tokenization import load_tokenizer

    source = tmp_path / "rows.jsonl"
    source.write_bytes(json.dumps(GOOD).encode() + b"\n" + LINES[name][0])
    settings = DataConfig(train_path=str(source), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=f"The first: {source}:2: "):
        find_or_make_store(str(source), load_tokenizer(str(tokenizer_folder)), settings, say=lambda text: None)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.suffix != ".unfinished"]


@pytest.mark.parametrize("text", ["[" * 100_000, '[{"a": ' + "9" * 5000 + "}]", "[{", '["\\'], ids=str)
def test_array_that_is_no_json_is_refused(text: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    source = tmp_path / "rows.json"
    source.write_text(text)
    with pytest.raises(UserError, match=f"{source}: begins like a list and is not"):
        prepare_rows("chat", source, tokenizer_folder)


def write_table(path: Path, messages: pa.Array) -> Path:
    pq.write_table(pa.table({"messages": messages}), path)
    return path


def make_invalid_text(rows: Sequence[bytes]) -> pa.Array:
    """A column of strings that says that its bytes are UTF-8."""
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(rows), pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(rows)))


def test_parquet_row_that_is_no_text_is_malformed(tmp_path: Path, tokenizer_folder: Path) -> None:
    content = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"] * 3), make_invalid_text([b"a", b"b", b"c", b"\xff", b"e", b"f"])],
        ["role", "content"],
    )
    source = write_table(tmp_path / "rows.parquet", pa.ListArray.from_arrays([0, 2, 4, 6], content))
    kept, report = prepare_rows("chat", source, tokenizer_folder)
    assert kept == [0, 2]
    assert [fault.partition(" (")[0] for fault in report] == [f"{source}:2: not readable"]


COLUMNS = {
    "bytes": (pa.array([b"\xff", b"a"]), "`messages` is bytes ("),
    "times": (pa.array([10**18, 1], pa.int64()).cast(pa.timestamp("us")), "not readable (date value out of range)"),
    "numbers": (pa.array([1.5, 2.5]), "`messages` is a number (1.5)"),
    "nulls": (pa.nulls(2), "found the keys none"),
}


@pytest.mark.parametrize(("column", "reason"), COLUMNS.values(), ids=COLUMNS.keys())
def test_parquet_of_other_columns_is_malformed(column, reason: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_table(tmp_path / "rows.parquet", column)
    with pytest.raises(UserError) as error:
        prepare_rows("chat", source, tokenizer_folder)
    assert "2 of 2 rows are malformed" in str(error.value) and f"The first: {source}:1: " in str(error.value)
    assert reason in str(error.value)


def test_time_within_a_message_is_ignored(tmp_path: Path, tokenizer_folder: Path) -> None:
    time = pa.array([0], pa.int64()).cast(pa.timestamp("us")).to_pylist()[0]
    with_time = [{**message, "at": time} for message in GOOD["messages"]]
    without = [{**message, "at": None} for message in GOOD["messages"]]
    source = write_table(tmp_path / "rows.parquet", pa.array([with_time, without]))
    assert prepare_rows("chat", source, tokenizer_folder) == ([0, 1], [])


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1, -50])
def test_truncated_parquet_is_refused(num_bytes: int, tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_table(tmp_path / "rows.parquet", pa.array([GOOD["messages"]] * 100))
    source.write_bytes(source.read_bytes()[:num_bytes])
    with pytest.raises(UserError, match=f"{source}: (not readable to its end as .parquet|the file is empty)"):
        prepare_rows("chat", source, tokenizer_folder)


def test_code_row_with_an_endless_index_is_malformed(tmp_path: Path, tokenizer_folder: Path) -> None:
    row = {"judgement": "right", "question": "a", "r1_generation": "<think>b</think>c"}
    endless = {**row, "question": "-", "dataset": "taco", "split": "train", "index": "9" * 5000}
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row) + "\n" + json.dumps(endless))
    kept, report = prepare_rows("code", source, tokenizer_folder)
    assert kept == [0] and "`index` is '999" in report[0] and len(report[0]) < 300


def test_unclosed_boxes_are_searched_in_one_pass() -> None:
    """Seconds with one pass, hours with one for each box."""
    text = "\\boxed{" * 10**6
    assert find_answer_spans(text) == []
    assert find_answer_spans(text + "a}}") == [(len(text) - 7, len(text) + 2), (len(text), len(text) + 1)]


def test_answer_spans_are_those_of_each_box_alone() -> None:
    random = np.random.default_rng(0)
    pieces = ["\\boxed{", "\\boxed {", "{", "}", "\\", "\\{", "\\}", "a", " ", "\\\\boxed{"]
    num_spans = 0
    for _ in range(2000):
        text = "".join(random.choice(pieces, 12))
        spans = find_answer_spans(text)
        assert spans == find_spans_one_by_one(text), text
        num_spans += len(spans)
    assert num_spans > 1000


def find_spans_one_by_one(text: str) -> list[tuple[int, int]]:
    spans = []
    for boxed in _BOXED.finditer(text):
        depth = 1
        for brace in _BRACE.finditer(text, boxed.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                spans.append((boxed.end(), brace.start()))
                break
    return spans


@pytest.mark.parametrize("share", ["nan", "-0.1", "1.5", "inf", "x"])
def test_a_limit_that_is_no_share_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["prepare", "chat", "a.jsonl", "--tokenizer", "t", "--output", "o", f"--max-malformed={share}"])
    assert f"--max-malformed: found {share}, expected a number from 0 to 1" in capsys.readouterr().err


def test_null_arguments_in_a_table_are_counted(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Whether the row had the argument, a table does not tell: {"a": null, "b": 2} and {"b": 2} are the same in it."""

    def make_row(arguments: object) -> dict:
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return {"messages": [GOOD["messages"][0], call, {"role": "tool", "content": "3"}, GOOD["messages"][1]]}

    rows = [make_row({"a": 1, "b": 2}), make_row({"a": None, "b": 2})]
    for name, has_null in (("rows.parquet", True), ("rows.jsonl", False)):
        read = [{"a": 1, "b": 2}, {"b": 2} if has_null else {"a": None, "b": 2}]
        if has_null:
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        else:
            (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        (file,) = find_files([str(tmp_path / name)], "train")
        chats = list(read_chat_rows(file))
        calls = [chat.messages[1]["tool_calls"][0]["function"]["arguments"] for chat in chats]
        assert calls == read and [chat.has_null_arguments for chat in chats] == [False, has_null]
    text = json.dumps({"a": None})
    pq.write_table(pa.Table.from_pylist([make_row(text)]), tmp_path / "text.parquet")
    (chat,) = read_chat_rows(find_files([str(tmp_path / "text.parquet")], "train")[0])
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.role + ' ' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c | tojson }}{% endfor %}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "calls")
    request = PrepareRequest("chat", (str(tmp_path / "rows.parquet"),), str(tmp_path / "calls"), "train")
    report = prepare(request, tmp_path / "store", say=lambda text: None)
    assert report.num_kept == 2
    assert any("null arguments" in text and number == 1 for text, number in report.noticed.items())
