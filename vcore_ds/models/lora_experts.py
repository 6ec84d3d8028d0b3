"""Experts of a mixture whose adapters are added before the output is rounded, as in `lora_linear`.

peft adds `(alpha / r) B A` to the weights, which rounds what is below half an ulp of a weight away: just off B = 0 a
model in bf16 computes as if it had hardly been trained. Here the experts' own product takes it in.
"""

from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from torch.nn.functional import pad

from vcore_ds.models.experts import ExpertsAdapter, adapted, are_ours

_MULTIPLE = 8
"""Ranks are padded to it with zeros: rows of the kernels' matrices are multiples of 16 bytes."""


class LoraExperts(ParamWrapper):
    """peft's adapter on one parameter of a layer of experts, whose forward is `experts_forward`; peft's own where the
    experts compute otherwise, or the adapter is off or merged."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        experts = self.get_base_layer()
        if not are_ours(experts) or self.disable_adapters or self.merged:
            return super().forward(x, *args, **options)
        (name,) = self.active_adapters
        left, right, scaling = self.get_delta_factors(name)
        rows = -self.r[name] % _MULTIPLE
        left, right = pad(left, (0, rows)), pad(right, (0, 0, 0, rows))
        down, up = (left, right) if experts.is_transposed else (right, left)
        with adapted(experts, self.parameter_name, ExpertsAdapter(down, up, scaling)):
            return self.base_layer(x, *args, **options)
