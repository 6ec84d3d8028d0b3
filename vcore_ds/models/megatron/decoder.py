"""A decoder layer of parallel layers: attention over this rank's heads, MLP over this rank's columns.

The products are megatron-core's layers, attention is that of all passes (`vcore_ds.models.attention`), rotary positions
are those of Hugging Face's models, to the last bit, and norms too where PyTorch computes them (`norms`).

The loop over layers is ours (`model.TokenLossModel`): megatron-core's calls a layer with keywords only, and under
ZeRO-3 the backward of such a layer fails.

Shapes: n ranks along the tensor axis, t tokens, b rows, H hidden size, D head dimension, A query heads and K key/value
heads of this rank.
"""

import importlib.util
from functools import cache, partial

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, local_torch_dtype
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vcore_ds.common.errors import UserError
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.models.attention import RowLayout
from vcore_ds.models.dual_tensors import unpack_parameter
from vcore_ds.models.megatron.configuration import TransformerConfig, sliding_window
from vcore_ds.models.megatron.parallel_layers import ColumnLinears, RowLinear
from vcore_ds.models.megatron.token_exchange import make_dual_if_any

# Norms of the decoder layers, whose weight all ranks of a tensor group have. Its gradient is a part of a sum on each:
# that of the rank's own tokens or heads.
#
# On a GPU where TransformerEngine is installed, its kernels compute values and gradients. Elsewhere PyTorch does, as
# Hugging Face's models do, to the last bit. One rule gives the tangents of both: TransformerEngine's kernels have
# none, and PyTorch's own differentiates one small operation after the other.


class DualTensorNorm(nn.Module):
    """Put before the class of a norm of plain numbers, it takes values from that class and tangents from
    `rms_norm_tangent`.

    The class needs `weight`, `eps` and a forward. That may be an autograd Function without a rule for tangents, and its
    backward may read the weight from the module again.
    """

    weight: nn.Parameter
    eps: float

    def forward(self, hidden: Tensor) -> Tensor:
        value, d_value = forward_ad.unpack_dual(hidden)
        weight, d_weight = unpack_parameter(self, "weight")
        is_reference = weight.dtype == torch.float64  # a pass for which there may be no kernel
        found = rms_norm(value, weight, self.eps) if is_reference else self._plain(value, weight)
        return make_dual_if_any(found, rms_norm_tangent(value, weight, self.eps, d_x=d_value, d_weight=d_weight))

    def _plain(self, x: Tensor, weight: Tensor) -> Tensor:
        # While the module runs, its weight may be hidden by a dual number (`vcore_ds.utility.forward_mode`), in whose
        # place the forward finds that number's value.
        stand_in = self.__dict__.get("weight")
        if stand_in is None:
            return super().forward(x)
        self.__dict__["weight"] = weight
        try:
            return super().forward(x)
        finally:
            self.__dict__["weight"] = stand_in


class PlainRMSNorm(nn.Module):
    """Root mean square norm of the last dimension, in PyTorch's operations."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RMSNorm(DualTensorNorm, PlainRMSNorm):
    """The norm where TransformerEngine is not used."""


def norm(config: TransformerConfig, size: int) -> nn.Module:
    """An RMSNorm of `size` features.

    Raises:
        UserError: see `norm_class`.
    """
    with local_torch_dtype(config.params_dtype):
        return norm_class()(size, config.layernorm_epsilon)


def norm_class() -> type[nn.Module]:
    """The class of the norms: TransformerEngine's on a GPU where it is installed.

    Raises:
        UserError: it is installed, and cannot be imported.
    """
    if not uses_gpu() or importlib.util.find_spec("transformer_engine") is None:
        return RMSNorm
    try:
        return _transformer_engine_norm()
    except Exception as error:  # its libraries raise whatever they find missing
        raise UserError(
            f"model.provider: found megatron and TransformerEngine, which cannot be imported ({type(error).__name__}: "
            f"{error}); expected a build for torch {torch.__version__} (pip install --no-build-isolation "
            "'transformer_engine[pytorch]'), or none: without it PyTorch computes the norms (pip uninstall "
            "transformer_engine)"
        ) from error


@cache
def _transformer_engine_norm() -> type[nn.Module]:
    """TransformerEngine's RMSNorm for dual numbers; imported only where its kernels can run."""
    from transformer_engine.pytorch import RMSNorm as KernelNorm

    class TransformerEngineNorm(DualTensorNorm, KernelNorm):
        """One kernel each for the value and the gradient. In bf16 it rounds once, where `PlainRMSNorm` rounds the
        normalized values and their product with the weight."""

        def __init__(self, size: int, eps: float):
            # Without a device it takes the current GPU, whatever PyTorch's default device is.
            super().__init__(size, eps=eps, device=torch.empty(0).device)

    return TransformerEngineNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`w x / sqrt(mean(x^2) + eps)` over the last dimension, rounded where Hugging Face's models round, in fp32 or the
    dtype of `x` where it is the more precise one.

    Args:
        x: `[..., size]`.
        weight: `[size]`, of the dtype of `x`.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (exact * _inverse_root_mean_square(exact, eps)).to(x.dtype)


@torch.no_grad()
def rms_norm_tangent(
    x: Tensor, weight: Tensor, eps: float, *, d_x: Tensor | None = None, d_weight: Tensor | None = None
) -> Tensor | None:
    """The tangent of `rms_norm`, without a graph; None where all tangents are missing.

    With `r = 1 / sqrt(mean(x^2) + eps)` and `n = r x`, that of n is `r (dx - n mean(n dx))`.
    """
    if d_x is None and d_weight is None:
        return None
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = _inverse_root_mean_square(exact, eps)
    normalized, found = exact * inverse, None
    if d_x is not None:
        d_exact = d_x.to(exact.dtype)
        along = (normalized * d_exact).mean(-1, keepdim=True)
        d_normalized = torch.addcmul(d_exact, normalized, along, value=-1).mul_(inverse)
        found = weight * d_normalized.to(x.dtype)
    if d_weight is not None:
        of_weight = d_weight * normalized.to(x.dtype)
        found = of_weight if found is None else found.add_(of_weight)
    return found


def _inverse_root_mean_square(exact: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary positions, `[b, t, D]` each."""


class ParallelAttention(nn.Module):
    """Self-attention over this rank's heads."""

    def __init__(self, config: TransformerConfig, hf_config: PretrainedConfig, layer: int):
        super().__init__()
        self.layer_idx, self.head_dim = layer, config.kv_channels
        self._config, self._sliding_window = hf_config, sliding_window(hf_config, layer)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_query_groups
        outputs = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
        self.qkv = ColumnLinears(
            config,
            config.hidden_size,
            {name: number * self.head_dim for name, number in outputs.items()},
            bias=config.add_qkv_bias,
        )
        self.o_proj = make_row_linear(config, num_heads * self.head_dim, config.hidden_size)
        self.q_norm, self.k_norm = (
            norm(config, self.head_dim) if config.qk_layernorm else nn.Identity() for _ in range(2)
        )

    def forward(self, hidden: Tensor, angles: Angles, row_layout: RowLayout) -> Tensor:
        """`[t / n, b, H]` to the same; all arguments are those of `DecoderLayer`."""
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv(hidden))  # [t, b, A or K, D]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (self.q_norm(query), self.k_norm(key), value))
        query, key = apply_rotary_pos_emb(query, key, *angles)
        attend = ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation]
        output, _ = attend(
            self, query, key, value, None, sliding_window=self._sliding_window, row_layout=row_layout
        )  # [b, t, A, D]
        # Contiguous, since PyTorch chooses the kernel of a product with strides by whether a gradient is needed, and a
        # checkpointed forward with tangents needs none: the last bit of a loss would depend on it.
        return self.o_proj(output.transpose(0, 1).flatten(2).contiguous())


class ParallelMLP(nn.Module):
    """Gated MLP over this rank's columns."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        outputs = dict.fromkeys(("gate_proj", "up_proj"), config.ffn_hidden_size)
        self.gate_up = ColumnLinears(config, config.hidden_size, outputs)
        self.down_proj = make_row_linear(config, config.ffn_hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(gated_silu(*self.gate_up(hidden)))  # no name keeps gate and up during the last product


class DecoderLayer(GradientCheckpointingLayer):
    """Norm, attention, norm, MLP, with residual sums. Its activations can be checkpointed as those of Hugging Face's
    layers."""

    def __init__(self, config: TransformerConfig, hf_config: PretrainedConfig, layer: int):
        super().__init__()
        self.self_attn = ParallelAttention(config, hf_config, layer)
        self.mlp = ParallelMLP(config)
        self.input_layernorm = norm(config, config.hidden_size)
        self.post_attention_layernorm = norm(config, config.hidden_size)

    def checkpoint_activations(self) -> None:
        """Keeps the layer's input alone for the backward, which computes the rest again."""
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, hidden: Tensor, angles: Angles, row_layout: RowLayout) -> Tensor:
        """Hidden states of this rank's tokens after the layer.

        Args:
            hidden: `[t / n, b, H]`; by position, so that ZeRO-3's hooks see it.
            angles: of all t tokens.
            row_layout: which sequences the rows hold, and the sequence-parallel degree.
        """
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles, row_layout)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, for dual numbers too: their tangents are used up.

    The rule writes into the tangents, which nothing else needs. PyTorch's makes three more tensors of the MLP's width,
    where a checkpointed forward with tangents takes the most memory.
    """
    (value, d_gate), (factor, d_up) = forward_ad.unpack_dual(gate), forward_ad.unpack_dual(up)
    activated = silu(value)
    with torch.no_grad():
        tangent = None
        if d_gate is not None:
            tangent = torch.ops.aten.silu_backward.grad_input(d_gate, value, grad_input=d_gate).mul_(factor)
        if d_up is not None:
            tangent = d_up.mul_(activated) if tangent is None else tangent.addcmul_(activated, d_up)
    found = activated * factor if torch.is_grad_enabled() else activated.mul_(factor)
    return make_dual_if_any(found, tangent)


def make_row_linear(config: TransformerConfig, num_inputs: int, num_outputs: int) -> RowLinear:
    """A row-parallel layer: each rank has a part of its inputs. Without a bias; its weight is zero until it is read.

    Args:
        num_inputs, num_outputs: of all ranks together.
    """
    return RowLinear(
        num_inputs,
        num_outputs,
        config=config,
        init_method=nn.init.zeros_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=layout.group("tensor"),
    )
