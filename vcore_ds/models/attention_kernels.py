"""PyTorch's flash kernels, for passes with a gradient, with the attention sinks that they do not know.

A sink s (gpt-oss, https://arxiv.org/abs/2508.10925) is one more score of each query of a head, whose value is 0. It
follows from what attention without it gives, the output O and each query's log-sum-exp L:

    L' = log(exp(L) + exp(s))        O' = exp(L - L') O

The backward is that of flash attention itself, called with O' and L': `exp(S - L')` are the weights beside the sink,
and `delta = rowsum(dO' * O')` serves them as it does without sinks. The gradient by s is `-sum exp(s - L') delta`.

Shapes: b rows, A query heads, K key/value heads, T tokens, D head dimension.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import checkpoint

TAKES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether `varlen_attn` knows keys and values of fewer heads than the queries: from torch 2.12 on."""


@dataclass(frozen=True)
class CpuFlash:
    """Rows of one sequence each. The operator that `scaled_dot_product_attention` chooses on a CPU, by its name: that
    function keeps the log-sum-exp to itself, and repeats key and value heads, which the operator does not need."""

    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output `[b, A, T, D]`, and the log-sum-exp `[b, A, T]` of the scaled scores."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(query, key, value, 0.0, True, scale=self.scale)

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by query, key and value."""
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(gradient, query, key, value, output, log_sum_exp, 0.0, True, scale=self.scale)


@dataclass(frozen=True)
class CudaFlash:
    """All rows in one call, in bf16 or fp16. The kernel knows sequences by their ends, so there is no mask. Without
    `TAKES_GROUPED_HEADS`, each query head has keys and values of its own."""

    scale: float
    sliding_window: int | None
    """A query sees this many last keys, itself included; None for all."""
    cu_seqlens: Tensor
    """int32 `[num_sequences + 1]`: 0, and where each sequence ends in the rows put end to end."""
    max_seqlen: int
    """Tokens of the longest sequence."""

    @property
    def _window(self) -> tuple[int, int]:
        """Keys that a query sees before and after itself; -1 for all."""
        return -1 if self.sliding_window is None else self.sliding_window - 1, 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output `[b, A, T, D]`, differentiable, and the log-sum-exp `[b, A, T]` of the scaled scores."""
        grouped: dict[str, Any] = {"enable_gqa": True} if TAKES_GROUPED_HEADS else {}
        output, log_sum_exp = varlen_attn(
            _end_to_end(query),
            _end_to_end(key),
            _end_to_end(value),
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            return_aux=AuxRequest(lse=True),
            scale=self.scale,
            window_size=self._window,
            **grouped,
        )
        num_rows = len(query)
        return output.unflatten(0, (num_rows, -1)).transpose(1, 2), log_sum_exp.unflatten(1, (num_rows, -1)).movedim(
            0, 1
        )

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by query, key and value. The call that `varlen_attn` makes in its own backward."""
        left, right = self._window
        found = torch.ops.aten._flash_attention_backward(
            *map(_end_to_end, (gradient, query, key, value, output)),
            log_sum_exp.movedim(1, 0).flatten(1).contiguous(),  # [A, b * T]; the kernel takes it for contiguous
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            0.0,
            self._window == (-1, 0),
            torch.zeros(2, dtype=torch.uint64, device=query.device),  # state of a dropout that there is not
            torch.empty(0, device=query.device),
            scale=self.scale,
            window_size_left=left,
            window_size_right=right,
        )
        by_query, by_key, by_value = (x.unflatten(0, (len(query), -1)).transpose(1, 2) for x in found)
        return by_query, by_key, by_value


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: CpuFlash | CudaFlash
) -> tuple[Tensor, Tensor]:
    """Causal attention, differentiable.

    Args:
        query: `[b, A, T, D]`.
        key, value: `[b, K, T, D]`; A is a multiple of K (grouped-query attention).
        sinks: `[A]`, or None for none.

    Returns:
        output `[b, A, T, D]`, and the log-sum-exp `[b, A, T]` of each query's scaled scores and sink.
    """
    if sinks is None:
        return kernel.forward(query, key, value)
    return _WithSinks.apply(query, key, value, sinks, kernel)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: CpuFlash | CudaFlash
    ) -> tuple[Tensor, Tensor]:
        output, log_sum_exp = kernel.forward(query, key, value)
        with_sink = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype)[:, None])
        output = (output * (log_sum_exp - with_sink).exp_()[..., None]).to(output.dtype)
        # A copy: the sinks are a view of a gathered parameter, and would keep its memory until the backward.
        ctx.save_for_backward(query, key, value, sinks.clone(), output, with_sink)
        ctx.mark_non_differentiable(with_sink)
        ctx.kernel = kernel
        return output, with_sink

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum_exp = ctx.saved_tensors
        by_inputs = ctx.kernel.backward(gradient, query, key, value, output, log_sum_exp)
        by_sinks = None
        if ctx.needs_input_grad[3]:
            delta = (gradient.to(log_sum_exp.dtype) * output).sum(-1)
            weights = (sinks.to(log_sum_exp.dtype)[:, None] - log_sum_exp).exp_()
            by_sinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
        return *by_inputs, by_sinks, None


def _end_to_end(tensor: Tensor) -> Tensor:
    """`[b, A, T, D]` as `[b * T, A, D]`."""
    return tensor.transpose(1, 2).flatten(0, 1)


# Causal attention in plain PyTorch, where no fused kernel serves: capped scores; windows and sinks outside of half
# precision on a GPU.
#
# All operations have a derivative in both modes, so inputs may need gradients or be dual numbers. A band of queries
# at a time has its scores in memory, and the backward computes them again.
#
# Shapes: B batch, A query heads, K key/value heads, G = A / K, T tokens, of a band t queries and s keys, D head
# dimension.


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
