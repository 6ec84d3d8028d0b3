"""megatron-core's configuration for a Hugging Face model, and the mapping from sharded parameters to its weights.

Models without support for tensor parallelism are refused here, before anything is built.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PretrainedConfig

from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import without_compiler
from vcore_ds.planning.model_shape import is_moe

with warnings.catch_warnings(), without_compiler():
    # It warns about GPU packages that the layers used here do not need; they need no compiler either.
    warnings.simplefilter("ignore")
    from megatron.core.transformer.transformer_config import TransformerConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders with RMSNorm before attention and MLP, rotary positions and a gated MLP."""

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the length of the input."""


def transformer_config(path: str, config: PretrainedConfig, *, tensor: int, dtype: torch.dtype) -> TransformerConfig:
    """Make megatron-core's configuration of a model.

    Args:
        path: folder or hub id, for messages.
        config: of the Hugging Face model.
        tensor: tensor-parallel size (`parallel.tensor`).
        dtype: dtype of the parameters.

    Raises:
        UserError: the architecture is not one of `ARCHITECTURES` as released, or `tensor` does not divide its sizes.
    """
    _check_architecture(path, config)
    _check_sizes(path, config, tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that its own defaults are deprecated
        return TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=head_dim(config),
            ffn_hidden_size=config.intermediate_size,
            gated_linear_unit=True,
            activation_func=silu,
            normalization="RMSNorm",
            layernorm_epsilon=config.rms_norm_eps,
            qk_layernorm=config.model_type == "qwen3",
            add_bias_linear=False,
            add_qkv_bias=config.model_type == "qwen2",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            tensor_model_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            use_cpu_initialization=True,  # create parameters on torch's default device
            perform_initialization=False,  # they are filled from the model's files
        )


def head_dim(config: PretrainedConfig) -> int:
    """Dimension of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: PretrainedConfig, layer: int) -> int | None:
    """Number of keys that a query of this layer sees, itself included; None for all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def padded_vocabulary(config: PretrainedConfig, tensor: int) -> int:
    """Number of rows of the embeddings over all ranks, padded to a multiple of the tensor-parallel size."""
    return -(-config.vocab_size // tensor) * tensor


def _check_architecture(path: str, config: PretrainedConfig) -> None:
    conflict = f"model.provider: found megatron together with model.path {path} ({config.model_type})"
    if is_moe(config.to_dict()):
        raise UserError(
            f"{conflict}, an MoE model; expected a dense one, or huggingface: routed experts are not sharded over a "
            "tensor-parallel group"
        )
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"{conflict}; expected one of {', '.join(ARCHITECTURES)}, or huggingface: tensor parallelism is "
            "implemented for those architectures"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY_TYPES:
        raise UserError(
            f"{conflict} with rotary positions of type {rotary}; expected {', '.join(ROTARY_TYPES)}, or huggingface: "
            "other frequencies depend on the length of the input"
        )
    for key, expected in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        value = getattr(config, key, expected)
        if value != expected:
            raise UserError(
                f"{conflict} with {key} {value}; expected {expected}, as in the released models of these "
                "architectures, or huggingface"
            )


def _check_sizes(path: str, config: PretrainedConfig, tensor: int) -> None:
    num_kv_heads, intermediate = config.num_key_value_heads, config.intermediate_size
    conflict = f"parallel.tensor: found {tensor} together with model.path {path}, which has"
    if num_kv_heads % tensor:  # the query heads are a multiple of them
        raise UserError(
            f"{conflict} {num_kv_heads} key/value heads; expected a divisor of {num_kv_heads}: a rank computes whole "
            "heads"
        )
    if intermediate % tensor:
        raise UserError(
            f"{conflict} an intermediate size of {intermediate}; expected a divisor of it: ranks have equal shards of "
            "the MLP"
        )
    rows = padded_vocabulary(config, tensor) // tensor
    if config.vocab_size <= (tensor - 1) * rows:
        raise UserError(
            f"{conflict} a vocabulary of {config.vocab_size}; expected fewer ranks: some would have no token at all"
        )


class WeightSlice(NamedTuple):
    """The slice of a Hugging Face weight that a rank's parameter holds."""

    name: str
    """The Hugging Face weight's name."""
    rows: slice
    columns: slice = slice(None)
    """Not used for one-dimensional weights."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the slice."""
        return self.rows.stop - self.rows.start

    def take(self, weight: Tensor) -> Tensor:
        """Return the slice of the weight, as a view."""
        return weight[self.rows] if weight.dim() == 1 else weight[self.rows, self.columns]


COLUMN_LAYERS = {
    "self_attn.qkv": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up": ("gate_proj", "up_proj"),
}
"""Column-parallel layers, by the name of their `ColumnLinears`."""


def weight_slices(config: PretrainedConfig, *, rank: int, size: int) -> dict[str, WeightSlice]:
    """Map each parameter of a `ParallelTokenLossModel` to its slice of a Hugging Face weight; further rows of the
    parameter are padding. `rank`, `size`: along the tensor axis."""
    rows = padded_vocabulary(config, size) // size
    vocabulary = slice(rank * rows, min((rank + 1) * rows, config.vocab_size))
    every_row = slice(0, config.hidden_size)
    slices = {
        "embed_tokens.weight": WeightSlice("model.embed_tokens.weight", vocabulary),
        "norm.weight": WeightSlice("model.norm.weight", every_row),
    }
    if not config.tie_word_embeddings:
        slices["lm_head.weight"] = WeightSlice("lm_head.weight", vocabulary)
    shards = shard_slices(config, rank=rank, size=size)
    norms = {"input_layernorm": every_row, "post_attention_layernorm": every_row}
    if config.model_type == "qwen3":
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), slice(0, head_dim(config)))
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        slices |= {f"{ours}{name}.weight": WeightSlice(f"{theirs}{name}.weight", rows) for name, rows in norms.items()}
        for module, names in COLUMN_LAYERS.items():
            for name in names:
                weight = f"{theirs}{module.split('.')[0]}.{name}"
                slices[f"{ours}{module}.{name}"] = WeightSlice(f"{weight}.weight", shards[name])
                if config.model_type == "qwen2" and module == "self_attn.qkv":
                    slices[f"{ours}{module}.{name}_bias"] = WeightSlice(f"{weight}.bias", shards[name])
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            columns = shards[name.split(".")[1]]
            slices[f"{ours}{name}.weight"] = WeightSlice(f"{theirs}{name}.weight", every_row, columns)
    return slices


def shard_slices(config: PretrainedConfig, *, rank: int, size: int) -> dict[str, slice]:
    """A rank's slices of the outputs of column-parallel and the inputs of row-parallel layers, by the layer's name."""

    def shard(total: int) -> slice:
        return slice(rank * total // size, (rank + 1) * total // size)

    queries, keys = (shard(n * head_dim(config)) for n in (config.num_attention_heads, config.num_key_value_heads))
    columns = shard(config.intermediate_size)
    return {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": keys,
        "o_proj": queries,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), columns),
    }


class Run(NamedTuple):
    """Elements that are contiguous both in a Hugging Face weight and in a parameter."""

    name: str
    """The Hugging Face weight's name."""
    start: int
    """Index of the first element in the flattened weight."""
    offset: int
    """Index of the first element in the requested range of the parameter."""
    numel: int


def iter_runs(piece: WeightSlice, shapes: Mapping[str, Sequence[int]], start: int, end: int) -> Iterator[Run]:
    """Yield the runs of elements `start` to `end` of a flattened parameter, without padding: one for a slice of full
    rows, one per row for a slice of some columns.

    Args:
        piece: the parameter's slice.
        shapes: of the Hugging Face weights.
    """
    width = math.prod(shapes[piece.name][1:])
    first_column, end_column, _ = piece.columns.indices(width)
    num_rows, num_columns = piece.num_rows, end_column - first_column
    if num_columns == width:  # as one long row
        num_rows, num_columns = 1, num_rows * width
    stop = min(end, num_rows * num_columns)
    for row in range(start // num_columns, -(-stop // num_columns)) if start < stop else ():
        row_start = row * num_columns
        left, right = max(start, row_start), min(stop, row_start + num_columns)
        weight_start = (piece.rows.start + row) * width + first_column
        yield Run(piece.name, weight_start + left - row_start, left - start, right - left)


def copy_to_weight(weights: Mapping[str, Tensor], parameter: Tensor, piece: WeightSlice) -> None:
    """Copy a rank's parameter, or a tensor of its shape such as its gradient, into its slice of a Hugging Face weight
    if `weights` has that."""
    if piece.name in weights:
        piece.take(weights[piece.name]).copy_(parameter[: piece.num_rows])
