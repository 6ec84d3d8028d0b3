"""A run on the language model of a vision-language model, on two ranks: its results keep the vision tower."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations, write_deepspeed_config
from tests.helpers.tokenizer import make_tokenizer
from tests.unit.test_language_model import make_vision_language_config
from vcore_ds.commands.export.write import export_run
from vcore_ds.config.schema import Recipe
from vcore_ds.models.causal_lm import find_auto_class
from vcore_ds.training import run

MODEL_TYPE = "gemma3"
"""Its vision tower has layers with the names of the decoder's, and tensors in files have other names than in memory."""
CASES = {"full": None, "lora": {"rank": 4, "alpha": 8}}


def make_recipe(folder: Path, name: str) -> Recipe:
    return Recipe(
        model={"path": str(folder / "base"), "precision": "fp32"},
        method={"kl_budget": 0.05},
        lora=CASES[name],
        data={"train_path": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache")},
        batch={"global_size": 4},
        probe={"batch_size": 2},
        optimizer={"learning_rate": 1e-2},
        schedule={"num_steps": 2},
        run={"output_dir": str(folder / name), "num_followed_traces": 0},
        engine={"deepspeed_config": str(folder / "fp32.json")},
    )


def train_all(folder: Path) -> None:
    for name in CASES:
        run.train(make_recipe(folder, name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("vision_language"), make_tokenizer()
    config = make_vision_language_config(MODEL_TYPE, vocab_size=len(tokenizer), max_position_embeddings=512)
    torch.manual_seed(0)
    find_auto_class(config).from_config(config, dtype=torch.float32).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    write_conversations(folder / "train.jsonl", sums(range(12)))
    write_deepspeed_config(folder / "fp32.json", persistence_threshold=0)
    run_ranks(train_all, 2, folder)
    export_run(folder / "full", output=folder / "exported")
    export_run(folder / "lora", output=folder / "merged", merge=True)
    return folder


def load(folder: Path) -> PreTrainedModel:
    model, loaded = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    return model


@pytest.mark.parametrize("result", ["full/model", "exported", "merged"])
def test_results_contain_the_unchanged_vision_tower(folder: Path, result: str) -> None:
    base, weights = (load_file(folder / name / "model.safetensors") for name in ("base", result))
    assert weights.keys() == base.keys()
    text_names = {name for name in base if name.startswith(("language_model.", "lm_head."))}
    assert text_names and base.keys() - text_names
    for name in base.keys() - text_names:
        assert torch.equal(weights[name], base[name]), name
    assert sum(not torch.equal(weights[name], base[name]) for name in text_names) >= 14  # linear layers at least
    assert type(load(folder / result)) is type(load(folder / "base"))
    written, original = (json.loads((folder / name / "config.json").read_text()) for name in (result, "base"))
    for key in ("architectures", "vision_config"):
        assert written[key] == original[key]


def test_the_export_of_a_checkpoint_equals_the_result(folder: Path) -> None:
    at_the_end, exported = (load_file(folder / name / "model.safetensors") for name in ("full/model", "exported"))
    assert at_the_end.keys() == exported.keys()
    assert all(torch.equal(at_the_end[name], exported[name]) for name in exported)


def test_only_the_language_model_has_adapters(folder: Path) -> None:
    names = load_file(folder / "lora" / "adapter" / "adapter_model.safetensors").keys()
    assert len(names) == 2 * 2 * 7 and all(".language_model.layers." in name for name in names)
