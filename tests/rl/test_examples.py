"""The examples of launch_scripts/rl without TRL and verl: reward, files of problems, settings and arguments."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from tests.helpers.commands import REPOSITORY
from vcore_ds.data.answers import AnswerChecker, math_prompt

EXAMPLES = REPOSITORY / "launch_scripts" / "rl"


def load_example(name: str) -> ModuleType:
    """An example's module, loaded from its path as verl loads the reward."""
    spec = importlib.util.spec_from_file_location(f"rl_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    return load_example("reward")


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
    ],
)
def test_rewards_are_1_for_the_right_boxed_answer_only(
    reward: ModuleType, answer: str, truth: str, expected: float
) -> None:
    assert reward.compute_score("sums", answer, truth, {}) == expected
    messages = [[{"role": "assistant", "content": answer}]]
    assert reward.boxed_answer_reward([answer], [truth], prompts=None) == [expected]
    assert reward.boxed_answer_reward(messages, [truth], prompts=None) == [expected]


def test_rewards_are_thread_safe_and_an_endless_answer_gets_0(
    reward: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward, "checker", AnswerChecker(limit_seconds=1))
    scores: dict[int, float] = {}

    def ask(number: int) -> None:
        endless = number == 0
        answer, truth = ("9^{9^{9^{9}}}", "9^{9^{9^{8}}}") if endless else (str(number), f"{number}.{number % 2}")
        scores[number] = reward.compute_score("", rf"\boxed{{{answer}}}", truth)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reward.checker.close()
    assert scores == {number: float(number > 0 and number % 2 == 0) for number in range(8)}


def write_problems(path: Path) -> Path:
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]
    others = [{"question": "What is 20 + 20?", "expected_answer": 40}, {"problem": "No answer?", "answer": None}, 7]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *others]))
    return path


def test_problems_are_written_with_the_prompt_of_training(tmp_path: Path, monkeypatch, capsys) -> None:
    source, problems = write_problems(tmp_path / "sums.jsonl"), load_example("problems")
    drawn = []
    for words in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--seed", "1", "--sample", "5"]):
        monkeypatch.setattr(
            sys, "argv", ["problems.py", str(source), "--output", str(tmp_path), "--held-out=4", *words]
        )
        problems.main()
        drawn.append([pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "validation")])
    assert drawn[0] == drawn[1] != drawn[2] and drawn[3] == [drawn[0][0][:5], drawn[0][1]]
    assert "2 rows without a problem or an answer left out" in capsys.readouterr().out
    train, held_out = drawn[0]
    assert (len(train), len(held_out)) == (17, 4)
    for row in train + held_out:
        number = row["extra_info"]["index"]
        assert row["prompt"] == [{"role": "user", "content": math_prompt(f"What is {number} + {number}?")}]
        assert row["reward_model"]["ground_truth"] == str(2 * number) and row["data_source"] == "sums"

    loaded = load_example("grpo_trl").load_problems(str(tmp_path / "train.parquet"))
    assert loaded.column_names == ["prompt", "ground_truth"]
    assert loaded["ground_truth"][0] == train[0]["reward_model"]["ground_truth"]

    for words, message in (
        ([str(source), "--sample", "30"], "found 21 problems with answers; expected at least 64 to hold out and 30 to"),
        ([str(tmp_path / "nowhere.jsonl")], "nowhere.jsonl"),
    ):
        monkeypatch.setattr(sys, "argv", ["problems.py", *words, "--output", str(tmp_path / "none")])
        with pytest.raises(SystemExit, match="2"):
            problems.main()
        assert message in capsys.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.parametrize("num_processes", [1, 8, 64])
def test_trl_takes_the_papers_steps_on_any_number_of_processes(num_processes: int) -> None:
    settings = load_example("grpo_trl").paper_settings(num_processes)
    answers_at_once = settings["per_device_train_batch_size"] * num_processes
    assert settings["gradient_accumulation_steps"] * answers_at_once == 32 * 4
    assert settings["generation_batch_size"] == 128 * 4 and settings["max_steps"] == 200 * 4


def test_the_script_starts_verl_with_its_arguments(tmp_path: Path) -> None:
    """The script runs with a stand-in for Python that prints its arguments."""
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    script, environment = ["bash", str(EXAMPLES / "grpo_verl.sh")], {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["my model", "rl data", "trainer.nnodes=2"]
    done = subprocess.run([*script, *words], capture_output=True, text=True, env=environment, check=True)
    first, module, *settings = done.stdout.splitlines()
    assert (first, module, settings[-1]) == ("-m", "verl.trainer.main_ppo", "trainer.nnodes=2")
    values = dict(word.split("=", 1) for word in settings)
    assert (
        values["actor_rollout_ref.model.path"] == "my model"
        and values["data.val_files"] == "rl data/validation.parquet"
    )
    lengths = (int(values[f"data.max_{name}_length"]) for name in ("prompt", "response"))
    assert int(values["actor_rollout_ref.rollout.max_model_len"]) == sum(lengths)
    refused = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert refused.returncode == 2 and "expected MODEL" in refused.stderr
