"""The gradients of several micro-batches before their one reduction, summed in fp32.

PyTorch adds them up in the parameters' dtype, and bf16 rounds the gradients of late micro-batches away. So each
micro-batch's gradient is moved to an fp32 sum, which is rounded once, for the reduction.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class GradientSum:
    """The sum of one accumulation, over gradients that have not been reduced; empty between two accumulations."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}

    def take(self) -> None:
        """Moves the gradients to the sum. What stays is zero instead of None: ZeRO-3 has replaced the gathered
        parameters by empty tensors, to which PyTorch would not attach another gradient."""
        found = self._gradients()
        if not found:
            return
        new = [parameter for parameter in found if parameter not in self._sums]
        known = [parameter for parameter in found if parameter in self._sums]
        if known:
            torch._foreach_add_([self._sums[p] for p in known], [found[p] for p in known])
        self._sums |= {parameter: found[parameter].float() for parameter in new}
        torch._foreach_zero_(list(found.values()))

    def give_back(self) -> None:
        """Adds the sum to the gradients, in fp32, and forgets it."""
        if not self._sums:
            return
        found = self._gradients()  # once there, a gradient stays
        sums = [self._sums[parameter] for parameter in found if parameter in self._sums]
        grads = [grad for parameter, grad in found.items() if parameter in self._sums]
        torch._foreach_add_(sums, grads)
        torch._foreach_copy_(grads, sums)
        self._sums = {}

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}


def unsharded_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """What trained parameters take on each rank until their one reduction: a gradient, and an fp32 sum beside one in
    16 bits."""
    size = 0
    for parameter in parameters:
        numel = getattr(parameter, "ds_numel", parameter.numel())
        size += numel * (4 if parameter.dtype == torch.float32 else parameter.element_size() + 4)
    return size
