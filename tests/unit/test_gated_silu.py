"""The gated activation of the parallel layers: value against PyTorch's, tangent against forward mode in fp64."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.nn.functional import silu

from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.megatron.decoder import gated_silu


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """gate, up, and their tangents."""
    random = torch.Generator().manual_seed(0)
    return [(3 * torch.randn(3, 5, 24, generator=random, dtype=torch.float64)).to(dtype) for _ in range(4)]


def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradients_are_pytorchs_to_the_last_bit(dtype: torch.dtype) -> None:
    gate, up, upstream, _ = tensors(dtype)
    found = []
    for function in (plain, gated_silu):
        leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        value = function(*leaves)
        found.append((value, *torch.autograd.grad(value, leaves, upstream)))
    with torch.no_grad():
        found.append((gated_silu(gate, up), *found[0][1:]))
    for own in found[1:]:
        assert all(torch.equal(x, expected) for x, expected in zip(own, found[0], strict=True))


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("moving", [(True, True), (True, False), (False, True)])
def test_the_tangent_is_that_of_forward_mode(moving: tuple[bool, bool], with_graph: bool) -> None:
    gate, up, d_gate, d_up = tensors()
    still = torch.zeros_like(gate)
    given = (d_gate if moving[0] else still, d_up if moving[1] else still)
    value, expected = torch.func.jvp(plain, (gate, up), given)
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
            torch.func.grad(lambda *x: plain(*x).sum(), (0, 1))(gate, up),
            strict=True,
        ):
            torch.testing.assert_close(own, exact, rtol=1e-12, atol=1e-12)


def test_the_tangent_in_bf16() -> None:
    rounded = tensors(torch.bfloat16)
    gate, up, d_gate, d_up = (x.double() for x in rounded)
    _, exact = torch.func.jvp(plain, (gate, up), (d_gate, d_up))
    with forward_ad.dual_level(), torch.no_grad():
        gate, up, d_gate, d_up = rounded
        _, tangent = forward_ad.unpack_dual(gated_silu(make_dual(gate, d_gate), make_dual(up, d_up)))
    assert tangent.dtype == torch.bfloat16
    assert float((tangent.double() - exact).norm() / exact.norm()) < 1e-2
