"""LoRA adapters on tensor-parallel layers: those that peft would add to the Hugging Face model, sharded over the ranks.

    column-parallel: y = x W^T + s (x A^T) B^T    B is sharded like W, A is replicated
    row-parallel:    y = x W^T + s (x A^T) B^T    A is sharded like W, B is replicated

Each rank has only a term of a replicated factor's gradient: A's from the rank's tokens, B's from the rank's part of
`x A^T`. As for norms, the terms are summed over the group in the ZeRO-3 shards (`FlatShards.sum_replicated_gradients`).
A column-parallel layer all-gathers the tokens' `x A^T` in addition to the tokens; a row-parallel one adds its adapter
to the matmul's result before the reduce-scatter.
"""

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
from vcore_ds.models.megatron.configuration import COLUMN_LAYERS, WeightSlice, shard_slices
from vcore_ds.models.megatron.token_exchange import gather_tokens

PEFT_PREFIX = "base_model.model."


class AdaptedLayer(NamedTuple):
    """A linear layer of the Hugging Face model that gets an adapter."""

    name: str
    """`model.layers.I.BLOCK.LAYER`."""
    num_inputs: int
    num_outputs: int

    @property
    def local_name(self) -> str:
        """Name of the adapter in a `ParallelTokenLossModel`."""
        block, layer = self.name.removeprefix("model.").rsplit(".", 1)
        for module, names in COLUMN_LAYERS.items():
            if layer in names:
                return f"{block.rsplit('.', 1)[0]}.{module}.adapters.{layer}"
        return f"{block}.{layer}.adapter"

    @property
    def is_column_parallel(self) -> bool:
        """Whether the layer's outputs are sharded, not its inputs."""
        return ".adapters." in self.local_name


def find_adapted_layers(path: str, config: PretrainedConfig, lora: LoraConfig) -> list[AdaptedLayer]:
    """Find the layers of the Hugging Face model that peft adapts, in the model's order. `path`: for messages. Raises
    UserError if `lora.target_modules` matches nothing, or anything but linear layers in decoder layers."""
    model = build_empty_adapted_model(path, config, lora)
    trained = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    layers = []
    for name, module in model.named_modules():
        if name not in trained:
            continue
        layer = name.removeprefix(PEFT_PREFIX)
        if not isinstance(module, PeftLinear) or not layer.startswith("model.layers."):
            raise UserError(
                f"lora.target_modules: found {lora.target_modules!r}, which adapts {layer}, together with "
                "model.provider megatron; expected linear layers of the decoder layers, such as all-linear"
            )
        assert module.in_features is not None and module.out_features is not None  # always set for a linear layer
        layers.append(AdaptedLayer(layer, module.in_features, module.out_features))
    return layers


class ShardDropout(TokenDropout):
    """Adapter dropout on this rank's tokens or features, with the masks of the unsharded model."""

    def __init__(self, p: float, number: int, *, first_feature: int, has_local_tokens: bool):
        """Args:
        number: index of the adapter in the model.
        first_feature: index of this rank's first feature.
        has_local_tokens: x is `[t / n, b, F]`, this rank's tokens; otherwise `[t, b, F]`, all tokens.
        """
        super().__init__(p, number)
        self.first_feature, self._has_local_tokens = first_feature, has_local_tokens

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        assert self.token_keys is not None
        keys = self.token_keys.t()
        if self._has_local_tokens:
            keys = keys.chunk(layout.size("tensor"))[layout.rank("tensor")]
        return self.drop(x, keys)


class Adapter(nn.Module):
    """This rank's shard of an adapter. It computes `x A^T`; the layer multiplies by B."""

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

    def reduce(self, x: Tensor) -> Tensor:
        """Compute `x A^T`, `[..., r]`, in the more precise of the dtypes of the adapter and x."""
        return self.lora_A(self.dropout(x.to(torch.promote_types(x.dtype, self.lora_A.weight.dtype))))


class Expansion(nn.Module):
    """B of an adapter. `(x A^T) B^T` is as large as the layer's output, so the layer's autograd Function computes it
    (`expand`)."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return B and its tangent, in a module call, since parameters are gathered and dual only while their module
        runs."""
        return unpack_parameter(self, "weight")


class Addend(NamedTuple):
    """The factors of an adapter's output, as arguments of an autograd Function; all None without an adapter."""

    reduced: Tensor | None = None
    """`x A^T`, `[..., r]`"""
    b: Tensor | None = None
    """`[O, r]`"""
    d_reduced: Tensor | None = None
    d_b: Tensor | None = None


def make_column_addends(adapters: nn.ModuleDict, x: Tensor) -> dict[str, Addend]:
    """Make the addends of column-parallel layers, by name, for `x [t / n, b, I]`. One all-gather for all adapters."""
    enabled = {name: a for name, a in adapters.items() if isinstance(a, Adapter) and a.is_enabled}
    if not enabled:
        return {}
    gathered = gather_tokens(torch.cat([adapter.reduce(x) for adapter in enabled.values()], -1))
    chunks = zip(enabled.items(), gathered.chunk(len(enabled), -1), strict=True)
    # Contiguous for the same reason as the input of `o_proj` (`decoder.ParallelAttention`).
    return {name: _make_addend(adapter, chunk.contiguous()) for (name, adapter), chunk in chunks}


def make_row_addend(adapter: Adapter | None, x: Tensor) -> Addend:
    """Make the addend of a row-parallel layer for `x [t, b, I / n]`, to be summed over the ranks."""
    return Addend() if adapter is None or not adapter.is_enabled else _make_addend(adapter, adapter.reduce(x))


def _make_addend(adapter: Adapter, reduced: Tensor) -> Addend:
    (value, tangent), (b, d_b) = forward_ad.unpack_dual(reduced), adapter.lora_B()
    return Addend(value, b, tangent, d_b)


def expand(addend: Addend, dtype: torch.dtype) -> Tensor | None:
    """Compute `(x A^T) B^T`, unscaled; None without an adapter."""
    return None if addend.reduced is None or addend.b is None else linear(addend.reduced, addend.b).to(dtype)


def expand_tangent(addend: Addend, dtype: torch.dtype) -> Tensor | None:
    """Compute the tangent of `expand`; None without tangents."""
    if addend.reduced is None or addend.b is None:
        return None
    tangent = linear_tangent(addend.reduced, addend.b, d_x=addend.d_reduced, d_weight=addend.d_b)
    return None if tangent is None else tangent.to(dtype)


def compute_addend_gradients(
    d_out: Tensor, reduced: Tensor | None, b: Tensor | None, scaling: float
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of `x A^T` and B from that of the layer's output."""
    if reduced is None or b is None:
        return None, None
    gradient = d_out.to(b.dtype)
    b_gradient = gradient.flatten(0, -2).t() @ reduced.flatten(0, -2)
    return (gradient @ b).mul_(scaling), b_gradient.mul_(scaling)


def mark_tensor_parallel(parameter: nn.Parameter) -> None:
    """Mark a sharded parameter for megatron-core and DeepSpeed."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # their attribute


def add_adapters(model: nn.Module, layers: list[AdaptedLayer], lora: LoraConfig, config: PretrainedConfig) -> None:
    """Freeze a `ParallelTokenLossModel` and add trainable adapters in fp32, like peft, in place.

    A is random, the same on all ranks whose generators are in the same state; B is zero.

    Args:
        layers: from `find_adapted_layers`.
        config: of the Hugging Face model.
    """
    device = next(model.parameters()).device
    model.requires_grad_(False)
    shards = shard_slices(config, rank=layout.rank("tensor"), size=layout.size("tensor"))
    for number, layer in enumerate(layers):
        shard = shards[layer.name.rsplit(".", 1)[1]]
        # The random draws of peft, in its order.
        sizes = (layer.num_inputs, lora.rank), (lora.rank, layer.num_outputs)
        full_a, full_b = (nn.Linear(*size, bias=False) for size in sizes)
        nn.init.kaiming_uniform_(full_a.weight, a=5**0.5)
        nn.init.zeros_(full_b.weight)
        a, b = (full.weight.detach().to(device) for full in (full_a, full_b))
        a, b = (a, b[shard]) if layer.is_column_parallel else (a[:, shard], b)
        dropout: nn.Module = nn.Identity()
        if lora.dropout > 0:
            first = 0 if layer.is_column_parallel else shard.start
            dropout = ShardDropout(lora.dropout, number, first_feature=first, has_local_tokens=layer.is_column_parallel)
        adapter = Adapter(a, b, lora.alpha / lora.rank, dropout)
        mark_tensor_parallel((adapter.lora_B if layer.is_column_parallel else adapter.lora_A).get_parameter("weight"))
        owner, name = layer.local_name.rsplit(".", 1)
        setattr(model.get_submodule(owner), name, adapter)


def adapter_slices(
    layers: list[AdaptedLayer], config: PretrainedConfig, lora: LoraConfig, *, rank: int, size: int
) -> dict[str, WeightSlice]:
    """Map each adapter parameter of a rank to its slice of peft's, as `configuration.weight_slices`."""
    shards = shard_slices(config, rank=rank, size=size)
    slices: dict[str, WeightSlice] = {}
    for layer in layers:
        shard, rows = shards[layer.name.rsplit(".", 1)[1]], slice(0, lora.rank)
        a, b = (f"{PEFT_PREFIX}{layer.name}.lora_{matrix}.default.weight" for matrix in "AB")
        if layer.is_column_parallel:
            pair = WeightSlice(a, rows), WeightSlice(b, shard)
        else:
            pair = WeightSlice(a, rows, shard), WeightSlice(b, slice(0, layer.num_outputs))
        slices |= {f"{layer.local_name}.lora_{matrix}.weight": piece for matrix, piece in zip("AB", pair, strict=True)}
    return slices
