"""The card of a result: true to the run, readable by huggingface_hub, without a path of this machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.helpers.report_runs import step_line, write_run
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.models.model_identity import BaseModel, identify_base_model
from vcore_ds.training.evaluation_folder import Evaluation, TaskResult, write_evaluation
from vcore_ds.training.model_card import make_model_card
from vcore_ds.training.run_folder import read_run_recipe

ENVIRONMENT = {
    "python": "3.11.7",
    "packages": {"vcore_ds": "0.1", "torch": "2.13.0"},
    "host": "secret-host",
    "command": ["/home/me/train.py"],
    "devices": ["NVIDIA H100"],
    "world_size": 8,
}
QWEN = BaseModel("Qwen3-8B", "Qwen/Qwen3-8B", {"license": "apache-2.0"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished LoRA run whose every path is a local one."""
    lines = [step_line(step, sequences=4, supervised_tokens=100) for step in (1, 2, 3)]
    folder = write_run(
        tmp_path / "run",
        make_tokenizer(),
        lines,
        {},
        environment=ENVIRONMENT,
        model={"path": str(tmp_path / "models" / "Qwen3-8B")},
        lora={"rank": 8, "alpha": 16},
        data={
            "train_path": str(tmp_path / "traces.jsonl"),
            "validation_path": {"right": str(tmp_path / "right.jsonl"), "wrong": "owner/wrong"},
            "cache_dir": str(tmp_path / "cache"),
        },
        engine={"deepspeed_config": str(tmp_path / "zero3.json")},
    )
    (folder / "held_out.json").write_text('{"before": {"right": 1.5}, "after": {"right": 1.25}}')
    return folder


def read_card(run: Path, kind: Any, **options: Any) -> tuple[ModelCard, str]:
    recipe = read_run_recipe(run)
    text = make_model_card(run, recipe.model.path, recipe.lora, recipe.method, recipe.data, kind, **options)
    return ModelCard(text), text


def write_task_evaluation(folder: Path) -> Path:
    task = TaskResult(60, 1, 0.4833, truncated_share=0.125, unanswered_share=0.0, mean_tokens=5000.0)
    write_evaluation(folder, Evaluation({"path": "m"}, None, {}, {}, {"aime": task}))
    return folder


def test_the_card_describes_training_and_results(run: Path, tmp_path: Path) -> None:
    evaluation = write_task_evaluation(tmp_path / "evaluation")
    card, text = read_card(run, "adapter", base=QWEN, evaluations=[evaluation])
    assert card.data.base_model == "Qwen/Qwen3-8B" and card.data.base_model_relation == "adapter"
    assert card.data.library_name == "peft" and card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0"
    assert card.data.tags == ["vcore_ds", "vcore", "lora"]
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("aime", "accuracy", 0.4833)
    for expected in (
        "# Qwen3-8B, fine-tuned with vcore (LoRA)",
        "A LoRA adapter for [Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B)",
        "AutoPeftModelForCausalLM",
        "`traces.jsonl`, `right.jsonl`, `wrong`",
        "applies here too: apache-2.0",
        "Held-out loss on right: 1.2500 nats, before 1.5000",
        "Accuracy on aime: 48.3% of 60 problems",
    ):
        assert expected in text, text


def test_the_card_has_no_path_or_host_of_this_machine(run: Path, tmp_path: Path) -> None:
    for kind in ("adapter", "merged"):
        text = read_card(run, kind)[1]
        assert str(tmp_path) not in text and "secret-host" not in text and "/home/me" not in text
        assert "base_model:" not in text  # a local folder of unknown origin has no id
        assert "`Qwen3-8B`" in text and "applies here too: unknown" in text


def test_an_earlier_checkpoint_has_no_losses_of_later_steps(run: Path) -> None:
    _, text = read_card(run, "adapter", step=2, base=QWEN)
    assert "for 2 optimizer steps" in text and "Held-out loss" not in text
    assert "Held-out loss" in read_card(run, "adapter", step=3, base=QWEN)[1]


def test_a_result_without_metrics_has_a_card(run: Path) -> None:
    for name in ("metrics.jsonl", "held_out.json", "environment.json"):
        (run / name).unlink()
    _, text = read_card(run, "model", base=QWEN)
    assert "Held-out" not in text


@pytest.mark.parametrize(
    ("path", "name", "hub_id"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B", "Qwen/Qwen3-8B"),
        ("{folder}/models--Qwen--Qwen3-8B/snapshots/abc", "Qwen3-8B", "Qwen/Qwen3-8B"),
        ("{folder}/local/model", "model", None),
        ("{folder}/result", "result", "Qwen/Qwen3-8B"),
        ("{folder}/foreign", "foreign", None),
    ],
)
def test_base_models_are_identified_by_path_and_card(path: str, name: str, hub_id: str | None, tmp_path: Path) -> None:
    for folder in ("models--Qwen--Qwen3-8B/snapshots/abc", "local/model", "result", "foreign"):
        (tmp_path / folder).mkdir(parents=True)
    card = "---\nbase_model: Qwen/Qwen3-8B\nlicense: apache-2.0\ntags: [{tag}]\n---\n"
    (tmp_path / "result" / "README.md").write_text(card.format(tag="vcore_ds"))
    (tmp_path / "foreign" / "README.md").write_text(card.format(tag="theirs"))  # names an ancestor, not itself
    base_model = identify_base_model(path.format(folder=tmp_path))
    assert (base_model.name, base_model.hub_id) == (name, hub_id)
    assert base_model.license == ({"license": "apache-2.0"} if path.endswith(("result", "foreign")) else {})
    assert identify_base_model(path.format(folder=tmp_path), hub_id="me/mine").hub_id == "me/mine"


def test_a_damaged_card_of_the_base_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert identify_base_model(str(tmp_path)).license == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, "format: Input should be 1"),
        ({"tasks": []}, "tasks: "),
        ({"tasks": {"aime": {"num_problems": 60}}}, "tasks.aime.num_samples_per_problem: Field required"),
        ({"tasks": {"aime": 0.5}}, "tasks.aime: "),
    ],
)
def test_an_evaluation_of_another_format_is_refused(run: Path, tmp_path: Path, changes: dict, reason: str) -> None:
    folder = write_task_evaluation(tmp_path / "evaluation")
    path = folder / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=rf"evaluation.json: .*{reason}"):
        read_card(run, "adapter", evaluations=[folder])
    with pytest.raises(UserError, match=f"--evaluation: {tmp_path}: "):
        read_card(run, "adapter", evaluations=[tmp_path])
