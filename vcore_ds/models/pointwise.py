"""RMSNorm, rotary embedding and gated activation with derivatives by formulas, for tensors that may be dual.

PyTorch would differentiate each elementwise operation, and its graph keeps fp32 copies of a norm's input and the
activated gate, which the backward here recomputes. `use_formulas` gives these functions to the modules of a Hugging
Face model whose forward has the code of Llama's (about 140 norms of transformers 5.23; not those of Gemma, OLMo and
gpt-oss). The parallel layers (`vcore_ds.models.megatron`) call the same functions.

On a GPU in half precision one kernel each computes value, gradient and tangent: PyTorch's fused RMSNorm, and
`pointwise_kernels` for the others. They round once where Hugging Face's operations round several times. Elsewhere
values and gradients equal Hugging Face's to the last bit in fp32 and bf16. Values do not depend on whether a pass has
tangents.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.llama import modeling_llama

from vcore_ds.models.attention import runs_triton
from vcore_ds.models.dual_tensors import make_dual_if_any, unpack_parameter


def use_formulas(model: nn.Module) -> None:
    """Give norms, gated MLPs and rotary embeddings with the code of Llama's the formulas below, in place. Only the
    modules' classes change."""
    for module in model.modules():
        kind: Any = type(module)
        if _has_same_code(kind.forward, modeling_llama.LlamaRMSNorm.forward):
            module.__class__ = _with_forward(kind, _norm_forward)
        elif _has_same_code(kind.forward, modeling_llama.LlamaMLP.forward) and _is_silu(module.act_fn):
            module.__class__ = _with_forward(kind, _mlp_forward)
        elif _rotates_like_llama(forward := inspect.unwrap(kind.forward)):  # from transformers' decorators
            module.__class__ = _with_forward(kind, _with_rotation(forward))


def _has_same_code(function: Any, other: Callable[..., Any]) -> bool:
    """Whether two functions are compiled from the same text, apart from docstrings."""
    code, expected = getattr(function, "__code__", None), other.__code__
    if code is None:
        return False
    docstrings = {function.__doc__, other.__doc__}
    constants, expected_constants = ([x for x in c.co_consts if x not in docstrings] for c in (code, expected))
    return (code.co_code, code.co_names, constants) == (expected.co_code, expected.co_names, expected_constants)


@cache
def _with_forward(kind: Any, forward: Any) -> Any:
    """Make a subclass of a module's class, of the same name, with another forward."""
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _is_silu(activation: Any) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    weight, d_weight = unpack_parameter(self, "weight")
    if hidden_states.dtype != weight.dtype:
        return modeling_llama.LlamaRMSNorm.forward(self, hidden_states)
    return rms_norm(hidden_states, weight, self.variance_epsilon, d_weight=d_weight, accumulation=torch.float32)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    # Nested, so that no local variable keeps gate and up alive during the last GEMM.
    return self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))


def _rotates_like_llama(forward: Any) -> bool:
    """Whether a forward calls the rotary embedding of Llama, a global of the architecture's Python module."""
    if "apply_rotary_pos_emb" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return False
    source = forward.__globals__
    return _has_same_code(source.get("apply_rotary_pos_emb"), modeling_llama.apply_rotary_pos_emb) and _has_same_code(
        source.get("rotate_half", modeling_llama.rotate_half), modeling_llama.rotate_half
    )


@cache
def _with_rotation(forward: FunctionType) -> FunctionType:
    """Make a copy of an attention's forward that calls `rotate_pair`. No other model of the architecture changes."""
    names = forward.__globals__
    names = {**names, "apply_rotary_pos_emb": rotate_pair}
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__, copied.__annotations__ = forward.__kwdefaults__, forward.__annotations__
    return copied


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of queries and keys that may be dual."""
    with torch._C.DisableTorchFunction():
        (query, d_query), (key, d_key) = forward_ad.unpack_dual(q), forward_ad.unpack_dual(k)
        angles = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        if _can_rotate_by_kernel(query, *angles):
            values: tuple[Tensor, Tensor] = (_Rotation.apply(query, *angles), _Rotation.apply(key, *angles))
        else:
            values = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim)
        tangents = (None if dx is None else rotate(dx, *angles) for dx in (d_query, d_key))
        rotated_query, rotated_key = map(make_dual_if_any, values, tangents)
        return rotated_query, rotated_key


@torch.no_grad()
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [..., D]` by angles whose cosines and sines `[..., D]` broadcast to it; without a graph."""
    if _can_rotate_by_kernel(x, cos, sin):
        from vcore_ds.models.pointwise_kernels import rotate_kernel

        return rotate_kernel(x, cos, sin)
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return rotated


def _can_rotate_by_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return runs_triton(x) and x.dim() == cos.dim() == 4 and cos.shape[1] == 1 and not cos.requires_grad


class _Rotation(torch.autograd.Function):
    """A rotation of `x [b, A, T, D]`; its gradient is the transposed rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`; takes dual tensors, whose tangents it overwrites.

    Nothing else needs these tangents. PyTorch's rule would allocate three more tensors of the MLP's width, at the peak
    memory of a checkpointed forward-mode pass.
    """
    with torch._C.DisableTorchFunction():
        (gate, d_gate), (up, d_up) = forward_ad.unpack_dual(gate), forward_ad.unpack_dual(up)
        tangent = gated_silu_tangent_(gate, up, d_gate, d_up)
        value = _GatedSilu.apply(gate, up) if torch.is_grad_enabled() else _gated_silu_value(gate, up)
        return make_dual_if_any(value, tangent)


@torch.no_grad()
def gated_silu_tangent_(gate: Tensor, up: Tensor, d_gate: Tensor | None, d_up: Tensor | None) -> Tensor | None:
    """Compute the tangent of `gated_silu`, in one of the tangents' memory; None without tangents."""
    if d_gate is None and d_up is None:
        return None
    if runs_triton(gate):
        from vcore_ds.models.pointwise_kernels import gated_silu_tangent_kernel

        return gated_silu_tangent_kernel(gate, up, d_gate, d_up)
    tangent = None
    if d_gate is not None:
        tangent = torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate).mul_(up)
    if d_up is not None:
        tangent = d_up.mul_(silu(gate)) if tangent is None else tangent.addcmul_(silu(gate), d_up)
    return tangent


def _gated_silu_value(gate: Tensor, up: Tensor) -> Tensor:
    if runs_triton(gate):
        from vcore_ds.models.pointwise_kernels import gated_silu_kernel

        return gated_silu_kernel(gate, up)
    return silu(gate).mul_(up)


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        # Detached: a view of a dual tensor would keep its tangent alive until the dual level ends.
        ctx.save_for_backward(gate.detach(), up.detach())
        return _gated_silu_value(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        if runs_triton(gate):
            from vcore_ds.models.pointwise_kernels import gated_silu_backward_kernel

            return gated_silu_backward_kernel(gate, up, grad)
        d_gate = torch.ops.aten.silu_backward(grad * up, gate) if ctx.needs_input_grad[0] else None
        return d_gate, silu(gate).mul_(grad) if ctx.needs_input_grad[1] else None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, d_weight: Tensor | None = None, accumulation: torch.dtype | None = None
) -> Tensor:
    """Compute `w x / sqrt(mean(x^2) + eps)` over the last dimension, rounding where Hugging Face's models do. `x` may
    be a dual tensor; `weight` has its dtype, and `d_weight` is its tangent; `accumulation`: dtype of the computation,
    None for fp32, or fp64 for fp64."""
    with torch._C.DisableTorchFunction():  # the fused pass's function mode intercepts every call from Python
        x, d_x = forward_ad.unpack_dual(x)
        accumulation = accumulation or torch.promote_types(x.dtype, torch.float32)
        if torch.is_grad_enabled():
            value, inverse = _RMSNorm.apply(x, weight, eps, accumulation)
        else:
            value, inverse = _normalize(x, weight, eps, accumulation)
        return make_dual_if_any(value, _rms_norm_tangent(x, weight, inverse, d_x, d_weight))


def _normalize(x: Tensor, weight: Tensor, eps: float, accumulation: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the value, and `1 / sqrt(mean(x^2) + eps)` `[..., 1]` in the dtype of the computation."""
    if _has_fused_norm(x):
        fused: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        return fused
    exact = x.to(accumulation)
    inverse = exact.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    normalized = exact * inverse if exact is x else exact.mul_(inverse)
    return weight * normalized.to(x.dtype), inverse


def _has_fused_norm(x: Tensor) -> bool:
    """Whether PyTorch has a fused RMSNorm and its gradient. `torch.nn.functional.rms_norm` calls the same operators,
    but keeps a dual input alive and does not return the inverse root mean square, which the tangent needs."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


class _RMSNorm(torch.autograd.Function):
    """Value and inverse root mean square (not differentiable). Unless fused, the backward has autograd's operations in
    its order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, accumulation: torch.dtype) -> tuple[Tensor, Tensor]:
        value, inverse = _normalize(x, weight, eps, accumulation)
        ctx.save_for_backward(x.detach(), weight, inverse)  # detached: see _GatedSilu
        ctx.mark_non_differentiable(inverse)
        return value, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        if _has_fused_norm(x):
            needed = list(ctx.needs_input_grad[:2])
            fused = torch.ops.aten._fused_rms_norm_backward(grad, x, weight.shape, inverse, weight, needed)
            d_x, d_weight = (result if is_needed else None for result, is_needed in zip(fused, needed, strict=True))
            return d_x, d_weight, None, None
        exact = x.to(inverse.dtype)
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (grad * (exact * inverse).to(x.dtype)).sum_to_size(weight.shape)
        if ctx.needs_input_grad[0]:
            by_normalized = (grad * weight).to(exact.dtype)
            by_inverse = (by_normalized * exact).sum(-1, keepdim=True)
            by_mean = (-0.5 * by_inverse * inverse.pow(3)).div_(exact.shape[-1])
            # Not fused: addcmul would round once less than autograd does.
            d_x = (by_normalized * inverse).add_(exact * (2.0 * by_mean)).to(x.dtype)
        return d_x, d_weight, None, None


@torch.no_grad()
def _rms_norm_tangent(
    x: Tensor, weight: Tensor, inverse: Tensor, d_x: Tensor | None, d_weight: Tensor | None
) -> Tensor | None:
    """With `r = 1 / sqrt(mean(x^2) + eps)` and `n = r x`: `dy = w r (dx - n mean(n dx)) + dw n`."""
    if d_x is None and d_weight is None:
        return None
    if runs_triton(x):
        from vcore_ds.models.pointwise_kernels import rms_norm_tangent_kernel

        return rms_norm_tangent_kernel(x, weight, inverse, d_x, d_weight)
    exact = x.to(inverse.dtype)
    normalized = exact * inverse if exact is x else exact.mul_(inverse)
    tangent = None
    if d_x is not None:
        d_exact = d_x.to(exact.dtype)
        projection = (normalized * d_exact).mean(-1, keepdim=True)
        tangent = torch.addcmul(d_exact, normalized, projection, value=-1).mul_(inverse).to(x.dtype).mul_(weight)
    if d_weight is not None:
        narrow = normalized.to(x.dtype)
        tangent = narrow * d_weight if tangent is None else tangent.addcmul_(narrow, d_weight)
    return tangent
