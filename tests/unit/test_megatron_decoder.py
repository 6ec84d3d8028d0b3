"""RMSNorm and gated SiLU of the tensor-parallel layers: values against Hugging Face's and PyTorch's, tangents against
forward mode in fp64."""

from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vcore_ds.common.errors import UserError
from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.megatron import decoder as norms
from vcore_ds.models.megatron.decoder import RMSNorm, gated_silu, rms_norm, rms_norm_tangent

EPS = 1e-5
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
SCALES = [1e-3, 1.0, 100.0]
"""Of the inputs; eps counts for the smallest."""


def tensors(scale: float, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, its tangent, the weight, its tangent."""
    random = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 24), (3, 5, 24), (24,), (24,)]
    found = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    found[0] *= scale
    return [x.to(dtype) for x in found]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("scale", SCALES)
def test_value_and_gradients_are_those_of_hugging_face_to_the_last_bit(dtype: torch.dtype, scale: float) -> None:
    x, upstream, weight, _ = tensors(scale, dtype)
    found = []
    for module in (LlamaRMSNorm(24, eps=EPS).to(dtype), RMSNorm(24, EPS).to(dtype)):
        module.weight.data.copy_(weight)
        leaf = x.clone().requires_grad_()
        value = module(leaf)
        found.append((value, *torch.autograd.grad(value, (leaf, module.weight), upstream)))
    for own, expected in zip(*found, strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("scale", SCALES)
def test_the_tangent_is_that_of_forward_mode(scale: float) -> None:
    x, d_x, weight, d_weight = tensors(scale)

    def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (24,), weight, EPS)

    value, expected = torch.func.jvp(normalized, (x, weight), (d_x, d_weight))
    torch.testing.assert_close(rms_norm(x, weight, EPS), value, rtol=1e-12, atol=1e-12)
    found = rms_norm_tangent(x, weight, EPS, d_x=d_x, d_weight=d_weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    both = [rms_norm_tangent(x, weight, EPS, **only) for only in ({"d_x": d_x}, {"d_weight": d_weight})]
    torch.testing.assert_close(both[0] + both[1], expected, rtol=1e-12, atol=1e-12)
    assert rms_norm_tangent(x, weight, EPS) is None


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items())
@pytest.mark.parametrize("scale", SCALES)
def test_the_tangent_in_the_dtypes_of_training(dtype: torch.dtype, bound: float, scale: float) -> None:
    rounded = tensors(scale, dtype)
    x, d_x, weight, d_weight = (tensor.double() for tensor in rounded)
    exact = rms_norm_tangent(x, weight, EPS, d_x=d_x, d_weight=d_weight)
    x, d_x, weight, d_weight = rounded
    found = rms_norm_tangent(x, weight, EPS, d_x=d_x, d_weight=d_weight)
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < bound


def test_a_dual_number_has_the_plain_value_and_a_graph_of_it_alone() -> None:
    x, d_x, weight, d_weight = tensors(1.0, torch.float32)
    module = RMSNorm(24, EPS)
    module.weight.data.copy_(weight)
    plain = module(x)
    with forward_ad.dual_level():
        module.__dict__["weight"] = make_dual(module._parameters["weight"], d_weight)
        value, tangent = forward_ad.unpack_dual(module(make_dual(x, d_x)))
    assert torch.equal(value, plain)
    assert value.requires_grad and not tangent.requires_grad
    assert torch.equal(tangent, rms_norm_tangent(x, weight, EPS, d_x=d_x, d_weight=d_weight))


def test_a_transformer_engine_that_cannot_be_imported_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('libcudart.so.13: no such file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(norms, "uses_gpu", lambda: True)
    with pytest.raises(UserError) as refused:
        norms.find_norm_class()
    assert "OSError: libcudart.so.13: no such file" in str(refused.value)
    assert "pip uninstall transformer_engine" in str(refused.value)


def gate_and_up(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """gate, up, and their tangents."""
    random = torch.Generator().manual_seed(0)
    return [(3 * torch.randn(3, 5, 24, generator=random, dtype=torch.float64)).to(dtype) for _ in range(4)]


def plain_gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_silu_equals_pytorchs_to_the_last_bit(dtype: torch.dtype) -> None:
    gate, up, upstream, _ = gate_and_up(dtype)
    found = []
    for function in (plain_gated_silu, gated_silu):
        leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        value = function(*leaves)
        found.append((value, *torch.autograd.grad(value, leaves, upstream)))
    with torch.no_grad():
        found.append((gated_silu(gate, up), *found[0][1:]))
    for own in found[1:]:
        assert all(torch.equal(x, expected) for x, expected in zip(own, found[0], strict=True))


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("moving", [(True, True), (True, False), (False, True)])
def test_the_tangent_of_gated_silu_is_that_of_forward_mode(moving: tuple[bool, bool], with_graph: bool) -> None:
    gate, up, d_gate, d_up = gate_and_up()
    still = torch.zeros_like(gate)
    given = (d_gate if moving[0] else still, d_up if moving[1] else still)
    value, expected = torch.func.jvp(plain_gated_silu, (gate, up), given)
    leaves = [x.clone().requires_grad_(with_graph) for x in (gate, up)]
    with forward_ad.dual_level(), torch.set_grad_enabled(with_graph):
        tangents = (d_gate.clone(), d_up.clone())
        duals = [make_dual(x, d) if moves else x for x, d, moves in zip(leaves, tangents, moving, strict=True)]
        found, tangent = forward_ad.unpack_dual(gated_silu(*duals))
    torch.testing.assert_close(tangent, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found, value)
    assert found.requires_grad == with_graph and not tangent.requires_grad
    if with_graph:  # no graph of the tangents, which have been written into
        for own, exact in zip(
            torch.autograd.grad(found.sum(), leaves),
            torch.func.grad(lambda *x: plain_gated_silu(*x).sum(), (0, 1))(gate, up),
            strict=True,
        ):
            torch.testing.assert_close(own, exact, rtol=1e-12, atol=1e-12)


def test_the_tangent_of_gated_silu_in_bf16() -> None:
    rounded = gate_and_up(torch.bfloat16)
    gate, up, d_gate, d_up = (x.double() for x in rounded)
    _, exact = torch.func.jvp(plain_gated_silu, (gate, up), (d_gate, d_up))
    with forward_ad.dual_level(), torch.no_grad():
        gate, up, d_gate, d_up = rounded
        _, tangent = forward_ad.unpack_dual(gated_silu(make_dual(gate, d_gate), make_dual(up, d_up)))
    assert tangent.dtype == torch.bfloat16
    assert float((tangent.double() - exact).norm() / exact.norm()) < 1e-2
