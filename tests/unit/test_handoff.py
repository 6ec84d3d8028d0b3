"""`vcore-ds handoff`: data in the prompt of training, a reward that can be trusted, scripts with the paper's settings.

What verl and TRL make of it: tests/handoff.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.helpers.setups import write_model
from tests.unit.test_export import trained_masters, write_run
from vcore_ds.cli import main
from vcore_ds.commands.handoff import reward
from vcore_ds.commands.handoff.data import read_rows
from vcore_ds.commands.handoff.scripts import verl_script
from vcore_ds.commands.handoff.settings import PAPER, paper_settings, parse_overrides
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.grading.prompts import math_prompt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is_gradient_checkpointing")

SHORT = ["data.max_prompt_length=2048", "data.max_response_length=1024", "data.train_batch_size=4"]
MODEL_LENGTH, KL_TYPE = "actor_rollout_ref.rollout.max_model_len", "actor_rollout_ref.actor.kl_loss_type"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    base = write_model(folder / "base")
    return write_run(folder / "run", base, trained_masters(base, lora=True), lora=True)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows: list[dict[str, Any]] = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(30)]
    rows += [{"question": "What is 100 + 1?", "answer": 101}]  # other keys, a number
    rows += [{"problem": "No answer?", "answer": None}, {"problem": "x" * 5000, "answer": "1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings_of(script: Path) -> dict[str, str]:
    """key -> value of the command in launch.sh."""
    text = script.read_text().partition("main_ppo")[2].replace("\\\n", " ")
    return dict(word.split("=", 1) for word in shlex.split(text) if "=" in word)


@pytest.fixture(scope="module")
def verl_folder(run: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl") / "handed"
    words = ["--to", "verl", "--data", problems, "--output", folder, "--held-out", "4"]
    assert main(["handoff", str(run), *SHORT, *map(str, words)]) == 0
    return folder


def test_the_folder_for_verl(verl_folder: Path, run: Path) -> None:
    names = {path.name for path in verl_folder.iterdir()}
    assert names == {"model", "train.parquet", "validation.parquet", "reward.py", "launch.sh", "VERSIONS"}
    assert (verl_folder / "model" / "model.safetensors").is_file()
    assert (verl_folder / "model" / "chat_template.jinja").is_file()
    table = pq.read_table(verl_folder / "train.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    rows = table.to_pylist() + pq.read_table(verl_folder / "validation.parquet").to_pylist()
    assert len(rows) == 31 and len({row["extra_info"]["index"] for row in rows}) == 31
    for row in rows:
        ((message,), truth) = row["prompt"], row["reward_model"]["ground_truth"]
        (first, second) = map(int, re.findall(r"What is (\d+) \+ (\d+)\?", message["content"])[0])
        assert message == {"role": "user", "content": math_prompt(f"What is {first} + {second}?")}
        assert truth == str(first + second) and row["data_source"] == "sums"
    versions = (verl_folder / "VERSIONS").read_text()
    assert "verl 0.9.1" in versions and "27 problems of seed 42" in versions and str(run.parent) not in versions


def test_the_script_for_verl_has_the_papers_settings(verl_folder: Path) -> None:
    assert subprocess.run(["bash", "-n", verl_folder / "launch.sh"]).returncode == 0
    found = settings_of(verl_folder / "launch.sh")
    changed = {word.split("=")[0] for word in SHORT}
    assert {key: found[key] for key in PAPER if key not in changed} == {
        k: v for k, v in PAPER.items() if k not in changed
    }
    assert found[MODEL_LENGTH] == "3072" and found["data.train_batch_size"] == "4"
    refused = subprocess.run(["bash", verl_folder / "launch.sh", "ppo"], capture_output=True, text=True)
    assert refused.returncode == 2 and "expected grpo or dapo" in refused.stderr


def test_dapo_differs_in_its_clip_alone(tmp_path: Path) -> None:
    """Run with a stand-in for Python that prints its arguments."""
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "launch.sh").write_text(
        verl_script("Test.", "owner/model", paper_settings({}, faithful=True, model_limit=None))
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = {}
    for method in ("grpo", "dapo"):
        words = ["bash", tmp_path / "launch.sh", method, "trainer.nnodes=2"]
        said[method] = subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout.split(
            "\n"
        )
    only = [sorted(set(said[a]) - set(said[b])) for a, b in (("grpo", "dapo"), ("dapo", "grpo"))]
    ratio, name = "actor_rollout_ref.actor.clip_ratio_high", "trainer.experiment_name"
    folder = f"trainer.default_local_dir={tmp_path}/output_"
    assert only == [
        [f"{ratio}=0.2", f"{folder}grpo", f"{name}=grpo"],
        [f"{ratio}=0.28", f"{folder}dapo", f"{name}=dapo"],
    ]
    assert said["dapo"][-2] == "trainer.nnodes=2" and f"{MODEL_LENGTH}=8192" in said["dapo"]


def test_the_folder_for_trl_keeps_the_adapter(run: Path, problems: Path, tmp_path: Path) -> None:
    words = ["--to", "trl", "--data", problems, "--output", tmp_path / "handed", "--sample", "8", "--held-out", "4"]
    assert main(["handoff", str(run), *SHORT, *map(str, words)]) == 0
    names = {path.name for path in (tmp_path / "handed").iterdir()}
    assert {"adapter", "train.py", "settings.json", "reward.py", "launch.sh"} <= names and "model" not in names
    settings = json.loads((tmp_path / "handed" / "settings.json").read_text())
    assert settings["base"] == str(run.parent / "base") and settings["clip"]["dapo"] == [0.2, 0.28]
    assert settings["batch"]["prompts_per_step"] == 4 and settings["config"]["beta"] == 0.02
    assert settings["config"]["max_completion_length"] == 1024
    assert pq.read_table(tmp_path / "handed" / "train.parquet").num_rows == 8


def test_the_base_is_handed_over_by_its_place(run: Path, problems: Path, tmp_path: Path) -> None:
    words = ["--to", "verl", "--data", problems, "--output", tmp_path / "handed", "--from-base", "--held-out", "4"]
    assert main(["handoff", str(run), *SHORT, *map(str, words)]) == 0
    assert not (tmp_path / "handed" / "model").exists()
    assert settings_of(tmp_path / "handed" / "launch.sh")["actor_rollout_ref.model.path"] == str(run.parent / "base")


@pytest.mark.parametrize(
    ("overrides", "faithful", "limit", "expected"),
    [
        ({KL_TYPE: "nonsense"}, False, None, "kl_loss_type: found nonsense; expected one of kl, k1"),
        ({MODEL_LENGTH: "8192"}, False, None, "found 8,192 for prompts of 4,096 and answers of 8,192"),
        ({}, False, 8192, "max_model_len: found 12,288; expected at most 8,192"),
        ({"data.max_prompt_length": "long"}, False, None, "data.max_prompt_length: found long"),
    ],
)
def test_what_verl_accepts_in_silence_is_refused(
    overrides: dict[str, str], faithful: bool, limit: int | None, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        paper_settings(overrides, faithful=faithful, model_limit=limit)


def test_lengths_fit_together_unless_they_are_to_be_the_papers() -> None:
    assert paper_settings({}, faithful=False, model_limit=40960)[MODEL_LENGTH] == "12288"
    assert paper_settings({}, faithful=True, model_limit=8192)[MODEL_LENGTH] == "8192"
    assert paper_settings({KL_TYPE: "k3+"}, faithful=True, model_limit=None)[KL_TYPE] == "k3+"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--to", "trl", "learning_rate=1"], "found learning_rate with --to trl"),
        (["--to", "trl", f"{KL_TYPE}=mse"], "expected low_var_kl, the only one of TRL"),
        (["--to", "trl", *SHORT, "actor_rollout_ref.rollout.n=many"], "rollout.n: found many; expected a number"),
        (["--to", "verl", "word"], "found word; expected key=value"),
        (["--to", "verl", *SHORT, "--held-out", "40"], "found 31 usable problems (1 left out: no answer"),
        (["--to", "verl", *SHORT, "--held-out", "40"], "expected at least 41, of which 40 are held out (--held-out)"),
        (["--to", "verl", *SHORT, "--checkpoint", "step_7"], "cannot be exported: .*step_7"),
    ],
)
def test_what_cannot_be_meant_is_one_message(
    run: Path, problems: Path, tmp_path: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(problems), "--output", str(tmp_path / "out"), "--held-out", "4"]
    assert main(["handoff", str(run), *options, *words]) == 2
    error = capsys.readouterr().err
    assert re.search(expected if ".*" in expected else re.escape(expected), error), error
    assert list(tmp_path.iterdir()) == []


def test_rows_are_drawn_by_the_seed(run: Path, problems: Path) -> None:
    tokenizer = load_tokenizer(str(run.parent / "base"))
    drawn = [
        read_rows(
            str(problems),
            tokenizer,
            prompt="plain",
            max_prompt_tokens=2048,
            sample=5,
            held_out=2,
            seed=seed,
            split="train",
        )
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].left_out == {"no answer": 1, "prompt longer than 2,048 tokens": 1}
    assert drawn[0].train[0]["prompt"][0]["content"].startswith("What is ")


def test_overrides_are_words_with_a_value() -> None:
    assert parse_overrides(["a.b=c=d", "+e=1"]) == {"a.b": "c=d", "+e": "1"}


# ---- the reward ------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied_reward(tmp_path: Path) -> ModuleType:
    """reward.py as verl loads it: a file by itself."""
    path = tmp_path / "reward.py"
    path.write_bytes(Path(reward.__file__).read_bytes())
    spec = importlib.util.spec_from_file_location("reward_alone", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (r"so \boxed{4}", "4", 1.0),
        (r"\boxed{4} no, \boxed{5}", "4", 0.0),  # the last one counts
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{ \{1, 2\} }", r"\{2, 1\}", 1.0),
        (r"\boxed{4", "4", 0.0),
        ("4", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        (r"\boxed{" + "9" * 3000 + "}", "4", 0.0),
    ],
)
def test_rewards(answer: str, truth: str, expected: float) -> None:
    assert reward.compute_score("sums", answer, truth, {}) == expected


def test_rewards_of_messages_and_texts_are_alike() -> None:
    texts = [r"\boxed{1}", r"\boxed{2}"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    for completions in (texts, messages):
        assert reward.boxed_answer_reward(completions, ["1", "1"], prompts=None) == [1.0, 0.0]


def test_an_answer_that_takes_hours_costs_the_limit_and_the_next_one_is_judged(copied_reward: ModuleType) -> None:
    started = time.monotonic()
    text = Path(copied_reward.__file__).read_text().replace("LIMIT_SECONDS = 5", "LIMIT_SECONDS = 1")
    Path(copied_reward.__file__).write_text(text)
    assert copied_reward.compute_score("", r"\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{8}}}") == 0.0
    assert copied_reward.compute_score("", r"\boxed{2}", "2") == 1.0
    assert time.monotonic() - started < 120


def test_threads_may_ask_at_the_same_time(copied_reward: ModuleType) -> None:
    found: dict[int, float] = {}

    def ask(number: int) -> None:
        found[number] = copied_reward.compute_score(
            "", rf"\boxed{{{number}}}", str(number if number % 2 else -number - 1)
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: float(number % 2) for number in range(8)}


def test_without_math_verify_training_does_not_go_on(
    copied_reward: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RuntimeError, match="math-verify cannot be imported"):
        copied_reward.compute_score("", r"\boxed{1}", "1")
