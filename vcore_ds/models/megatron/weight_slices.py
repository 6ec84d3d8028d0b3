"""The slice of a Hugging Face weight that each parameter of a tensor-parallel rank holds."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor
from transformers import PretrainedConfig


def head_dim(config: PretrainedConfig) -> int:
    """Dimension of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def padded_vocabulary(config: PretrainedConfig, tensor: int) -> int:
    """Number of rows of the embeddings over all ranks, padded to a multiple of the tensor-parallel size."""
    return -(-config.vocab_size // tensor) * tensor


class WeightSlice(NamedTuple):
    """The slice of a Hugging Face weight that a rank's parameter holds."""

    name: str  # of the Hugging Face weight
    rows: slice
    columns: slice = slice(None)  # not used for one-dimensional weights

    @property
    def num_rows(self) -> int:
        """Number of rows in the slice."""
        return self.rows.stop - self.rows.start

    def take(self, weight: Tensor) -> Tensor:
        """Return the slice of the weight, as a view."""
        return weight[self.rows] if weight.dim() == 1 else weight[self.rows, self.columns]

    def iter_runs(self, width: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the elements `start` to `end` of the flattened parameter, without padding, in runs that are contiguous
        in the flattened weight too: first element there, offset from `start`, number. One run for a slice of full rows,
        one per row for a slice of some columns. `width`: elements of a row of the weight."""
        first_column, end_column, _ = self.columns.indices(width)
        num_rows, num_columns = self.num_rows, end_column - first_column
        if num_columns == width:  # as one long row
            num_rows, num_columns = 1, num_rows * width
        stop = min(end, num_rows * num_columns)
        for row in range(start // num_columns, -(-stop // num_columns)) if start < stop else ():
            row_start = row * num_columns
            left, right = max(start, row_start), min(stop, row_start + num_columns)
            weight_start = (self.rows.start + row) * width + first_column
            yield weight_start + left - row_start, left - start, right - left


COLUMN_LAYERS = {"self_attn.qkv": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up": ("gate_proj", "up_proj")}
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


def copy_to_weight(weights: Mapping[str, Tensor], parameter: Tensor, piece: WeightSlice) -> None:
    """Copy a rank's parameter, or a tensor of its shape such as its gradient, into its slice of a Hugging Face weight
    if `weights` has that."""
    if piece.name in weights:
        piece.take(weights[piece.name]).copy_(parameter[: piece.num_rows])
