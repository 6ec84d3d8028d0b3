"""Raw data that a recipe names become a store once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.conversations import decode_learned, make_row, write_lines
from tests.helpers.ranks import forkserver
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.common import paths
from vcore_ds.common.errors import UserError
from vcore_ds.config.data_section import DataConfig
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.prepare.report import describe_reading
from vcore_ds.data.prepare.sources import check_source
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def make(path: Path, tokenizer_folder: Path, cutoff_length: int = 1000, **settings: Any) -> tuple[Path, str]:
    """Find or make a store; returns its folder and the messages."""
    said: list[str] = []
    cache = str(path.parent / "cache")
    config = DataConfig(train_path=str(path), cutoff_length=cutoff_length, cache_dir=cache, **settings)
    folder = find_or_make_store(str(path), load_tokenizer(str(tokenizer_folder)), config, say=said.append)
    return folder, "\n".join(said)


Prepared = Callable[..., tuple[Path, str]]


@pytest.fixture
def prepare(tokenizer_folder: Path) -> Prepared:
    return lambda path, **settings: make(path, tokenizer_folder, **settings)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.jsonl", None, "there is no such file"),
        ("blank.jsonl", "\n \n", "no row is left"),
        ("one.jsonl", '{"question": "x"}\n', "1 of 1 rows are malformed (100.00%)"),  # with no hint to leave it out
        ("two.jsonl", '\n{"question": "x"}\n' + json.dumps(make_row("q", "a")), "1 of 2 rows are malformed (50.00%)"),
    ],
)
def test_bad_data_are_named_and_nothing_is_made(
    prepare: Prepared, tmp_path: Path, name: str, content: str | None, reason: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        prepare(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and reason in message
    if "malformed" in reason:
        assert f"1 row, first {path}:{content.startswith(chr(10)) + 1}: found the keys question; expected" in message
        assert "data.columns" in message and ("data.max_malformed=0.5 in" in message) == ("two" in name)
    made = (tmp_path / "cache").iterdir() if (tmp_path / "cache").exists() else ()
    assert not [folder for folder in made if folder.is_dir() and folder.suffix != ".unfinished"]


def test_malformed_rows_up_to_the_share_are_left_out_and_said(prepare: Prepared, tmp_path: Path) -> None:
    rows = [make_row("q", "a")] * 99
    path = write_lines(tmp_path / "train.jsonl", [*rows[:49], "{broken", *rows[49:]])
    folder, _ = prepare(path)  # 1 of 100, the default share
    line = f"1 malformed rows are left out; the first: {path}:50: not JSON"
    assert line in TokenStore(folder).describe() and len(TokenStore(folder)) == 99
    assert any(what.startswith("malformed rows") for what in TokenStore(folder).manifest["counts"]["noticed"])
    assert Path(f"{folder}.malformed.txt").read_text().startswith(f"{path}:50: not JSON")
    with pytest.raises(UserError, match=f"1 of 100 rows are malformed .1.00%(?s:.*)first {path}:50: not JSON"):
        prepare(path, max_malformed=0.005)  # the store that is there was made with another share


def test_a_recipe_names_a_configuration_of_a_folder(prepare: Prepared, tmp_path: Path) -> None:
    files = [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("math", "code")]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "README.md").write_text(f"---\n{json.dumps({'configs': files})}\n---\n")
    for name in ("math", "code"):
        (tmp_path / "set" / name).mkdir()
        write_lines(tmp_path / "set" / name / "rows.jsonl", [make_row("q", name)])
    check_source(f"{tmp_path / 'set'}::code")
    assert decode_learned(prepare(Path(f"{tmp_path / 'set'}::code"))[0]) == ["code<|im_end|>"]
    with pytest.raises(UserError, match="found several configurations.*math, code"):
        check_source(str(tmp_path / "set"))


def test_a_recipe_names_a_split(prepare: Prepared, tmp_path: Path) -> None:
    """Also for the lines of `check`; the message without one names the key."""
    files = [{"split": name, "path": f"{name}.jsonl"} for name in ("math", "chat")]
    (tmp_path / "set").mkdir()
    configs = json.dumps({"configs": [{"config_name": "default", "data_files": files}]})
    (tmp_path / "set" / "README.md").write_text(f"---\n{configs}\n---\n")
    for name in ("math", "chat"):
        write_lines(tmp_path / "set" / f"{name}.jsonl", [make_row("q", name)])
    assert decode_learned(prepare(tmp_path / "set", split="chat")[0]) == ["chat<|im_end|>"]
    assert describe_reading(str(tmp_path / "set"), split="math")[0].endswith("set: 1 rows")
    with pytest.raises(UserError, match=r"no split 'train', only math, chat; name one with data\.split \(prepare --s"):
        prepare(tmp_path / "set")
    (tmp_path / "set" / "chat.jsonl").rename(tmp_path / "set" / "train.jsonl")
    (tmp_path / "set" / "README.md").write_text("---\n[\n---\n")  # a page without YAML names no splits
    assert decode_learned(prepare(tmp_path / "set")[0]) == ["math<|im_end|>", "chat<|im_end|>"]


def test_columns_of_other_names_are_mapped(prepare: Prepared, tmp_path: Path) -> None:
    row = {"question": "q", "solution": "s", "attempt": "a", "messages": "other"}
    path = write_lines(tmp_path / "train.jsonl", [row])
    columns = {"prompt": "question", "completion": "attempt"}
    folder, said = prepare(path, columns=columns)
    assert decode_learned(folder) == ["a<|im_end|>"] and "ignored: `messages` 1, `solution` 1" in said
    assert prepare(path, columns={**columns, "completion": "solution"})[0] != folder
    with pytest.raises(UserError, match="no column `answer`, which data.columns .*names; found question, solution"):
        prepare(path, columns={**columns, "completion": "answer"})


LAST = {"supervise": "last"}


def test_a_store_is_made_once_and_again_when_its_data_change(
    prepare: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "WHOLE_BYTES", 0)  # only samples of a larger file are read, and its time tells the rest
    rows = [make_row("q", f"{i:04d}" + "x" * 4000) for i in range(300)]
    path = write_lines(tmp_path / "train.jsonl", rows)
    first, said = prepare(path, cutoff_length=5000)
    made_at = (first / "tokens.bin").stat().st_mtime_ns
    assert "rows read" in said
    again, said = prepare(path, cutoff_length=5000)
    assert again == first and said == "" and (first / "tokens.bin").stat().st_mtime_ns == made_at
    assert prepare(first) == (first, "")  # a store is what it is
    assert TokenStore(first).sequence_ids.tolist() == list(range(300))
    assert [text[:4] for text in decode_learned(first)] == [f"{i:04d}" for i in range(300)]

    before = path.stat()
    rows[150] = make_row("q", "9999" + "x" * 4000)  # the same size
    write_lines(path, rows)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed, _ = prepare(path, cutoff_length=5000)
    assert changed != first and decode_learned(changed)[150].startswith("9999")
    write_lines(path, [make_row("q", "short")])
    folders = [prepare(path, cutoff_length=60, **settings)[0] for settings in ({}, LAST, {"overlong": "truncate"})]
    assert len({prepare(path, cutoff_length=50)[0], *folders}) == 4
    (folder := folders[0]).rename(tmp_path / "made")
    (unfinished := paths.unfinished_path(folder)).mkdir()  # by another version
    (unfinished / "request.json").write_text('{"version": "0"}')
    (unfinished / "part").touch()
    assert prepare(path, cutoff_length=60)[0] == folder and len(TokenStore(folder)) == 1
    with pytest.raises(UserError, match="no chat template"):
        find_or_make_store(str(path), make_tokenizer(None), DataConfig(train_path=str(path)))


def test_processes_that_need_the_same_store_wait_for_the_first(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [make_row("q", "x" * 2000 + str(i)) for i in range(600)])
    with forkserver().Pool(3) as pool:
        results = pool.starmap(make, [(path, tokenizer_folder, 5000)] * 3)
    assert len({folder for folder, _ in results}) == 1
    assert sum("rows read" in said for _, said in results) == 1  # one has made it
    assert len(TokenStore(results[0][0])) == 600
