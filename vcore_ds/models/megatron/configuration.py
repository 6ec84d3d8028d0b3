"""megatron-core's configuration of a dense decoder, made from that of a Hugging Face model.

Models that cannot be divided among the ranks of a tensor-parallel group are refused here, before anything is built.
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
from vcore_ds.planning.model_shape import is_mixture

with warnings.catch_warnings(), without_compiler():
    # They are about packages for GPUs that the layers used here do without; nor is anything compiled of what is called.
    warnings.simplefilter("ignore")
    from megatron.core.transformer.transformer_config import TransformerConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders with RMSNorm before attention and MLP, rotary positions and a gated MLP."""

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that do not depend on the length of the row."""


def transformer_config(path: str, config: PretrainedConfig, *, tensor: int, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of the model.

    Args:
        path: folder or hub id, for messages.
        config: of the Hugging Face model.
        tensor: ranks of a tensor-parallel group (`parallel.tensor`).
        dtype: of the parameters.

    Raises:
        UserError: the architecture is not one of `ARCHITECTURES` as released, or has sizes that cannot be divided.
    """
    _check_architecture(path, config)
    _check_sizes(path, config, tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # defaults of its own that it calls deprecated
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
            use_cpu_initialization=True,  # parameters are made on torch's default device
            perform_initialization=False,  # and filled from the model's files
        )


def head_dim(config: PretrainedConfig) -> int:
    """Dimensions of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: PretrainedConfig, layer: int) -> int | None:
    """Keys that a query of this layer sees, itself included; None for all before it."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def padded_vocabulary(config: PretrainedConfig, tensor: int) -> int:
    """Rows of the embeddings over all ranks of a tensor group, equally many on each; the last ones are no tokens."""
    return -(-config.vocab_size // tensor) * tensor


def _check_architecture(path: str, config: PretrainedConfig) -> None:
    found = f"model.provider: found megatron together with model.path {path} ({config.model_type})"
    if is_mixture(config.to_dict()):
        raise UserError(
            f"{found}, a mixture of experts; expected a dense model, or huggingface: routed experts are not divided "
            "among the ranks of a tensor-parallel group"
        )
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"{found}; expected one of {', '.join(ARCHITECTURES)}, or huggingface: megatron-core's layers are put "
            "together here as those architectures need them"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY_TYPES:
        raise UserError(
            f"{found} with rotary positions of type {rotary}; expected {', '.join(ROTARY_TYPES)}, or huggingface: "
            "other frequencies depend on the length of the row"
        )
    for key, expected in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        value = getattr(config, key, expected)
        if value != expected:
            raise UserError(
                f"{found} with {key} {value}; expected {expected}, or huggingface: the released models of these "
                "architectures have no other layers"
            )


def _check_sizes(path: str, config: PretrainedConfig, tensor: int) -> None:
    num_kv_heads, intermediate = config.num_key_value_heads, config.intermediate_size
    found = f"parallel.tensor: found {tensor} together with model.path {path}, which has"
    if num_kv_heads % tensor:  # the query heads are a multiple of them
        raise UserError(
            f"{found} {num_kv_heads} key/value heads; expected a divisor of {num_kv_heads}: a rank computes whole heads"
        )
    if intermediate % tensor:
        raise UserError(
            f"{found} an intermediate size of {intermediate}; expected a divisor of it: ranks have equal parts of the "
            "MLP"
        )
    rows = padded_vocabulary(config, tensor) // tensor
    if config.vocab_size <= (tensor - 1) * rows:
        raise UserError(
            f"{found} a vocabulary of {config.vocab_size}; expected fewer ranks: some would have no token at all"
        )


# Which parts of a Hugging Face model's weights the parameters of a rank are, for both ways between the two.


class WeightSlice(NamedTuple):
    """A part of one of the Hugging Face model's weights."""

    name: str
    rows: slice
    columns: slice = slice(None)
    """Not used for weights of one dimension."""

    @property
    def num_rows(self) -> int:
        """Of the part."""
        return self.rows.stop - self.rows.start

    def of(self, weight: Tensor) -> Tensor:
        """The part of that weight; a view."""
        return weight[self.rows] if weight.dim() == 1 else weight[self.rows, self.columns]


COLUMN_LAYERS = {
    "self_attn.qkv": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up": ("gate_proj", "up_proj"),
}
"""Linear layers whose outputs are divided, by the name of the module that holds them here (`ColumnLinears`)."""


def pieces(config: PretrainedConfig, *, rank: int, size: int) -> dict[str, WeightSlice]:
    """What each parameter of a `ParallelTokenLossModel` is, by its name. Rows after the piece's are padding.

    Args:
        config: of the Hugging Face model.
        rank, size: along the tensor axis.
    """
    rows = padded_vocabulary(config, size) // size
    vocabulary = slice(rank * rows, min((rank + 1) * rows, config.vocab_size))
    every_row = slice(0, config.hidden_size)
    found = {
        "embed_tokens.weight": WeightSlice("model.embed_tokens.weight", vocabulary),
        "norm.weight": WeightSlice("model.norm.weight", every_row),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = WeightSlice("lm_head.weight", vocabulary)
    parts = divided(config, rank=rank, size=size)
    norms = {"input_layernorm": every_row, "post_attention_layernorm": every_row}
    if config.model_type == "qwen3":
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), slice(0, head_dim(config)))
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        found |= {f"{ours}{name}.weight": WeightSlice(f"{theirs}{name}.weight", rows) for name, rows in norms.items()}
        for module, names in COLUMN_LAYERS.items():
            for name in names:
                weight = f"{theirs}{module.split('.')[0]}.{name}"
                found[f"{ours}{module}.{name}"] = WeightSlice(f"{weight}.weight", parts[name])
                if config.model_type == "qwen2" and module == "self_attn.qkv":
                    found[f"{ours}{module}.{name}_bias"] = WeightSlice(f"{weight}.bias", parts[name])
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            columns = parts[name.split(".")[1]]
            found[f"{ours}{name}.weight"] = WeightSlice(f"{theirs}{name}.weight", every_row, columns)
    return found


def divided(config: PretrainedConfig, *, rank: int, size: int) -> dict[str, slice]:
    """This rank's outputs of the linear layers whose outputs are divided, by name, and inputs of the others."""

    def part(total: int) -> slice:
        return slice(rank * total // size, (rank + 1) * total // size)

    queries, keys = (part(n * head_dim(config)) for n in (config.num_attention_heads, config.num_key_value_heads))
    columns = part(config.intermediate_size)
    return {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": keys,
        "o_proj": queries,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), columns),
    }


class Run(NamedTuple):
    """Elements of one of the Hugging Face model's weights that follow each other in a parameter too."""

    name: str
    start: int
    """First element, counted in the flattened weight."""
    offset: int
    """Its place in the part of the parameter that was asked for."""
    numel: int


def runs(piece: WeightSlice, shapes: Mapping[str, Sequence[int]], start: int, end: int) -> Iterator[Run]:
    """What elements `start` to `end` of a flattened parameter are; nothing of those that are padding.

    A piece of whole rows is one run, of some columns a run for each row.

    Args:
        piece: the parameter's.
        shapes: of the weights.
    """
    shape = shapes[piece.name]
    width = math.prod(shape[1:])
    first_column, end_column, _ = piece.columns.indices(width)
    num_rows, num_columns = piece.num_rows, end_column - first_column
    if num_columns == width:  # as one long row
        num_rows, num_columns = 1, num_rows * width
    stop = min(end, num_rows * num_columns)
    for row in range(start // num_columns, -(-stop // num_columns)) if start < stop else ():
        of_row = row * num_columns
        left, right = max(start, of_row), min(stop, of_row + num_columns)
        place = (piece.rows.start + row) * width + first_column
        yield Run(piece.name, place + left - of_row, left - start, right - left)


def copy_to_weight(weights: Mapping[str, Tensor], parameter: Tensor, piece: WeightSlice) -> None:
    """The way back: copies a rank's parameter into a Hugging Face model's weights.

    Args:
        weights: the model's tensors by name, which are overwritten; a piece of another is passed over.
        parameter: or another tensor of its shape, such as its gradient.
        piece: what it is.
    """
    if piece.name in weights:
        piece.of(weights[piece.name]).copy_(parameter[: piece.num_rows])
