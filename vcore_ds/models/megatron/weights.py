"""Which parts of a Hugging Face model's weights the parameters of a rank are, for both ways between the two."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PretrainedConfig

from vcore_ds.models.megatron.configuration import head_dim, padded_vocabulary


class Piece(NamedTuple):
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


def pieces(config: PretrainedConfig, *, rank: int, size: int) -> dict[str, Piece]:
    """What each parameter of a `ParallelTokenLossModel` is, by its name. Rows after the piece's are padding.

    Args:
        config: of the Hugging Face model.
        rank, size: along the tensor axis.
    """
    rows = padded_vocabulary(config, size) // size
    vocabulary = slice(rank * rows, min((rank + 1) * rows, config.vocab_size))
    every_row = slice(0, config.hidden_size)
    found = {
        "embed_tokens.weight": Piece("model.embed_tokens.weight", vocabulary),
        "norm.weight": Piece("model.norm.weight", every_row),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = Piece("lm_head.weight", vocabulary)
    parts = divided(config, rank=rank, size=size)
    norms = {"input_layernorm": every_row, "post_attention_layernorm": every_row}
    if config.model_type == "qwen3":
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), slice(0, head_dim(config)))
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        found |= {f"{ours}{name}.weight": Piece(f"{theirs}{name}.weight", rows) for name, rows in norms.items()}
        for module, names in COLUMN_LAYERS.items():
            for name in names:
                weight = f"{theirs}{module.split('.')[0]}.{name}"
                found[f"{ours}{module}.{name}"] = Piece(f"{weight}.weight", parts[name])
                if config.model_type == "qwen2" and module == "self_attn.qkv":
                    found[f"{ours}{module}.{name}_bias"] = Piece(f"{weight}.bias", parts[name])
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            columns = parts[name.split(".")[1]]
            found[f"{ours}{name}.weight"] = Piece(f"{theirs}{name}.weight", every_row, columns)
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


def runs(piece: Piece, shapes: Mapping[str, Sequence[int]], start: int, end: int) -> Iterator[Run]:
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


def put_together(weights: Mapping[str, Tensor], parameter: Tensor, piece: Piece) -> None:
    """The way back: copies a rank's parameter into a Hugging Face model's weights.

    Args:
        weights: the model's tensors by name, which are overwritten; a piece of another is passed over.
        parameter: or another tensor of its shape, such as its gradient.
        piece: what it is.
    """
    if piece.name in weights:
        piece.of(weights[piece.name]).copy_(parameter[: piece.num_rows])
