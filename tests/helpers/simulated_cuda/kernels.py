"""Reference code for operators that exist only for CUDA: variable-length attention, matrix multiplications of bf16 with
fp32 results, grouped GEMM; and the package's Triton kernels in Triton's interpreter.

Shapes: n tokens of all sequences, A query heads, K key/value heads, D head dimension.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

OnCpu = Callable[[Tensor], Tensor]

library = torch.library.Library("aten", "IMPL", "CUDA")
"""Its operators exist as long as this object."""


def install(on_cpu: OnCpu) -> None:
    """Register the operators. `on_cpu` returns a CPU tensor over the same memory, whose reads are not counted as host
    waits."""

    def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            device = arguments[0].device
            arguments, options = tree_map_only(Tensor, on_cpu, (arguments, options))
            return tree_map_only(Tensor, lambda result: _copied(result, device), function(*arguments, **options))

        return run

    for name, function in {
        "mm.dtype": _matmul,
        "bmm.dtype": _matmul,
        "_grouped_mm": _grouped_matmul,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_backward": _flash_backward,
        "_fused_rms_norm": _fused_norm,
        "_fused_rms_norm_backward": _fused_norm_backward,
    }.items():
        library.impl(name, on_device(function))

    def add_matmul(
        total: Tensor,
        left: Tensor,
        right: Tensor,
        out_dtype: torch.dtype,
        *,
        beta: int = 1,
        alpha: int = 1,
        out: Tensor,
    ) -> Tensor:
        assert (beta, alpha) == (1, 1) and out_dtype == total.dtype == torch.float32
        return out.copy_(total + torch.mm(left, right, out_dtype=out_dtype))

    library.impl("addmm.dtype_out", add_matmul)


def interpret_kernels(on_cpu: OnCpu) -> None:
    """Make `TRITON_INTERPRET=1` run the package's kernels on the device's memory: the attention kernel with tangents,
    those of norms, rotary embedding and gate in `pointwise_kernels`, and that of the token loss."""
    # Imported only here: they import Triton, which reads the variable.
    from tests.helpers.triton_interpreter import patch_language_once_a_launch
    from vcore_ds.models import flash_tangent, pointwise, pointwise_kernels, token_loss, token_loss_kernel

    patch_language_once_a_launch()

    def on_memory(launch: Callable[..., Any]) -> Callable[..., None]:
        def interpreted(*arguments: Any, **options: Any) -> None:
            devices = {x.device for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)}
            assert len(devices) == 1, devices
            arguments, options = tree_map_only(Tensor, on_cpu, (arguments, options))
            launch(*arguments, **options)

        return interpreted

    flash_tangent.launch = on_memory(flash_tangent.launch)
    for kernel in (
        pointwise_kernels._rms_norm_tangent,
        pointwise_kernels._rotate,
        pointwise_kernels._gated_silu,
        pointwise_kernels._gated_silu_backward,
        pointwise_kernels._gated_silu_tangent,
        token_loss_kernel._token_loss_rows,
    ):
        kernel.run = on_memory(kernel.run)
    pointwise.runs_triton = token_loss.runs_triton = lambda x: False


@contextmanager
def interpreted_pointwise_kernels() -> Iterator[Counter[str]]:
    """Use the kernels of norms, rotary embedding, gate and token loss inside the block, and count their launches by
    name.

    Elsewhere PyTorch's operations are used: each layer has nine of these, and the interpreter would take minutes for
    a run."""
    from vcore_ds.models import pointwise, pointwise_kernels, token_loss, token_loss_kernel

    launches: Counter[str] = Counter()

    def counted(name: str, source: Any = pointwise_kernels) -> Callable[..., Any]:
        launch = getattr(source, name)

        def run(x: Tensor, *others: Any) -> Any:
            assert x.is_cuda
            launches[name] += 1
            return launch(x, *others)

        return run

    names = [name for name in vars(pointwise_kernels) if name.endswith("_kernel")]
    of_loss = [name for name in vars(token_loss_kernel) if name.endswith("_kernel")]
    with ExitStack() as patches:
        for module in (pointwise, token_loss):
            runs_triton = patch.object(module, "runs_triton", lambda x: x.is_cuda and x.dtype == torch.bfloat16)
            patches.enter_context(runs_triton)
        patches.enter_context(patch.multiple(pointwise_kernels, **{name: counted(name) for name in names}))
        counters = {name: counted(name, token_loss_kernel) for name in of_loss}
        patches.enter_context(patch.multiple(token_loss_kernel, **counters))
        yield launches


def _copied(result: Tensor, device: torch.device) -> Tensor:
    copied = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=device)
    return copied.copy_(result, non_blocking=True)


def _matmul(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (left.double() @ right.double()).to(out_dtype)


def _grouped_matmul(
    left: Tensor, right: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`[S, in]` by `[E, in, out]` to `[S, out]`, or `[a, S]` by `[S, b]` to `[E, a, b]`."""
    assert bias is None and left.dtype == torch.bfloat16
    ends = [0, *offs.tolist()]
    spans = [slice(start, end) for start, end in itertools.pairwise(ends)]
    if right.dim() == 3:
        parts = [left[span].float() @ matrix.float() for span, matrix in zip(spans, right, strict=True)]
        return torch.cat(parts).to(left.dtype)
    return torch.stack([left[:, span].float() @ right[span].float() for span in spans]).to(left.dtype)


def _fused_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Value, rounded once, and inverse root mean square `[..., 1]` in fp32."""
    inverse = (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (weight.float() * inverse * x.float()).to(x.dtype), inverse


def _fused_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], inverse: Tensor, weight: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor]:
    normalized, by_normalized = x.float() * inverse, gradient.float() * weight.float()
    d_x = inverse * (by_normalized - normalized * (normalized * by_normalized).mean(-1, keepdim=True))
    return d_x.to(x.dtype), (gradient.float() * normalized).sum_to_size(weight.shape).to(weight.dtype)


def _sequences(ends: Tensor, query: Tensor, left: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Rows of each sequence, and a mask `[q, k]` of the keys that its queries see."""
    assert query.stride(-1) == 1 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256, "not for the flash kernel"
    assert query.dtype in (torch.bfloat16, torch.float16), query.dtype
    bounds = ends.tolist()
    for start, end in itertools.pairwise(bounds):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        is_seen = distance >= 0
        if left is not None and left >= 0:
            is_seen &= distance <= left
        yield slice(start, end), is_seen


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, ends_of_keys: Tensor, longest: int, longest_key: int,
    dropout: float, is_causal: bool, return_debug_mask: bool, *, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None, **unused: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output `[n, A, D]`, log-sum-exp `[A, n]`, and three tensors that are never read."""
    assert (is_causal or window_size_right == 0) and not any(x is not None for x in unused.values()), unused
    group = query.shape[1] // key.shape[1]
    output, log_sum_exp = torch.zeros_like(query), torch.zeros(query.shape[1], len(query))
    for rows, is_seen in _sequences(ends, query, window_size_left):
        q, k, v = query[rows].float(), *(x[rows].float().repeat_interleave(group, 1) for x in (key, value))
        scores = (torch.einsum("qad,kad->aqk", q, k) * scale).masked_fill(~is_seen, -torch.inf)
        log_sum_exp[:, rows] = scores.logsumexp(-1)
        output[rows] = torch.einsum("aqk,kad->qad", scores.softmax(-1), v).to(output.dtype)
    return output, log_sum_exp, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor, ends: Tensor,
    ends_of_keys: Tensor, longest: int, longest_key: int, dropout: float, is_causal: bool, *unused: Any, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients with respect to query, key and value, from the given output and log-sum-exp, as the kernel does."""
    group = query.shape[1] // key.shape[1]
    totals = [torch.zeros_like(x) for x in (query, key, value)]
    for rows, is_seen in _sequences(ends, query, window_size_left):
        q, o, d_o = (x[rows].float() for x in (query, output, gradient))
        k, v = (x[rows].float().repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qad,kad->aqk", q, k) * scale
        weights = (scores - log_sum_exp[:, rows, None]).exp().masked_fill(~is_seen, 0.0)
        delta = (o * d_o).sum(-1).T[..., None]
        d_scores = weights * (torch.einsum("qad,kad->aqk", d_o, v) - delta) * scale
        gradients = (
            torch.einsum("aqk,kad->qad", d_scores, k),
            torch.einsum("aqk,qad->kad", d_scores, q).unflatten(1, (-1, group)).sum(2),
            torch.einsum("aqk,qad->kad", weights, d_o).unflatten(1, (-1, group)).sum(2),
        )
        for total, part in zip(totals, gradients, strict=True):
            total[rows] = part.to(total.dtype)
    return tuple(totals)
