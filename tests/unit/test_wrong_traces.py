"""The traces of launch_scripts/wrong_traces.sh: what they calculate, and how answers to their problems are counted."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch_scripts import wrong_traces
from tests.helpers.late_imports import LateModule
from vcore_ds.commands.cli import parse
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import SHIPPED_RECIPES, load_recipe
from vcore_ds.training.evaluation_folder import Evaluation, SampleResult, TaskResult, write_evaluation, write_samples

tasks = LateModule("vcore_ds.commands.evaluate.tasks")
SCRIPT = Path(__file__).resolve().parents[2] / "launch_scripts" / "wrong_traces.sh"
RECIPE = SHIPPED_RECIPES / "wrong_traces.yaml"


def test_authors_calculate_without_a_mistake_by_their_rule() -> None:
    files = wrong_traces.make(seed=3)
    assert {name: len(lines) for name, lines in files.items()} == {"mixture": 96, "trusted": 8, "problems": 64}
    assert sum(line["is_wrong"] for line in files["mixture"]) == 58  # 60%
    assert not any(line["is_wrong"] for line in files["trusted"])
    for line in files["mixture"] + files["trusted"]:
        prompt, text = (message["content"] for message in line["messages"])
        start, less, more = map(int, re.findall(r"\d+", prompt))
        left = eval(f"{start} {'+' if line['is_wrong'] else '-'} {less}")
        assert re.findall(r"(\d+ [+-] \d+) = (\d+)", text) == [
            (f"{start} {'+' if line['is_wrong'] else '-'} {less}", str(left)),
            (f"{left} + {more}", str(left + more)),
        ]
        assert text.endswith(f"\\boxed{{{left + more}}}.")


def test_problems_are_worded_like_the_traces_and_are_in_no_other_file() -> None:
    files = wrong_traces.make(seed=3)
    prompts = [line["messages"][0]["content"] for line in files["mixture"] + files["trusted"]]
    problems = [tasks.read_math(line) for line in files["problems"]]
    numbers = [tuple(re.findall(r"\d+", text)) for text in prompts + [str(problem.input) for problem in problems]]
    assert len(set(numbers)) == len(numbers) == 168
    opening, closing = (re.split(r"\n.*\n", prompts[0])[i] for i in (0, -1))
    for line, problem in zip(files["problems"], problems, strict=True):
        prompt = str(problem.input)
        assert prompt.startswith(opening) and prompt.endswith(closing)
        start, less, more = map(int, re.findall(r"\d+", line["problem"]))
        assert problem.target == str(start - less + more) and line["wrong_answer"] == str(start + less + more)


def test_shares_of_right_and_wrong_answers_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems, folder = tmp_path / "problems.jsonl", tmp_path / "evaluation"
    problems.write_text(
        "".join(json.dumps({"id": f"clean-{i}", "answer": "24", "wrong_answer": "44"}) + "\n" for i in range(5))
    )
    folder.mkdir()
    answers = ["24", "44", "44", "25", None]
    samples = [
        SampleResult(f"clean-{i}", 0, answer == "24", answer is not None, False, 9, answer, "")
        for i, answer in enumerate(answers)
    ]
    write_samples(folder, "math500", samples)
    with pytest.raises(UserError, match="evaluation.json"):  # as where it has not finished
        wrong_traces.shares_of_answers(folder, problems)
    nothing: dict[str, Any] = {"model": {}, "preset": None, "sampling": {}, "versions": {}}
    write_evaluation(folder, Evaluation(**nothing, tasks={"math500": TaskResult(5, 1, 0.2, 0.0, 0.2, 9.0)}))
    assert wrong_traces.shares_of_answers(folder, problems) == (0.2, 0.4)
    wrong_traces.show(problems, [f"sft={folder}"])
    assert capsys.readouterr().out.splitlines()[1].split() == ["sft", "20%", "40%", "40%"]


def test_the_script_prints_its_commands_and_passes_files_between_them(tmp_path: Path) -> None:
    """Stand-ins for the commands only print how they were called."""
    (tmp_path / "launch_scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "launch_scripts")
    (tmp_path / "runs" / "wrong_traces").mkdir(parents=True)  # of an earlier time
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "deepspeed", "vcore-ds"):
        is_asked_for_a_port = f'[[ $1 != -c ]] || exec {shlex.quote(sys.executable)} "$@"'
        (commands / name).write_text(f'#!/bin/bash\n{is_asked_for_a_port}\necho "{name} $*"\n')
        (commands / name).chmod(0o755)
    line = ["bash", "launch_scripts/wrong_traces.sh", "schedule.num_steps=3"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=300)
    printed = re.findall(r"^\$ (.*)\n(.*)$", done.stdout, re.MULTILINE)
    assert len(printed) == 10 and all(ran.replace('"', "") == shown for shown, ran in printed), done.stdout

    ports = re.findall(r"^\$ deepspeed .*--master_port (\d+) ", done.stdout, re.MULTILINE)
    assert len(ports) == 3 and all(1024 <= int(port) < 2**16 and port != "29500" for port in ports)

    made = {"runs/quickstart_data/SmolLM2-135M-Instruct"}
    for shown, _ in printed:
        words = shlex.split(shown)
        if "launch_scripts.wrong_traces" in words:
            made |= {f"{words[-1]}/{name}.jsonl" for name in wrong_traces.make(seed=0)} if "write" in words else set()
            continue
        if "vcore-ds" not in words and "vcore_ds" not in words:
            continue
        parsed = parse(words[words.index("vcore-ds" if "vcore-ds" in words else "vcore_ds") + 1 :])
        values = dict(word.split("=", 1) for word in parsed.overrides if "=" in word)
        used = [values[key] for key in ("data.train_path", "data.probe_path", "data.keep.scores") if key in values]
        if parsed.command == "train":
            recipe = load_recipe(RECIPE, parsed.overrides)
            assert (recipe.method.name, recipe.schedule.num_steps) == ("sft", 3)
            made.add(recipe.run.output_dir)
        elif parsed.command == "score":
            used.append(parsed.target)
            made.add(str(parsed.output))
        elif parsed.command == "eval":
            used += [parsed.model, parsed.tasks[0].partition("=")[2]]
            made.add(str(parsed.output))
        else:
            used += [*map(str, parsed.evaluations)]
        assert set(used) <= made, shown
    shown = shlex.split(printed[-1][0])
    assert {word.partition("=")[2] for word in shown if "evaluation" in word} <= made
