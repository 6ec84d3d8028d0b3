"""Runs that go on from the result of another one, on two ranks, against a script in plain PyTorch and peft."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.repocard import metadata_load
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.helpers import resumed_runs
from tests.helpers.conversations import tokenize
from tests.helpers.exports import load_tensors
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations, write_deepspeed_config, write_model
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.export.write import export_run
from vcore_ds.commands.score import compute, read_inputs
from vcore_ds.config.load import load_recipe
from vcore_ds.data.scores_folder import read_scores, read_traces
from vcore_ds.distributed.process_group import run_on_first_rank
from vcore_ds.training import run

pytestmark = pytest.mark.dist

DATA = {"first": range(6), "second": range(20, 24)}
"""Every batch of a stage has all of its sequences."""
RATES = {"first": 1e-3, "second": 3e-3}
STEPS, EPS = 2, 1e-4


def train(folder: Path, output: str, stage: str, *begins_from: str, stops: bool = False) -> None:
    """Train a stage; `stops`: after its first step, and resume."""
    words = [f"data.train_path={folder / stage}.jsonl", f"optimizer.learning_rate={RATES[stage]}", *begins_from]
    words += [f"batch.global_size={len(DATA[stage])}", f"run.output_dir={folder / output}"]
    recipe = load_recipe(folder / "sft.yaml", words)
    if stops:
        resumed_runs.run_until(recipe, 1)
    run.train(recipe)


def train_all(folder: Path) -> None:
    train(folder, "full_1", "first", "lora=null")
    train(folder, "full_2", "second", f"model.path={folder}/full_1")
    train(folder, "lora_1", "first", f"lora.adapter={folder}/plain")
    train(folder, "lora_2", "second", f"lora.adapter={folder}/lora_1", stops=True)
    run_on_first_rank(lambda: export_run(folder / "lora_2", merge=True))
    train(folder, "merged", "first", f"model.path={folder}/lora_2/checkpoints/step_00000002")
    words = ["model.precision=fp32", f"engine.deepspeed_config={folder}/zero3.json", f"data.cache_dir={folder}/cache"]
    good, pool = [f"good={folder}/second.jsonl"], f"{folder}/first.jsonl"
    compute.score(read_inputs(f"{folder}/plain", words, good, None, folder / "scores", data=pool))
    # A run that is scored, selected from and gone on from.
    compute.score(read_inputs(f"{folder}/full_1", [], good, None, folder / "scores of full_1"))
    keep = f"data.keep={{scores: '{folder}/scores of full_1', top: 1.0}}"
    train(folder, "full_kept", "first", f"model.path={folder}/full_1", keep)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter of plain peft, and all runs on two ranks."""
    root = tmp_path_factory.mktemp("second stage")
    write_model(root / "model")
    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    get_peft_model(load_model(root), config).save_pretrained(root / "plain")
    for name, numbers in DATA.items():
        write_conversations(root / f"{name}.jsonl", sums(numbers))
    sections: dict[str, Any] = {
        "method": {"name": "sft"},
        "model": {"path": f"{root}/model", "precision": "fp32"},
        "data": {"cache_dir": f"{root}/cache"},
        "optimizer": {"eps": EPS, "gradient_clipping": 0.5},
        "schedule": {"num_steps": STEPS, "kind": "constant", "warmup_steps": 0},
        "run": {"num_followed_traces": 0},
        "engine": {"deepspeed_config": str(write_deepspeed_config(root / "zero3.json"))},
    }
    (root / "sft.yaml").write_text(json.dumps(sections))
    run_ranks(train_all, 2, root)
    return root


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def compute_losses(model: Any, folder: Path, stage: str) -> list[torch.Tensor]:
    """Losses of the supervised tokens of each sequence, one sequence at a time."""
    lines = (folder / f"{stage}.jsonl").read_text().splitlines()
    losses = []
    for sequence in tokenize([json.loads(line)["messages"] for line in lines], make_tokenizer()):
        ids = torch.from_numpy(sequence.input_ids).long()
        all_losses = cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none")
        losses.append(all_losses[torch.from_numpy(sequence.supervised[1:])])
    return losses


def train_plainly(model: Any, folder: Path, stages: Iterable[str]) -> None:
    """Train in stages, each with a new optimizer."""
    for stage in stages:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATES[stage], eps=EPS, weight_decay=0.0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.stack([losses.mean() for losses in compute_losses(model, folder, stage)]).mean().backward()
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()


def check_close(result: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = load_tensors(result)
    assert tensors and tensors.keys() <= expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


def test_two_stages_equal_those_of_a_plain_script(folder: Path) -> None:
    model = load_model(folder)
    train_plainly(model, folder, ("first", "second"))
    check_close(folder / "full_2" / "model", model.state_dict())
    adapted = PeftModel.from_pretrained(load_model(folder), folder / "plain", is_trainable=True)
    train_plainly(adapted, folder, ("first", "second"))
    state = {name.replace(".default.", "."): tensor for name, tensor in adapted.state_dict().items()}
    check_close(folder / "lora_2" / "adapter", state)
    merged = adapted.merge_and_unload().requires_grad_(True)
    train_plainly(merged, folder, ["first"])
    check_close(folder / "merged" / "model", merged.state_dict())


def test_the_card_names_all_stages(folder: Path) -> None:
    first, second = (f"sft (LoRA) for 2 optimizer steps, run lora_{i}" for i in (1, 2))
    last = "sft (all parameters) for 2 optimizer steps, run merged"
    card = folder / "merged" / "model" / "README.md"
    assert metadata_load(card)["stages"] == ["model", first, second, last]
    assert f"`model`: {first}; {second}; {last}" in card.read_text()


def test_an_adapter_is_scored_by_the_gradients_of_its_parameters(folder: Path) -> None:
    model = PeftModel.from_pretrained(load_model(folder), folder / "plain", is_trainable=True).double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    along = torch.autograd.grad(sum(one.mean() for one in compute_losses(model, folder, "second")) / 4, trained)
    expected = []
    for losses in compute_losses(model, folder, "first"):
        gradients = torch.autograd.grad(losses.sum(), trained, retain_graph=True)
        expected.append(sum(float((a * b).sum()) for a, b in zip(gradients, along, strict=True)))
    sums_of_traces = read_traces(folder / "scores", ["utility_sum.good"])["utility_sum.good"]
    assert sums_of_traces.tolist() == pytest.approx(expected, rel=1e-4)


def test_scores_and_selections_name_the_weights_that_were_scored(folder: Path) -> None:
    adapter, run = (read_scores(folder / name) for name in ("scores", "scores of full_1"))
    assert (adapter.adapter, adapter.weights) == (f"{folder}/plain", f"{folder}/plain on {folder}/model")
    assert run.weights == f"{folder}/full_1 after step 2" and run.adapter is None
    assert json.loads((folder / "full_kept" / "environment.json").read_text())["kept"]["scored_weights"] == run.weights
