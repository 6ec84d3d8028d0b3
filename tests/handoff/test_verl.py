"""What verl makes of the folder: its settings, its data set, its loading of the reward; and what it lets pass.

verl needs another transformers than this project, so it is in an environment of its own (docs/handoff.md):
VCORE_DS_VERL_PYTHON=VENV/bin/python python -m pytest tests/handoff/test_verl.py
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.setups import write_model
from tests.unit.test_export import trained_masters, write_run
from vcore_ds.cli import main
from vcore_ds.data.rendering import render_prompt
from vcore_ds.data.tokenization import load_tokenizer

VERL = os.environ.get("VCORE_DS_VERL_PYTHON")
pytestmark = [
    pytest.mark.skipif(
        VERL is None, reason="NOT CHECKED: verl. Name a Python that has verl 0.9.1 in VCORE_DS_VERL_PYTHON"
    ),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is_gradient_checkpointing"),
]
CHECKS = Path(__file__).with_name("verl_checks.py")
KL_TYPE = "actor_rollout_ref.actor.kl_loss_type"


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    base = write_model(folder / "base")
    run = write_run(folder / "run", base, trained_masters(base, lora=True), lora=True)
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(300)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--to", "verl", "--data", str(folder / "sums.jsonl"), "--output", str(folder / "handed")]
    assert main(["handoff", str(run), *words]) == 0
    return folder / "handed"


def as_verl_reads(handed: Path, tmp_path: Path, *words: str) -> dict[str, Any]:
    """What verl_checks.py finds in the words that launch.sh gives to verl."""
    assert VERL is not None
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {VERL} {CHECKS} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", handed / "launch.sh", *words], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def test_verl_accepts_the_folder_and_asks_as_in_training(handed: Path, tmp_path: Path) -> None:
    found = as_verl_reads(handed, tmp_path, "grpo")
    assert found["sizes"] == [236, 64] and found["adv_estimator"] == "grpo"
    assert found["lengths"] == [4096, 8192, 12288] and found["clip"] == [0.2, 0.2]
    assert found["kl"] == [True, 0.02, "low_var_kl"]
    assert found["rewards"] == [1.0, 0.0, 0.0]
    tokenizer = load_tokenizer(str(handed / "model"))
    for row in found["rows"]:
        number = row["index"]
        messages = [{"role": "user", "content": row["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]}]
        assert f"What is {number} + {number}?" in messages[0]["content"] and row["truth"] == str(2 * number)
        assert row["text"] == render_prompt(messages, tokenizer) and row["source"] == "sums"


def test_verl_accepts_dapo(handed: Path, tmp_path: Path) -> None:
    assert as_verl_reads(handed, tmp_path, "dapo")["clip"] == [0.2, 0.28]


def test_verl_lets_pass_what_is_refused_here(handed: Path, tmp_path: Path) -> None:
    """Where this fails verl has learnt to refuse it, and the refusal here can go."""
    words = [f"{KL_TYPE}=nonsense", "actor_rollout_ref.rollout.max_model_len=8192"]
    found = as_verl_reads(handed, tmp_path, "grpo", *words)
    assert found["kl"][2] == "nonsense" and found["lengths"] == [4096, 8192, 8192]
