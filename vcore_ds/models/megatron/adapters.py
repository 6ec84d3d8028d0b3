"""Low-rank adapters on parallel layers: those that peft would put on the Hugging Face model, a part on each rank.

    column-parallel: y = x W^T + s (x A^T) B^T    B is divided as W is; every rank has all of A
    row-parallel:    y = x W^T + s (x A^T) B^T    A is divided as W is; every rank has all of B

What every rank has sees a part of the sum on each: A the rank's own tokens, B the rank's part of `x A^T`. So its
gradient is a part of a sum too, and is summed in the ZeRO-3 shards, as that of a norm
(`FlatShards.sum_replicated_gradients`). A column-parallel layer gathers the tokens' `x A^T`, of the adapter's rank,
beside the tokens; a row-parallel one adds its adapter to the product before the sum over the ranks, which is then one
exchange for both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig

from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import LoraConfig
from vcore_ds.distributed import layout
from vcore_ds.models.dropout import TokenDropout
from vcore_ds.models.dual_tensors import unpack_parameter
from vcore_ds.models.lora import build_empty_adapted_model
from vcore_ds.models.lora_linear import linear_tangent
from vcore_ds.models.megatron.configuration import COLUMN_LAYERS, WeightSlice, divided
from vcore_ds.models.megatron.token_exchange import gather_tokens

PEFT_PREFIX = "base_model.model."


class AdaptedLayer(NamedTuple):
    """A linear layer of the Hugging Face model that gets an adapter."""

    name: str
    """`model.layers.I.BLOCK.LAYER`."""
    num_inputs: int
    num_outputs: int

    @property
    def own_name(self) -> str:
        """Of its adapter in a `ParallelTokenLossModel`."""
        block, layer = self.name.removeprefix("model.").rsplit(".", 1)
        for module, names in COLUMN_LAYERS.items():
            if layer in names:
                return f"{block.rsplit('.', 1)[0]}.{module}.adapters.{layer}"
        return f"{block}.{layer}.adapter"

    @property
    def is_column_parallel(self) -> bool:
        """Whether the ranks divide the layer's outputs, and not its inputs."""
        return ".adapters." in self.own_name


def adapted_layers(path: str, config: PretrainedConfig, lora: LoraConfig) -> list[AdaptedLayer]:
    """The layers that peft adapts, in the model's order.

    Args:
        path: of the model, for messages.
        config: of the Hugging Face model.

    Raises:
        UserError: `lora.target_modules` names nothing, or something else than linear layers of the decoder layers.
    """
    model = build_empty_adapted_model(path, config, lora)
    trained = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for name, module in model.named_modules():
        if name not in trained:
            continue
        layer = name.removeprefix(PEFT_PREFIX)
        if not isinstance(module, PeftLinear) or not layer.startswith("model.layers."):
            raise UserError(
                f"lora.target_modules: found {lora.target_modules!r}, with which {layer} gets an adapter, together "
                "with model.provider megatron; expected linear layers of the decoder layers, such as all-linear"
            )
        assert module.in_features is not None and module.out_features is not None  # those of a linear layer
        found.append(AdaptedLayer(layer, module.in_features, module.out_features))
    return found


class ShardDropout(TokenDropout):
    """The dropout of the other provider's adapter, with its masks, on this rank's tokens or features."""

    def __init__(self, p: float, number: int, *, first_feature: int, of_own_tokens: bool):
        """Args:
        number: the adapter's place among those of the model.
        first_feature: where this rank's features begin.
        of_own_tokens: x is `[t / n, b, F]`, of this rank's tokens; otherwise `[t, b, F]`, of all.
        """
        super().__init__(p, number)
        self.first_feature, self._of_own_tokens = first_feature, of_own_tokens

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        assert self.token_keys is not None
        keys = self.token_keys.t()
        return self.dropped(
            x, keys.chunk(layout.size("tensor"))[layout.rank("tensor")] if self._of_own_tokens else keys
        )


class Adapter(nn.Module):
    """This rank's part of an adapter, of which the layer asks what it needs: `x A^T` and B."""

    def __init__(self, lora_a: Tensor, lora_b: Tensor, scaling: float, dropout: nn.Module):
        """Args:
        lora_a: `[r, I]`, or this rank's columns.
        lora_b: `[O, r]`, or this rank's rows.
        scaling: alpha / r.
        """
        super().__init__()
        self.lora_A = nn.Linear(lora_a.shape[1], lora_a.shape[0], bias=False, device="meta")
        self.lora_A.weight = nn.Parameter(lora_a.clone())
        self.lora_B = Expansion(lora_b.clone())
        self.dropout, self.scaling = dropout, scaling
        self.is_enabled = True

    def reduced(self, x: Tensor) -> Tensor:
        """`x A^T`, `[..., r]`, in the adapter's dtype, or that of x where it is the more precise one."""
        return self.lora_A(self.dropout(x.to(torch.promote_types(x.dtype, self.lora_A.weight.dtype))))


class Expansion(nn.Module):
    """B of an adapter. Its product is as large as the layer's output, and taken within the layer's product alone: see
    `expanded`."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """B and its tangent, if any. Called, as parameters are whole and have tangents while their module runs."""
        return unpack_parameter(self, "weight")


class Addend(NamedTuple):
    """What gives an adapter's output, as arguments of an autograd Function; all None without an adapter."""

    reduced: Tensor | None = None
    b: Tensor | None = None
    d_reduced: Tensor | None = None
    d_b: Tensor | None = None


def column_addends(adapters: nn.ModuleDict, x: Tensor) -> dict[str, Addend]:
    """Of column-parallel layers, by name, for `x [t / n, b, I]`. A collective: what all of the adapters make of the
    tokens is gathered at once."""
    every = {name: adapter for name, adapter in adapters.items() if isinstance(adapter, Adapter)}
    enabled = {name: adapter for name, adapter in every.items() if adapter.is_enabled}
    if not enabled:
        return {}
    whole = gather_tokens(torch.cat([adapter.reduced(x) for adapter in enabled.values()], -1))
    parts = zip(enabled.items(), whole.chunk(len(enabled), -1), strict=True)
    # Contiguous, as the input of the output projection (`decoder.ParallelAttention`).
    return {name: _addend(adapter, part.contiguous()) for (name, adapter), part in parts}


def row_addend(adapter: Adapter | None, x: Tensor) -> Addend:
    """Of a row-parallel layer, for `x [t, b, I / n]`: this rank's part of a sum."""
    return Addend() if adapter is None or not adapter.is_enabled else _addend(adapter, adapter.reduced(x))


def _addend(adapter: Adapter, reduced: Tensor) -> Addend:
    (value, tangent), (b, d_b) = forward_ad.unpack_dual(reduced), adapter.lora_B()
    return Addend(value, b, tangent, d_b)


def expanded(addend: Addend, dtype: torch.dtype) -> Tensor | None:
    """`(x A^T) B^T`, not scaled yet; without a graph."""
    return None if addend.reduced is None or addend.b is None else linear(addend.reduced, addend.b).to(dtype)


def expanded_tangent(addend: Addend, dtype: torch.dtype) -> Tensor | None:
    """The tangent of `expanded`."""
    if addend.reduced is None or addend.b is None:
        return None
    found = linear_tangent(addend.reduced, addend.b, d_x=addend.d_reduced, d_weight=addend.d_b)
    return None if found is None else found.to(dtype)


def addend_gradients(
    by_out: Tensor, reduced: Tensor | None, b: Tensor | None, scaling: float
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `x A^T` and B, given that of the layer's output."""
    if reduced is None or b is None:
        return None, None
    gradient = by_out.to(b.dtype)
    by_b = gradient.flatten(0, -2).t() @ reduced.flatten(0, -2)
    return (gradient @ b).mul_(scaling), by_b.mul_(scaling)


def mark_tensor_parallel(parameter: nn.Parameter) -> None:
    """Marks a parameter of which each rank has a part, as megatron-core and DeepSpeed know it."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # the mark is theirs


def add_adapters(model: nn.Module, layers: list[AdaptedLayer], lora: LoraConfig, config: PretrainedConfig) -> None:
    """Freezes a `ParallelTokenLossModel` and adds trainable adapters, in place: A at random, the same on all ranks that
    have drawn the same before, and B zero. In fp32, as peft's.

    Args:
        layers: those to adapt, from `adapted_layers`.
        config: of the Hugging Face model.
    """
    like = next(model.parameters())
    model.requires_grad_(False)
    parts = divided(config, rank=layout.rank("tensor"), size=layout.size("tensor"))
    for number, layer in enumerate(layers):
        part = parts[layer.name.rsplit(".", 1)[1]]
        # Drawn as peft draws them, in its order.
        sizes = (layer.num_inputs, lora.rank), (lora.rank, layer.num_outputs)
        whole_a, whole_b = (nn.Linear(*size, bias=False) for size in sizes)
        nn.init.kaiming_uniform_(whole_a.weight, a=5**0.5)
        nn.init.zeros_(whole_b.weight)
        a, b = (whole.weight.detach().to(like.device) for whole in (whole_a, whole_b))
        a, b = (a, b[part]) if layer.is_column_parallel else (a[:, part], b)
        dropout: nn.Module = nn.Identity()
        if lora.dropout > 0:
            first = 0 if layer.is_column_parallel else part.start
            dropout = ShardDropout(lora.dropout, number, first_feature=first, of_own_tokens=layer.is_column_parallel)
        adapter = Adapter(a, b, lora.alpha / lora.rank, dropout)
        mark_tensor_parallel((adapter.lora_B if layer.is_column_parallel else adapter.lora_A).get_parameter("weight"))
        owner, name = layer.own_name.rsplit(".", 1)
        setattr(model.get_submodule(owner), name, adapter)


def adapter_pieces(
    layers: list[AdaptedLayer], config: PretrainedConfig, lora: LoraConfig, *, rank: int, size: int
) -> dict[str, WeightSlice]:
    """What each parameter of this rank's adapters is of peft's, by its name: see `weights.pieces`."""
    parts = divided(config, rank=rank, size=size)
    found: dict[str, WeightSlice] = {}
    for layer in layers:
        part, rows = parts[layer.name.rsplit(".", 1)[1]], slice(0, lora.rank)
        a, b = (f"{PEFT_PREFIX}{layer.name}.lora_{matrix}.default.weight" for matrix in "AB")
        if layer.is_column_parallel:
            pair = WeightSlice(a, rows), WeightSlice(b, part)
        else:
            pair = WeightSlice(a, rows, part), WeightSlice(b, slice(0, layer.num_outputs))
        found |= {f"{layer.own_name}.lora_{matrix}.weight": piece for matrix, piece in zip("AB", pair, strict=True)}
    return found


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """A context in which the layers compute without their adapters."""
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.is_enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_enabled = True
