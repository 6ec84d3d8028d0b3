"""The sum of unreduced gradients: exact where PyTorch's own rounds micro-batches away."""

import torch
from torch import nn

from vcore_ds.engine.flat_shards import GradientSum, unsharded_gradient_bytes


def accumulate(gradients: list[torch.Tensor], parameter: nn.Parameter, in_fp32: bool) -> torch.Tensor:
    gradient_sum = GradientSum([parameter])
    parameter.grad = None
    for i, gradient in enumerate(gradients):
        (parameter * gradient).sum().backward()
        if in_fp32 and i < len(gradients) - 1:
            gradient_sum.add()
    gradient_sum.write_back()
    assert parameter.grad is not None
    return parameter.grad.clone()


def test_many_micro_batches_are_rounded_once() -> None:
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    gradients = [(1 + torch.rand(64, generator=generator)).bfloat16() for _ in range(64)]
    exact = torch.stack(gradients).double().sum(0)
    assert torch.equal(accumulate(gradients, parameter, in_fp32=True), exact.bfloat16())
    assert not torch.equal(accumulate(gradients, parameter, in_fp32=False), exact.bfloat16())


def test_the_next_accumulation_begins_at_zero_and_one_micro_batch_is_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ones = torch.ones(3, dtype=torch.bfloat16)
    for _ in range(2):
        assert accumulate([ones, 2 * ones], parameter, in_fp32=True).tolist() == [3.0] * 3
    assert accumulate([ones], parameter, in_fp32=True).tolist() == [1.0] * 3


def test_a_parameter_that_only_some_micro_batches_use_is_summed() -> None:
    used, late = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    gradient_sum = GradientSum([used, late])
    used.sum().backward()
    gradient_sum.add()
    (used + late).sum().backward()
    gradient_sum.write_back()
    assert used.grad is not None and late.grad is not None
    assert (used.grad.tolist(), late.grad.tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_bytes_of_unsharded_gradients_include_the_fp32_sum() -> None:
    parameters = [nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))]
    assert unsharded_gradient_bytes(parameters) == 10 * 4 + 5 * 6
