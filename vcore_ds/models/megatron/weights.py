"""Which parts of a Hugging Face model's weights the parameters of a rank are, for both ways between the two."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
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
        return self.rows.stop - self.rows.start

    def of(self, weight: Tensor) -> Tensor:
        """The part of that weight; a view."""
        return weight[self.rows] if weight.dim() == 1 else weight[self.rows, self.columns]


def pieces(config: PretrainedConfig, *, rank: int, size: int) -> dict[str, list[Piece]]:
    """The pieces that lie one below the other in each parameter of a `ParallelTokenLossModel`, by its name.

    Args:
        config: of the Hugging Face model.
        rank, size: along the tensor axis.
    """

    def part(total: int) -> slice:
        return slice(rank * total // size, (rank + 1) * total // size)

    rows = padded_vocabulary(config, size) // size
    vocabulary = slice(rank * rows, min((rank + 1) * rows, config.vocab_size))
    dim, every_row = head_dim(config), slice(0, config.hidden_size)
    queries, keys = part(config.num_attention_heads * dim), part(config.num_key_value_heads * dim)
    found = {
        "embed_tokens.weight": [Piece("model.embed_tokens.weight", vocabulary)],
        "norm.weight": [Piece("model.norm.weight", every_row)],
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = [Piece("lm_head.weight", vocabulary)]
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        norms = {"input_layernorm": every_row, "post_attention_layernorm": every_row}
        if config.model_type == "qwen3":
            norms |= {"self_attn.q_norm": slice(0, dim), "self_attn.k_norm": slice(0, dim)}
        found |= {f"{ours}{name}.weight": [Piece(f"{theirs}{name}.weight", rows)] for name, rows in norms.items()}
        for kind in ("weight", "bias") if config.model_type == "qwen2" else ("weight",):
            found[f"{ours}self_attn.qkv_proj.{kind}"] = [
                Piece(f"{theirs}self_attn.{name}_proj.{kind}", heads)
                for name, heads in (("q", queries), ("k", keys), ("v", keys))
            ]
        columns = part(config.intermediate_size)
        found |= {
            f"{ours}self_attn.o_proj.weight": [Piece(f"{theirs}self_attn.o_proj.weight", every_row, queries)],
            f"{ours}mlp.gate_up_proj.weight": [
                Piece(f"{theirs}mlp.{name}_proj.weight", columns) for name in ("gate", "up")
            ],
            f"{ours}mlp.down_proj.weight": [Piece(f"{theirs}mlp.down_proj.weight", every_row, columns)],
        }
    return found


class Run(NamedTuple):
    """Elements of one of the Hugging Face model's weights that follow each other in a parameter too."""

    name: str
    start: int
    """First element, counted in the flattened weight."""
    offset: int
    """Its place in the part of the parameter that was asked for."""
    numel: int


def runs(parts: Sequence[Piece], shapes: Mapping[str, Sequence[int]], start: int, end: int) -> Iterator[Run]:
    """What elements `start` to `end` of a flattened parameter are; nothing of those that are padding.

    A piece of whole rows is one run, of some columns a run for each row.

    Args:
        parts: the parameter's pieces.
        shapes: of the weights.
    """
    first = 0  # element of the parameter at which the piece begins
    for piece in parts:
        shape = shapes[piece.name]
        width = math.prod(shape[1:])
        first_column, end_column, _ = piece.columns.indices(width)
        num_columns = end_column - first_column
        num_rows = piece.num_rows
        if num_columns == width:  # as one long row
            num_rows, num_columns = 1, num_rows * width
        begin, stop = max(start, first), min(end, first + num_rows * num_columns)
        for row in range((begin - first) // num_columns, -(-(stop - first) // num_columns)) if begin < stop else ():
            of_row = first + row * num_columns
            left, right = max(begin, of_row), min(stop, of_row + num_columns)
            place = (piece.rows.start + row) * width + first_column
            yield Run(piece.name, place + left - of_row, left - start, right - left)
        first += num_rows * num_columns


def fill(model: nn.Module, of_rank: Mapping[str, Sequence[Piece]], read: Callable[[Piece], Tensor]) -> None:
    """Copies a Hugging Face model's weights into a model that is not sharded; rows of no token become zero.

    Args:
        of_rank: the rank's pieces of every parameter.
        read: gives a piece.
    """
    with torch.no_grad():
        for name, parts in of_rank.items():
            parameter, start = model.get_parameter(name), 0
            for piece in parts:
                values = read(piece)
                parameter[start : start + len(values)].copy_(values)
                start += len(values)
            parameter[start:].zero_()


def put_together(weights: Mapping[str, Tensor], parameter: Tensor, parts: Sequence[Piece]) -> None:
    """The way back: copies a rank's parameter into a Hugging Face model's weights.

    Args:
        weights: the model's tensors by name, which are overwritten; pieces of others are passed over.
        parameter: or another tensor of its shape, such as its gradient.
        parts: its pieces.
    """
    start = 0
    for piece in parts:
        end = start + piece.num_rows
        if piece.name in weights:
            piece.of(weights[piece.name]).copy_(parameter[start:end])
        start = end
