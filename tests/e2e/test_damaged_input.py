"""Randomly damaged data files, stores and model folders: each ends in success or in one message, within seconds."""

import contextlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.helpers.report_runs import step_line, write_run
from tests.helpers.setups import TinySetup, sums, write_conversations
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main
from vcore_ds.commands.evaluate import choose_sampling
from vcore_ds.commands.generation import end_token_ids, generate_answers, load_to_answer
from vcore_ds.commands.named_model import find_named_model
from vcore_ds.common.errors import UserError
from vcore_ds.config.exports import resolve_exports
from vcore_ds.data.store import TokenStore, check_contents
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.architecture_check import check_model_folder
from vcore_ds.models.causal_lm import load_causal_lm
from vcore_ds.models.stored_weights import find_stored_weights
from vcore_ds.training.run_folder import begin as begin_run

pytestmark = pytest.mark.e2e

MAX_SECONDS = 10.0
"""Processor time of this process for one damaged input: other load on the machine does not change it."""

bounded = settings(
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

EXTREMES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "x", "\0", "é" * 999,
    [], {}, [[]], [None], {"a": 1}, {"": None},
]  # fmt: skip

Damage = Callable[[bytes], bytes]


@st.composite
def byte_damages(draw: st.DrawFn) -> Damage:
    """Flip, truncate, insert, repeat, swap or zero bytes. Offsets are shares of the file, so that they fit any size."""
    kind = draw(st.sampled_from(["flip", "truncate", "insert", "repeat", "swap", "zero"]))
    where, length = draw(st.floats(0, 1)), draw(st.integers(1, 64))
    new = draw(st.binary(min_size=1, max_size=16))
    mask = draw(st.integers(1, 255))

    def damage(content: bytes) -> bytes:
        offset = int(where * max(0, len(content) - 1))
        before, part, after = content[:offset], content[offset : offset + length], content[offset + length :]
        return {
            "flip": before + bytes(byte ^ mask for byte in part) + after,
            "truncate": before,
            "insert": before + new + content[offset:],
            "repeat": before + part + content[offset:],
            "swap": after + part + before,
            "zero": before + bytes(len(part)) + after,
        }[kind]

    return damage


@st.composite
def json_damages(draw: st.DrawFn) -> Damage:
    """Replace a value somewhere in a JSON file by an extreme or mistyped one, or remove it with its key."""
    steps = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    value, removes = draw(st.sampled_from(EXTREMES)), draw(st.integers(0, 3)) == 0

    def damage(content: bytes) -> bytes:
        lines = content.splitlines() if content[:1] == b"{" and content.count(b"\n{") else [content]
        number = steps[0] % len(lines)
        lines[number] = json.dumps(_change(json.loads(lines[number]), steps, value, removes)).encode()
        return b"\n".join(lines)

    return damage


def _change(tree: Any, steps: list[int], value: Any, removes: bool) -> Any:
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    if not keys or not steps:
        return value
    key = keys[steps[0] % len(keys)]
    if len(steps) == 1 and removes:
        del tree[key]
    else:
        tree[key] = _change(tree[key], steps[1:], value, removes)
    return tree


def damage_folder(folder: Path, names: list[str], data: st.DataObject) -> None:
    """Damage or remove a file, or exchange it with another."""
    path = folder / data.draw(st.sampled_from(names))
    kind = data.draw(st.sampled_from(["bytes", "json", "remove", "exchange"]))
    if not path.exists():
        return
    if kind == "json" and path.suffix in (".json", ".jsonl"):
        with contextlib.suppress(ValueError):  # what is damaged already may be no JSON
            path.write_bytes(data.draw(json_damages())(path.read_bytes()))
    elif kind == "remove":
        path.unlink()
    elif kind == "exchange":
        other = folder / data.draw(st.sampled_from(names))
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        path.write_bytes(data.draw(byte_damages())(path.read_bytes()))


def check_end(work: Callable[[], object]) -> None:
    """Assert that `work` succeeds or raises a UserError with a short message, within `MAX_SECONDS`."""
    started = time.process_time()
    try:
        work()
    except UserError as error:
        assert str(error).strip() and len(str(error)) < 5_000
    assert time.process_time() - started < MAX_SECONDS


def copy_folder(folder: Path, copy: Path) -> Path:
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(folder, copy)


# ---- data files ----------------------------------------------------------------------------------------------------

DATA_FILES = ["rows.jsonl", "rows.json", "rows.parquet"]


@pytest.fixture(scope="module")
def data_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    lines = write_conversations(folder / "rows.jsonl", sums(range(4))).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows.append({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})
    rows.append({"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]})
    pq.write_table(pa.Table.from_pylist(rows[:4]), folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


@settings(bounded, max_examples=150)
@given(st.sampled_from(DATA_FILES), st.data())
def test_damaged_data_is_prepared_or_refused(
    data_files: Path, setup: TinySetup, tmp_path: Path, name: str, data: st.DataObject
) -> None:
    folder = copy_folder(data_files, tmp_path / "data")
    for _ in range(data.draw(st.integers(1, 2))):
        damage_folder(folder, [name], data)
    store, out, errors = folder / "store", io.StringIO(), io.StringIO()
    words = ["prepare", str(folder / name), "--tokenizer", str(setup.untied), "--output", str(store)]
    started = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main([*words, "--processes", "1", "--max-malformed", "0.9"])
    assert time.process_time() - started < MAX_SECONDS
    left = {path.name for path in folder.iterdir()} - {*DATA_FILES, "store.malformed.txt"}
    if code == 0:
        assert left == {"store"} and len(TokenStore(store)) > 0
    else:
        assert code == UserError.EXIT_CODE
        assert errors.getvalue().count("vcore-ds: ") == 1 and "Traceback" not in errors.getvalue()
        assert left <= {"store.unfinished"}


# ---- stores --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "store"
    assert main(["prepare", str(setup.train), "--tokenizer", str(setup.untied), "--output", str(folder)]) == 0
    return folder


STORE_FILES = ["manifest.json", "tokens.bin", "tokens.idx", "marks.bin", "marks.idx"]
STORE_FILES += ["sequence_id.npy", "num_supervised_tokens.npy"]


@settings(bounded, max_examples=150)  # these are cheap
@given(st.data())
def test_a_damaged_store_is_never_read_as_written(store: Path, tmp_path: Path, data: st.DataObject) -> None:
    damaged = copy_folder(store, tmp_path / "store")
    damage_folder(damaged, STORE_FILES, data)
    written = {name: (store / name).read_bytes() for name in STORE_FILES}
    check_end(lambda: check_store(damaged, written, tmp_path / "cache"))


def check_store(folder: Path, written: dict[str, bytes], cache: Path) -> None:
    """Assert that a store which passes the checks has the bytes that were written: no damaged token gets into a run."""
    check_contents(folder, cache)
    opened = TokenStore(folder, vocabulary_size=259)
    opened.describe()
    assert all(len(sequence) for sequence in opened)
    assert all((folder / name).read_bytes() == content for name, content in written.items() if name != "manifest.json")


# ---- model folders -------------------------------------------------------------------------------------------------


MODEL_FILES = ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@bounded
@given(st.data())
def test_a_damaged_model_folder_is_loaded_or_refused(setup: TinySetup, tmp_path: Path, data: st.DataObject) -> None:
    folder = copy_folder(setup.untied, tmp_path / "model")
    damage_folder(folder, MODEL_FILES, data)
    check_end(lambda: load_model_folder(folder))


@bounded
@given(st.data())
def test_a_damaged_adapter_answers_or_is_refused(
    setup: TinySetup, adapter: Path, tmp_path: Path, data: st.DataObject
) -> None:
    folder, base = copy_folder(adapter, tmp_path / "adapter"), copy_folder(setup.untied, tmp_path / "base")
    damage_folder(folder, ["adapter_config.json", "adapter_model.safetensors"], data)
    damage_folder(base, ["generation_config.json"], data)
    for work in (lambda: answer(folder, base), lambda: list(resolve_exports(adapter_recipe(folder)))):
        check_end(work)


@pytest.fixture(scope="module")
def adapter(setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of plain peft."""
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(setup.untied)
    config = LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules=["q_proj", "up_proj"])
    get_peft_model(model, config).save_pretrained(folder)
    return folder


def adapter_recipe(folder: Path) -> dict[str, Any]:
    return {"model": {}, "lora": {"adapter": str(folder)}}


def answer(adapter: Path, base: Path) -> None:
    """Answer as `chat` and `eval` do."""
    named = find_named_model(str(adapter), str(base))
    tokenizer = load_tokenizer(named.tokenizer)
    choose_sampling(named.weights, None, {})
    model = load_to_answer(named, torch.float32)
    ends = end_token_ids(model.generation_config, tokenizer)
    generate_answers(model, [[1, 2]], [1], GenerationConfig(eos_token_id=ends, pad_token_id=ends[0]))


RUN_FILES: dict[str, list[str]] = {
    "environment.json": ["[1]", '{"world_size": "x"}', '{"resumed": 1}', '{"resumed": [{}]}', "[" * 9999],
    "recipe.yaml": ["[" * 9999, "a: " * 9999],
}


@pytest.mark.parametrize("name", RUN_FILES)
def test_damaged_files_of_a_run_are_one_message(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", make_tokenizer(), [step_line(1)], {})
    (run / "start.txt").write_bytes(b"\xff\xfe")
    assert main(["report", str(run)]) == 0 and begin_run(run, (run / "recipe.yaml").read_text(), 1, 1) == 0
    for text in RUN_FILES[name]:
        (run / name).write_text(text)
        capsys.readouterr()
        assert main(["report", str(run)]) == 2
        error = capsys.readouterr().err
        assert error.count("vcore-ds: ") == 1 and str(run / name) in error and len(error) < 2_000


def load_model_folder(folder: Path) -> None:
    check_model_folder(str(folder))
    load_tokenizer(str(folder))
    find_stored_weights(str(folder))
    load_causal_lm(str(folder), dtype=torch.float32, attention="sdpa", gradient_checkpointing=False)


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Keep transformers from asking the hub for what a damaged folder lacks."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    os.environ.pop("HF_HUB_OFFLINE") if before is None else os.environ.update(HF_HUB_OFFLINE=before)
