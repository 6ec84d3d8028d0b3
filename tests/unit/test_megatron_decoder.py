"""RMSNorm of the tensor-parallel layers: values and gradients against Hugging Face's."""

from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vcore_ds.common.errors import UserError
from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.megatron import decoder as norms
from vcore_ds.models.megatron.decoder import RMSNorm
from vcore_ds.models.pointwise import rms_norm_tangent

EPS = 1e-5
SCALES = [1e-3, 1.0, 100.0]
"""Scales of the inputs; eps matters for the smallest."""


def draw_tensors(scale: float, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, its tangent, the weight, its tangent."""
    random = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 24), (3, 5, 24), (24,), (24,)]
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    drawn[0] *= scale
    return [x.to(dtype) for x in drawn]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES)
def test_value_and_gradients_are_those_of_hugging_face_bit_for_bit(dtype: torch.dtype, scale: float) -> None:
    x, upstream, weight, _ = draw_tensors(scale, dtype)
    results = []
    for module in (LlamaRMSNorm(24, eps=EPS).to(dtype), RMSNorm(24, EPS).to(dtype)):
        module.weight.data.copy_(weight)
        leaf = x.clone().requires_grad_()
        value = module(leaf)
        results.append((value, *torch.autograd.grad(value, (leaf, module.weight), upstream)))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_a_dual_tensor_has_the_plain_value_and_a_tangent_without_graph() -> None:
    x, d_x, weight, d_weight = draw_tensors(1.0, torch.float32)
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
