"""Whole runs with parallel layers: loaded from a Hugging Face folder, stopped, resumed, exported, loaded again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.helpers import resumed_runs, tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations
from tests.helpers.soak import soak
from tests.helpers.token_records import assert_same_followed
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.export.write import export_run
from vcore_ds.commands.fidelity import FidelityOptions
from vcore_ds.commands.fidelity.measure import measure_fidelity
from vcore_ds.common.errors import UserError
from vcore_ds.config.schema import Recipe
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.export_shards import save_hugging_face
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.train import setup as shared
from vcore_ds.train.settings import derive_engine_settings

pytestmark = pytest.mark.dist

DEEPSPEED_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
UNTRAINED = (("untied", "fp32"), ("tied", "bf16"))
FIDELITY = ("fp32", *soak({"bf16": "bf16"}))
"""Precisions in which it is measured; with adapters in bf16, in `test_megatron_adapters.py`."""
COMPARED = {"loss", "alpha", "grad_norm", "direction_norm", "supervised_tokens", "sequences", "validation_loss"}
"""Metrics of a step that do not depend on how the ranks are used."""
NUM_STEPS = 3
STOP = 1
"""The step after it takes the direction that was saved."""


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
            "num_followed_traces": 3 if name in ("whole", "stopped", "on_two", "alone") else 0,
        },
        engine={"deepspeed_config": str(DEEPSPEED_CONFIGS / f"zero3_{model['precision']}.json")},
        **sections,
    )


PARALLEL: dict[str, Any] = {"model": {"provider": "megatron"}, "parallel": {"tensor": 2}}


def save_models(root: Path) -> Path:
    """Two models and conversations, in a folder, which is returned."""
    tokenizer = make_tokenizer()
    for name in ("tied", "untied"):
        # One token that the ranks cannot share out evenly.
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
    resumed_runs.run_and_copy_after(make_recipe(folder, "whole", **PARALLEL), STOP, killed)
    if layout.is_first():
        shutil.copytree(killed, folder / "runs" / "on_two")
    resumed_runs.run_to_end(make_recipe(folder, "stopped", **PARALLEL))


def load_and_export(folder: Path, kind: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Exports without training, in files of a few weights; what the engine computes with what it has loaded."""
    found: dict[str, Any] = {}
    for name, precision in UNTRAINED:
        recipe = make_recipe(folder, f"{name}_{kind}", **_with_precision(sections, precision))
        start_process_group(10, recipe.parallel.tensor)
        settings = derive_plan_settings(recipe)
        engine = shared.build_engine(
            derive_engine_settings(recipe), deepspeed_config(settings, shared.plan_ranks(settings))
        )
        target = folder / "untrained" / f"{name}_{kind}"
        save_hugging_face(engine, load_tokenizer(recipe.model.path), recipe.model.path, target, max_file_bytes=20_000)
        with engine.without_gradient():
            found[name] = engine.token_losses(tiny.make_batch(3)).float()
        found[f"{name}, frequencies"] = [b for n, b in engine.module.named_buffers() if n.endswith("rotary.inv_freq")]
        engine.close()
    for precision in FIDELITY:
        recipe = make_recipe(folder, f"fidelity_{precision}_{kind}", **_with_precision(sections, precision))
        options = FidelityOptions(3, epsilons=(0.1,), probe_sizes=(1,), large_probe_size=2, stale_steps=(1,))
        found[f"fidelity, {precision}"] = measure_fidelity(recipe, options)
    return found


def _with_precision(sections: dict[str, Any], precision: str) -> dict[str, Any]:
    return {**sections, "model": {**sections.get("model", {}), "precision": precision}}


def train_alone(folder: Path) -> None:
    for name in ("alone", "tied_alone"):
        resumed_runs.run_to_end(make_recipe(folder, name))


def resume_on_two(folder: Path) -> tuple[str, torch.Tensor]:
    """Resumes a run of 4 ranks that was killed. Before that: why it is refused with whole layers on every rank, and
    what those compute when they are loaded from the checkpoint's export."""
    whole_layers = {**PARALLEL, "parallel": {"tensor": 1}}
    try:
        resumed_runs.run_to_end(make_recipe(folder, "on_two", **whole_layers))
        refusal = "none"
    except UserError as error:
        refusal = str(error)
    recipe = make_recipe(folder, "reloaded", **whole_layers)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder / "reloaded")})})
    start_process_group(10, recipe.parallel.tensor)
    settings = derive_plan_settings(recipe)
    engine = shared.build_engine(
        derive_engine_settings(recipe), deepspeed_config(settings, shared.plan_ranks(settings))
    )
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
    assert resumed_runs.find_differences(runs / "stopped", runs / "whole", NUM_STEPS) == []


@pytest.mark.parametrize(("parallel", "alone"), [("whole", "alone"), ("tied", "tied_alone")])
def test_losses_are_those_of_hugging_faces_layers(runs, parallel, alone):
    found, expected = (resumed_runs.read_deterministic_metrics(runs / name) for name in (parallel, alone))
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for key in COMPARED & {key for key in b if b[key] is not None}:
            assert a[key] == pytest.approx(b[key], rel=2e-4), (a["step"], key)
    assert any(line.get("validation_loss") is not None for line in found)
    assert all(any(line.get(key) is not None for line in expected) for key in COMPARED)


@pytest.fixture(scope="module")
def untrained(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """With Hugging Face's layers on 2 ranks, and with parallel ones on 4."""
    return run_ranks(load_and_export, 2, folder, "alone", {})[0], run_ranks(
        load_and_export, 4, folder, "parallel", PARALLEL
    )[3]


@pytest.mark.parametrize(("name", "precision"), UNTRAINED)
def test_an_untrained_export_is_the_other_providers_byte_for_byte(folder, untrained, name, precision):
    alone, parallel = (folder / "untrained" / f"{name}_{kind}" for kind in ("alone", "parallel"))
    names = sorted(file.name for file in alone.iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) >= 3
    assert sorted(file.name for file in parallel.iterdir()) == names
    for file in names:
        assert (parallel / file).read_bytes() == (alone / file).read_bytes(), file


def losses_of(plain: nn.Module) -> torch.Tensor:
    """Of the supervised tokens of `tiny.make_batch(3)`, by Hugging Face's own forward."""
    batch = tiny.make_batch(3)
    targets = batch.targets()
    with torch.no_grad():
        logits = plain(input_ids=batch.input_ids).logits
    return cross_entropy(logits[targets != -100], targets[targets != -100], reduction="none")


@pytest.mark.parametrize(("name", "precision"), UNTRAINED)
def test_loaded_layers_compute_what_the_model_computes(folder, untrained, name, precision):
    plain = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    expected = losses_of(plain)
    of_alone, of_parallel = (float((of[name] - expected).abs().max()) for of in untrained)
    print(of_alone, of_parallel)
    if precision == "fp32":
        assert of_parallel < 2e-6
    else:  # within the rounding that the other provider has too
        assert of_parallel < 2 * of_alone
    (frequencies,) = untrained[1][f"{name}, frequencies"]
    assert torch.equal(frequencies, plain.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("precision", FIDELITY)
def test_fidelity_is_that_of_hugging_faces_layers(untrained, precision):
    alone, parallel = (of[f"fidelity, {precision}"] for of in untrained)
    assert parallel.num_tokens == alone.num_tokens > 0
    assert parallel.utility_std == pytest.approx(alone.utility_std, rel=1e-5 if precision == "fp32" else 2e-2)
    both = [one for one in alone.estimators if "FP8" not in one.estimator]
    for ours, theirs in zip(parallel.estimators, both, strict=True):
        assert ours.agreement.spearman == pytest.approx(theirs.agreement.spearman, abs=1e-3)
    assert parallel.estimators[0].agreement.spearman > 0.99
    # Each tensor-parallel rank factorizes its own shards, so a low rank keeps more there; the largest keeps everything.
    for ours, theirs in zip(parallel.low_ranks, alone.low_ranks, strict=True):
        assert ours.energy > theirs.energy - 0.01 and ours.spearman > 0.9
    assert parallel.low_ranks[-1].spearman > 0.9999


def test_followed_traces_are_those_of_hugging_faces_layers(runs):
    steps = assert_same_followed(runs / "whole", runs / "alone", num_traces=3, tolerance=2e-3)
    assert steps == [*range(1, NUM_STEPS + 1)]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("parallel", "alone"), [("whole", "alone"), ("tied", "tied_alone")])
def test_exports_are_those_of_hugging_faces_layers(runs, parallel, alone, tmp_path):
    ours, theirs = weights_of(runs / parallel / "model"), weights_of(runs / alone / "model")
    assert list(ours) == list(theirs)
    for name, weight in theirs.items():
        assert ours[name].shape == weight.shape
        assert float((ours[name] - weight).abs().max()) < 1e-4, name
    from_checkpoint = export_run(runs / parallel, output=tmp_path / "export")
    assert all(torch.equal(weight, ours[name]) for name, weight in weights_of(from_checkpoint).items())
    for file in (runs / alone / "model").iterdir():
        if file.name not in ("model.safetensors", "README.md"):  # the card names the recipe and its ranks
            assert (runs / parallel / "model" / file.name).read_bytes() == file.read_bytes()
    AutoModelForCausalLM.from_pretrained(runs / parallel / "model")


@pytest.fixture(scope="module")
def resumed(folder: Path, runs: Path) -> tuple[str, torch.Tensor]:
    export_run(runs / "on_two", output=folder / "reloaded")
    return run_ranks(resume_on_two, 2, folder)[0]


def test_resuming_with_layers_divided_otherwise_is_refused_with_the_way_to_them(folder, resumed):
    refusal, losses = resumed
    assert "parallel.tensor: 2 there, 1 here" in refusal
    assert "export it (vcore-ds export) and give the result to a new run as its model.path" in refusal
    expected = losses_of(AutoModelForCausalLM.from_pretrained(folder / "reloaded", dtype=torch.float32))
    assert float((losses - expected).abs().max()) < 2e-6


def test_resuming_on_fewer_ranks(resumed, runs):
    on_two, whole = (resumed_runs.load_checkpoint_tensors(runs / name, NUM_STEPS) for name in ("on_two", "whole"))
    assert on_two.keys() == whole.keys()
    for name, tensor in whole.items():
        if name.startswith("master"):
            torch.testing.assert_close(on_two[name], tensor, rtol=0, atol=1e-4)
