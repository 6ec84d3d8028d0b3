"""Model configurations that training refuses: `check` and `plan` refuse them in the same words."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    Llama4TextConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import load_recipe
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import LoraConfig, ModelConfig, ParallelConfig, UtilityConfig
from vcore_ds.models import architecture_check
from vcore_ds.models.architecture_check import check_configuration, check_estimator
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.run import train

SIZES = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
)
DENSE = Qwen3Config(**SIZES)
MOE = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
FIXED_ATTENTION = BloomConfig(hidden_size=16, n_layer=1, n_head=2)
FIXED_MOE = Llama4TextConfig(**SIZES, num_local_experts=4)
RECIPE = Path(__file__).resolve().parents[2] / "launch_scripts" / "recipes" / "qwen3_4b_math_full.yaml"
DIFFERENCE = ["utility.estimator=finite_difference", "utility.epsilon=auto"]


@pytest.mark.parametrize(
    ("config", "estimator", "message"),
    [
        (FIXED_ATTENTION, "jvp", "found jvp .*m .BloomForCausalLM.*expected finite_difference .*epsilon=auto"),
        (FIXED_MOE, "jvp", "found jvp .*; expected another architecture, or a method without utilities"),
        (FIXED_MOE, "finite_difference", "found finite_difference .*; expected another architecture, or a method"),
        (MOE, "finite_difference", "found finite_difference .* an MoE model.*; expected jvp .*epsilon=null"),
        (FIXED_ATTENTION, "finite_difference", None),
        (DENSE, "jvp", None),
        (DENSE, "finite_difference", None),
        (MOE, "jvp", None),
    ],
)
def test_estimators_that_an_architecture_does_not_support_are_refused(
    config: PretrainedConfig, estimator: architecture_check.Estimator, message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_estimator("m", config, estimator)


# ---- the model without weights ---------------------------------------------------------------------------------------


def save_config(config: PretrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


SFT = {"method": MethodConfig(name="sft")}
DIFFERENCES = {"utility": UtilityConfig(estimator="finite_difference", epsilon="auto")}


def check(config: PretrainedConfig, folder: Path, **changes: Any) -> None:
    """Check a configuration with a recipe; `changes`: of its sections."""
    settings = derive_plan_settings(load_recipe(RECIPE, [f"model.path={save_config(config, folder)}"]))
    check_configuration(replace(settings, **changes))


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_model_that_can_be_trained_passes(config: PretrainedConfig, tmp_path: Path) -> None:
    for lora in (None, LoraConfig(rank=2, alpha=4, dropout=0.1)):
        check(config, tmp_path, lora=lora)


WINDOWED = Qwen2MoeConfig(
    **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8,
    layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=4096, dtype="float32",
)  # fmt: skip
"""Its windows are in its mask alone, and only behind a layer of experts."""


def test_a_window_that_only_the_mask_has_is_refused(tmp_path: Path) -> None:
    """The remedy passes, as do the windows that a layer passes, and a causal mask of the architecture's own."""
    with pytest.raises(UserError, match="Qwen2MoeAttention computes with a window of 4096 tokens .*attention eager"):
        check(WINDOWED, tmp_path)
    check(WINDOWED, tmp_path, **SFT, model=ModelConfig(path=str(tmp_path), attention="eager"))
    check(MixtralConfig(**SIZES, num_local_experts=4, sliding_window=4096), tmp_path)
    check(Qwen2MoeConfig(**WINDOWED.to_diff_dict() | dict(use_sliding_window=False, layer_types=None)), tmp_path)


def test_experts_that_cannot_be_sharded_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense model passes here: the batch plan refuses it without building the model."""
    in_groups = {"parallel": ParallelConfig(expert=2)}
    check(MOE, tmp_path, **in_groups)
    monkeypatch.setattr(architecture_check, "can_replace_experts", lambda module: False)
    with pytest.raises(UserError, match="parallel.expert: found 2 .*whose experts do not use .*; expected 1"):
        check(MOE, tmp_path, **in_groups)
    check(MOE, tmp_path)
    check(DENSE, tmp_path, **in_groups)


@pytest.mark.parametrize("changes", [{}, DIFFERENCES, SFT], ids=["jvp", "differences", "sft"])
def test_a_biased_output_embedding_is_refused_whatever_the_estimator(changes: dict[str, Any], tmp_path: Path) -> None:
    """No message names an estimator that would then fail for the bias."""
    with pytest.raises(UserError, match="^model.path: codegen: the output embedding is .*bias=True.*another model"):
        check(CodeGenConfig(n_embd=16, n_layer=1, n_head=4, vocab_size=64, rotary_dim=4), tmp_path, **changes)


def test_unknown_names_of_adapted_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lora.target_modules: found wqkv"):
        check(DENSE, tmp_path, lora=LoraConfig(rank=2, alpha=4, target_modules=("wqkv",)))


def test_an_attention_that_cannot_replace_the_models_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A UserError of the decoder is reported; other failures without weights do not show that training would fail."""
    raised: Exception = UserError("uses what ours does not know")

    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setitem(AttentionInterface._global_mapping, TRAINING_ATTENTION, fail)
    with pytest.raises(UserError, match="uses what ours does not know"):
        check(MOE, tmp_path)
    check(MOE, tmp_path, **SFT, model=ModelConfig(path=str(tmp_path), attention="eager"))
    raised = NotImplementedError("no meta form")
    check(MOE, tmp_path)


# ---- the commands ----------------------------------------------------------------------------------------------------


def read_training_refusal(path: str, overrides: list[str]) -> str:
    with pytest.raises(UserError) as error:
        train(load_recipe(RECIPE, [f"model.path={path}", *overrides]))
    return str(error.value)


@pytest.mark.parametrize(
    "config, overrides",
    [(MOE, DIFFERENCE), (FIXED_ATTENTION, []), (DENSE, ["lora={rank: 2, alpha: 4, target_modules: [wqkv]}"])],
    ids=["differences on an MoE model", "jvp without attention", "names of layers"],
)
def test_check_and_plan_refuse_in_the_words_of_training(
    config: PretrainedConfig, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    overrides = ["batch.pack_tokens_per_rank=null", f"run.output_dir={tmp_path}/run", *overrides]
    expected = read_training_refusal(path, overrides)
    capsys.readouterr()
    for command in (["check"], ["plan", "--gpus", "8"]):
        assert main([command[0], str(RECIPE), f"model.path={path}", *overrides, *command[1:]]) == 2
        assert capsys.readouterr().err == f"vcore-ds: {expected}\n"


@pytest.mark.parametrize("command", [["check", "--ranks", "8"], ["plan", "--gpus", "16"]], ids=lambda words: words[0])
def test_a_known_moe_model_is_checked_without_its_files(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command, str(RECIPE), "model.path=Qwen/Qwen3-30B-A3B", f"run.output_dir={tmp_path}/run"]
    assert main([*words, *DIFFERENCE]) == 2
    assert "found finite_difference together with model.path Qwen/Qwen3-30B-A3B" in capsys.readouterr().err
    assert main(words) == 0


def test_plan_reads_a_config_json_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_config(FIXED_ATTENTION, tmp_path) + "/config.json"
    assert main(["plan", str(RECIPE), f"model.path={path}", "--gpus", "8"]) == 2
    assert "BloomForCausalLM" in capsys.readouterr().err
