"""Arithmetic of a pass, for the share of a device's speed that a step uses (MFU)."""

from collections.abc import Iterable

from vcore_ds.planning.model_shape import ModelShape

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense bf16 FLOP a second from data sheets (SXM where there are several), by a part of the device's name."""


def peak_flops(device_name: str) -> float | None:
    """None for a device that is not in the table."""
    words = device_name.upper().replace("-", " ").split()
    return next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)


def forward_flops(shape: ModelShape, lengths: Iterable[int]) -> float:
    """FLOP of the products in one forward over sequences of so many tokens: linear layers, head, causal attention."""
    linear = 2 * (shape.num_layers * shape.layer_parameters + shape.vocabulary_size * shape.hidden_size)
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim  # scores and values, half of them hidden
    return float(sum(linear * n + attention * n * n for n in lengths))


def step_flops(main: float, probe: float, *, forwards_of_utilities: float = 0.0) -> float:
    """FLOP that a step needs: a forward and a backward, which is twice that, of the main and the probe batch; and the
    utilities. What activation checkpoints compute again does not count.

    Args:
        main, probe: `forward_flops` of the two batches.
        forwards_of_utilities: passes over the main batch that they take, in forwards: 1 for a finite difference, 3 for
            a forward with tangents (three products where it has one), 2 where the main forward carries the tangents.
    """
    return 3.0 * (main + probe) + forwards_of_utilities * main
