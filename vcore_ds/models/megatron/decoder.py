"""A tensor-parallel decoder layer: attention over this rank's heads, MLP over this rank's columns, RMSNorms.

Linear layers are megatron-core's; attention is `vcore_ds.models.attention`; rotary embeddings equal those of Hugging
Face's models bit for bit, and so do norms that PyTorch computes.

The loop over layers is in `model.ParallelTokenLossModel`: megatron-core's passes only keyword arguments, with which the
backward of a layer fails under ZeRO-3.

Norm weights are replicated, and their gradient on a rank is that of its tokens or heads, to be summed over the group.
On a GPU with TransformerEngine its kernels compute norms and their gradients, elsewhere PyTorch does. Both share one
rule for tangents: TransformerEngine's kernels have none, and PyTorch would differentiate one elementwise operation
after the other.

Shapes: n tensor-parallel ranks, t tokens, b packs or unpacked sequences, H hidden size, D head dimension, A query heads
and K key/value heads of this rank.
"""

import importlib.util
from functools import cache, partial

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, local_torch_dtype
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vcore_ds.common.errors import UserError
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.models.attention import SequenceLayout
from vcore_ds.models.dual_tensors import make_dual_if_any, unpack_parameter
from vcore_ds.models.megatron.parallel_layers import ColumnLinears, RowLinear, TransformerConfig
from vcore_ds.models.pointwise import gated_silu, rms_norm, rms_norm_tangent


class DualTensorNorm(nn.Module):
    """Mixin before a class of RMSNorm kernels: values come from that class, tangents from `rms_norm_tangent`. The class
    needs `weight`, `eps` and a forward, which may be an autograd Function without a forward-mode rule, and whose
    backward may read the weight from the module again."""

    weight: nn.Parameter
    eps: float

    def forward(self, hidden: Tensor) -> Tensor:
        value, d_value = forward_ad.unpack_dual(hidden)
        weight, d_weight = unpack_parameter(self, "weight")
        is_reference = weight.dtype == torch.float64  # kernels may not support fp64
        normalized = rms_norm(value, weight, self.eps) if is_reference else self._forward_value(value, weight)
        return make_dual_if_any(normalized, rms_norm_tangent(value, weight, self.eps, d_x=d_value, d_weight=d_weight))

    def _forward_value(self, x: Tensor, weight: Tensor) -> Tensor:
        # In forward mode a dual tensor shadows the weight in `__dict__` (`vcore_ds.utility.forward_mode`), but the
        # class's forward must see its value.
        dual = self.__dict__.get("weight")
        if dual is None:
            return super().forward(x)
        self.__dict__["weight"] = weight
        try:
            return super().forward(x)
        finally:
            self.__dict__["weight"] = dual


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension in PyTorch operations."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight, d_weight = unpack_parameter(self, "weight")
        return rms_norm(x, weight, self.eps, d_weight=d_weight)


def sliding_window(config: PretrainedConfig, layer: int) -> int | None:
    """Number of keys that a query of this layer sees, itself included; None for all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def make_norm(config: TransformerConfig, size: int) -> nn.Module:
    """Make an RMSNorm of `size` features; raises UserError as `find_norm_class`."""
    with local_torch_dtype(config.params_dtype):
        return find_norm_class()(size, config.layernorm_epsilon)


def find_norm_class() -> type[nn.Module]:
    """Return TransformerEngine's norm on a GPU if it is installed, otherwise PyTorch's. Raises UserError if it is
    installed but cannot be imported."""
    if not uses_gpu() or importlib.util.find_spec("transformer_engine") is None:
        return RMSNorm
    try:
        return _transformer_engine_norm()
    except Exception as error:  # any class of error, since its libraries check their own requirements
        raise UserError(
            f"model.provider: found megatron and TransformerEngine, which cannot be imported ({type(error).__name__}: "
            f"{error}); expected a build for torch {torch.__version__} (pip install --no-build-isolation "
            "'transformer_engine[pytorch]'), or none (pip uninstall transformer_engine): PyTorch then computes the "
            "norms"
        ) from error


@cache
def _transformer_engine_norm() -> type[nn.Module]:
    """Make TransformerEngine's RMSNorm for dual tensors; imported only where its kernels can run."""
    from transformer_engine.pytorch import RMSNorm as KernelNorm

    class TransformerEngineNorm(DualTensorNorm, KernelNorm):
        """One fused kernel each for value and gradient. In bf16 it rounds once; `RMSNorm` rounds the normalized
        values, and again after multiplying by the weight."""

        def __init__(self, size: int, eps: float):
            # Without a device it uses the current GPU, not PyTorch's default device.
            super().__init__(size, eps=eps, device=torch.empty(0).device)

    return TransformerEngineNorm


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, `[b, t, D]` each."""


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
            make_norm(config, self.head_dim) if config.qk_layernorm else nn.Identity() for _ in range(2)
        )

    def forward(self, hidden: Tensor, angles: Angles, sequence_layout: SequenceLayout) -> Tensor:
        """Compute `[t / n, b, H]` from `[t / n, b, H]`; arguments as for `DecoderLayer`."""
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv(hidden))  # [t, b, A or K, D]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (self.q_norm(query), self.k_norm(key), value))
        query, key = apply_rotary_pos_emb(query, key, *angles)
        attend = ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation]
        output, _ = attend(
            self, query, key, value, None, sliding_window=self._sliding_window, sequence_layout=sequence_layout
        )  # [b, t, A, D]
        # Contiguous: for strided inputs PyTorch chooses the matmul kernel by whether a gradient is needed. It is not in
        # a checkpointed forward with tangents, so the last bit of a loss would differ there.
        return self.o_proj(output.transpose(0, 1).flatten(2).contiguous())


class ParallelMLP(nn.Module):
    """Gated MLP over this rank's columns."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        outputs = dict.fromkeys(("gate_proj", "up_proj"), config.ffn_hidden_size)
        self.gate_up = ColumnLinears(config, config.hidden_size, outputs)
        self.down_proj = make_row_linear(config, config.ffn_hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        # Nested, so that no local variable keeps gate and up alive during the last matmul.
        return self.down_proj(gated_silu(*self.gate_up(hidden)))


class DecoderLayer(GradientCheckpointingLayer):
    """Norm, attention, norm, MLP, with residual connections and optional activation checkpointing."""

    def __init__(self, config: TransformerConfig, hf_config: PretrainedConfig, layer: int):
        super().__init__()
        self.self_attn = ParallelAttention(config, hf_config, layer)
        self.mlp = ParallelMLP(config)
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)

    def checkpoint_activations(self) -> None:
        """Save only the layer's input, and recompute the rest in the backward."""
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, hidden: Tensor, angles: Angles, sequence_layout: SequenceLayout) -> Tensor:
        """Compute the hidden states of this rank's tokens after the layer. `hidden`: `[t / n, b, H]`, positional so
        that ZeRO-3's hooks see it; `angles`: of all t tokens; `sequence_layout`: the sequences of the batch, and the
        sequence-parallel size."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles, sequence_layout)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def make_row_linear(config: TransformerConfig, num_inputs: int, num_outputs: int) -> RowLinear:
    """Make a row-parallel layer without a bias, whose weight is zero until it is loaded. `num_inputs`, `num_outputs`:
    over all ranks."""
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
