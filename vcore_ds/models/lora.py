"""LoRA adapters (peft) on a causal language model: choosing layers, adding adapters, loading trained ones.

In bf16, LoRA layers round once, after adding the adapter. peft adds an adapter's output to a base output that is
already rounded. Close to B = 0 it is below half an ulp of the base output, so the sum rounds back to the same number:
the model computes as if it had hardly been trained. Here the adapter's output is added in the fp32 accumulator of the
base matrix multiplication:

    out = round(x W^T + scaling * B A x)

`B A x` is itself rounded, an error relative to the adapter alone. Nothing of the output's size is saved for the
backward. Experts do the same in their grouped GEMM: peft would add `(alpha / r) B A` to the weights, and lose updates
below half an ulp of a weight.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.utils import SAFETENSORS_WEIGHTS_NAME, transformers_weight_conversion
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import reading
from vcore_ds.config.sections import LoraConfig
from vcore_ds.models.causal_lm import find_decoder
from vcore_ds.models.description import ModelDescription, build_empty_model, is_vision_language, read_model
from vcore_ds.models.dual_tensors import linear_with_addend
from vcore_ds.models.experts import ExpertsAdapter, use_adapter, uses_our_experts
from vcore_ds.models.safetensors_ranges import read_header, read_tensor

ALL_LINEAR = "all-linear"
EXPERTS = "experts"


def find_targets(model: PreTrainedModel, names: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Return peft's `target_modules` and `target_parameters` for the layers that the recipe names.

    Experts are parameters: in memory they are not linear layers, but tensors `[expert, ., .]` of a module `experts`.

    Raises UserError for a name without a matching linear layer or experts: peft ignores it if another name matches, and
    adapters of other layers could not be exported.
    """
    layers: list[str] = []
    parameters: dict[str, None] = {}
    outside = re.compile(_match_outside_decoder(model) or "(?!)")
    modules = [(name, module) for name, module in model.named_modules() if not outside.fullmatch(name)]
    for target in [names] if isinstance(names, str) else names:
        if target == ALL_LINEAR:
            layers += _find_linear_layers(model)
            continue
        matches = [module for name, module in modules if _is_targeted(name, [target])]
        stacked = {f"{target}.{name}": None for module in matches for name in _list_expert_parameters(module)}
        if stacked:
            parameters |= stacked
        elif matches and all(isinstance(module, nn.Linear | Conv1D) for module in matches):
            layers.append(target)
        else:
            linear = {name.rpartition(".")[2]: None for name, layer in modules if isinstance(layer, nn.Linear)}
            if any(name.endswith(f".{EXPERTS}") and _list_expert_parameters(module) for name, module in modules):
                linear[EXPERTS] = None
            raise UserError(
                f"lora.target_modules: found {target}, without a matching layer in the model; expected all-linear, or "
                f"names of linear layers or experts, such as {', '.join(linear)}"
            )
    return layers, list(parameters)


def _is_targeted(name: str, targets: Iterable[str]) -> bool:
    """Whether peft matches a module's name with one of the targets, which may be the end of its path."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _list_expert_parameters(module: nn.Module) -> list[str]:
    """Return the names of the module's three-dimensional parameters, `[expert, ., .]`."""
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if len(getattr(parameter, "ds_shape", parameter.shape)) == 3  # under ZeRO-3 `shape` is empty
        and not isinstance(module, nn.Conv1d)
    ]


def _find_linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers except the output embedding, routers, experts, block-diagonal layers
    (DeepSeek V4), and layers whose weights are read without calling the layer."""
    head, names = model.get_output_embeddings(), []
    for name, layer in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if not isinstance(layer, (nn.Linear, Conv1D)) or layer is head or _ROUTING.search(name):
            continue
        if type(layer).__name__.endswith("GroupedLinear"):
            continue
        is_read_by_kernel = leaf in _READ_BY_KERNELS and hasattr(model.get_submodule(parent), "D")
        if not is_read_by_kernel and leaf != "correction_coefs":  # whose weight Gemma 3n reads
            names.append(name)
    return names


_ROUTING = re.compile(r"(^|\.)(router|gate|experts|shared_expert_gate)(\.|$)")
"""Matches names of routers and experts."""

_READ_BY_KERNELS = ("x_proj", "dt_proj", "out_proj")
"""Layers of Mamba modules (the only ones with a parameter D) whose weights the kernels read."""


@contextmanager
def keep_layer_names() -> Iterator[None]:
    """Context in which peft does not reinterpret the names of target modules.

    By default, for an MoE model it treats `gate_proj` as the experts of adapters that were trained with transformers 4,
    and silently leaves out dense and shared layers of this name.
    """
    convert = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        with warnings.catch_warnings():
            # peft reads a property that transformers 5.23 renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = convert


def find_misread_layers(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """Return the names of layers among `targets` that peft would treat as experts when it loads the adapter."""
    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and _is_targeted(name, targets)
    ]
    is_misread = {}
    for leaf in {name.rpartition(".")[2] for name in names}:
        probe = peft.LoraConfig(target_modules=[leaf])
        try:
            transformers_weight_conversion.convert_peft_config_for_transformers(probe, model, None)
            is_misread[leaf] = bool(probe.target_parameters)
        except ValueError:  # only one of two names that are fused in the experts
            is_misread[leaf] = True
    return [name for name in names if is_misread[name.rpartition(".")[2]]]


def rename_to_parameters(config: peft.LoraConfig, layers: list[str]) -> None:
    """Replace these layers by their weights in the configuration to be saved, in place.

    peft loads the same adapter from it, and treats none of them as experts. It has no dropout on target_parameters; the
    saved adapter is for use after training, so none is needed.
    """
    config.target_modules = [
        target for target in config.target_modules or () if not any(_is_targeted(name, [target]) for name in layers)
    ]
    config.target_parameters = [*(config.target_parameters or ()), *(f"{name}.weight" for name in layers)]
    config.lora_dropout = 0.0


def rename_to_layers(config: peft.LoraConfig) -> None:
    """Undo `rename_to_parameters`, so that these layers get peft's forward of linear layers."""
    if isinstance(config.target_modules, str):  # saved by another program
        return
    weights = [name for name in config.target_parameters or () if name.endswith(".weight")]
    config.target_parameters = [name for name in config.target_parameters or () if name not in weights] or None
    config.target_modules = [*(config.target_modules or ()), *(name.removesuffix(".weight") for name in weights)]


def add_lora(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    """Freeze the model and add trainable adapters to its language model, in place.

    Raises UserError if a name in `lora.target_modules` matches no layer, or if experts would get dropout.
    """
    layers, parameters = find_targets(model, lora.target_modules)
    if parameters and lora.dropout:
        raise UserError(
            f"lora.dropout: found {lora.dropout:g} together with adapters on {', '.join(parameters)}; expected 0: "
            "adapters of experts are computed together with the weights, without a separate input to drop"
        )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only divides it by the rank
        lora_dropout=lora.dropout,
        target_modules=layers,
        target_parameters=parameters or None,
        exclude_modules=_match_outside_decoder(model),
        task_type="CAUSAL_LM",
        bias="none",
    )
    misread = find_misread_layers(model, layers)
    with keep_layer_names():
        adapted = get_peft_model(model, config)
    # peft keeps a set, whose order differs between processes; sorted, a run always writes the same adapter_config.json.
    config.target_modules = sorted(config.target_modules or ())
    if misread:
        rename_to_parameters(config, misread)
    round_adapters_once(adapted)
    # The first layer's input comes from a frozen embedding. Unless it requires a gradient, an activation checkpoint of
    # that layer gives its adapters no gradients, and ZeRO-3's backward hook runs before the adapters'.
    adapted.enable_input_require_grads()
    return adapted


def load_adapter(adapted: nn.Module, folder: Path) -> None:
    """Load a trained adapter into a model with adapters that are not sharded yet; on the meta device only compare names
    and shapes. Raises UserError if it cannot be read, or has other layers or shapes."""
    file = folder / SAFETENSORS_WEIGHTS_NAME
    with reading("lora.adapter", file, "a trained adapter"):
        stored = read_header(file)
    trained = {name.replace(".default.", "."): p for name, p in adapted.named_parameters() if p.requires_grad}
    shapes, expected = ({name: tuple(one.shape) for name, one in each.items()} for each in (stored, trained))
    if differing := sorted(name for name, _ in shapes.items() ^ expected.items()):
        raise UserError(
            f"lora.adapter: {file}: {differing[0]}: found {shapes.get(differing[0], 'none')}; expected "
            f"{expected.get(differing[0], 'none')}: the layers in lora.target_modules of the model in model.path"
        )
    for name, parameter in trained.items():
        parameter.data.copy_(read_tensor(stored[name], name))


def build_empty_adapted_model(path: str, lora: LoraConfig) -> PeftModel:
    """Build an adapted model on the meta device, once for one model and these adapters: it is shared. Raises UserError
    as `read_model` and `add_lora` do."""
    return _adapt_empty_model(read_model(path), lora)


@lru_cache(maxsize=1)
def _adapt_empty_model(description: ModelDescription, lora: LoraConfig) -> PeftModel:
    base = build_empty_model(description.path, description.config)
    with torch.device("meta"):
        return add_lora(base, lora)


def _match_outside_decoder(model: PreTrainedModel) -> str | None:
    """Return a pattern of layers outside the decoder of a vision-language model, where target names occur too."""
    if not is_vision_language(model.config):
        return None
    name = next(name for name, module in model.named_modules() if module is find_decoder(model))
    return rf"(?!{re.escape(name)}\.).*"


class Adapter(NamedTuple):
    """The adapter of one weight."""

    layer: Linear | ParamWrapper
    lora_a: str  # name of A in the adapted model
    lora_b: str  # name of B

    def compute_update(self, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """Compute `(alpha / r) B A`, in the shape of the weight. `lora_a`: `[r, in]`; for n experts `[n r, in]`, expert
        by expert. `lora_b`: `[out, r]`; for n experts `[out, r n]`, with the experts in the innermost position."""
        layer, scaling = self.layer, self.layer.scaling["default"]
        if not isinstance(layer, ParamWrapper):
            product = scaling * lora_b @ lora_a
            return product.T if layer.fan_in_fan_out else product
        num_experts, num_out = layer.num_experts, lora_b.shape[0]
        expert_b = lora_b.view(num_out, -1, num_experts).permute(2, 0, 1)  # [n, out, r]
        product = scaling * expert_b @ lora_a.view(num_experts, -1, lora_a.shape[1])
        return product if layer._did_swap_in_out_features else product.mT


def find_adapters(adapted: PeftModel) -> dict[str, Adapter]:
    """Return the adapter of each adapted weight, by the weight's name in the model without adapters."""
    adapters = {}
    for name, layer in adapted.named_modules():
        if not isinstance(layer, (Linear, ParamWrapper)):
            continue
        weight = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        # peft nests the wrappers of several adapted parameters of a module.
        base = name.removeprefix("base_model.model.").replace(".base_layer", "")
        adapters[f"{base}.{weight}"] = Adapter(layer, f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight")
    return adapters


def add_trained_adapter(model: PreTrainedModel, folder: Path, base: str) -> PeftModel:
    """Load a trained adapter onto the model for inference, in place: LoRA with the forward of training, all else with
    peft's. `base`: path of the model, for messages. Raises UserError if the adapter cannot be read, or its layers or
    their sizes are not those of this model."""
    with reading("adapter", folder, "a folder with a trained adapter"):
        try:
            config = peft.PeftConfig.from_pretrained(str(folder))
            if isinstance(config, peft.LoraConfig):
                rename_to_layers(config)
            with keep_layer_names():
                adapted = PeftModel.from_pretrained(model, str(folder), config=config)
            with safe_open(folder / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
                differing = sorted(set(file.keys()) ^ set(get_peft_model_state_dict(adapted)))
            if differing:
                raise ValueError(f"{differing[0]} is in one of them only")
        except OSError:
            raise
        except Exception as error:  # peft and safetensors raise errors of any kind for damaged files
            mismatches = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
            problem = (mismatches or [first_line(error)])[0]
            raise UserError(
                f"adapter: {folder}: is damaged, or does not fit the model {base}: {problem:.300}; expected an "
                "adapter of this model. Name the model that it was trained from"
            ) from None
    round_adapters_once(adapted)
    return adapted


# Layers that round once.


_RANK_MULTIPLE = 8
"""Adapter ranks of experts are zero-padded to this multiple: the kernels need rows of a multiple of 16 bytes."""


class LoraExperts(ParamWrapper):
    """peft's adapter on a parameter of experts that compute by `experts_forward`; for other experts, or with the
    adapter disabled or merged, the forward is peft's."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        experts = self.get_base_layer()
        if not uses_our_experts(experts) or self.disable_adapters or self.merged:
            return super().forward(x, *args, **options)
        (name,) = self.active_adapters
        left, right, scaling = self.get_delta_factors(name)
        rows = -self.r[name] % _RANK_MULTIPLE
        left, right = pad(left, (0, rows)), pad(right, (0, 0, 0, rows))
        down, up = (left, right) if experts.is_transposed else (right, left)
        with use_adapter(experts, self.parameter_name, ExpertsAdapter(down, up, scaling)):
            return self.base_layer(x, *args, **options)


class BaseLinear(nn.Linear):
    """The frozen layer under an adapter, which takes the adapter's output as an argument: ZeRO-3 gathers the weight
    only while this module runs."""

    def forward(self, x: Tensor, addend: Tensor | None = None, scaling: float = 1.0) -> Tensor:
        return linear_with_addend(x, self.weight, self.bias, addend, scaling)


class LoraLinear(Linear):
    """peft's LoRA layer, which rounds once in bf16. In other dtypes, or with the adapter disabled or merged, the
    forward is peft's."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16 or self.disable_adapters or self.merged:
            return super().forward(x)
        (adapter,) = self.active_adapters
        lora_a, lora_b = self.lora_A[adapter], self.lora_B[adapter]
        assert isinstance(lora_a, nn.Linear)
        dropped = self.lora_dropout[adapter](self._cast_input_dtype(x, lora_a.weight.dtype))
        return self.base_layer(x, lora_b(lora_a(dropped)).to(x.dtype), self.scaling[adapter])


def round_adapters_once(adapted: nn.Module) -> None:
    """Make the LoRA layers of a peft model round once, in place. Only classes change, so saved adapters do not."""
    for module in adapted.modules():
        # peft's variants (DoRA, KaSA, aLoRA) are layers of the same class that compute something else.
        if type(module) is Linear and type(module.base_layer) is nn.Linear and not module.lora_variant:
            module.__class__ = LoraLinear
            module.base_layer.__class__ = BaseLinear
        elif type(module) is ParamWrapper:
            module.__class__ = LoraExperts
