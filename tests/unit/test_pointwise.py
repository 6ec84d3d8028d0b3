"""RMSNorm, rotary embedding and gated activation: values and gradients bit for bit against Hugging Face's modules by
PyTorch's operations, and against fp64 by the kernels where `test_flash_tangent.py` runs this file in Triton's
interpreter; tangents against forward mode in fp64 by both."""

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm

from vcore_ds.models import pointwise
from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.pointwise import gated_silu, rms_norm, use_formulas

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EPS = 1e-5
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Largest error of a result, relative to its norm. Triton's interpreter truncates to bf16 instead of rounding."""
DTYPES = [torch.bfloat16] if IS_INTERPRETED else [torch.float64, *BOUNDS]
SCALES = [1e-3, 1.0, 100.0]
"""Scales of a norm's input; eps matters for the smallest."""


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check_close(result: Tensor, exact: Tensor) -> None:
    """Check a result against that in fp64."""
    bound = BOUNDS.get(result.dtype, 1e-12)
    assert float((result.detach().double() - exact).norm() / exact.norm()) < bound
    assert pointwise.runs_triton(result) == IS_INTERPRETED


def check_value(value: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Check a value against that of Hugging Face's operations, or of a kernel against that in fp64."""
    if IS_INTERPRETED:
        check_close(value, exact)
    else:
        assert torch.equal(value, plain)


def check_tangent(tangent: Tensor, exact: Tensor) -> None:
    """Check a tangent, which has no graph, against that in fp64."""
    assert not tangent.requires_grad
    check_close(tangent, exact)


class Parts(nn.Module):
    """Norms and an MLP, as a model has them."""

    def __init__(self, dtype: torch.dtype, activation: str = "silu"):
        super().__init__()
        self.norm = Qwen3RMSNorm(24, eps=EPS)
        sizes = dict(hidden_size=24, intermediate_size=40, mlp_bias=False, hidden_act=activation)
        self.mlp = LlamaMLP(SimpleNamespace(**sizes))
        self.others = nn.ModuleList([GemmaRMSNorm(24), Olmo2RMSNorm(24)])
        self.to(dtype)
        torch.nn.init.normal_(self.norm.weight)


@pytest.mark.skipif(IS_INTERPRETED, reason="kernels round once")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("scale", SCALES)
def test_modules_have_hugging_faces_values_and_gradients_bit_for_bit(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    parts = Parts(dtype)
    x, upstream = draw((3, 7, 24), (3, 7, 24), dtype=dtype)
    results = []
    for replaces in (False, True):
        if replaces:
            use_formulas(parts)
        for module in (parts.norm, parts.mlp):
            leaf = (scale * x).requires_grad_()
            value = module(leaf)
            with torch.no_grad():
                assert torch.equal(module(leaf), value)
            results.append((value, *torch.autograd.grad(value, (leaf, *module.parameters()), upstream)))
    for before, after in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, before, after))


def make_attention() -> Qwen3Attention:
    sizes = dict(hidden_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=12, num_hidden_layers=1)
    return Qwen3Attention(modeling_qwen3.Qwen3Config(**sizes), layer_idx=0)


def test_only_modules_with_llamas_code_are_replaced() -> None:
    parts, gelu = Parts(torch.float32), Parts(torch.float32, activation="gelu")
    for model in (parts, gelu):
        use_formulas(model)
    assert type(parts.norm) is not Qwen3RMSNorm and isinstance(parts.norm, Qwen3RMSNorm)
    assert type(parts.norm).__name__ == "Qwen3RMSNorm"
    assert type(parts.mlp) is not LlamaMLP and type(gelu.mlp) is LlamaMLP
    attention = make_attention()
    use_formulas(attention)
    assert type(attention) is not Qwen3Attention and isinstance(attention, Qwen3Attention)
    plain = inspect.unwrap(Qwen3Attention.forward).__globals__["apply_rotary_pos_emb"]
    assert modeling_qwen3.apply_rotary_pos_emb is plain is not type(attention).forward.__globals__[plain.__name__]
    assert [type(module) for module in parts.others] == [GemmaRMSNorm, Olmo2RMSNorm]


def test_a_norm_of_another_dtype_than_its_input_is_hugging_faces() -> None:
    (x,) = draw((3, 24), dtype=torch.bfloat16)
    norm = Parts(torch.float32).norm
    before = norm(x)
    use_formulas(norm)
    assert norm(x).dtype == torch.float32 and torch.equal(norm(x), before)


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_graph_keeps_one_copy_of_a_norms_input_and_no_activated_gate(with_graph: bool) -> None:
    """Nor a dual tensor: its tangent would live as long as the graph."""
    x, d_x, gate, up = draw((4, 24), (4, 24), (4, 24), (4, 24), dtype=torch.bfloat16)
    weight = nn.Parameter(torch.ones(24, dtype=torch.bfloat16))
    saved: list[Tensor] = []
    leaves = [leaf.requires_grad_(with_graph) for leaf in (x, gate, up)]
    with (
        forward_ad.dual_level(),
        torch.set_grad_enabled(with_graph),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor),
    ):
        duals = [make_dual(leaf, d_x.clone()) for leaf in leaves]
        results = [rms_norm(duals[0], weight, EPS), gated_silu(*duals[1:])]
        assert all(forward_ad.unpack_dual(result).tangent is not None for result in results)
        assert all(forward_ad.unpack_dual(tensor).tangent is None for tensor in saved)
    sizes = sorted(tensor.numel() * tensor.element_size() for tensor in saved)
    assert sizes == ([4 * 4, 24 * 2, *[4 * 24 * 2] * 3] if with_graph else [])
    assert {tensor.data_ptr() for tensor in saved} >= ({leaf.data_ptr() for leaf in leaves} if with_graph else set())


def normalize_exactly(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [24, 130])
def test_tangent_of_a_norm(dtype: torch.dtype, scale: float, size: int) -> None:
    x, d_x, weight, d_weight = draw((3, 5, size), (3, 5, size), (size,), (size,), dtype=dtype)
    x = (scale * x).transpose(0, 1)
    d_x = d_x.transpose(0, 1)
    exact = [tensor.double() for tensor in (x, weight, d_x, d_weight)]
    for given in ((True, True), (True, False), (False, True)):
        tangents = [t if is_given else torch.zeros_like(t) for t, is_given in zip(exact[2:], given, strict=True)]
        value, expected = torch.func.jvp(normalize_exactly, tuple(exact[:2]), tuple(tangents))
        for with_graph in (False, True):
            leaf = x.clone().requires_grad_(with_graph)
            with forward_ad.dual_level(), torch.set_grad_enabled(with_graph):
                dual = make_dual(leaf, d_x) if given[0] else leaf
                primal, tangent = forward_ad.unpack_dual(
                    rms_norm(dual, weight, EPS, d_weight=d_weight if given[1] else None)
                )
            check_tangent(tangent, expected)
            error = float((primal.detach().double() - value).norm() / value.norm())
            assert primal.requires_grad == with_graph and error < BOUNDS.get(dtype, 1e-12)


def plain_gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_tangent_of_gated_silu(dtype: torch.dtype, with_graph: bool, given: tuple[bool, bool]) -> None:
    inputs = [(3 * x).to(dtype) for x in draw(*[(3, 5, 24)] * 4)]
    exact = [x.double() for x in inputs]
    still = torch.zeros_like(exact[0])
    tangents = tuple(x if is_given else still for x, is_given in zip(exact[2:], given, strict=True))
    exact_value, expected = torch.func.jvp(plain_gated_silu, tuple(exact[:2]), tangents)
    leaves = [x.clone().requires_grad_(with_graph) for x in inputs[:2]]
    with forward_ad.dual_level(), torch.set_grad_enabled(with_graph):
        duals = [make_dual(x, d.clone()) if has else x for x, d, has in zip(leaves, inputs[2:], given, strict=True)]
        value, tangent = forward_ad.unpack_dual(gated_silu(*duals))
    check_tangent(tangent, expected)
    check_value(value, plain_gated_silu(*inputs[:2]), exact_value)
    assert value.requires_grad == with_graph
    if with_graph:
        upstream = exact[2]
        exact_leaves = [x.clone().requires_grad_() for x in exact[:2]]
        expected_gradients = torch.autograd.grad(plain_gated_silu(*exact_leaves), exact_leaves, upstream)
        for gradient, right in zip(torch.autograd.grad(value, leaves, inputs[2]), expected_gradients, strict=True):
            check_close(gradient, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_tangent_of_the_rotary_embedding(dtype: torch.dtype, num_rows: int) -> None:
    """One row of angles for all rows of the batch, or one for each."""
    shapes = [(3, 2, 5, 12), (3, 2, 2, 12)] * 2
    q, k, d_q, d_k = (x.transpose(1, 2) for x in draw(*shapes, dtype=dtype))
    cos, sin = draw((num_rows, 2, 12), (num_rows, 2, 12), dtype=dtype, seed=1)
    attention = make_attention()
    use_formulas(attention)
    rotate = type(attention).forward.__globals__["apply_rotary_pos_emb"]
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    with forward_ad.dual_level():
        pairs = map(make_dual, leaves, (d_q, d_k))
        rotated = [forward_ad.unpack_dual(x) for x in rotate(*pairs, cos, sin)]
    exact_leaves = [x.double().requires_grad_() for x in (q, k)]
    exact_values = apply_rotary_pos_emb(*exact_leaves, cos.double(), sin.double())
    exact_tangents = apply_rotary_pos_emb(*(x.double() for x in (d_q, d_k, cos, sin)))
    plain_values, without_tangents = apply_rotary_pos_emb(q, k, cos, sin), rotate(q, k, cos, sin)
    exact_gradients = torch.autograd.grad(exact_values, exact_leaves, [d_q.double(), d_k.double()])
    gradients = torch.autograd.grad([value for value, _ in rotated], leaves, [d_q, d_k])
    for i, (value, tangent) in enumerate(rotated):
        check_tangent(tangent, exact_tangents[i])
        check_value(value, plain_values[i], exact_values[i])
        assert value.requires_grad and torch.equal(value, without_tangents[i])
        check_close(gradients[i], exact_gradients[i])
