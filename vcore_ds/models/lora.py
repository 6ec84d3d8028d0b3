"""Low-rank adapters (peft) on a causal language model."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import peft
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.utils import SAFETENSORS_WEIGHTS_NAME, transformers_weight_conversion
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import reading
from vcore_ds.config.sections import LoraConfig
from vcore_ds.models.causal_lm import decoder, is_vision_language
from vcore_ds.models.lora_linear import round_adapters_once
from vcore_ds.models.model_folder import build_empty_model

# Which layers of a model get adapters, and how peft is told.
#
# In memory the experts of a mixture are no linear layers: a layer `experts` holds them as tensors of three
# dimensions.


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
def keep_layer_names() -> Iterator[None]:
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


def find_misread_layers(model: PreTrainedModel, targets: list[str]) -> list[str]:
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


def rename_to_parameters(config: peft.LoraConfig, layers: list[str]) -> None:
    """Names the weights of these layers in the configuration that is written, instead of the layers: peft loads the
    same adapter from it, and takes none of them for experts. It knows no dropout there; it is over by then."""
    config.target_modules = [
        one for one in config.target_modules or () if not any(n == one or n.endswith(f".{one}") for n in layers)
    ]
    config.target_parameters = [*(config.target_parameters or ()), *(f"{name}.weight" for name in layers)]
    config.lora_dropout = 0.0


def rename_to_layers(config: peft.LoraConfig) -> None:
    """Undoes `rename_to_parameters`, so that these layers get the forward of linear layers again."""
    if isinstance(config.target_modules, str):  # of an adapter that another program has written
        return
    weights = [name for name in config.target_parameters or () if name.endswith(".weight")]
    config.target_parameters = [name for name in config.target_parameters or () if name not in weights] or None
    config.target_modules = [*(config.target_modules or ()), *(name.removesuffix(".weight") for name in weights)]


def add_lora(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    """Freezes the model and adds trainable adapters to its language model, in place.

    Raises UserError where no layer of the model has one of the names in `lora.target_modules`, or experts would get
    dropout.
    """
    layers, parameters = find_targets(model, lora.target_modules)
    if parameters and lora.dropout:
        raise UserError(
            f"lora.dropout: found {lora.dropout:g} together with adapters on {', '.join(parameters)}; expected 0: an "
            "expert computes with its weight plus the adapter's product, so that there is no adapter's input to drop"
        )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whatever its type
        lora_dropout=lora.dropout,
        target_modules=layers,
        target_parameters=parameters or None,
        exclude_modules=_outside_the_decoder(model),
        task_type="CAUSAL_LM",
        bias="none",
    )
    taken = find_misread_layers(model, layers)
    try:
        with warnings.catch_warnings(), keep_layer_names():
            # peft asks transformers for gradient checkpointing by the name it had before 5.23.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"lora.target_modules: {lora.target_modules!r}: {error}") from None
    # peft keeps a set, whose order is another one in every process: the same run writes the same adapter_config.json.
    config.target_modules = sorted(config.target_modules or ())
    if taken:
        rename_to_parameters(config, taken)
    round_adapters_once(adapted)
    # The first layer's input comes out of a frozen embedding. Unless it requires a gradient, an activation checkpoint
    # around that layer passes none to the adapters, and ZeRO-3's backward hook on it runs before they have theirs.
    adapted.enable_input_require_grads()
    return adapted


def build_empty_adapted_model(path: str, config: PretrainedConfig, lora: LoraConfig) -> PeftModel:
    """A model without weights, with adapters, for names, shapes and configuration; see `build_empty_model`.

    Raises UserError as `build_empty_model` and `add_lora` do.
    """
    base = build_empty_model(path, config)
    with torch.device("meta"):  # nor is anything drawn
        return add_lora(base, lora)


def _outside_the_decoder(model: PreTrainedModel) -> str | None:
    """Pattern of the layers of a vision-language model that no text goes through: some have the decoder's names."""
    if not is_vision_language(model.config):
        return None
    name = next(name for name, module in model.named_modules() if module is decoder(model))
    return rf"(?!{re.escape(name)}\.).*"


# What adapters add to the weights that they were trained on.


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


def find_adapters(adapted: PeftModel) -> dict[str, Adapter]:
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


# A trained adapter, read from its folder onto the model that it belongs to.


def add_trained_adapter(model: PreTrainedModel, folder: Path, base: str) -> PeftModel:
    """The model with the adapter of a folder, for inference, with the forward of training (`lora_linear`); in place.

    Args:
        base: what the model was loaded from, for messages.

    Raises:
        UserError: the adapter cannot be read, or is of another base model: it has layers that this one has not, or of
            other sizes.
    """
    with reading("adapter", folder, "a folder with a trained adapter"):
        try:
            config = peft.LoraConfig.from_pretrained(str(folder))
            rename_to_layers(config)
            with warnings.catch_warnings(), keep_layer_names():
                # peft asks transformers for gradient checkpointing by the name it had before 5.23.
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
                adapted = PeftModel.from_pretrained(model, str(folder), config=config)
            with safe_open(folder / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
                stored = set(file.keys())
        except FileNotFoundError:
            raise UserError(
                f"adapter: {folder}: found no {SAFETENSORS_WEIGHTS_NAME}; expected the weights of an adapter"
            ) from None
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            if isinstance(error, RuntimeError) and "size mismatch" in str(error):
                reason = next(line.strip() for line in str(error).splitlines() if "size mismatch" in line)
            raise UserError(_other_base(folder, base, reason)) from None
    differing = sorted(stored ^ set(get_peft_model_state_dict(adapted)))
    if differing:
        raise UserError(_other_base(folder, base, f"{differing[0]} is in one of them only"))
    round_adapters_once(adapted)
    return adapted


def _other_base(folder: Path, base: str, reason: str) -> str:
    return (
        f"adapter: {folder}: does not fit the model {base}: {reason:.300}; expected an adapter of this very model. "
        "Name the model that it was trained from"
    )
