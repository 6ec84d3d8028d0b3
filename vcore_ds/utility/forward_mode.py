"""Exact utilities by forward-mode differentiation of a model whose parameters and direction are ZeRO-3 shards.

Every trained parameter becomes a dual tensor whose tangent is its all-gathered part of the probe direction. The tangent
of a token's loss is its utility `s[i,t] = <v, grad l[i,t]>`, without a step size or perturbed parameters. The same pass
can compute a reference in fp32 or fp64 without a second model: a layer's parameters are replaced while it runs, so they
can be replaced by copies in higher precision, and activations have their dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from peft.helpers import disable_input_dtype_casting
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import noop_context_fn

from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import Batch
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.attention import FORWARD_MODE_ATTENTION
from vcore_ds.models.dual_tensors import (
    LowRank,
    clear_low_rank_tangents,
    linear_tangent,
    linear_with_addend,
    make_dual,
    make_dual_if_any,
    read_low_rank_tangent,
    set_low_rank_tangent,
)
from vcore_ds.models.experts import EXPERT_WEIGHTS, uses_our_experts
from vcore_ds.models.lora import BaseLinear
from vcore_ds.utility.direction import Direction, ShardGroupGather

if TYPE_CHECKING:  # megatron-core takes seconds
    from vcore_ds.models.causal_lm import TokenLossModel
    from vcore_ds.models.megatron.model import ParallelTokenLossModel


@contextmanager
def forward_mode(engine: Engine, direction: Direction, precision: torch.dtype | None = None) -> Iterator[None]:
    """A context for JVP passes: `compute_losses_and_utilities` differentiates along `direction`. `precision`: dtype of
    the computation, None for that of the parameters. All parameters, frozen ones included, and the direction are
    converted from the values in the shards, so the derivative is taken at the parameters of the training forward,
    without its rounding. Hugging Face's norms always compute in fp32, so fp64 has fp32 rounding there."""
    # peft would cast an adapter's input to the dtype that the adapter has outside its forward.
    without_casting = disable_input_dtype_casting(engine.module, active=precision is not None)
    with engine.without_gradient(), without_casting, dual_parameters(engine, direction, precision):
        yield


@contextmanager
def dual_parameters(
    engine: Engine,
    direction: Direction,
    precision: torch.dtype | None = None,
    *,
    attention: str = FORWARD_MODE_ATTENTION,
    with_graph: bool = False,
) -> Iterator[None]:
    """A context in which each layer's parameters are dual tensors while the layer runs. `precision`: as in
    `forward_mode`; `attention`: name of an implementation that carries tangents; `with_graph`: if gradients are
    enabled, keep the parameter itself as the value, so that it receives a gradient."""
    config = engine.module.base.config.get_text_config()
    tangents = _TangentGatherer(direction, precision, with_graph=with_graph)
    attention_before = config._attn_implementation
    _add_tangent_rules_to_hooks(engine.module)
    config._attn_implementation = attention
    try:
        tangents.attach(engine)
        yield
        tangents.check_all_dual(engine)
    finally:
        tangents.detach()
        config._attn_implementation = attention_before


def compute_losses_and_utilities(engine: Engine, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute losses and utilities of the supervised tokens of `batch`, within `forward_mode`: both `[N]`, fp32 (fp64
    with that precision), utilities without a graph. A collective."""
    with forward_ad.dual_level():
        losses, utilities = forward_ad.unpack_dual(engine.token_losses(batch))
    if utilities is None:  # this rank has no tokens
        utilities = torch.zeros_like(losses)
    return losses, utilities.detach()


def _add_tangent_rules_to_hooks(model: nn.Module) -> None:
    """Add a `jvp` to the identity Functions in which ZeRO-3, and with a graph torch's backward hooks, wrap the inputs
    and outputs of every module."""
    if "jvp" not in BackwardHookFunction.__dict__:
        rule = staticmethod(lambda ctx, *tangents: tuple(None if t is None else t.view_as(t) for t in tangents))
        BackwardHookFunction.jvp = rule  # type: ignore[method-assign]  # torch has left it undefined
    for module in model.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            function = module.__dict__.get(name)
            if function is not None and "jvp" not in function.__dict__:
                # The Function returns a view of its input, and PyTorch requires the same of the tangent.
                function.jvp = staticmethod(lambda ctx, tangent: tangent.view_as(tangent))


def _dual_linear(
    layer: nn.Linear, x: Tensor, addend: Tensor | None = None, scaling: float = 1.0, *, in_fp8: bool = False
) -> Tensor:
    """The forward of `nn.Linear` and `BaseLinear` for dual tensors, without a graph of the tangents. `in_fp8`: see
    `linear_tangent`."""
    with torch._C.DisableTorchFunction():  # see rms_norm
        (x, d_x), (weight, d_weight) = forward_ad.unpack_dual(x), forward_ad.unpack_dual(layer.weight)
        tangent = read_low_rank_tangent(layer, "weight") or d_weight
        bias, d_bias = (None, None) if layer.bias is None else forward_ad.unpack_dual(layer.bias)
        addend, d_addend = (None, None) if addend is None else forward_ad.unpack_dual(addend)
        out = linear_with_addend(x, weight, bias, addend, scaling)
        with torch.no_grad():
            tangents = dict(d_x=d_x, d_weight=tangent, d_bias=d_bias, d_addend=d_addend)
            d_out = linear_tangent(x, weight, **tangents, scaling=scaling, in_fp8=in_fp8)
        return make_dual_if_any(out, d_out)


def _dual_embedding(layer: nn.Embedding, ids: Tensor) -> Tensor:
    """The forward of `nn.Embedding` for a weight with a low-rank tangent: `Q[ids] B`."""
    out = nn.Embedding.forward(layer, ids)
    tangent = read_low_rank_tangent(layer, "weight")
    if tangent is None:
        return out
    with torch.no_grad():
        d_out = tangent.left[ids] @ tangent.right
    return make_dual(out, d_out)


_DUAL_FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _dual_linear,
    BaseLinear: _dual_linear,
    nn.Embedding: _dual_embedding,
}
"""Replacement forwards that take low-rank tangents as factors, by exact module type."""


class _TangentGatherer:
    """Makes a layer's parameters dual while it runs. At most two groups of tangents are unsharded at a time."""

    def __init__(self, direction: Direction, precision: torch.dtype | None, *, with_graph: bool):
        """`precision`, `with_graph`: see `dual_parameters`."""
        self._direction, self._precision, self._with_graph = direction, precision, with_graph
        self._replaced_modules: list[nn.Module] = []
        self._replaced_forwards: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self._with_dual_forwards: set[nn.Module] = set()
        self._dual_parameters: set[int] = set()
        self._gathered: dict[int, Tensor | LowRank] = {}
        self._in_flight: dict[int, list[ShardGroupGather]] = {}

    def attach(self, engine: Engine) -> None:
        """Replace the forwards of all units, and of the modules that take low-rank tangents as factors."""
        groups, is_low_rank = self._direction.groups, self._direction.rank is not None
        if is_low_rank:
            self._gathered = self._direction.low_rank_tangents()
        group_of = {id(p): number for number, (_, parameters) in enumerate(groups) for p in parameters}
        group_of_module = {id(module): number for number, (module, _) in enumerate(groups)}
        for name, module in engine.module.named_modules():
            forward = _DUAL_FORWARDS.get(type(module))
            if forward is not None and "forward" not in module.__dict__:
                # Adapters, which take little time and carry all of the utility, are not multiplied in FP8.
                in_fp8 = self._direction.fp8_tangents and forward is _dual_linear and ".lora_" not in name
                options = {"in_fp8": True} if in_fp8 and self._precision is None else {}
                self._replace_forward(module, partial(forward, module, **options))
                self._with_dual_forwards.add(module)
        for unit, modules in _gather_units(engine.module):
            readers = [m for m in modules if any(self._precision or id(p) in group_of for p in m.parameters(False))]
            if not readers:
                continue
            # Tied weights are in the group of their first user; the others gather that group again.
            needed = sorted({group_of[id(p)] for m in readers for p in m.parameters(False) if id(p) in group_of})
            self._replaced_modules += readers
            # Not in pre-hooks: autograd runs nodes in reverse order of creation, and ZeRO-3 reduces a layer's gradients
            # at the node of its input, which is created after the pre-hooks. The node of a parameter made dual before
            # would run too late, and zeros would be reduced.
            run = partial(self._run_with_duals, [] if is_low_rank else needed, group_of_module.get(id(unit)), readers)
            self._replace_forward(unit, partial(run, unit.forward))

    def check_all_dual(self, engine: Engine) -> None:
        """Raise UserError if a parameter with a nonzero direction was never made dual: utilities would silently lack
        its term. A collective if there are such parameters, which are the same on all ranks."""
        missing = [(name, p) for name, p in engine.trainable if id(p) not in self._dual_parameters]
        if self._dual_parameters and missing and self._direction.is_nonzero([p for _, p in missing]):
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            raise UserError(
                f"utility.estimator: jvp: {engine.module.base.config.model_type} reads {missing[0][0]}{more} outside "
                "the module that owns it, where it carries no tangent, so utilities would be wrong; expected "
                "another architecture, or lora.target_modules without it"
            )

    def detach(self) -> None:
        for module in self._replaced_modules:  # the forward may have raised
            self._restore(module)
        for module, before in reversed(self._replaced_forwards):
            if before is None:
                del module.forward  # the instance attribute
            else:
                module.forward = before
        for _, pending in chain.from_iterable(self._in_flight.values()):
            if pending is not None:
                pending.wait()  # or it would overlap the next collective; every rank has started it, so it ends
        self._in_flight, self._gathered = {}, {}

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._replaced_forwards.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def _run_with_duals(
        self, needed: Sequence[int], owned: int | None, readers: Sequence[nn.Module], forward: Callable[..., Any],
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run a unit. `needed`: the groups of tangents that it reads; `owned`: its group, after which the next one is
        prefetched."""
        direction = self._direction
        for number in needed:
            is_prefetched, following = number in self._in_flight, number + 1
            gathers = self._in_flight.pop(number) if is_prefetched else direction.start_gather(number)
            self._gathered.update(direction.finish_gather(gathers))
            if number == owned and following < len(direction.groups) and following not in self._in_flight:
                self._in_flight[following] = direction.start_gather(following)
        for module in readers:
            self._make_dual(module)
        result = forward(*args, **kwargs)
        for module in readers:
            self._restore(module)
        for parameter in chain.from_iterable(direction.groups[number][1] for number in needed):
            self._gathered.pop(id(parameter), None)
        return result

    def _make_dual(self, module: nn.Module) -> None:
        # An instance attribute hides the parameter of the same name from nn.Module.__getattr__.
        for name, parameter in module._parameters.items():
            tangent = None if parameter is None else self._gathered.get(id(parameter))
            if parameter is None or (tangent is None and self._precision is None):
                continue
            has_graph = self._with_graph and torch.is_grad_enabled()
            value = parameter if has_graph else parameter.data.to(self._precision or parameter.dtype)
            if tangent is not None:
                tangent = tangent.to(value.dtype)
            if isinstance(tangent, LowRank) and self._reads_factors(module, name):
                set_low_rank_tangent(module, name, tangent, on_read=partial(self._dual_parameters.add, id(parameter)))
                tangent = None
            elif isinstance(tangent, LowRank):
                tangent = tangent.matrix()
            elif tangent is not None and self._direction.rank is not None:
                # PyTorch gives a tangent the storage size of its value. On one rank a parameter is a view of all
                # parameters' shards: for the few small ones without factors it would allocate zeros for all of them.
                value = value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
            module.__dict__[name] = make_dual_if_any(value, tangent)
            if tangent is not None:
                self._dual_parameters.add(id(parameter))

    def _reads_factors(self, module: nn.Module, name: str) -> bool:
        """Whether the module's forward uses the low-rank factors of `name`; other modules get the full matrix."""
        if uses_our_experts(module):
            return name in EXPERT_WEIGHTS
        if getattr(module, "reads_low_rank_tangents", False):
            return True
        return name == "weight" and type(module) in _DUAL_FORWARDS and module in self._with_dual_forwards

    def _restore(self, module: nn.Module) -> None:
        clear_low_rank_tangents(module)
        for name in module._parameters:
            module.__dict__.pop(name, None)


def _gather_units(model: "TokenLossModel | ParallelTokenLossModel") -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield the units whose parameters become dual together, with their modules: a decoder layer with all its
    submodules, and every module outside the layers alone. Within a layer, parameters must be dual before their module
    runs: a parent may read a weight earlier, or without calling the module at all (short convolutions, gated delta
    nets, adapters of experts), and would get no tangent."""
    layers = {layer: list(layer.modules()) for layer in model.layers}
    inside = {module for modules in layers.values() for module in modules}
    for module in model.modules():
        if module in layers:
            yield module, layers[module]
        elif module not in inside:
            yield module, [module]


Layer = Callable[..., Any]


def checkpoint_with_tangent(
    layer: Layer,
    x: Tensor,
    *others: Any,
    context_fn: Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]] = noop_context_fn,
) -> Any:
    """Compute `layer(x, *others)` with activation checkpointing: the forward carries tangents and saves only `x`, the
    backward recomputes without tangents. Replaces the function that Hugging Face's layers call for checkpointing. The
    forward builds no graph, so the layer's tangents are freed when it ends. `x`: hidden states `[b, t, H]`, dual if the
    layers below have tangents. `context_fn`: as that of `torch.utils.checkpoint.checkpoint`.

    Raises UserError if another argument requires a gradient, whose graph every layer's backward would run through
    again, or if the layer returns further activations (Zaya), whose gradient would be lost.
    """
    named = layer.keywords.values() if isinstance(layer, partial) else ()
    if any(isinstance(other, Tensor) and other.requires_grad for other in (*others, *named)):
        raise _make_recompute_error()
    value, tangent = forward_ad.unpack_dual(x)
    computing, recomputing = context_fn()
    with torch.no_grad(), computing:
        start = value.detach()
        result = layer(start if tangent is None else forward_ad.make_dual(start, tangent.detach()), *others)
        if isinstance(result, tuple) and any(isinstance(x, Tensor) and x.is_floating_point() for x in result[1:]):
            raise _make_recompute_error()
        y, d_y = forward_ad.unpack_dual(_extract_hidden_states(result))

    def recompute(again: Tensor) -> Tensor:
        with recomputing:
            return _extract_hidden_states(layer(again, *others))

    # .data: a view of the dual result would keep its tangent alive.
    y = _Recomputed.apply(value, y.data, recompute)
    y = y if d_y is None else make_dual(y, d_y.detach())
    return (y, *result[1:]) if isinstance(result, tuple) else y


def _make_recompute_error() -> UserError:
    return UserError(
        "utility.fused: the layers of this architecture exchange activations in addition to their input and output, "
        "which the fused forward cannot recompute; expected false (utility.fused=false)"
    )


def _extract_hidden_states(result: Any) -> Tensor:
    """Extract hidden states from a layer's result; some architectures (Falcon-H1, Bamba) return a tuple with None."""
    return result[0] if isinstance(result, tuple) else result


class _Recomputed(torch.autograd.Function):
    """Returns `y`, computed from `x` without a graph; the backward recomputes `layer(x)` and differentiates it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, layer: Layer) -> Tensor:
        # .data: a view of a dual tensor would keep its tangent alive until the dual level ends.
        ctx.save_for_backward(x.data)
        ctx.layer = layer
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.layer(x)
        torch.autograd.backward(y, d_y)
        return x.grad, None, None
