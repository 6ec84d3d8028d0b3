"""What adapters add to the weights that they were trained on."""

from typing import NamedTuple

from peft import PeftModel
from peft.tuners.lora.layer import Linear, ParamWrapper
from torch import Tensor


class Adapter(NamedTuple):
    """The two matrices that are added to one weight."""

    layer: Linear | ParamWrapper
    lora_a: str
    """The matrices' names in the adapted model."""
    lora_b: str

    def change(self, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """`(alpha / r) B A`, in the shape of the weight.

        Args:
            lora_a: `[r, in]`; of n experts `[n r, in]`, one after the other.
            lora_b: `[out, r]`; of n experts `[out, r n]`, the experts of one rank next to each other.
        """
        layer, scaling = self.layer, self.layer.scaling["default"]
        if not isinstance(layer, ParamWrapper):
            product = scaling * lora_b @ lora_a
            return product.T if layer.fan_in_fan_out else product
        num_experts, num_out = layer.num_experts, lora_b.shape[0]
        of_experts = lora_b.view(num_out, -1, num_experts).permute(2, 0, 1)  # [n, out, r]
        product = scaling * of_experts @ lora_a.view(num_experts, -1, lora_a.shape[1])
        return product if layer._did_swap_in_out_features else product.mT


def adapters_of(adapted: PeftModel) -> dict[str, Adapter]:
    """The adapter of each adapted weight, by the weight's name in the model without adapters."""
    found = {}
    for name, layer in adapted.named_modules():
        if not isinstance(layer, (Linear, ParamWrapper)):
            continue
        weight = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        # The second of two adapted parameters of a module is wrapped around the first.
        base = name.removeprefix("base_model.model.").replace(".base_layer", "")
        found[f"{base}.{weight}"] = Adapter(layer, f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight")
    return found
