"""verl reads launch_scripts/rl: its settings, its data set, its loading of the reward.

verl needs another transformers than this project, so it is in another environment (docs/export.md):
VCORE_DS_VERL_PYTHON=VENV/bin/python python -m pytest tests/rl/test_verl.py
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY
from tests.helpers.setups import write_model
from vcore_ds.data.conversations import render_prompt
from vcore_ds.data.tokenization import load_tokenizer

VERL = os.environ.get("VCORE_DS_VERL_PYTHON")
pytestmark = pytest.mark.skipif(
    VERL is None, reason="NOT CHECKED: verl. Name a Python that has verl 0.9.1 in VCORE_DS_VERL_PYTHON"
)
EXAMPLES = REPOSITORY / "launch_scripts" / "rl"
CHECKS = Path(__file__).with_name("verl_checks.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ and rl_data/."""
    folder = tmp_path_factory.mktemp("verl")
    write_model(folder / "model")
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(300)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [folder / "sums.jsonl", "--output", folder / "rl_data"]
    subprocess.run([sys.executable, EXAMPLES / "problems.py", *words], check=True)
    return folder


def test_verl_accepts_the_example_and_asks_as_in_training(folder: Path, tmp_path: Path) -> None:
    """verl_checks.py receives the arguments that grpo_verl.sh gives to verl."""
    assert VERL is not None
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(VERL)} {shlex.quote(str(CHECKS))} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "HF_HOME": str(tmp_path)}
    words = [folder / "model", folder / "rl_data", "actor_rollout_ref.actor.clip_ratio_high=0.28"]
    line = ["bash", EXAMPLES / "grpo_verl.sh", *words]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (output,) = (text for text in done.stdout.splitlines() if text.startswith("PARSED "))
    parsed = json.loads(output.removeprefix("PARSED "))
    assert parsed["sizes"] == [236, 64] and parsed["adv_estimator"] == "grpo"
    assert parsed["lengths"] == [4096, 8192, 12288] and parsed["clip"] == [0.2, 0.28]
    assert parsed["kl"] == [True, 0.02, "low_var_kl"]
    assert parsed["rewards"] == [1.0, 0.0, 0.0]
    tokenizer = load_tokenizer(str(folder / "model"))
    for row in parsed["rows"]:
        number = row["index"]
        messages = [{"role": "user", "content": row["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]}]
        assert f"What is {number} + {number}?" in messages[0]["content"] and row["truth"] == str(2 * number)
        assert row["text"] == render_prompt(messages, tokenizer) and row["source"] == "sums"
