"""Raw data that a recipe names become a store once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.ranks import forkserver
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.config.data_section import DataConfig
from vcore_ds.data.cache import check_source, find_or_make_store
from vcore_ds.data.store import TokenStore

GOOD_ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def make_row(answer: str, question: str = "q") -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}, ensure_ascii=False) + "\n"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def make(path: Path, tokenizer_folder: Path, cutoff_length: int = 1000, **settings: Any) -> tuple[Path, str]:
    """Find or make a store; returns its folder and the messages."""
    from transformers import AutoTokenizer

    said: list[str] = []
    folder = find_or_make_store(
        str(path),
        AutoTokenizer.from_pretrained(tokenizer_folder),
        DataConfig(train_path=str(path), cutoff_length=cutoff_length, cache_dir=str(path.parent / "cache"), **settings),
        say=said.append,
    )
    return folder, "\n".join(said)


Prepared = Callable[..., tuple[Path, str]]


@pytest.fixture
def prepare(tokenizer_folder: Path) -> Prepared:
    return lambda path, **settings: make(path, tokenizer_folder, **settings)


def decode_texts(folder: Path) -> list[str]:
    tokenizer = make_tokenizer()
    return [tokenizer.decode(s.input_ids[s.supervised]).removesuffix("<|im_end|>") for s in TokenStore(folder)]


BAD_ROWS = {
    "not an object": ("[1, 2]", "found list, expected an object"),
    "no messages": ('{"prompt": "x", "answer": "y"}', "found the keys prompt, answer"),
    "messages not a list": ('{"messages": "hello"}', 'a string ("hello")'),
    "messages empty": ('{"messages": []}', "an empty list"),
    "message not an object": ('{"messages": ["hello"]}', "message 1 is a string"),
    "no role": ('{"messages": [{"content": "x"}]}', "message 1 has no `role`, found content"),
    "null content": ('{"messages": [{"role": "assistant", "content": null}]}', "message 1 has no `content`"),
    "content not a string": (
        '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        "message 1: `content` is a list",
    ),
    "no assistant": ('{"messages": [{"role": "user", "content": "x"}]}', "no turn of the assistant"),
    "broken JSON": ('{"messages": [', "not JSON"),
}


@pytest.mark.parametrize(("line", "reason"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_one_bad_line_is_refused_with_file_and_line(prepare: Prepared, tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f"{make_row('a')}\n{line}\n")
    with pytest.raises(UserError) as error:
        prepare(path)
    message = str(error.value)
    assert f"{path}:3: " in message and reason in message
    assert "1 of 2 rows are malformed (50.00%), expected at most 1.00%" in message and "data.max_malformed" in message


def test_skipping_rows_is_not_recommended_where_no_row_is_usable(prepare: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "x", "answer": "y"}\n')
    with pytest.raises(UserError, match="1 of 1 rows are malformed .* rename the keys") as error:
        prepare(path)
    assert "raise the share" not in str(error.value)


def test_malformed_rows_up_to_the_share_are_left_out_and_said(prepare: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(make_row("a") * 49 + "{broken\n" + make_row("b") * 50)
    folder, _ = prepare(path)  # 1 of 100, the default share
    line = f"1 malformed rows are left out; the first: {path}:50: not JSON"
    assert line in TokenStore(folder).describe() and len(TokenStore(folder)) == 99
    assert any(what.startswith("malformed rows") for what in TokenStore(folder).manifest["counts"]["noticed"])
    assert Path(f"{folder}.malformed.txt").read_text().startswith(f"{path}:50: not JSON")
    with pytest.raises(UserError, match=f"1 of 100 rows are malformed .1.00%.*The first: {path}:50: not JSON"):
        prepare(path, max_malformed=0.005)  # the store that is there was made with another share
    path.write_text(make_row("a") * 48 + "{broken\n" + make_row("b") * 50)
    with pytest.raises(UserError, match="1 of 99 rows are malformed .1.01%.*expected at most 1.00%"):
        prepare(path)
    assert len(TokenStore(prepare(path, max_malformed=0.02)[0])) == 98


def test_a_recipe_names_a_configuration_of_a_folder(prepare: Prepared, tmp_path: Path) -> None:
    files = [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("math", "code")]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "README.md").write_text(f"---\n{json.dumps({'configs': files})}\n---\n")
    for name in ("math", "code"):
        (tmp_path / "set" / name).mkdir()
        (tmp_path / "set" / name / "rows.jsonl").write_text(make_row(name))
    check_source(f"{tmp_path / 'set'}::code")
    assert decode_texts(prepare(Path(f"{tmp_path / 'set'}::code"))[0]) == ["code"]
    with pytest.raises(UserError, match="found several configurations, expected .*set::NAME with one of math, code"):
        check_source(str(tmp_path / "set"))


def test_columns_of_other_names_are_mapped(prepare: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": "q", "solution": "s", "attempt": "a", "messages": "other"}))
    columns = {"prompt": "question", "completion": "attempt"}
    folder, said = prepare(path, columns=columns)
    assert decode_texts(folder) == ["a"] and "ignored: `messages` 1, `solution` 1" in said
    assert prepare(path, columns={**columns, "completion": "solution"})[0] != folder
    with pytest.raises(UserError, match="no column `answer`, which data.columns .*names; found question, solution"):
        prepare(path, columns={**columns, "completion": "answer"})


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.jsonl", None, "there is no such file"),
        ("empty.jsonl", b"", "the file is empty"),
        ("blank.jsonl", b"\n \n", "no row is left"),
        ("table.txt", b"a,b\n", "ending in '.txt'"),
        ("broken.parquet", b"not parquet", "not readable to its end as .parquet"),
    ],
)
def test_a_bad_file_is_named(prepare: Prepared, tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        prepare(path)
    assert str(error.value).startswith(f"{path}: ")
    assert reason in str(error.value)


def test_sequence_ids_are_the_line_numbers_of_a_jsonl_file(prepare: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    # A byte-order mark, a blank line, and a line separator inside of a string, which ends no line.
    path.write_text("\ufeff" + make_row("first") + "\n" + make_row("a\u2028b"), encoding="utf-8")
    folder, _ = prepare(path)
    assert TokenStore(folder).sequence_ids.tolist() == [0, 2]
    assert decode_texts(folder) == ["first", "a\u2028b"]


def test_parquet_rows_are_read(prepare: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    thinking = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b", "reasoning_content": "r"}]
    pq.write_table(pa.table({"messages": [GOOD_ROW["messages"], thinking], "id": [1, 2]}), path)
    assert decode_texts(prepare(path)[0]) == ["a", "<think>\nr\n</think>\n\nb"]


def test_many_conversations_keep_their_order(prepare: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(make_row(str(i)) for i in range(600)))
    folder, _ = prepare(path)
    assert TokenStore(folder).sequence_ids.tolist() == list(range(600))
    assert decode_texts(folder) == [str(i) for i in range(600)]


def test_overlong_sequences_are_dropped_or_truncated_and_counted(prepare: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(make_row("a" * 20) + make_row("b" * 60))
    uncut = TokenStore(prepare(path)[0])
    cutoff = int(uncut.lengths[0])
    assert uncut.lengths[1] > cutoff

    dropped = TokenStore(prepare(path, cutoff_length=cutoff)[0])
    assert dropped.sequence_ids.tolist() == [0] and dropped.lengths.tolist() == [cutoff]
    assert f"1 dropped: longer than {cutoff} tokens" in dropped.describe()
    assert "1 of 2 rows kept" in dropped.describe()

    truncated = TokenStore(prepare(path, cutoff_length=cutoff, overlong="truncate")[0])
    assert truncated.lengths.tolist() == [cutoff, cutoff]
    np.testing.assert_array_equal(truncated[1].input_ids, uncut[1].input_ids[:cutoff])
    np.testing.assert_array_equal(truncated[1].supervised, uncut[1].supervised[:cutoff])
    assert "1 truncated at the cutoff" in truncated.describe() and "2 of 2 rows kept" in truncated.describe()
    assert truncated.manifest["num_supervised_tokens"] == sum(s.supervised.sum() for s in truncated)

    with pytest.raises(UserError, match="2 of 2 rows are malformed.*the prompt alone has"):
        prepare(path, cutoff_length=4, overlong="truncate")
    with pytest.raises(UserError, match=r"no row is left[\s\S]*longer than the cutoff +2"):
        prepare(path, cutoff_length=4)


def test_a_store_is_made_once_and_again_when_its_data_change(prepare: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    lines = [make_row(f"{i:04d}" + "x" * 4000) for i in range(600)]  # more than the fingerprint looks at
    path.write_text("".join(lines))
    first, said = prepare(path, cutoff_length=5000)
    made_at = (first / "tokens.bin").stat().st_mtime_ns
    assert "rows read" in said
    again, said = prepare(path, cutoff_length=5000)
    assert again == first and said == "" and (first / "tokens.bin").stat().st_mtime_ns == made_at
    assert prepare(first) == (first, "")  # a store is what it is

    before = path.stat()
    lines[300] = make_row("9999" + "x" * 4000)  # the same size
    path.write_text("".join(lines))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed, _ = prepare(path, cutoff_length=5000)
    assert changed != first and decode_texts(changed)[300].startswith("9999")
    path.write_text(make_row("short"))
    assert prepare(path, cutoff_length=60)[0] != prepare(path, cutoff_length=50)[0]


def test_processes_that_need_the_same_store_wait_for_the_first(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(make_row("x" * 2000 + str(i)) for i in range(1500)))
    with forkserver().Pool(3) as pool:
        results = pool.starmap(make, [(path, tokenizer_folder, 5000)] * 3)
    assert len({folder for folder, _ in results}) == 1
    assert sum("rows read" in said for _, said in results) == 1  # one has made it
    assert len(TokenStore(results[0][0])) == 1500
