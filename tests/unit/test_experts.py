"""Experts of MoE models by grouped GEMMs, against each architecture's loop over experts in fp64."""

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Ernie4_5_MoeConfig, GptOssConfig, Qwen3MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.experts import OUR_EXPERTS, grouped_matmul
from vcore_ds.utility.fused_forward import UnrecordedTangents

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
NUM_TOKENS, NUM_EXPERTS, NUM_CHOSEN = 11, 6, 2

KINDS: dict[str, Callable[[], nn.Module]] = {
    "gate and up in one": lambda: Qwen3MoeExperts(
        Qwen3MoeConfig(**SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=8)
    ),
    "input first, with biases and a custom gate": lambda: GptOssExperts(
        GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS, intermediate_size=8)
    ),
    "another configuration": lambda: Ernie4_5_MoeExperts(
        Ernie4_5_MoeConfig(**SIZES, moe_num_experts=NUM_EXPERTS, moe_intermediate_size=8)
    ),
}


@pytest.fixture(params=list(KINDS))
def experts(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    module = KINDS[request.param]().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the chosen experts, and their weights. The last expert has no token."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, SIZES["hidden_size"], generator=generator, dtype=torch.float64)
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS - 1, generator=generator, dtype=torch.float64)
    weights, chosen = scores.topk(NUM_CHOSEN)
    return hidden, chosen, weights


def run(experts: nn.Module, implementation: str, parameters: dict[str, Tensor], hidden, chosen, weights) -> Tensor:
    experts.config._experts_implementation = implementation
    return functional_call(experts, parameters, (hidden, chosen, weights))


def draw_dual(tensor: Tensor, seed: int) -> Tensor:
    tangent = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)
    return make_dual(tensor, tangent)


def test_values_gradients_and_tangents_are_those_of_the_loop(experts: nn.Module, inputs) -> None:
    hidden, chosen, weights = inputs
    results = {}
    for implementation in ("eager", OUR_EXPERTS):
        leaves = {name: p.detach().clone().requires_grad_() for name, p in experts.named_parameters()}
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        output = run(experts, implementation, leaves, x, chosen, w)
        gradients = torch.autograd.grad(output.sin().sum(), [x, w, *leaves.values()])
        with torch.no_grad(), forward_ad.dual_level():
            duals = {name: draw_dual(p.detach(), seed) for seed, (name, p) in enumerate(leaves.items())}
            result = run(experts, implementation, duals, draw_dual(hidden, 10), chosen, draw_dual(weights, 11))
            tangent = forward_ad.unpack_dual(result).tangent
        results[implementation] = [output.detach(), tangent, *gradients]
    for ours, expected in zip(results[OUR_EXPERTS], results["eager"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_with_a_graph_the_value_is_unchanged_and_the_tangent_has_no_graph(experts: nn.Module, inputs) -> None:
    hidden, chosen, weights = inputs
    experts.config._experts_implementation = OUR_EXPERTS
    plain = experts(hidden, chosen, weights)
    plain_gradients = torch.autograd.grad(plain.sum(), list(experts.parameters()))
    with forward_ad.dual_level(), UnrecordedTangents():
        # As in the engine, an attribute of the instance hides the parameter.
        for seed, (name, parameter) in enumerate(experts.named_parameters()):
            experts.__dict__[name] = draw_dual(parameter, seed)
        value, tangent = forward_ad.unpack_dual(experts(draw_dual(hidden, 10), chosen, draw_dual(weights, 11)))
        gradients = torch.autograd.grad(value.sum(), list(experts.parameters()))
    assert tangent is not None
    assert not tangent.requires_grad
    assert torch.equal(value, plain)
    assert all(map(torch.equal, gradients, plain_gradients))


def test_the_grouped_gemm_saves_the_parameter_and_no_view_of_it() -> None:
    """ZeRO-3 releases a parameter by exchanging its data, and gathers it again for the backward. A view of the first
    data, kept by the graph, would keep the whole layer's memory until then."""
    weight = nn.Parameter(torch.randn(3, 5, 4))
    x = torch.randn(6, 4, requires_grad=True)
    product = grouped_matmul(x, weight, None, torch.tensor([2, 2, 6], dtype=torch.int32))
    weight.data = torch.ones(3, 5, 4)
    (gradient,) = torch.autograd.grad(product.sum(), x)
    assert torch.equal(gradient, torch.full_like(gradient, 5.0))
