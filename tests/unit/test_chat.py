"""`vcore-ds chat`: the right model answers, from a pipe and on a terminal, and it ends when it is told to."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import tiny
from tests.helpers.recipes import smallest_recipe
from tests.helpers.setups import write_model
from tests.unit.test_export import trained_masters, write_run
from vcore_ds.cli import main
from vcore_ds.commands.chat.models import load_voices
from vcore_ds.commands.chat.session import Sampling, answer_question, generation_settings
from vcore_ds.commands.export.write import export_run
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.errors import UserError
from vcore_ds.grading.prompts import math_prompt
from vcore_ds.models.named_model import find_named_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is_gradient_checkpointing")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def lora_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, whose adapter changes what is answered."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    masters = {name: 20 * tensor for name, tensor in trained_masters(base, lora=True).items()}
    export_run(write_run(folder, base, masters, lora=True), output=folder / "adapter")
    return folder


def greedy(folder: Path | str, prompt: str, num_tokens: int) -> str:
    """What plain transformers answers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def piped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *words: str | Path
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["chat", *map(str, words)]) == 0
    return capsys.readouterr()


def test_standard_input_is_one_prompt(base, monkeypatch, capsys):
    said, stats = piped(monkeypatch, capsys, "two\nlines\n", base, "--max-new-tokens", "12")
    assert said.strip() == greedy(base, "two\nlines", 12)
    assert "12 tokens, cut off" in stats


def test_base_and_tuned_answer_one_after_the_other(base, lora_run, tmp_path, monkeypatch, capsys):
    said, _ = piped(monkeypatch, capsys, "hello", lora_run, "--base", "--max-new-tokens", "12", "--dtype", "fp32")
    _, before, after = (part.partition("\n")[2].strip() for part in f"\n{said}".split("---"))
    merged = export_run(lora_run, merge=True, dtype="fp32", output=tmp_path / "merged")
    assert before == greedy(base, "hello", 12) and after == greedy(merged, "hello", 12)
    assert before != after


def test_the_prompt_of_training_is_used(base, monkeypatch, capsys):
    said, _ = piped(monkeypatch, capsys, "What is 2 + 2?", base, "--prompt", "math", "--max-new-tokens", "12")
    assert said.strip() == greedy(base, math_prompt("What is 2 + 2?"), 12)


def test_a_run_that_trained_all_parameters_is_compared_with_its_base(base, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    recipe = smallest_recipe() | {"model": {"path": str(base)}}
    (run / "recipe.yaml").write_text(dump_recipe(Recipe.model_validate(recipe)))
    with pytest.raises(UserError, match="the run has no result yet .model/."):
        find_named_model(str(run))
    write_model(run / "model")
    found = find_named_model(str(run))
    assert (found.weights, found.base, found.adapter) == (str(run / "model"), str(base), None)
    assert [voice.name for voice in load_voices(found, with_base=True, dtype=None)] == ["base", "tuned"]


def test_an_adapter_is_found_by_itself(base, lora_run):
    found = find_named_model(str(lora_run / "adapter"))
    assert (found.weights, found.adapter) == (str(base), str(lora_run / "adapter"))


def test_a_small_adapter_counts_in_bf16(base, tmp_path):
    """Each output of its layers is below half an ulp of the base's, to which peft's forward adds it after rounding."""
    adapted = tiny.with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=5e-5)
    adapted.save_pretrained(tmp_path)
    before, after = load_voices(find_named_model(str(tmp_path)), with_base=True, dtype="bf16")
    ids = torch.randint(0, 256, (64, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact = adapted(ids).logits
        with adapted.disable_adapter():
            exact = exact - adapted(ids).logits
        found = after.model(ids).logits
        with before.during():
            found = found - before.model(ids).logits
    assert float((found * exact).sum() / exact.square().sum()) == pytest.approx(1.0, abs=0.2)


def test_samples_depend_on_the_seed_alone(base):
    (voice,) = load_voices(find_named_model(str(base)), with_base=False, dtype=None)
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(answer_question(voice, [{"role": "user", "content": "x"}], Sampling(16, temperature=1.5)).text)
    assert answers[0] == answers[1] != answers[2]


def test_settings_of_the_user_replace_those_of_the_model(base):
    (voice,) = load_voices(find_named_model(str(base)), with_base=False, dtype=None)
    model, tokenizer = voice.model, voice.tokenizer
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.95, eos_token_id=[1, 2])
    own = generation_settings(model, tokenizer, Sampling(9))
    assert (own.do_sample, own.temperature, own.top_p) == (True, 0.6, 0.95)
    assert own.eos_token_id == sorted({1, 2, tokenizer.eos_token_id})
    assert not generation_settings(model, tokenizer, Sampling(9, temperature=0.0)).do_sample
    mixed = generation_settings(model, tokenizer, Sampling(9, temperature=1.2, top_k=7))
    assert (mixed.temperature, mixed.top_p, mixed.top_k) == (1.2, 0.95, 7)


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        (["{base}"], "  \n", "found nothing on standard input"),
        (["{base}", "--base"], "x", "--base: found a model without a run or an adapter"),
        (["/no/such/model"], "x", "RUN|MODEL: /no/such/model: no such folder"),
        (["{base}/.."], "x", "found no run, adapter or model there; expected a run's folder, the folder of an adapter"),
        (["{base}", "extra"], "x", "chat: found extra; expected no more than its --help lists"),
        (["{damaged}"], "x", "found no base_model_name_or_path"),
        (["{base}"], "x" * 40_000, "expected fewer than the 32,768 that the model takes"),
    ],
)
def test_what_cannot_be_meant_is_one_message(words, text, expected, base, tmp_path, monkeypatch, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["chat", *(word.format(base=base, damaged=tmp_path) for word in words)]) == 2
    message = capsys.readouterr().err
    assert expected in message and message.count("; expected") <= 1


@pytest.mark.parametrize("command", ["chat", "eval"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--top-p", "1.5"], "found 1.5, expected a number above 0, at most 1"),
        (["--temperature", "inf"], "found inf, expected a number of at least 0"),
        (["--temperature", "x" * 10**5], "found a word of 100,000 characters, expected a number of at least 0"),
    ],
)
def test_numbers_that_sample_nothing_are_refused(command, words, expected, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "model", *words])
    assert expected in capsys.readouterr().err


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model that never ends an answer: the token that would is beyond its vocabulary."""
    folder = write_model(tmp_path / "endless")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": None}))
    return folder


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(endless):
    """On a pseudo-terminal, as a user types it."""
    terminal, slave = pty.openpty()
    words = ["chat", str(endless), "--max-new-tokens", "30000", "--temperature", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vcore_ds.cli", *words], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    seen = ""

    def wait_for(text: str, after: int = 0, characters: int = 0) -> int:
        """Until `text`, and so many further characters, have come; returns the place behind `text`, after which more
        may have come already."""
        nonlocal seen
        deadline = time.monotonic() + 300
        while text not in seen[after:] or len(seen) < after + characters:
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace")
        return seen.index(text, after) + len(text)

    try:
        wait_for("> ")
        os.write(terminal, b"hello\n")
        end = wait_for("hello")
        wait_for("", end, characters=20)  # something of the answer
        os.write(terminal, b"\x03")
        end = wait_for("tokens, stopped", end)
        wait_for("> ", end)
        os.write(terminal, b"\x04")
        assert process.wait(timeout=60) == 0
        assert "Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
