"""Causal attention in plain PyTorch, where no fused kernel serves: capped scores; windows and sinks outside of half
precision on a GPU.

All operations have a derivative in both modes, so inputs may need gradients or be dual numbers. A band of queries at a
time has its scores in memory, and the backward computes them again.

Shapes: B batch, A query heads, K key/value heads, G = A / K, T tokens, of a band t queries and s keys, D head
dimension.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BAND_TOKENS = 256
"""Queries of a band: at 8,192 tokens, scores of 16 heads are 128 MiB in fp32."""


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention output, `[B, A, T, D]`.

    Args:
        query: `[B, A, T, D]`.
        key, value: `[B, K, T, D]`; A is a multiple of K (grouped-query attention).
        scale: factor on the scores.
        sliding_window: a query sees this many last keys, itself included; None for all.
        sinks: `[A]`, one more score of each query, neither scaled nor capped, whose value is 0; None for none.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2); None to leave them.
    """
    num_tokens = query.shape[2]
    positions, outputs = torch.arange(num_tokens, device=query.device), []
    for start in range(0, num_tokens, BAND_TOKENS):
        end = min(start + BAND_TOKENS, num_tokens)
        first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        distance = positions[start:end, None] - positions[None, first:end]
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= distance >= sliding_window
        band = (query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], sinks, hidden, scale, softcap)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(_attend, *band, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_attend(*band))
    return torch.cat(outputs, 2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    hidden: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """`[B, A, t, D]` of a band; `hidden` `[t, s]`, True where a query may not see a key."""
    num_kv_heads, num_keys = key.shape[1:3]
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.unflatten(1, (num_kv_heads, -1))  # [B, K, G, t, D]
    group, num_queries = rows.shape[2:4]
    # Scores in 16 bits would be off by a tenth where they are large.
    scores = scale * (rows.flatten(2, 3).to(accumulate) @ key.to(accumulate).transpose(2, 3))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (group, num_queries)).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.to(accumulate).view(num_kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :num_keys].flatten(2, 3).to(value.dtype)
    return (weights @ value).unflatten(2, (group, num_queries)).flatten(1, 2)
