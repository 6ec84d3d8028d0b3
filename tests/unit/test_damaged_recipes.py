"""Any recipe, DeepSpeed JSON or command line: `vcore-ds check` ends with a result or with one message."""

import io
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vcore_ds.cli import main
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.schema import SECTIONS

RESOLVED = dump_recipe(load_recipe("qwen3_4b_math_lora.yaml"))
SHIPPED = "qwen3_4b_math_lora.yaml"


def check(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `vcore-ds check`, both encoded as Python does it for a terminal."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(["check", *words])
        except SystemExit as ended:  # argparse
            assert ended.code == 2
            code = 2
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return code, *texts


def assert_one_message(code: int, out: str, err: str) -> None:
    assert code == 2 and out == ""
    assert "Traceback" not in err and len(err) < 50_000
    if err.startswith("usage: "):  # argparse's own
        assert re.search(r"^vcore-ds( check)?: error: \S", err, re.MULTILINE)
    else:
        assert err.startswith("vcore-ds: ") and len(err) > 20 and err.endswith("\n")
        assert all(char.isprintable() or char == "\n" for char in err)


def assert_result_or_message(*words: str) -> None:
    """Check passes, and then passes what it printed; or it refuses."""
    code, out, err = check(*words)
    if code != 0:
        assert_one_message(code, out, err)
        return
    recipe, separator, _ = out.partition("\nBatch: ")
    assert separator and err == ""
    with tempfile.TemporaryDirectory() as name:
        resolved = Path(name, "resolved.yaml")
        resolved.write_text(recipe)
        again = [word for word in words if word.startswith("--")]
        assert check(str(resolved), *again) == (0, out, "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- anything

VALUES = [
    *"null true -1 0 1 2 1.5 1e-4 1e400 -1e-400 .inf .nan 0x1F 0b1 017 12:30 [] {} [[]] '' text auto vcore sft".split(),
    *"dft = << ~ ~root/x . / /dev/null/x 2026-01-31 2147483648 1180591620717411303424".split(),
    "{a: {b: [1]}}",
    "[0.9, 0.99]",
    "9" * 5000,
    "0x" + "f" * 5000,
    ":".join(["59"] * 2000) + ".5",
    "x" * 300,
    "/x" * 3000,
    "[" * 50,
    "[" * 5000,
    "{a: " * 30 + "}" * 30,
    "[" + "1," * 1000 + "]",
    "&a [*a]",
    "*nothing",
    "!!int x",
    "!!bool maybe",
    "!!timestamp x",
    "!!binary aGk=",
    "!!set {a, b}",
    "!!python/object:os.system x",
    '"a\\0b"',
    '"~a\\0b"',
    '"\\ud800"',
    '"\\UFFFFFFFF"',
    '"\\e[31m\\n"',
    "{rank: 8, alpha: 16}",
    "{rank: 8, rank: 9}",
    "{<<: {rank: 8}, alpha: 16}",
    "{1: 2, null: 3, .nan: 4}",
    "{? [a] : b}",
    "ds_configs/zero3_bf16.json",
]
KEYS = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
keys = st.sampled_from([*KEYS, *SECTIONS]) | st.text(max_size=8)
values = st.sampled_from(VALUES) | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A resolved recipe with one to four mutations."""
    lines = RESOLVED.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, len(lines) - 1))
        key, _, _ = lines[i].partition(":")
        match draw(st.sampled_from(["value", "double", "indent", "delete", "base", "cut", "wrap"])):
            case "value":
                lines[i] = f"{key}: {draw(values)}"
            case "double":
                lines.insert(draw(st.integers(0, len(lines))), lines[i])
            case "indent":
                lines[i] = " " * draw(st.integers(0, 6)) + lines[i].lstrip()
            case "delete":
                del lines[i]
            case "base":
                lines.insert(0, f"base: {draw(st.sampled_from([SHIPPED, 'damaged.yaml', *VALUES]))}")
            case "cut":
                lines[i] = lines[i][: draw(st.integers(0, len(lines[i])))]
            case "wrap":
                lines[i] = f"{key}: {{{lines[i].strip()}}}"
        lines = lines or [""]
    data = bytearray("\n".join(lines).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data)


words = st.lists(
    st.tuples(keys, values).map("=".join)
    | st.sampled_from(["methods/dft.yaml", "presets/paper.yaml", "methods/iw_sft.yaml", "damaged.yaml", "nothing.yaml"])
    | st.sampled_from(
        ["--ranks=0", "--ranks=3", "--ranks=1e3", "--nothing", "-", "--", ".yaml", "/.yaml", "\udcff", "\udcff.yaml"]
    )
    | st.text(max_size=8),
    max_size=3,
)
quietly = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


@quietly
@given(damaged(), words)
def test_a_damaged_recipe(data: bytes, words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name, chdir(name):
        Path("damaged.yaml").write_bytes(data)
        assert_result_or_message("damaged.yaml", *words)
        assert [path.name for path in Path().iterdir()] == ["damaged.yaml"]


@quietly
@given(st.lists(st.tuples(keys, st.sampled_from(VALUES)).map("=".join), min_size=1, max_size=2))
@example([f"run.seed={2**32 - 1}"])
def test_damaged_overrides(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name, chdir(name):
        assert_result_or_message(SHIPPED, *words)
        assert list(Path().iterdir()) == []


# ---------------------------------------------------------------- files that are none


@pytest.fixture
def odd_files(folder: Path) -> Iterator[dict[str, str]]:
    """Name of what cannot be read -> words of the message."""
    os.mkfifo(folder / "pipe.yaml")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "dangling.yaml").symlink_to("nowhere.yaml")
    (folder / "folder.yaml").mkdir()
    (folder / "large.yaml").write_bytes(b"#" * 200_000)
    (folder / "endless.yaml").symlink_to("/dev/zero")
    (folder / "nul.yaml").write_bytes(b"run:\n  seed: \0\n")
    (folder / "latin.yaml").write_bytes("run: ä".encode("latin-1"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.yaml")
        yield {
            "pipe.yaml": "found a pipe",
            "loop.yaml": "cannot be read: Too many levels of symbolic links",
            "dangling.yaml": "found no such file",
            "folder.yaml": "found a folder",
            "large.yaml": "found more than 131,072 bytes",
            "endless.yaml": "found a device",
            "nul.yaml": "cannot be read as YAML: unacceptable character #x0000",
            "latin.yaml": "found bytes that are not UTF-8",
            "socket.yaml": "found a socket",
            "latin.yaml/below.yaml": "cannot be read: Not a directory",
            "x" * 300 + ".yaml": "cannot be read: File name too long",
            "a\0b.yaml": "found no path: embedded null byte",
        }


@pytest.mark.timeout(60)  # reading a pipe waits for its writer, and /dev/zero has no end
@pytest.mark.parametrize("place", ["recipe", "fragment", "base"])
def test_a_file_that_is_none(odd_files: dict[str, str], folder: Path, place: str) -> None:
    for name, words in odd_files.items():
        (folder / "based.yaml").write_text(f"base: {json.dumps(name)}\n")
        code, out, err = check(*{"recipe": [name], "fragment": [SHIPPED, name], "base": ["based.yaml"]}[place])
        assert_one_message(code, out, err)
        if place == "recipe" or os.path.lexists(os.path.realpath(name) if "\0" not in name else name):
            assert words in err
        else:  # looked up in several folders, and found in none
            assert {"fragment": "found no such file", "base": "which is no file"}[place] in err


@pytest.mark.timeout(60)
def test_a_deepspeed_json_that_is_none(odd_files: dict[str, str]) -> None:
    for name in odd_files:
        code, out, err = check(SHIPPED, f"engine.deepspeed_config={json.dumps(name)}")
        assert_one_message(code, out, err)
        assert "engine.deepspeed_config: found " in err or re.search(rf"/{name}:[1\d:]* found ", err)


@pytest.mark.parametrize("output", ["x" * 300, "/dev/null/x", "loop/x", "loop"])
def test_an_output_folder_that_cannot_be(folder: Path, output: str) -> None:
    (folder / "loop").symlink_to("loop")
    code, out, err = check(SHIPPED, f"run.output_dir={output}")
    assert_one_message(code, out, err)
    assert f"run.output_dir: {output[:200]}" in err and "cannot be written: " in err


# ---------------------------------------------------------------- small files that stand for large ones


def nested_anchors(first: str, form: str) -> str:
    """Fifteen lines, each of nine aliases of the line before."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i + 1}: &a{i + 1} {form.format(', '.join([f'*a{i}'] * 9))}" for i in range(14)]
    return "\n".join(lines)


SMALL_TEXTS = [
    (nested_anchors("[x, x]", "[{}]"), "more than 20,000 keys and values, aliases counted as often as they are used"),
    (nested_anchors("{k: v}", "{{<<: [{}]}}"), "more than 20,000 keys and values"),
    ("run: &a {b: [*a]}", ":1:6: cannot be read as YAML: an alias within the value that it stands for"),
    ("run: " + "[" * 30 + "]" * 30, "values nested more than 20 levels deep"),
    ("run: " + "[" * 2000, "values nested more than 20 levels deep"),
    (
        "run: {seed: " + "9" * 5000 + "}",
        ":1:13: cannot be read as YAML: a number of 5,000 characters; expected at most 100",
    ),
    ("run: {seed: " + ":".join(["59"] * 2000) + "}", "a number of 5,999 characters"),
    ("run: {seed: 1180591620717411303424}", "expected a number less than or equal to 4294967295"),
    ('run: {output_dir: "\\UFFFFFFFF"}', ":1:22: cannot be read as YAML: a number out of range"),
    ("base: [" + ", ".join(f"{i}.yaml" for i in range(9000)) + "]", "and 51 more problems"),
    ("run: *" + "a" * 5000, "cannot be read as YAML: found undefined alias"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("text", "words"), SMALL_TEXTS, ids=lambda value: value[:30])
def test_a_small_text_that_stands_for_much(folder: Path, text: str, words: str) -> None:
    (folder / "small.yaml").write_text(text)
    code, out, err = check("small.yaml")
    assert_one_message(code, out, err)
    assert words in err


@pytest.mark.timeout(60)
def test_bases_that_fork(folder: Path) -> None:
    for i in range(30):
        (folder / f"{i}.yaml").write_text(f"base: [{i + 1}.yaml, {i + 1}.yaml]")
    (folder / "30.yaml").write_text("run: {seed: 1}")
    assert check("0.yaml") == (2, "", "vcore-ds: 0.yaml: found more than 100 files under base\n")


@pytest.mark.timeout(60)
def test_problems_without_end_are_counted(folder: Path) -> None:
    (folder / "many.yaml").write_text("run:\n" + "".join(f"  seed_{i}: {i}\n" for i in range(5000)))
    code, out, err = check(SHIPPED, "many.yaml")
    assert_one_message(code, out, err)
    lines = err.splitlines()
    assert len(lines) == 51 and 'did you mean "run.seed"?' in lines[49] and lines[50] == "and 4,950 more problems"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "found values nested more than 20 levels deep"),
        ('{"a": ' * 100 + "1" + "}" * 100, "found values nested more than 20 levels deep"),
        ('{"a": ' + "9" * 5000 + "}", "found an integer of more than 4,300 digits"),
        ("{" + ", ".join(f'"k{i % 5000}": 1' for i in range(10_000)) + "}", "and 4,950 more problems"),
        ("{" + ", ".join(f'"k{i}": "auto"' for i in range(5000)) + "}", "more problems"),
        ('{"a\\u0000\\u001b[31m": "auto"}', '\\x00\\x1b[31m: found "auto"'),
    ],
    ids=lambda value: value[:20],
)
def test_a_deepspeed_json_that_is_too_much(folder: Path, text: str, words: str) -> None:
    (folder / "ds.json").write_text(text)
    code, out, err = check(SHIPPED, "engine.deepspeed_config=ds.json")
    assert_one_message(code, out, err)
    assert words in err
