"""Exports of mixtures: the names, shapes and files of the hub's, though experts are one tensor in memory; and adapters
on experts, on dense and shared layers beside them, for plain peft and merged."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.exports import load_tensors, write_run
from tests.helpers.moe_models import MOE_CONFIGS, moe_model, read_config, write_moe_model
from vcore_ds.commands.export.write import export_run
from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import LoraConfig
from vcore_ds.models.experts import OUR_EXPERTS
from vcore_ds.models.lora import add_lora, add_trained_adapter
from vcore_ds.models.model_folder import write_config
from vcore_ds.models.stored_weights import FolderWeights, describe_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is_gradient_checkpointing")

PROMPT = torch.randint(0, 250, (1, 16), generator=torch.Generator().manual_seed(5))
EXPERTS = {"rank": 4, "alpha": 12, "target_modules": ["all-linear", "experts"]}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {name: write_moe_model(folder / name, name) for name in MOE_CONFIGS}


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model) -> Tensor:
    with torch.no_grad():
        return model.eval()(PROMPT).logits


def largest_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def masters(model) -> dict[str, Tensor]:
    return {f"causal_lm.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", MOE_CONFIGS)
def test_an_untrained_export_is_the_input_byte_for_byte(bases, tmp_path, name):
    base = bases[name]
    model = load(base)
    run = write_run(tmp_path / "run", base, masters(model), lora=False, precision="fp32")
    folder = export_run(run, max_file_bytes=10_000)
    assert len(list(folder.glob("*.safetensors"))) > 4  # the experts of a layer are in several
    found, expected = load_tensors(folder), load_tensors(base)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    assert torch.equal(logits(load(folder)), logits(model))
    ours, theirs = read_config(folder), read_config(base)
    assert {key for key in theirs if ours.get(key) != theirs[key]} <= {"transformers_version", "dtype"}


def test_experts_that_the_input_holds_joined_stay_so(bases, tmp_path):
    base = tmp_path / "base"
    model = load(bases["qwen3_moe"])
    model.save_pretrained(base)
    (tmp_path / "base" / "model.safetensors").unlink()
    save_file(model.state_dict(), base / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (base / file).write_bytes((bases["qwen3_moe"] / file).read_bytes())
    folder = export_run(write_run(tmp_path / "run", base, masters(model), lora=False, precision="fp32"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_tensors(folder)
    assert load_tensors(folder).keys() == load_tensors(base).keys()
    assert torch.equal(logits(load(folder)), logits(model))


def test_of_quantized_files_the_names_are_those_of_save_pretrained(bases, tmp_path):
    base = bases["deepseek_v3"]
    config = read_config(base) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    folder = FolderWeights(str(tmp_path), describe_weights(str(tmp_path), torch.bfloat16))
    assert not folder.is_complete and not folder.copied
    assert folder.stored.keys() == {name for name in load_tensors(base) if "layers.2." not in name}


def test_a_configuration_says_what_is_there(tmp_path):
    """Of quantized files nothing is copied: no layers that predict further tokens, and no quantization any more."""
    model = moe_model("deepseek_v3")
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path / "base")
    for is_complete, number in ((True, 1), (False, 0)):
        write_config(tmp_path / str(number), str(tmp_path / "base"), torch.bfloat16, is_complete=is_complete)
        found = read_config(tmp_path / str(number))
        assert "quantization_config" not in found and found["dtype"] == "bfloat16"
        assert found["num_nextn_predict_layers"] == number


# ---- adapters ------------------------------------------------------------------------------------------------------


def with_adapters(base: Path, section: dict) -> PeftModel:
    adapted = add_lora(load(base), LoraConfig(**section))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_adapters_on_experts_are_those_of_plain_peft_and_merged(bases, tmp_path, name):
    base = bases[name]
    ours = with_adapters(base, EXPERTS)
    run = write_run(tmp_path / "run", base, masters(ours), lora=EXPERTS, precision="fp32")
    expected = logits(ours)
    with ours.disable_adapter():
        assert largest_difference(logits(ours), expected) > 0.1
    adapter, merged = export_run(run), export_run(run, merge=True)
    assert largest_difference(logits(PeftModel.from_pretrained(load(base), adapter)), expected) < 1e-6
    assert largest_difference(logits(add_trained_adapter(load(base), adapter, str(base))), expected) < 1e-6
    assert largest_difference(logits(load(merged)), expected) < 2e-6
    assert load_tensors(merged).keys() == load_tensors(base).keys()


def adapted_layers(name: str, *targets: str, dropout: float = 0.0) -> set[str]:
    """Names without their layers' numbers; of experts, that of the parameter."""
    lora = LoraConfig(rank=2, alpha=4, dropout=dropout, target_modules=targets)
    adapted = add_lora(moe_model(name), lora)
    found = set()
    for key, module in adapted.named_modules():
        if hasattr(module, "lora_A"):
            parameter = getattr(module, "parameter_name", "")
            found.add(f"{key.split('.', 5)[-1].replace('.base_layer', '')}.{parameter}".rstrip("."))
    return found


def test_which_layers_get_adapters():
    attention = {f"self_attn.{one}_proj" for one in "qkvo"}
    dense = {f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    shared = {f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert adapted_layers("qwen3_moe", "all-linear") == attention
    assert adapted_layers("qwen3_moe", "experts") == experts
    assert adapted_layers("qwen3_moe", "q_proj", "experts") == {"self_attn.q_proj"} | experts
    assert adapted_layers("glm4_moe", "all-linear", dropout=0.1) == attention | dense | shared
    assert adapted_layers("glm4_moe", "all-linear", "experts") == attention | dense | shared | experts
    assert adapted_layers("glm4_moe", "gate_proj") == {"mlp.gate_proj", "mlp.shared_experts.gate_proj"}
    assert not any("out_proj" in name for name in adapted_layers("nemotron_h", "all-linear"))


def test_a_router_that_is_a_linear_layer_gets_no_adapter():
    sizes = dict(num_experts=4, n_routed_experts=4, num_shared_experts=1, num_dense_layers=1, layer_types=None)
    MOE_CONFIGS["afmoe"] = sizes
    try:
        found = adapted_layers("afmoe", "all-linear")
    finally:
        del MOE_CONFIGS["afmoe"]
    assert found and not any("router" in name for name in found)


def test_names_and_dropout_that_experts_cannot_have():
    with pytest.raises(UserError, match="found gate_proj, without a matching layer .* such as q_proj, .*, experts"):
        adapted_layers("qwen3_moe", "gate_proj")
    with pytest.raises(UserError, match="lora.dropout: found 0.1 together with adapters on experts.gate_up_proj"):
        adapted_layers("qwen3_moe", "all-linear", "experts", dropout=0.1)


def test_an_adapter_that_peft_would_take_for_experts_names_parameters(bases, tmp_path):
    """peft 0.21 takes `gate_proj` of these models for the experts, and leaves dense and shared layers out."""
    section = {"rank": 4, "alpha": 12, "dropout": 0.1, "target_modules": ["gate_proj", "q_a_proj"]}
    base = bases["deepseek_v3"]
    folder = export_run(
        write_run(tmp_path / "run", base, masters(with_adapters(base, section)), lora=section, precision="fp32")
    )
    found = json.loads((folder / "adapter_config.json").read_text())
    assert found["target_modules"] == ["q_a_proj"] and found["lora_dropout"] == 0.0
    assert found["target_parameters"] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.gate_proj.weight",
    ]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_on_experts_that_is_below_half_an_ulp_of_their_weights_is_kept(name):
    model = moe_model(name, hidden_size=256, moe_intermediate_size=128, intermediate_size=128)
    model.config._experts_implementation = OUR_EXPERTS
    adapted = add_lora(model, LoraConfig(rank=6, alpha=12, target_modules=["experts"]))
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=5e-5)
    experts = adapted.get_submodule("base_model.model.model.layers.0.mlp.experts").bfloat16()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 256, generator=generator).bfloat16()
    chosen, weights = torch.randint(0, 4, (256, 2), generator=generator), torch.ones(256, 2).bfloat16()

    def effect(module: torch.nn.Module, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            on = module(x.to(dtype), chosen, weights.to(dtype))
            for wrapper in (module, module.base_layer):
                wrapper.enable_adapters(False)
            off = module(x.to(dtype), chosen, weights.to(dtype))
        return (on - off).double()

    exact, found = effect(copy.deepcopy(experts).double(), torch.float64), effect(experts, torch.bfloat16)
    kept = float((found * exact).sum() / exact.square().sum())
    print(f"{name}: kept {kept:.3f}")
    assert 0.9 < kept < 1.1
