"""The forward of an adapted layer in bf16 against fp64: what it keeps of a small adapter, gradients, tangents, dropout;
and what it leaves as peft has it."""

import copy
import json

import peft
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.utils.checkpoint import checkpoint

from tests.helpers import tiny
from tests.helpers.allocations import Allocations
from tests.helpers.step_runs import relative_error
from vcore_ds.common.errors import UserError
from vcore_ds.config import sections as recipes
from vcore_ds.models.lora import BaseLinear, LoraLinear, add_lora, add_trained_adapter, round_adapters_once

NUM_TOKENS, IN, OUT, RANK = 256, 64, 192, 4
SCALING = 3.0
"""Not a power of two, by which a product would not round."""


def make_layer(
    *,
    bias: bool = False,
    rate: float = 0.0,
    adapters: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
) -> LoraLinear:
    """A layer just off B = 0: the adapter's output is about a tenth of an ulp of the base's."""
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=SCALING * RANK, lora_dropout=rate, target_modules=["0"])
    model = get_peft_model(nn.Sequential(nn.Linear(IN, OUT, bias=bias)).to(dtype), config)
    round_adapters_once(model)
    layer = model.base_model.model[0]
    nn.init.normal_(layer.lora_B["default"].weight, std=2e-4)
    layer.lora_A.to(adapters), layer.lora_B.to(adapters)
    return layer


def make_peft_layer(layer: LoraLinear) -> lora.Linear:
    plain = copy.deepcopy(layer)
    plain.__class__, plain.base_layer.__class__ = lora.Linear, nn.Linear
    return plain


def draw_inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, NUM_TOKENS // 2, IN, generator=torch.Generator().manual_seed(1)).to(dtype)


def compute_exact(layer: nn.Module, x: Tensor, kept: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Base output and the adapter's in fp64; `kept` is dropout's factor on the adapter's input."""
    base, a, b = layer.base_layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    bias = None if base.bias is None else base.bias.double()
    delta = linear(linear(x.double() * kept, a.double()), b.double()) * SCALING
    return linear(x.double(), base.weight.double(), bias), delta


def measure_kept_share(out: Tensor, base: Tensor, delta: Tensor) -> float:
    """Share of the adapter's output that `out` contains, by least squares, with an error of 0.01 here."""
    return float(((out.double() - base) * delta).sum() / delta.square().sum())


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32], ids=["bf16 adapter", "fp32 adapter"])
def test_an_adapter_below_half_an_ulp_is_kept(adapters: torch.dtype, bias: bool) -> None:
    layer, x = make_layer(adapters=adapters, bias=bias), draw_inputs()
    base, delta = compute_exact(layer, x)
    assert delta.std() < 2**-9 * base.abs().median()
    with torch.no_grad():
        out, before = layer(x), make_peft_layer(layer)(x)
    assert out.dtype == torch.bfloat16
    assert measure_kept_share(out, base, delta) == pytest.approx(1.0, abs=0.05)
    assert measure_kept_share(before, base, delta) < 0.8  # peft's forward loses much of it
    if not bias:
        assert float((out == (base + delta).bfloat16()).float().mean()) > 0.99


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32], ids=["bf16 adapter", "fp32 adapter"])
def test_gradients_are_those_of_fp64(adapters: torch.dtype, bias: bool) -> None:
    layer, x = make_layer(adapters=adapters, bias=bias), draw_inputs().requires_grad_()
    upstream = torch.randn(2, NUM_TOKENS // 2, OUT, generator=torch.Generator().manual_seed(2)).bfloat16()
    layer(x).backward(upstream)
    trained = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    in_fp64 = copy.deepcopy(layer).double()
    y = x.detach().double().requires_grad_()
    sum(compute_exact(in_fp64, y)).backward(upstream.double())
    expected = [in_fp64.lora_A["default"].weight.grad, in_fp64.lora_B["default"].weight.grad, y.grad]
    for tensor, wanted in zip([*trained, x], expected, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert relative_error(tensor.grad, wanted) < 5e-3
    assert all(parameter.grad is None for parameter in layer.base_layer.parameters())


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_tangents_are_those_of_fp64(bias: bool) -> None:
    layer, x = make_layer(bias=bias), draw_inputs()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.manual_seed(3)
    tangents = [torch.randn_like(primal) * scale for primal, scale in ((x, 1.0), (a, 0.1), (b, 2e-4))]

    def make_duals(dtype: torch.dtype) -> list[Tensor]:
        values = zip((x, a, b), tangents, strict=True)
        return [forward_ad.make_dual(primal.detach().to(dtype), tangent.to(dtype)) for primal, tangent in values]

    with torch.no_grad(), forward_ad.dual_level():
        y, layer.lora_A["default"].__dict__["weight"], layer.lora_B["default"].__dict__["weight"] = make_duals(
            torch.bfloat16
        )
        measured = forward_ad.unpack_dual(layer(y)).tangent
        y, layer.lora_A["default"].__dict__["weight"], layer.lora_B["default"].__dict__["weight"] = make_duals(
            torch.float64
        )
        expected = forward_ad.unpack_dual(sum(compute_exact(layer, y))).tangent
    assert measured.dtype == torch.bfloat16
    assert relative_error(measured, expected) < 5e-3


def test_dropout_is_on_the_adapters_input_alone() -> None:
    layer, x = make_layer(rate=0.5), draw_inputs()
    nn.init.normal_(layer.lora_B["default"].weight)  # large enough to be seen through the rounding
    torch.manual_seed(4)
    out = layer(x)
    torch.manual_seed(4)
    kept = dropout(torch.ones_like(x), 0.5)
    assert relative_error(out, sum(compute_exact(layer, x, kept.double()))) < 5e-3
    assert relative_error(layer.eval()(x), sum(compute_exact(layer, x))) < 5e-3


@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32], ids=["bf16 adapter", "fp32 adapter"])
def test_an_activation_checkpoint_changes_nothing(adapters: torch.dtype) -> None:
    layer, results = make_layer(rate=0.5, adapters=adapters), []
    for checkpointed in (False, True):
        layer.zero_grad()
        torch.manual_seed(5)
        x = draw_inputs().requires_grad_()
        out = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        out.float().square().mean().backward()
        results.append([out, x.grad, *(layer.get_parameter(f"lora_{k}.default.weight").grad.clone() for k in "AB")])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("merged", [False, True], ids=["off", "merged"])
def test_an_adapter_that_is_off_or_merged_is_an_ordinary_layer(bias: bool, merged: bool) -> None:
    layer, x = make_layer(bias=bias), draw_inputs()
    layer.merge() if merged else layer.enable_adapters(False)
    base = layer.base_layer
    assert torch.equal(layer(x), linear(x, base.weight, base.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_compute_what_peft_computes_bit_for_bit(dtype: torch.dtype) -> None:
    layer = make_layer(bias=True, rate=0.5, adapters=dtype, dtype=dtype)
    results = []
    for module in (layer, make_peft_layer(layer)):
        torch.manual_seed(6)
        x = draw_inputs(dtype).requires_grad_()
        out = module(x)
        out.square().mean().backward()
        results.append([out, x.grad, *(module.get_parameter(f"lora_{k}.default.weight").grad for k in "AB")])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32], ids=["bf16 adapter", "fp32 adapter"])
def test_it_takes_no_more_memory_than_peft(adapters: torch.dtype) -> None:
    layer = make_layer(adapters=adapters)
    peaks, saved = [], []
    for module in (layer, make_peft_layer(layer)):
        x, held = draw_inputs().requires_grad_(), {}

        def pack(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with Allocations() as allocations, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x).sum().backward()
        peaks.append(allocations.peak_bytes)
        saved.append(sum(held.values()))
    assert peaks[0] <= peaks[1]
    assert saved[0] <= saved[1]


def test_add_lora_gives_every_adapted_layer_this_forward() -> None:
    modules = list(tiny.with_lora(tiny.qwen3()).modules())
    layers = [module for module in modules if isinstance(module, lora.Linear)]
    assert len(layers) == 14 and all(type(layer) is LoraLinear for layer in layers)
    assert all(type(layer.base_layer) is BaseLinear for layer in layers)


def test_a_name_that_no_layer_has_is_refused_beside_one_that_some_have() -> None:
    settings = recipes.LoraConfig(rank=4, alpha=8, target_modules=["q_proj", "qproj"])
    with pytest.raises(UserError, match="lora.target_modules: found qproj, without .*, such as q_proj, k_proj, v_proj"):
        add_lora(tiny.qwen3(), settings)


def test_a_saved_adapter_is_the_one_that_peft_saves(tmp_path) -> None:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0)
    plain = get_peft_model(tiny.qwen3(), config)
    ours = tiny.with_lora(tiny.qwen3())
    assert list(ours.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(ours.state_dict())
    plain.save_pretrained(tmp_path / "peft")
    ours.save_pretrained(tmp_path / "ours")
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "ours")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    settings = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("peft", "ours")]
    for setting in settings:
        setting["target_modules"] = sorted(setting["target_modules"])  # a set of peft's, in any order
    assert settings[0] == settings[1]

    loaded, ids = PeftModel.from_pretrained(tiny.qwen3(), tmp_path / "ours"), tiny.make_batch(2).input_ids
    assert not any(isinstance(module, LoraLinear) for module in loaded.modules())
    assert torch.equal(loaded(input_ids=ids).logits, ours.eval()(input_ids=ids).logits)


IDS = tiny.make_batch(2).input_ids
TARGETS = ["q_proj", "v_proj", "down_proj"]
VARIANTS = {
    "dora": LoraConfig(use_dora=True),
    "kasa": LoraConfig(kasa_config=KasaConfig()),
    "alora": LoraConfig(alora_invocation_tokens=IDS[0, 2:4].tolist()),
    "bdlora": LoraConfig(
        use_bdlora=BdLoraConfig(target_modules_bd_a=["down_proj"], target_modules_bd_b=["q_proj", "v_proj"], nblocks=2)
    ),
    "mica": LoraConfig(init_lora_weights="mica"),
    "velora": LoraConfig(velora_config=VeloraConfig()),
    "monteclora": LoraConfig(monteclora_config=MontecloraConfig()),
    "ia3": peft.IA3Config(feedforward_modules=["down_proj"]),
    "vera": peft.VeraConfig(),
    "adalora": peft.AdaLoraConfig(total_step=10),
}


def test_all_variants_of_peft_are_tried() -> None:
    names = {name for key in make_layer().lora_variants for name in key}
    tried = {name for config in VARIANTS.values() for name in names if getattr(config, name, None)}
    # Arrow routes between several adapters; "mica" is a value of `init_lora_weights`.
    assert names - tried == {"arrow_config", "mica"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_and_other_methods_compute_what_peft_computes(variant: str, tmp_path) -> None:
    """For `eval` and `chat`, in bf16: bit for bit, and not what the base computes."""
    config = copy.deepcopy(VARIANTS[variant])
    config.task_type, config.target_modules = "CAUSAL_LM", set(TARGETS)
    base = tiny.qwen3(dtype=torch.bfloat16)
    adapted = get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    loaded = add_trained_adapter(copy.deepcopy(base), tmp_path, "base").eval()
    with torch.inference_mode():
        before, expected, logits = (model(input_ids=IDS).logits for model in (base, plain, loaded))
    assert torch.equal(logits, expected) and not torch.equal(logits, before)
