"""The quickstart as it is typed: real model, real traces, two ranks where there are no GPUs; one small step of it."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch_scripts.quickstart import DATA, RECIPE
from tests.helpers.commands import METRICS, has_control_characters, read_metrics, run_command
from vcore_ds.commands.evaluate.champ import HELD_OUT
from vcore_ds.config.load import load_recipe, make_override

pytestmark = pytest.mark.e2e


def test_the_quickstart_trains_reports_and_exports_an_adapter(tmp_path: Path):
    folder = tmp_path / "my #1 [quick] start"
    # Short traces, and none that is followed, since the default takes minutes.
    changes = "schedule.num_steps=1 batch.global_size=2 batch.micro_batch_size_per_rank=1 data.cutoff_length=176"
    changes += " run.num_followed_traces=0"
    word = shlex.quote(make_override("run.output_dir", folder))
    done = run_command(f"bash launch_scripts/quickstart.sh {changes} {word}")
    output = done.stdout
    assert done.returncode == 0, output
    assert "Traceback" not in output and not has_control_characters(output), ascii(output)
    for name in ("correct", "incorrect"):
        losses = re.search(rf"Held-out loss: .*{name} ([\d.]+) -> ([\d.]+)", output)
        before, after = map(float, losses.groups())
        assert 0 < after < before < 3
    assert f"{folder / 'adapter'} (Hugging Face format)" in output
    assert f"Report: {folder / 'report.html'} " in output
    # The probe's gradient and the utilities, without trusted data.
    cost = re.search(r"\nCost: +([\d.]+) times the FLOP of a step of methods/sft\.yaml, .*docs/scoring\.md", output)
    assert 1.5 < float(cost[1]) < 3.5
    assert "Tokens that gained most weight" in (folder / "report.html").read_text()
    assert "bash launch_scripts/quickstart.sh schedule.num_steps=" in output  # what to do next

    trained_on = (DATA / "train.jsonl").read_text() + (DATA / "trusted.jsonl").read_text()
    problems = {json.loads(line)["problem"] for line in trained_on.splitlines()}
    assert len(problems) > 100 and not problems & set(HELD_OUT)  # what vcore-ds eval asks

    (first,) = read_metrics(folder)
    losses = {"validation_loss_correct", "validation_loss_incorrect"}
    assert set(first) == METRICS | losses and first["sequences"] == 2
    assert first["kl"] == pytest.approx(load_recipe(RECIPE).method.kl_budget, rel=0.01)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["world_size"] == 2 or torch.cuda.is_available()

    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    base_path = config["base_model_name_or_path"]
    assert os.path.isdir(base_path)
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.bfloat16)
    tokens = AutoTokenizer.from_pretrained(folder / "adapter")("two and two is four", return_tensors="pt")
    with torch.no_grad():
        base_logits = base(**tokens).logits
        logits = PeftModel.from_pretrained(base, folder / "adapter")(**tokens).logits
    assert logits.isfinite().all() and not torch.equal(logits, base_logits)
