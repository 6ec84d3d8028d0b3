"""Arithmetic of a pass, for the share of a device's speed that a step uses (MFU)."""

from collections.abc import Iterable

from vcore_ds.planning.model_shape import ModelShape


def linear_flops_per_token(shape: ModelShape) -> int:
    """FLOP of a forward's linear layers and head for one token, which goes through few of a layer's experts."""
    return 2 * (shape.num_layers * shape.layer_parameters + shape.vocabulary_size * shape.hidden_size)


def flops_of_all_weights(shape: ModelShape) -> int:
    """The same for a token that went through all experts: proportional to the weights that a pass reads."""
    return linear_flops_per_token(shape) + 2 * shape.idle_parameters


def routed_flops_per_token(shape: ModelShape) -> int:
    """What of a forward's FLOP for one token its experts compute, without shared ones; 0 in a dense model."""
    experts = shape.experts
    return 0 if experts is None else 6 * shape.hidden_size * experts.num_layers * experts.per_token * experts.width


def attention_flops_per_square(shape: ModelShape) -> int:
    """FLOP of a forward's causal attention over a sequence, divided by the square of its tokens: scores and values,
    half of them hidden."""
    return 2 * shape.num_layers * shape.num_heads * shape.head_dim


def forward_flops(shape: ModelShape, lengths: Iterable[int], *, linear: float = 1.0, attention: float = 1.0) -> float:
    """FLOP of the products in one forward over sequences of so many tokens: linear layers, head, causal attention.

    Args:
        linear, attention: how often a pass takes the products of both.
    """
    per_token = linear * linear_flops_per_token(shape)
    per_square = attention * attention_flops_per_square(shape)
    return float(sum(per_token * n + per_square * n * n for n in lengths))
