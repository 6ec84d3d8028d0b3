"""`vcore-ds chat`: the right model answers, from a pipe and on a terminal, and it ends when it is told to."""

import io
import json
import os
import pty
import select
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import tiny
from tests.helpers.ranks import forkserver
from tests.helpers.recipes import smallest_recipe
from tests.helpers.setups import write_model
from tests.unit.test_export import make_trained_masters, write_run
from vcore_ds.commands.cli import main
from vcore_ds.commands.export.write import export_run
from vcore_ds.commands.generation import load_to_answer
from vcore_ds.commands.named_model import find_named_model
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.data.answers import math_prompt
from vcore_ds.models.model_folder import find_end_tokens

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is_gradient_checkpointing")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "base")


class Terminal(io.StringIO):
    """Lines that are typed; Ctrl-D behind them."""

    def isatty(self) -> bool:
        return True


def answer_greedily(folder: Path | str, *turns: str) -> str:
    """Answer the last turn (the user's) in 12 tokens with plain transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Standard output and error of `vcore-ds chat WORDS` with 12 tokens an answer."""

    def run(stdin: io.StringIO, *words: str | Path) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", stdin)
        capsys.readouterr()  # of the test's own preparations
        assert main(["chat", *map(str, words), "--max-new-tokens", "12"]) == 0
        return capsys.readouterr()

    return run


def test_standard_input_is_one_prompt(base: Path, say: Callable) -> None:
    output, notes = say(io.StringIO("two\nlines\n"), base)
    assert output == answer_greedily(base, "two\nlines") + "\n" and "[cut off after 12 tokens]" in notes
    output, _ = say(io.StringIO("What is 2 + 2?"), base, "--prompt", "math")
    assert output == answer_greedily(base, math_prompt("What is 2 + 2?")) + "\n"


def test_a_conversation_goes_on_until_a_new_one_begins(base: Path, say: Callable) -> None:
    output, notes = say(Terminal("caf\udce9\nhello\n\nagain\n/new\nagain\n"), base)
    assert "chat: found a byte that is no UTF-8" in notes
    first = answer_greedily(base, "hello")
    second, anew = answer_greedily(base, "hello", first.strip(), "again"), answer_greedily(base, "again")
    assert second != anew and output == f"> > {first}\n> > {second}\n> > {anew}\n> \n"


def test_a_run_answers_by_its_newest_checkpoint_or_its_result(base: Path, tmp_path: Path, say: Callable) -> None:
    masters = {name: 20 * tensor for name, tensor in make_trained_masters(base, lora=True).items()}
    run = write_run(tmp_path / "run", base, masters, lora=True)
    expected = answer_greedily(export_run(run, merge=True, dtype="fp32", output=tmp_path / "merged"), "hello") + "\n"
    assert expected != answer_greedily(base, "hello") + "\n"
    output, notes = say(io.StringIO("hello"), run)
    assert output == expected and "export/" in notes
    adapter = run / "export" / "chat"
    shutil.copytree(adapter, run / "adapter")
    assert say(io.StringIO("hello"), adapter)[0] == say(io.StringIO("hello"), run)[0] == expected


def test_sampling_options_replace_those_of_the_model(base: Path, tmp_path: Path, say: Callable) -> None:
    sampling = tmp_path / "sampling"
    shutil.copytree(base, sampling)
    (sampling / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 5.0, "top_k": 9}))
    answers = [say(io.StringIO("x"), sampling, "--seed", seed)[0] for seed in "112"]
    assert answers[0] == answers[1] != answers[2]
    assert say(io.StringIO("x"), sampling, "--temperature", "0")[0] == answer_greedily(base, "x") + "\n"
    assert say(io.StringIO("x"), base, "--top-k", "9", "--temperature", "5", "--seed", "1")[0] == answers[0]


def test_the_result_of_a_run_that_trained_all_parameters_is_found(base: Path, tmp_path: Path) -> None:
    recipe = smallest_recipe() | {"model": {"path": str(base)}}
    (tmp_path / "recipe.yaml").write_text(dump_recipe(Recipe.model_validate(recipe)))
    with pytest.raises(UserError, match=f"vcore-ds export {tmp_path}"):
        find_named_model(str(tmp_path))
    write_model(tmp_path / "model")
    named_model = find_named_model(str(tmp_path))
    assert (named_model.weights, named_model.base, named_model.adapter) == (str(tmp_path / "model"), str(base), None)


def test_a_small_adapter_is_not_lost_to_rounding_in_bf16(base: Path, tmp_path: Path) -> None:
    """Each output of its layers is below half an ulp of the base's, to which peft's forward adds it after rounding."""
    adapted = tiny.with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=5e-5)
    adapted.save_pretrained(tmp_path)
    loaded = load_to_answer(find_named_model(str(tmp_path)), torch.bfloat16)
    ids = torch.randint(0, 256, (64, 64), generator=torch.Generator().manual_seed(0))
    changes = []
    for model in (adapted, loaded):
        with torch.inference_mode():
            change = model(ids).logits
            with model.disable_adapter():
                changes.append(change - model(ids).logits)
    exact, in_bf16 = changes
    assert float((in_bf16 * exact).sum() / exact.square().sum()) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        (["{base}"], "  \n", "found nothing on standard input"),
        (["/no/such/model"], "x", "RUN|MODEL: /no/such/model: no such folder"),
        (["{base}/.."], "x", "found no run, adapter or model there; expected a run's folder, the folder of an adapter"),
        (["{base}", "extra"], "x", "chat: found extra; expected no more than its --help lists"),
        (["{damaged}"], "x", "found no base_model_name_or_path"),
        (["{base}"], "x" * 40_000, "tokens so far, which leave the model no room"),
        (["{base}"], b"caf\xe9", "chat: found a byte that is no UTF-8"),
        (["{base}", "--system", os.fsdecode(b"caf\xe9")], "x", "--system: found a byte that is no UTF-8"),
    ],
)
def test_each_mistake_is_one_message(words, text, expected, base, tmp_path, monkeypatch, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    stdin = io.StringIO(text) if isinstance(text, str) else io.TextIOWrapper(io.BytesIO(text), "utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["chat", *(word.format(base=base, damaged=tmp_path) for word in words)]) == 2
    message = capsys.readouterr().err
    assert expected in message and message.count("; expected") <= 1


def test_impossible_sampling_settings_are_refused(capsys):
    for command in ("chat", "eval"):
        for words, expected in (
            (["--top-p", "1.5"], "found 1.5, expected a number above 0, at most 1"),
            (["--temperature", "inf"], "found inf, expected a number of at least 0"),
            (["--temperature", "x" * 10**5], "found a word of 100,000 characters, expected a number of at least 0"),
        ):
            with pytest.raises(SystemExit, match="2"):
                main([command, "model", *words])
            assert expected in capsys.readouterr().err


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model that never ends an answer: the token that would, also by its template, is beyond its vocabulary."""
    folder = write_model(tmp_path / "endless")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "'<|im_end|>\n'", "('<|never|>' if m.role == 'assistant' else '<|im_end|>') + '\n'"
    )
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": None}))
    assert find_end_tokens(tokenizer) == (tokenizer.eos_token_id,)
    return folder


def run_on_terminal(name: str, words: list[str]) -> None:
    """`vcore-ds` as the first process of the session of a terminal, which sends it Ctrl-C as a signal."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    for number in range(3):
        os.dup2(terminal, number)
    sys.stdin = open(0)  # noqa: SIM115  as long as the process lives
    sys.exit(main(words))


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(endless):
    """Runs the command on a pseudo-terminal."""
    terminal, slave = pty.openpty()
    words = ["chat", str(endless), "--max-new-tokens", "30000", "--temperature", "1"]
    process = forkserver().Process(target=run_on_terminal, args=(os.ttyname(slave), words))
    process.start()
    seen = ""

    def wait_for(text: str, after: int = 0, characters: int = 0) -> int:
        """Wait for `text` and then `characters` more characters; returns the end of `text` in what has come."""
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
        end = wait_for("stopped; the conversation", end)
        wait_for("> ", end)
        os.write(terminal, b"\x04")
        process.join(60)
        assert process.exitcode == 0 and "Traceback" not in seen
    finally:
        process.kill()
        process.join()
        os.close(slave)
        os.close(terminal)
