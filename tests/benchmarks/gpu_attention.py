"""Time of attention alone, for tests/benchmarks/gpu.py: plain forward, and with tangents by kernel and in blocks."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vcore_ds.distributed.device import device
from vcore_ds.models.attention import (
    MAX_KERNEL_HEAD_DIM,
    ScoreOptions,
    SequenceLayout,
    attend_with_graph_and_tangents,
    causal_attention,
)
from vcore_ds.models.block_attention import block_attention

Timed = Callable[[Callable[[], object], int], float]
"""Median seconds of a call, from the call and the number of repeats."""


def measure_attention(sizes: dict[str, Any], lengths: Sequence[int], timed: Timed) -> dict[str, Any]:
    """Seconds of one layer's attention on a pack, by way."""
    heads, kv_heads, head_dim = (sizes[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    num_tokens, place, scale = sum(lengths), device(), head_dim**-0.5
    torch.manual_seed(0)

    def draw(num_heads: int) -> Tensor:  # memory layout as of a model's projections
        drawn = torch.randn(1, num_tokens, num_heads, head_dim, device=place, dtype=torch.bfloat16)
        return drawn.transpose(1, 2)

    primals = [draw(number) for number in (heads, kv_heads, kv_heads)]
    tangents = tuple(draw(number) for number in (heads, kv_heads, kv_heads))
    layout = SequenceLayout.from_lengths([list(lengths)], 1, place)

    def in_blocks() -> None:
        for _, columns in layout.iter_sequences():
            parts = [x[:, :, columns] for x in primals]
            block_attention(*parts, tuple(x[:, :, columns] for x in tangents), scale=scale)

    implementations: dict[str, Callable[[], object]] = {
        "plain forward": lambda: causal_attention([*primals, None], layout, ScoreOptions(scale)),
        "with tangents, in blocks": in_blocks,
    }
    # Triton's interpreter takes minutes, and its times are meaningless.
    is_compiled = os.environ.get("TRITON_INTERPRET") != "1"
    if is_compiled:
        # As in the fused main pass: on a GPU FlashAttention, then the kernel for the tangent from its output.
        implementations["with tangents, beside the plain forward"] = lambda: attend_with_graph_and_tangents(
            [*primals, None], [*tangents, None], layout, ScoreOptions(scale)
        )
    seconds: dict[str, Any] = {}
    if is_compiled and place.type == "cuda" and head_dim <= MAX_KERNEL_HEAD_DIM:
        from vcore_ds.models.flash_tangent import flash_tangent

        options = dict(cu_seqlens=layout.cu_seqlens, scale=scale)
        implementations["with tangents, kernel"] = lambda: flash_tangent(*primals, tangents, **options)
    for name, work in implementations.items():
        try:
            seconds[name] = timed(work, 5)
        except Exception as error:  # one may not fit this device; measure the others
            seconds[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return seconds
