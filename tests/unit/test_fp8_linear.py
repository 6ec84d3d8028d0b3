"""The linear layer of FP8 tangents, against fp64 matrix multiplications of the same rounded factors."""

import pytest
import torch

from vcore_ds.models import dual_tensors
from vcore_ds.models.dual_tensors import fp8_linear, has_fp8_units, is_supported, linear_tangent


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    scale = (x.double().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-300)
    return (x.double() / scale).to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_factors_are_rounded_row_by_row(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 64, generator=generator).mul(scale).bfloat16()
    weight = torch.randn(48, 64, generator=generator).mul(10.0 ** torch.linspace(-3, 3, 48)[:, None]).bfloat16()
    x[1, 2] = 0.0
    product = fp8_linear(x, weight)
    expected = round_to_fp8(x) @ round_to_fp8(weight).t()
    exact = x.double() @ weight.double().t()
    assert product.shape == (2, 5, 48) and product.dtype == torch.bfloat16
    assert float((product.double() - expected).abs().max() / expected.abs().max()) < 2**-8  # bf16 of the result
    norm = exact.norm(dim=-1)
    error = (product.double() - exact).norm(dim=-1)
    assert bool((error <= 0.06 * norm).all()) and float(error.max() / norm.max()) > 1e-3
    assert not product[1, 2].any()


def test_unsupported_shapes_are_multiplied_in_bf16() -> None:
    x, weight = torch.randn(7, 24).bfloat16(), torch.randn(32, 24).bfloat16()
    assert (
        not is_supported(weight)
        and not is_supported(torch.zeros(32, 32))
        and is_supported(torch.zeros(32, 32).bfloat16())
    )
    assert torch.equal(linear_tangent(x, weight, d_x=x, in_fp8=True), x @ weight.t())


def test_an_adapter_is_added_unrounded() -> None:
    generator = torch.Generator().manual_seed(0)
    d_x, weight = (torch.randn(size, 32, generator=generator).bfloat16() for size in (6, 16))
    addend = torch.randn(6, 16, generator=generator).bfloat16()
    tangent = linear_tangent(d_x, weight, d_x=d_x, d_addend=addend, scaling=2.0, in_fp8=True)
    assert torch.equal(tangent, fp8_linear(d_x, weight) + 2.0 * addend)


def test_a_device_that_cannot_multiply_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_fp8_units()

    def refuse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(dual_tensors, "fp8_linear", refuse)
    assert not has_fp8_units()
