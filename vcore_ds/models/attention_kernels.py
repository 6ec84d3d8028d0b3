"""PyTorch's flash kernels for passes with a gradient, extended by attention sinks and by outputs that a checkpointed
layer keeps; and attention in plain PyTorch.

A sink s (gpt-oss, https://arxiv.org/abs/2508.10925) is an additional score of each query of a head, whose value vector
is 0. Attention with sinks follows from the output O and each query's log-sum-exp L of attention without them:

    L' = log(exp(L) + exp(s))        O' = exp(L - L') O

The backward is that of flash attention, called with O' and L': `exp(S - L')` are the weights next to the sink, and
`delta = rowsum(dO' * O')` as without sinks. The gradient of s is `-sum exp(s - L') delta`.

Shapes: b packs or unpacked sequences, A query heads, K key/value heads, T tokens, D head dimension.
"""

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import checkpoint

SUPPORTS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether `varlen_attn` supports grouped-query attention (torch 2.12 and later)."""


@dataclass(frozen=True)
class CpuFlash:
    """Flash attention of unpacked sequences on a CPU.

    Calls the operator behind `scaled_dot_product_attention`, which returns no log-sum-exp and needlessly repeats key
    and value heads.
    """

    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output `[b, A, T, D]`, and the log-sum-exp `[b, A, T]` of the scaled scores."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(query, key, value, 0.0, True, scale=self.scale)

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(gradient, query, key, value, output, log_sum_exp, 0.0, True, scale=self.scale)


@dataclass(frozen=True)
class CudaFlash:
    """Flash attention on a GPU in bf16 or fp16: all packs in one variable-length call without a mask.

    Without `SUPPORTS_GQA`, keys and values have to be repeated for every query head.
    """

    scale: float
    sliding_window: int | None  # number of keys that a query sees, itself included; None for all
    cu_seqlens: Tensor  # see `SequenceLayout`
    max_seqlen: int

    @property
    def _window(self) -> tuple[int, int]:
        """Number of keys that a query sees before and after itself; -1 for all."""
        return -1 if self.sliding_window is None else self.sliding_window - 1, 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output `[b, A, T, D]`, differentiable, and the log-sum-exp `[b, A, T]` of the scaled scores."""
        grouped: dict[str, Any] = {"enable_gqa": True} if SUPPORTS_GQA else {}
        output, log_sum_exp = varlen_attn(
            _concat_rows(query),
            _concat_rows(key),
            _concat_rows(value),
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            return_aux=AuxRequest(lse=True),
            scale=self.scale,
            window_size=self._window,
            **grouped,
        )
        shape = len(query), -1
        return output.unflatten(0, shape).transpose(1, 2), log_sum_exp.unflatten(1, shape).movedim(0, 1)

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, by the operator of `varlen_attn`'s backward."""
        left, right = self._window
        gradients = torch.ops.aten._flash_attention_backward(
            *map(_concat_rows, (gradient, query, key, value, output)),
            log_sum_exp.movedim(1, 0).flatten(1).contiguous(),  # [A, b * T]; the kernel assumes that it is contiguous
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            0.0,
            self._window == (-1, 0),
            torch.zeros(2, dtype=torch.uint64, device=query.device),  # random state of the dropout, which is 0
            torch.empty(0, device=query.device),
            scale=self.scale,
            window_size_left=left,
            window_size_right=right,
        )
        d_query, d_key, d_value = (x.unflatten(0, (len(query), -1)).transpose(1, 2) for x in gradients)
        return d_query, d_key, d_value


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: CpuFlash | CudaFlash
) -> tuple[Tensor, Tensor]:
    """Compute causal attention `[b, A, T, D]` and the log-sum-exp `[b, A, T]` over each query's scaled scores and sink,
    differentiable. `query [b, A, T, D]`; `key` and `value [b, K, T, D]`, where A is a multiple of K (grouped-query
    attention); `sinks [A]`."""
    if sinks is None and _layer_pass is None:
        return kernel.forward(query, key, value)
    given = next(_layer_pass.remaining) if _layer_pass is not None and _layer_pass.is_recomputation else None
    # In both passes over a checkpointed layer: PyTorch compares what they save.
    output, log_sum_exp = _Flash.apply(query, key, value, sinks, kernel, given)
    if _layer_pass is not None and given is None:
        _layer_pass.outputs.append((output.detach(), log_sum_exp.detach()))
    return output, log_sum_exp


Outputs = tuple[Tensor, Tensor]
"""Output and log-sum-exp of an attention."""


class _LayerPass:
    """Context of a checkpointed layer's forward, in which attention adds to `outputs`, or of its recomputation, in
    which attention takes them. It may be entered again: a graph that is retained is recomputed in each backward."""

    def __init__(self, outputs: list[Outputs], *, is_recomputation: bool):
        self.outputs, self.is_recomputation = outputs, is_recomputation

    def __enter__(self) -> None:
        global _layer_pass
        self._before, _layer_pass = _layer_pass, self
        self.remaining = iter(self.outputs)

    def __exit__(self, *_: object) -> None:
        global _layer_pass
        _layer_pass = self._before


# Not local to a thread: a device's backward enters and leaves it in a thread of its own, while the others wait.
_layer_pass: _LayerPass | None = None


def keep_attention_outputs() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for the forward of a checkpointed layer and for its recomputation, whose attention starts from
    the output and log-sum-exp of the forward: a `context_fn` of `torch.utils.checkpoint.checkpoint`."""
    outputs: list[Outputs] = []
    return _LayerPass(outputs, is_recomputation=False), _LayerPass(outputs, is_recomputation=True)


class _Flash(torch.autograd.Function):
    """Flash attention with sinks, or from its result that was computed before."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kernel: CpuFlash | CudaFlash,
        given: Outputs | None,
    ) -> Outputs:
        if given is not None:
            output, log_sum_exp = (x.view_as(x) for x in given)
        else:
            output, log_sum_exp = kernel.forward(query, key, value)
            if sinks is not None:
                with_sink = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype)[:, None])
                output = (output * (log_sum_exp - with_sink).exp_()[..., None]).to(output.dtype)
                log_sum_exp = with_sink
        # A copy: the sinks are a view of a gathered parameter, whose memory they would keep until the backward.
        ctx.save_for_backward(query, key, value, None if sinks is None else sinks.clone(), output, log_sum_exp)
        ctx.mark_non_differentiable(log_sum_exp)
        ctx.kernel = kernel
        return output, log_sum_exp

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum_exp = ctx.saved_tensors
        d_inputs = ctx.kernel.backward(gradient, query, key, value, output, log_sum_exp)
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta = (gradient.to(log_sum_exp.dtype) * output).sum(-1)
            weights = (sinks.to(log_sum_exp.dtype)[:, None] - log_sum_exp).exp_()
            d_sinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
        return *d_inputs, d_sinks, None, None


def _concat_rows(tensor: Tensor) -> Tensor:
    """Reshape `[b, A, T, D]` to `[b * T, A, D]`."""
    return tensor.transpose(1, 2).flatten(0, 1)


BAND_TOKENS = 256
"""Queries in a band of `explicit_attention`: at 8,192 tokens, the scores of 16 heads are 128 MiB in fp32."""


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
    """Compute causal attention in plain PyTorch, `[b, A, T, D]`, where no fused kernel applies: softcaps; and windows
    or sinks anywhere but in half precision on a GPU.

    Every operation has a derivative in both modes, so inputs may require gradients or be dual tensors. Only one band of
    queries has its scores in memory at a time; the backward recomputes them. Shapes as in `flash_attention`, scores as
    in `vcore_ds.models.attention.ScoreOptions`; sinks are neither scaled nor capped.
    """
    num_tokens = query.shape[2]
    positions, outputs = torch.arange(num_tokens, device=query.device), []
    for start in range(0, num_tokens, BAND_TOKENS):
        end = min(start + BAND_TOKENS, num_tokens)
        first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        distance = positions[start:end, None] - positions[None, first:end]
        mask = distance < 0
        if sliding_window is not None:
            mask |= distance >= sliding_window
        band = (query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], sinks, mask, scale, softcap)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(_attend, *band, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_attend(*band))
    return torch.cat(outputs, 2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Attention of one band of t queries to s keys, `[b, A, t, D]`; `mask [t, s]` is True for hidden keys."""
    num_kv_heads, num_keys = key.shape[1:3]
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [b, K, A / K, t, D]
    group, num_queries = grouped.shape[2:4]
    # In 16 bits, large scores would be off by a tenth.
    scores = scale * (grouped.flatten(2, 3).to(accumulate) @ key.to(accumulate).transpose(2, 3))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (group, num_queries)).masked_fill(mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(accumulate).view(num_kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :num_keys].flatten(2, 3).to(value.dtype)
    return (weights @ value).unflatten(2, (group, num_queries)).flatten(1, 2)
