"""TransformerEngine's norms in the parallel layers: against fp64, and in steps of the engine against PyTorch's norms.

The same rules around another kernel, without a GPU and on four ranks: tests/dist/test_megatron.py, "norms of a kernel".
"""

import importlib.util
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from tests.helpers import step_runs, tiny
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed.device import device
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.megatron.decoder import RMSNorm, find_norm_class
from vcore_ds.models.pointwise import rms_norm, rms_norm_tangent
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="no TransformerEngine: its norms are untested (pip install 'transformer_engine[pytorch]')",
)

EPS = 1e-6
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative to the norm of the exact result for the rounded inputs."""

SIZES = [64, 128, 5120]
"""Features of a head, and hidden states of Qwen3-32B."""

PASSES: dict[str, dict[str, Any]] = {
    "fused": {},
    "fused, checkpointed": {"checkpointing": True},
    "separate": {"fused": False},
}


def measure_error(computed: Tensor, exact: Tensor) -> float:
    return float((computed.detach().double().cpu() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items())
@pytest.mark.parametrize("size", SIZES)
def test_value_tangent_and_gradients_equal_fp64(dtype: torch.dtype, bound: float, size: int) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(7, 3, size)] * 3 + [(size,)] * 2
    rounded = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]
    x, d_x, upstream, weight, d_weight = (tensor.double() for tensor in rounded)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    value = rms_norm(*leaves, EPS)
    gradients = torch.autograd.grad(value, leaves, upstream)
    tangent = rms_norm_tangent(x, weight, EPS, d_x=d_x, d_weight=d_weight)

    norm_class = find_norm_class()
    assert norm_class is not RMSNorm
    module = norm_class(size, EPS).to(device(), dtype)
    x, d_x, upstream, weight, d_weight = (tensor.to(device()) for tensor in rounded)
    module.weight.data.copy_(weight)
    leaf = x.clone().requires_grad_()
    computed = module(leaf)
    computed_gradients = torch.autograd.grad(computed, (leaf, module.weight), upstream)
    with forward_ad.dual_level():
        module.__dict__["weight"] = make_dual(module._parameters["weight"], d_weight)
        dual_value, computed_tangent = forward_ad.unpack_dual(module(make_dual(x, d_x)))
        del module.__dict__["weight"]
    assert torch.equal(dual_value, computed)
    errors = [measure_error(computed, value.detach()), measure_error(computed_tangent, tangent)]
    errors += [measure_error(gradient, exact) for gradient, exact in zip(computed_gradients, gradients, strict=True)]
    print(f"{dtype}, {size}: value, tangent, gradients " + " ".join(f"{x:.1e}" for x in errors))
    assert max(errors) < bound


def take_step(norm_class: type[nn.Module], precision: str, *, fused: bool = True, **options: bool) -> dict[str, Tensor]:
    """Losses, utilities and weights of all tokens, and the gradient, of one step of the tiny Qwen3 in parallel layers;
    and utilities of one micro-batch by forward mode in fp64."""
    from tests.helpers import megatron  # only here: megatron-core takes seconds to import

    recipe = step_runs.make_recipe(model={"path": "none", "precision": precision}, utility={"fused": fused})
    plain = tiny.qwen3(dtype=torch.bfloat16)  # the same weights in both precisions
    model = megatron.make_parallel_model(
        plain.float() if precision == "fp32" else plain, norm_class=norm_class, **options
    )
    engine = step_runs.make_engine(model, recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    batches = StepBatches(step_runs.deal(tiny.make_batch(8), 2), step_runs.deal(tiny.make_batch(4, seed=9), 2))
    recorded = step_runs.Recorder(engine)
    metrics = step_runs.train_step(engine, recipe, batches, estimator, recorded)
    by_sequence = recorded.by_sequence(batches.main)
    with forward_mode(engine, estimator.direction, torch.float64):
        _, exact = compute_losses_and_utilities(engine, batches.main[0])
    engine.close()
    return {
        "loss": torch.tensor([metrics.values["loss"]]),
        "utilities": torch.cat([utilities for utilities, _ in by_sequence.values()]).cpu(),
        "weights": torch.cat([weights for _, weights in by_sequence.values()]).cpu(),
        "gradient": torch.cat([gradient.flatten().cpu() for gradient in recorded.gradient.values()]),
        "utilities in fp64": exact.cpu(),
    }


@pytest.mark.parametrize("name", PASSES)
def test_a_step_equals_that_of_pytorchs_norms(name: str) -> None:
    start_process_group(timeout_minutes=10)
    ours, pytorch = (take_step(norm_class, "fp32", **PASSES[name]) for norm_class in (find_norm_class(), RMSNorm))
    for quantity, expected in pytorch.items():
        deviation = step_runs.relative_error(ours[quantity], expected)
        print(f"{name}, {quantity}: {deviation:.1e}")
        assert deviation < 1e-5, quantity


@pytest.mark.parametrize("name", PASSES)
def test_a_step_in_bf16_is_as_close_to_fp32_as_with_pytorchs_norms(name: str) -> None:
    start_process_group(timeout_minutes=10)
    ours, pytorch = (take_step(norm_class, "bf16", **PASSES[name]) for norm_class in (find_norm_class(), RMSNorm))
    for quantity, exact in take_step(RMSNorm, "fp32", **PASSES[name]).items():
        if quantity == "utilities in fp64":  # along a direction that was computed in bf16
            continue
        errors = [step_runs.relative_error(measured[quantity], exact) for measured in (ours, pytorch)]
        print(f"{name}, {quantity}: " + ", ".join(f"{x:.1e}" for x in errors))
        assert errors[0] < 2 * errors[1] + 1e-6, quantity
