"""Complete runs with parallel layers: loaded from a Hugging Face folder, stopped, resumed, exported, loaded again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.helpers import resumed_runs, tiny
from tests.helpers.exports import load_tensors
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations
from tests.helpers.token_records import assert_same_records
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.export.write import export_run
from vcore_ds.commands.fidelity.measure import measure_fidelity
from vcore_ds.common.errors import UserError
from vcore_ds.config.schema import Recipe
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.export_shards import save_hugging_face
from vcore_ds.engine.zero3 import Engine
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.setup import build_engine, plan_ranks

pytestmark = pytest.mark.dist

DEEPSPEED_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
UNTRAINED = (("untied", "fp32"), ("tied", "bf16"))
FIDELITY = ("fp32", "bf16")
"""Precisions in which fidelity is measured."""
COMPARED = {"loss", "alpha", "grad_norm", "direction_norm", "supervised_tokens", "sequences", "validation_loss"}
"""Metrics of a step that do not depend on how the ranks are used."""
NUM_STEPS = 3
STOP = 1
"""Step after which the run is stopped: the next one takes the saved direction."""


def make_recipe(folder: Path, name: str, **sections: Any) -> Recipe:
    tied = "tied" if name.startswith("tied") else "untied"
    model = {"path": str(folder / tied), "precision": "fp32", **sections.pop("model", {})}
    return Recipe(
        model=model,
        method=sections.pop("method", {"kl_budget": 0.05}),
        data={
            "train_path": str(folder / "train.jsonl"),
            "validation_path": str(folder / "validation.jsonl"),
            "cache_dir": str(folder / "cache"),
        },
        batch={"global_size": 4},
        probe={"batch_size": 2, "every": 2},
        optimizer=sections.pop("optimizer", {"learning_rate": 1e-3, "eps": 1e-4}),
        schedule=sections.pop("schedule", {"num_steps": NUM_STEPS}),
        run={
            "output_dir": str(folder / "runs" / name),
            "validate_every": sections.pop("validate_every", 2),
            "num_followed_traces": 3 if name in ("parallel", "stopped", "on_two", "alone") else 0,
        },
        engine={"deepspeed_config": str(DEEPSPEED_CONFIGS / f"zero3_{model['precision']}.json")},
        **sections,
    )


PARALLEL: dict[str, Any] = {"model": {"provider": "megatron"}, "parallel": {"tensor": 2}}


def save_models(root: Path) -> Path:
    """Write two models and conversations to a folder, which is returned."""
    tokenizer = make_tokenizer()
    for name in ("tied", "untied"):
        # An odd vocabulary, which two ranks cannot divide.
        tiny.qwen3(tied=name == "tied", vocab_size=len(tokenizer) + 1 - len(tokenizer) % 2).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    write_conversations(root / "train.jsonl", sums(range(13)))
    write_conversations(root / "validation.jsonl", sums(range(20, 23)))
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("megatron"))


def train_parallel(folder: Path) -> None:
    resumed_runs.run_to_end(make_recipe(folder, "tied", **PARALLEL))
    killed = folder / "runs" / "stopped"
    resumed_runs.run_and_copy_after(make_recipe(folder, "parallel", **PARALLEL), STOP, killed)
    if layout.is_first():
        shutil.copytree(killed, folder / "runs" / "on_two")
    resumed_runs.run_to_end(make_recipe(folder, "stopped", **PARALLEL))


def make_untrained_engine(recipe: Recipe) -> Engine:
    """Load the recipe's model as a run does."""
    start_process_group(10, recipe.parallel.tensor)
    settings = derive_plan_settings(recipe)
    return build_engine(derive_plan_settings(recipe), deepspeed_config(settings, plan_ranks(settings)))


def load_and_export(folder: Path, kind: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Export untrained models in small files, and measure fidelity; returns the engines' losses too."""
    results: dict[str, Any] = {}
    for name, precision in UNTRAINED:
        recipe = make_recipe(folder, f"{name}_{kind}", **_with_precision(sections, precision))
        engine = make_untrained_engine(recipe)
        target = folder / "untrained" / f"{name}_{kind}"
        save_hugging_face(engine, load_tokenizer(recipe.model.path), recipe.model.path, target, max_file_bytes=20_000)
        with engine.without_gradient():
            results[name] = engine.token_losses(tiny.make_batch(3)).float()
        results[f"{name}, frequencies"] = [b for n, b in engine.module.named_buffers() if n.endswith("rotary.inv_freq")]
        engine.close()
    for precision in FIDELITY:
        recipe = make_recipe(folder, f"fidelity_{precision}_{kind}", **_with_precision(sections, precision))
        results[f"fidelity, {precision}"] = measure_fidelity(
            recipe, num_sequences=3, epsilons=[0.1], ranks=[16, 64, 128]
        )
    return results


def _with_precision(sections: dict[str, Any], precision: str) -> dict[str, Any]:
    return {**sections, "model": {**sections.get("model", {}), "precision": precision}}


def train_alone(folder: Path) -> None:
    for name in ("alone", "tied_alone"):
        resumed_runs.run_to_end(make_recipe(folder, name))


def resume_on_two(folder: Path) -> tuple[str, torch.Tensor]:
    """Resume a run of 4 ranks that was killed. Before that: the message that refuses it with undivided layers, and the
    losses of undivided layers that are loaded from the checkpoint's export."""
    undivided = {**PARALLEL, "parallel": {"tensor": 1}}
    try:
        resumed_runs.run_to_end(make_recipe(folder, "on_two", **undivided))
        refusal = "none"
    except UserError as error:
        refusal = str(error)
    recipe = make_recipe(folder, "reloaded", **undivided)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder / "reloaded")})})
    engine = make_untrained_engine(recipe)
    with engine.without_gradient():
        losses = engine.token_losses(tiny.make_batch(3))
    engine.close()
    resumed_runs.run_to_end(make_recipe(folder, "on_two", **PARALLEL))
    return refusal, losses


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    run_ranks(train_parallel, 4, folder)
    run_ranks(train_alone, 2, folder)
    return folder / "runs"


def test_a_resumed_run_equals_one_that_was_not_stopped(runs):
    assert resumed_runs.find_differences(runs / "stopped", runs / "parallel", NUM_STEPS) == []


@pytest.mark.parametrize(("parallel", "alone"), [("parallel", "alone"), ("tied", "tied_alone")])
def test_a_run_has_the_losses_of_hugging_faces_layers(runs, parallel, alone):
    metrics, expected = (resumed_runs.read_deterministic_metrics(runs / name) for name in (parallel, alone))
    for a, b in zip(metrics, expected, strict=True):
        assert a.keys() == b.keys()
        for key in COMPARED & {key for key in b if b[key] is not None}:
            assert a[key] == pytest.approx(b[key], rel=2e-4), (a["step"], key)
    assert any(line.get("validation_loss") is not None for line in metrics)
    assert all(any(line.get(key) is not None for line in expected) for key in COMPARED)


@pytest.fixture(scope="module")
def untrained(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """With Hugging Face's layers on 2 ranks, and with parallel ones on 4."""
    return run_ranks(load_and_export, 2, folder, "alone", {})[0], run_ranks(
        load_and_export, 4, folder, "parallel", PARALLEL
    )[3]


@pytest.mark.parametrize(("name", "precision"), UNTRAINED)
def test_an_untrained_export_equals_the_other_providers_byte_for_byte(folder, untrained, name, precision):
    alone, parallel = (folder / "untrained" / f"{name}_{kind}" for kind in ("alone", "parallel"))
    names = sorted(file.name for file in alone.iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) >= 3
    assert sorted(file.name for file in parallel.iterdir()) == names
    for file in names:
        assert (parallel / file).read_bytes() == (alone / file).read_bytes(), file


def compute_losses(plain: nn.Module) -> torch.Tensor:
    """Losses of the supervised tokens of `tiny.make_batch(3)`, by Hugging Face's forward."""
    batch = tiny.make_batch(3)
    targets = batch.targets()
    with torch.no_grad():
        logits = plain(input_ids=batch.input_ids).logits
    return cross_entropy(logits[targets != -100], targets[targets != -100], reduction="none")


@pytest.mark.parametrize(("name", "precision"), UNTRAINED)
def test_loaded_layers_compute_what_the_model_computes(folder, untrained, name, precision):
    plain = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    expected = compute_losses(plain)
    alone, parallel = (float((results[name] - expected).abs().max()) for results in untrained)
    print(alone, parallel)
    if precision == "fp32":
        assert parallel < 2e-6
    else:  # within the rounding that the other provider has too
        assert parallel < 2 * alone
    (frequencies,) = untrained[1][f"{name}, frequencies"]
    assert torch.equal(frequencies, plain.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("precision", FIDELITY)
def test_fidelity_equals_that_of_hugging_faces_layers(untrained, precision):
    alone, parallel = (results[f"fidelity, {precision}"] for results in untrained)
    assert parallel.num_tokens == alone.num_tokens > 0
    assert parallel.utility_std == pytest.approx(alone.utility_std, rel=1e-5 if precision == "fp32" else 2e-2)
    both = [one for one in alone.estimators if "FP8" not in one.estimator]
    for ours, theirs in zip(parallel.estimators, both, strict=True):
        assert ours.spearman == pytest.approx(theirs.spearman, abs=1e-3)
    assert parallel.estimators[0].spearman > 0.99
    # Each tensor-parallel rank factorizes its own shards, so a low rank keeps more there; the largest keeps everything.
    for ours, theirs in zip(parallel.low_ranks, alone.low_ranks, strict=True):
        assert ours.energy > theirs.energy - 0.01 and ours.spearman > 0.9
    assert parallel.low_ranks[-1].spearman > 0.9999


def test_followed_traces_equal_those_of_hugging_faces_layers(runs):
    steps = assert_same_records(runs / "parallel", runs / "alone", "followed", num_sequences=3, tolerance=2e-3)
    assert steps == [*range(1, NUM_STEPS + 1)]


@pytest.mark.parametrize(("parallel", "alone"), [("parallel", "alone"), ("tied", "tied_alone")])
def test_exports_equal_those_of_hugging_faces_layers(runs, parallel, alone, tmp_path):
    ours, theirs = load_tensors(runs / parallel / "model"), load_tensors(runs / alone / "model")
    assert list(ours) == list(theirs)
    for name, weight in theirs.items():
        assert ours[name].shape == weight.shape
        assert float((ours[name] - weight).abs().max()) < 1e-4, name
    from_checkpoint = export_run(runs / parallel, output=tmp_path / "export")
    assert all(torch.equal(weight, ours[name]) for name, weight in load_tensors(from_checkpoint).items())
    for file in (runs / alone / "model").iterdir():
        if file.name not in ("model.safetensors", "README.md"):  # the card names the recipe and its ranks
            assert (runs / parallel / "model" / file.name).read_bytes() == file.read_bytes()
    AutoModelForCausalLM.from_pretrained(runs / parallel / "model")


@pytest.fixture(scope="module")
def resumed(folder: Path, runs: Path) -> tuple[str, torch.Tensor]:
    export_run(runs / "on_two", output=folder / "reloaded")
    return run_ranks(resume_on_two, 2, folder)[0]


def test_resuming_at_another_tensor_parallel_size_is_refused_with_advice(folder, resumed):
    refusal, losses = resumed
    assert "parallel.tensor: 2 there, 1 here" in refusal
    assert f"model.path={folder / 'runs' / 'on_two'}" in refusal
    expected = compute_losses(AutoModelForCausalLM.from_pretrained(folder / "reloaded", dtype=torch.float32))
    assert float((losses - expected).abs().max()) < 2e-6


def test_a_run_resumed_on_fewer_ranks_has_the_same_parameters(resumed, runs):
    on_two, straight = (resumed_runs.load_checkpoint_tensors(runs / name, NUM_STEPS) for name in ("on_two", "parallel"))
    assert on_two.keys() == straight.keys()
    for name, tensor in straight.items():
        if name.startswith("master"):
            torch.testing.assert_close(on_two[name], tensor, rtol=0, atol=1e-4)
