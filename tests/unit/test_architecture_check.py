"""What training refuses in a model's configuration: said by `check` and `plan` in the words of the run itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    CTRLConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import load_recipe
from vcore_ds.config.sections import LoraConfig
from vcore_ds.models import architecture_check
from vcore_ds.models.architecture_check import advise_on_noise, check_architecture, check_estimator
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.configuration import read_config
from vcore_ds.train.run import train

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
MIXTURE = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
OWN_ATTENTION = BloomConfig(hidden_size=16, n_layer=1, n_head=2)
RECIPE = Path(__file__).resolve().parents[2] / "launch_scripts" / "recipes" / "qwen3_4b_math_full.yaml"
DIFFERENCE = ["utility.estimator=finite_difference", "utility.epsilon=auto"]


# ---- which estimator -------------------------------------------------------------------------------------------------


def test_jvp_is_refused_where_attention_cannot_be_replaced() -> None:
    with pytest.raises(UserError, match="found jvp .*m .BloomForCausalLM.*expected finite_difference .*epsilon=auto"):
        check_estimator("m", OWN_ATTENTION, "jvp")
    check_estimator("m", OWN_ATTENTION, "finite_difference")
    check_estimator("m", DENSE, "jvp")
    check_estimator("m", DENSE, "finite_difference")


def test_differences_are_refused_with_an_moe_model() -> None:
    with pytest.raises(UserError, match="found finite_difference .* an MoE model.*; expected jvp .*epsilon=null"):
        check_estimator("m", MIXTURE, "finite_difference")
    check_estimator("m", MIXTURE, "jvp")


@pytest.mark.parametrize("estimator", ["jvp", "finite_difference"])
def test_no_estimator_sends_a_user_to_one_that_is_refused_too(
    estimator: architecture_check.Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture_check, "can_replace_attention", lambda config: False)
    with pytest.raises(UserError, match="MoE model.*expected another architecture, or a method") as error:
        check_estimator("m", MIXTURE, estimator)
    assert "utility.estimator=" not in str(error.value)


def test_advice_on_noise_names_jvp_where_there_is_one() -> None:
    assert "utility.estimator=jvp" in advise_on_noise(DENSE)
    assert "estimator=" not in advise_on_noise(OWN_ATTENTION)
    assert "model.precision=fp32" in advise_on_noise(OWN_ATTENTION)


# ---- the model without weights ---------------------------------------------------------------------------------------


def saved(config: PretrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def check(config: PretrainedConfig, folder: Path, **recipe: Any) -> None:
    path = saved(config, folder)
    check_architecture(path, read_config(path), **recipe)


@pytest.mark.parametrize(
    "config, lora",
    [
        (DENSE, None),
        (DENSE, LoraConfig(rank=2, alpha=4, dropout=0.1)),
        (MIXTURE, None),
        (MIXTURE, LoraConfig(rank=2, alpha=4)),
    ],
    ids=["dense full", "dense lora", "mixture full", "mixture lora"],
)
def test_a_model_that_can_be_trained_passes(config: PretrainedConfig, lora: LoraConfig | None, tmp_path: Path) -> None:
    check(config, tmp_path, attention="auto", lora=lora, estimator="jvp")


def test_experts_that_cannot_be_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense model is left to the plan of the batch, which knows it without building it."""
    divided: dict[str, Any] = dict(attention="auto", lora=None, estimator="jvp", expert=2)
    check(MIXTURE, tmp_path, **divided)
    monkeypatch.setattr(architecture_check, "can_replace_experts", lambda module: False)
    with pytest.raises(UserError, match="parallel.expert: found 2 .*whose experts do not use .*; expected 1"):
        check(MIXTURE, tmp_path, **divided)
    check(MIXTURE, tmp_path, **{**divided, "expert": 1})
    check(DENSE, tmp_path, **divided)


def test_names_of_adapted_layers(tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, alpha=4, target_modules=("wqkv",))
    with pytest.raises(UserError, match="lora.target_modules: found wqkv"):
        check(DENSE, tmp_path, attention="auto", lora=lora, estimator=None)


def test_an_attention_that_cannot_take_the_models_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder is called, and says so; whatever else fails without weights says nothing of training."""
    raised: Exception = UserError("uses what ours does not know")

    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setitem(AttentionInterface._global_mapping, TRAINING_ATTENTION, fail)
    with pytest.raises(UserError, match="uses what ours does not know"):
        check(MIXTURE, tmp_path, attention="auto", lora=None, estimator=None)
    check(MIXTURE, tmp_path, attention="eager", lora=None, estimator=None)
    raised = NotImplementedError("no meta form")
    check(MIXTURE, tmp_path, attention="auto", lora=None, estimator=None)


def test_embeddings_that_change_in_place_cannot_have_adapters_behind_them(tmp_path: Path) -> None:
    config = CTRLConfig(n_embd=16, dff=32, n_layer=1, n_head=2, vocab_size=64)
    check(config, tmp_path, attention="auto", lora=None, estimator=None)
    with pytest.raises(UserError, match="lora: found adapters .*CTRLLMHeadModel.*in place.*expected null"):
        check(config, tmp_path, attention="auto", lora=LoraConfig(rank=2, alpha=4), estimator=None)


# ---- the commands ----------------------------------------------------------------------------------------------------


def refusal_of_training(path: str, overrides: list[str]) -> str:
    with pytest.raises(UserError) as error:
        train(load_recipe(RECIPE, [f"model.path={path}", *overrides]))
    return str(error.value)


@pytest.mark.parametrize(
    "config, overrides",
    [
        (MIXTURE, DIFFERENCE),
        (OWN_ATTENTION, []),
        (DENSE, ["lora={rank: 2, alpha: 4, target_modules: [wqkv]}"]),
    ],
    ids=["differences on a mixture", "jvp without attention", "names of layers"],
)
def test_check_and_plan_say_what_training_says(
    config: PretrainedConfig, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    overrides = ["batch.pack_tokens_per_rank=null", f"run.output_dir={tmp_path}/run", *overrides]
    expected = refusal_of_training(path, overrides)
    capsys.readouterr()
    for command in (["check"], ["plan", "--gpus", "8"]):
        assert main([command[0], str(RECIPE), f"model.path={path}", *overrides, *command[1:]]) == 2
        assert capsys.readouterr().err == f"vcore-ds: {expected}\n"


@pytest.mark.parametrize("command", [["check", "--ranks", "8"], ["plan", "--gpus", "16"]], ids=lambda words: words[0])
def test_a_known_mixture_that_is_not_on_this_machine(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command, str(RECIPE), "model.path=Qwen/Qwen3-30B-A3B", f"run.output_dir={tmp_path}/run"]
    assert main([*words, *DIFFERENCE]) == 2
    assert "found finite_difference together with model.path Qwen/Qwen3-30B-A3B" in capsys.readouterr().err
    assert main(words) == 0


def test_a_config_json_by_itself_is_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(OWN_ATTENTION, tmp_path) + "/config.json"
    assert main(["plan", str(RECIPE), f"model.path={path}", "--gpus", "8"]) == 2
    assert "BloomForCausalLM" in capsys.readouterr().err
