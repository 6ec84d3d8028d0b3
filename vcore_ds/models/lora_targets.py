"""Which layers of a model get adapters, and how peft is told.

In memory the experts of a mixture are no linear layers: a layer `experts` holds them as tensors of three dimensions.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import peft
from peft.utils import transformers_weight_conversion
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vcore_ds.errors import UserError

ALL_LINEAR = "all-linear"
EXPERTS = "experts"


def find_targets(model: PreTrainedModel, wanted: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of layers, and of parameters that are no layer's own (the experts of a mixture), both for peft.

    Raises UserError for a name that no layer has: peft ignores it where another one is found.
    """
    layers: list[str] = []
    parameters: dict[str, None] = {}
    modules = list(model.named_modules())
    unknown = []
    for one in [wanted] if isinstance(wanted, str) else wanted:
        if one == ALL_LINEAR:
            layers += _all_linear(model)
            continue
        found = [module for name, module in modules if name == one or name.endswith(f".{one}")]
        stacked = {f"{one}.{name}": None for module in found for name in _stacked(module)}
        if not found:
            unknown.append(one)
        elif stacked:
            parameters |= stacked
        else:
            layers.append(one)
    if unknown:
        linear = {name.rpartition(".")[2]: None for name, layer in modules if isinstance(layer, nn.Linear)}
        if any(name.endswith(f".{EXPERTS}") and _stacked(module) for name, module in modules):
            linear[EXPERTS] = None
        raise UserError(
            f"lora.target_modules: found {', '.join(unknown)}, which no layer of the model is called; expected "
            f"all-linear, or names of layers, such as {', '.join(linear)}"
        )
    return layers, list(parameters)


def _stacked(module: nn.Module) -> list[str]:
    """Names of the module's own parameters of three dimensions, `[expert, ., .]`."""
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if len(getattr(parameter, "ds_shape", parameter.shape)) == 3  # under ZeRO-3 its own shape is empty
        and not isinstance(module, nn.Conv1d)
    ]


def _all_linear(model: PreTrainedModel) -> list[str]:
    """Every linear layer but the output embedding, what decides between experts, experts that are linear layers of
    their own, and those whose weights are read past the layer."""
    head, found = model.get_output_embeddings(), []
    for name, layer in model.named_modules():
        parent, _, own_name = name.rpartition(".")
        if not isinstance(layer, (nn.Linear, Conv1D)) or layer is head or _ROUTING.search(name):
            continue
        if own_name in _READ_BY_KERNELS and hasattr(model.get_submodule(parent), "D"):
            continue
        if own_name == "correction_coefs":  # of Gemma 3n, which reads its weight past the layer in training
            continue
        found.append(name)
    return found


_ROUTING = re.compile(r"(^|\.)(router|gate|experts|shared_expert_gate)(\.|$)")
"""Parts of the names of linear layers that weigh experts, and of experts."""

_READ_BY_KERNELS = ("x_proj", "dt_proj", "out_proj")
"""In modules of Mamba, which alone have a parameter D."""


# ---- peft and the names of mixtures --------------------------------------------------------------------------------


@contextmanager
def names_as_they_are() -> Iterator[None]:
    """A context in which peft takes names of layers for those of the model.

    Otherwise it takes `gate_proj`, in a mixture, for the experts of adapters that transformers 4 trained, and leaves
    the dense and shared layers of this name out, silently.
    """
    convert = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = convert


def taken_for_experts(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """Names of the layers among `targets` that peft, when it loads the adapter, would take for experts."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    wanted = [name for name in linear if any(name == one or name.endswith(f".{one}") for one in targets)]
    taken = {}
    for leaf in {name.rpartition(".")[2] for name in wanted}:
        probe = peft.LoraConfig(target_modules=[leaf])
        try:
            transformers_weight_conversion.convert_peft_config_for_transformers(probe, model, None)
            taken[leaf] = bool(probe.target_parameters)
        except ValueError:  # one of two that are joined in the experts
            taken[leaf] = True
    return [name for name in wanted if taken[name.rpartition(".")[2]]]


def write_as_parameters(config: peft.LoraConfig, layers: list[str]) -> None:
    """Names the weights of these layers in the configuration that is written, instead of the layers: peft loads the
    same adapter from it, and takes none of them for experts. It knows no dropout there; it is over by then."""
    config.target_modules = [
        one for one in config.target_modules or () if not any(n == one or n.endswith(f".{one}") for n in layers)
    ]
    config.target_parameters = [*(config.target_parameters or ()), *(f"{name}.weight" for name in layers)]
    config.lora_dropout = 0.0


def read_as_layers(config: peft.LoraConfig) -> None:
    """Undoes `write_as_parameters`, so that these layers get the forward of linear layers again."""
    if isinstance(config.target_modules, str):  # of an adapter that another program has written
        return
    weights = [name for name in config.target_parameters or () if name.endswith(".weight")]
    config.target_parameters = [name for name in config.target_parameters or () if name not in weights] or None
    config.target_modules = [*(config.target_modules or ()), *(name.removesuffix(".weight") for name in weights)]
