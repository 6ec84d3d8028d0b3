"""Export of MoE models: names, shapes and files as on the hub, although experts are fused in memory; and adapters on
experts, and on dense and shared layers beside them, for plain peft and merged."""

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
    folder = tmp_path_factory.mktemp("moe")
    return {name: write_moe_model(folder / name, name) for name in MOE_CONFIGS}


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def compute_logits(model) -> Tensor:
    with torch.no_grad():
        return model.eval()(PROMPT).logits


def measure_difference(computed: Tensor, expected: Tensor) -> float:
    return float((computed - expected).abs().max())


def read_masters(model) -> dict[str, Tensor]:
    return {f"causal_lm.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", MOE_CONFIGS)
def test_an_untrained_export_is_the_input_byte_for_byte(bases, tmp_path, name):
    base = bases[name]
    model = load_model(base)
    run = write_run(tmp_path / "run", base, read_masters(model), lora=False, precision="fp32")
    folder = export_run(run, max_file_bytes=10_000)
    assert len(list(folder.glob("*.safetensors"))) > 4  # the experts of a layer are in several
    exported, expected = load_tensors(folder), load_tensors(base)
    assert exported.keys() == expected.keys()
    for key, value in expected.items():
        assert exported[key].dtype == value.dtype and torch.equal(exported[key], value), key
    assert torch.equal(compute_logits(load_model(folder)), compute_logits(model))
    ours, theirs = read_config(folder), read_config(base)
    assert {key for key in theirs if ours.get(key) != theirs[key]} <= {"transformers_version", "dtype"}


def test_experts_that_the_input_stores_fused_stay_fused(bases, tmp_path):
    base = tmp_path / "base"
    model = load_model(bases["qwen3_moe"])
    model.save_pretrained(base)
    (tmp_path / "base" / "model.safetensors").unlink()
    save_file(model.state_dict(), base / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (base / file).write_bytes((bases["qwen3_moe"] / file).read_bytes())
    folder = export_run(write_run(tmp_path / "run", base, read_masters(model), lora=False, precision="fp32"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_tensors(folder)
    assert load_tensors(folder).keys() == load_tensors(base).keys()
    assert torch.equal(compute_logits(load_model(folder)), compute_logits(model))


def test_exports_of_quantized_files_have_the_names_of_save_pretrained(bases, tmp_path):
    base = bases["deepseek_v3"]
    config = read_config(base) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    folder = FolderWeights(str(tmp_path), describe_weights(str(tmp_path), torch.bfloat16))
    assert not folder.is_complete and not folder.copied
    assert folder.stored.keys() == {name for name in load_tensors(base) if "layers.2." not in name}


def test_an_exported_configuration_describes_the_exported_files(tmp_path):
    """Nothing is copied from quantized files: no multi-token prediction layers and no quantization settings."""
    model = moe_model("deepseek_v3")
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path / "base")
    for is_complete, number in ((True, 1), (False, 0)):
        write_config(tmp_path / str(number), str(tmp_path / "base"), torch.bfloat16, is_complete=is_complete)
        exported = read_config(tmp_path / str(number))
        assert "quantization_config" not in exported and exported["dtype"] == "bfloat16"
        assert exported["num_nextn_predict_layers"] == number


# ---- adapters ------------------------------------------------------------------------------------------------------


def add_adapters(base: Path, section: dict) -> PeftModel:
    adapted = add_lora(load_model(base), LoraConfig(**section))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_adapters_on_experts_give_the_same_logits_in_peft_and_merged(bases, tmp_path, name):
    base = bases[name]
    ours = add_adapters(base, EXPERTS)
    run = write_run(tmp_path / "run", base, read_masters(ours), lora=EXPERTS, precision="fp32")
    expected = compute_logits(ours)
    with ours.disable_adapter():
        assert measure_difference(compute_logits(ours), expected) > 0.1
    adapter, merged = export_run(run), export_run(run, merge=True)
    assert measure_difference(compute_logits(PeftModel.from_pretrained(load_model(base), adapter)), expected) < 1e-6
    assert (
        measure_difference(compute_logits(add_trained_adapter(load_model(base), adapter, str(base))), expected) < 1e-6
    )
    assert measure_difference(compute_logits(load_model(merged)), expected) < 2e-6
    assert load_tensors(merged).keys() == load_tensors(base).keys()


def list_adapted_layers(name: str, *targets: str, dropout: float = 0.0) -> set[str]:
    """Names of adapted layers without the layers' numbers; for experts, with the name of the parameter."""
    lora = LoraConfig(rank=2, alpha=4, dropout=dropout, target_modules=targets)
    adapted = add_lora(moe_model(name), lora)
    layers = set()
    for key, module in adapted.named_modules():
        if hasattr(module, "lora_A"):
            parameter = getattr(module, "parameter_name", "")
            layers.add(f"{key.split('.', 5)[-1].replace('.base_layer', '')}.{parameter}".rstrip("."))
    return layers


def test_adapters_are_added_to_target_layers_and_experts():
    attention = {f"self_attn.{projection}_proj" for projection in "qkvo"}
    dense = {f"mlp.{projection}_proj" for projection in ("gate", "up", "down")}
    shared = {f"mlp.shared_experts.{projection}_proj" for projection in ("gate", "up", "down")}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert list_adapted_layers("qwen3_moe", "all-linear") == attention
    assert list_adapted_layers("qwen3_moe", "experts") == experts
    assert list_adapted_layers("qwen3_moe", "q_proj", "experts") == {"self_attn.q_proj"} | experts
    assert list_adapted_layers("glm4_moe", "all-linear", dropout=0.1) == attention | dense | shared
    assert list_adapted_layers("glm4_moe", "all-linear", "experts") == attention | dense | shared | experts
    assert list_adapted_layers("glm4_moe", "gate_proj") == {"mlp.gate_proj", "mlp.shared_experts.gate_proj"}
    assert not any("out_proj" in name for name in list_adapted_layers("nemotron_h", "all-linear"))


def test_a_router_that_is_a_linear_layer_gets_no_adapter():
    sizes = dict(num_experts=4, n_routed_experts=4, num_shared_experts=1, num_dense_layers=1, layer_types=None)
    MOE_CONFIGS["afmoe"] = sizes
    try:
        layers = list_adapted_layers("afmoe", "all-linear")
    finally:
        del MOE_CONFIGS["afmoe"]
    assert layers and not any("router" in name for name in layers)


def test_names_and_dropout_that_experts_cannot_have_are_refused():
    with pytest.raises(UserError, match="found gate_proj, without a matching layer .* such as q_proj, .*, experts"):
        list_adapted_layers("qwen3_moe", "gate_proj")
    with pytest.raises(UserError, match="lora.dropout: found 0.1 .*experts.gate_up_proj"):
        list_adapted_layers("qwen3_moe", "all-linear", "experts", dropout=0.1)


def test_adapters_beside_experts_are_exported_by_parameter_name(bases, tmp_path):
    """peft 0.21 takes `gate_proj` of these models for the experts, and leaves dense and shared layers out."""
    section = {"rank": 4, "alpha": 12, "dropout": 0.1, "target_modules": ["gate_proj", "q_a_proj"]}
    base = bases["deepseek_v3"]
    folder = export_run(
        write_run(tmp_path / "run", base, read_masters(add_adapters(base, section)), lora=section, precision="fp32")
    )
    exported = json.loads((folder / "adapter_config.json").read_text())
    assert exported["target_modules"] == ["q_a_proj"] and exported["lora_dropout"] == 0.0
    assert exported["target_parameters"] == [
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

    def measure_effect(module: torch.nn.Module, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            on = module(x.to(dtype), chosen, weights.to(dtype))
            for wrapper in (module, module.base_layer):
                wrapper.enable_adapters(False)
            off = module(x.to(dtype), chosen, weights.to(dtype))
        return (on - off).double()

    exact, in_bf16 = (
        measure_effect(copy.deepcopy(experts).double(), torch.float64),
        measure_effect(experts, torch.bfloat16),
    )
    kept = float((in_bf16 * exact).sum() / exact.square().sum())
    print(f"{name}: kept {kept:.3f}")
    assert 0.9 < kept < 1.1
