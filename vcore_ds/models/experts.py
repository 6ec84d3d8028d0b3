"""Experts of a mixture, with tangents: tokens sorted by expert, and one grouped product for all experts.

Hugging Face's mixtures find the function below by name, as they find attention. Their own takes PyTorch's grouped
product, which has no forward-mode rule, or a fallback that drops tangents without a word.

Shapes: n tokens, k experts for each, E experts, H hidden size, F width of an expert, S = n k.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from vcore_ds.distributed import layout
from vcore_ds.models.dual_tensors import LowRank, make_dual, read_low_rank_tangent, unpack_parameter

# Expert parallelism: rows of tokens go to the ranks that have their experts, and the results come back.
#
# Each rank of an expert-parallel group has a block of the experts of every mixture layer, and tokens of its own. A
# layer takes three exchanges: how many rows, the rows, their results. Values and tangents travel in one, and
# gradients the same way back. All ranks of a group take part in all of them, whatever tokens they have.
#
# Shapes: S rows (a token has one for each of its experts), E experts, N ranks of a group, H hidden size.


def mark_sharded(experts: nn.Module) -> None:
    """Says that a module of experts holds those of this rank alone."""
    experts._are_sharded = True  # type: ignore[assignment]


def are_sharded(experts: nn.Module) -> bool:
    """Whether a module of experts holds those of this rank alone."""
    return getattr(experts, "_are_sharded", False)


def expert_offsets(chosen: Tensor, num_experts: int) -> Tensor:
    """Where the rows of each expert end, int32 `[E]`, of rows that are sorted by expert.

    On the device: no host waits to learn how many tokens an expert has.
    """
    numbers = torch.arange(num_experts, device=chosen.device)
    return torch.searchsorted(chosen, numbers, right=True, out_int32=True)


def run_at_experts(
    x: Tensor, chosen: Tensor, num_experts: int, compute: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """What the experts of the whole group make of this rank's rows, `[S, H]`; dual where `x` or a parameter is, on any
    rank of the group. A collective over `expert`.

    Args:
        x: `[S, H]`, may be dual; sorted by expert.
        chosen: `[S]`, the rows' experts, of all E.
        compute: given rows sorted by expert, their experts numbered from this rank's first, and their
            `expert_offsets`, returns the experts' outputs.
    """
    num_ranks = layout.size("expert")
    num_own = num_experts // num_ranks
    counts = expert_offsets(chosen, num_experts).long().diff(prepend=chosen.new_zeros(1)).view(num_ranks, num_own)
    # Whether a tangent comes along is agreed on: an idle rank may have none where others have, and would exchange rows
    # of another length.
    is_dual = counts.new_full((num_ranks, 1), forward_ad.unpack_dual(x).tangent is not None)
    theirs, some_dual = layout.all_to_all("expert", torch.cat([counts, is_dual], 1)).split([num_own, 1], 1)
    # The one place where the host waits for the device.
    sent, received, dual = torch.stack([counts.sum(1), theirs.sum(1), some_dual[:, 0]]).tolist()
    x = _exchange(x, sent, received, is_dual=any(dual))
    numbers = torch.arange(num_own, device=chosen.device).repeat(num_ranks)
    own_chosen, order = numbers.repeat_interleave(theirs.flatten(), output_size=sum(received)).sort(stable=True)
    y = compute(x[order], own_chosen, expert_offsets(own_chosen, num_own))
    # Where the rows have no tangents, those of the parameters alone decide, on all ranks alike.
    return _exchange(y[order.argsort()], received, sent, is_dual=forward_ad.unpack_dual(y).tangent is not None)


def _exchange(x: Tensor, sent: list[int], received: list[int], *, is_dual: bool) -> Tensor:
    """Rows to other ranks, as many to each as `sent` says, and theirs here; the value has a graph, the tangent none."""
    value, tangent = forward_ad.unpack_dual(x)
    if is_dual and tangent is None:
        tangent = torch.zeros_like(value)
    y, d_y = _Exchange.apply(value, None if tangent is None else tangent.detach(), sent, received)
    return y if d_y is None else make_dual(y, d_y)


class _Exchange(torch.autograd.Function):
    """Rows `[x | dx]` to other ranks; the gradient of x comes back the same way. One of a result that nobody has used
    is zeros, not None: the other ranks wait for it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, d_x: Tensor | None, sent: list[int], received: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        ctx.numbers = sent, received
        if d_x is None:
            return layout.exchange_rows("expert", x, sent, received), None
        both = layout.exchange_rows("expert", torch.cat([x, d_x], 1), sent, received)
        y, d_y = (half.contiguous() for half in both.chunk(2, 1))
        ctx.mark_non_differentiable(d_y)
        return y, d_y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.numbers
        return layout.exchange_rows("expert", gradient, received, sent), None, None, None


# How unevenly tokens go to the experts of an MoE model: counted on the device in every forward, read once a step.
#
# All ranks wait for the fullest one in each layer's exchange where experts are divided (`parallel.expert`).


_TOKENS_OF: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Of the experts of a layer, `[E]` int64: this rank's tokens that were sent to each, since counting began."""

_IS_TOKEN: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Of the experts of a layer, int64 `[n]`: 1 for each token of the current batch, 0 for padding."""


def mark_padding(experts: Iterable[nn.Module], is_token: Tensor) -> None:
    """Tells layers of experts which of the tokens they get next are padding, which is not counted.

    The marks are kept until the next call: a layer that is recomputed in the backward counts its tokens again.

    Args:
        is_token: bool `[b, t]`, of this rank's columns, on the device.
    """
    marks = is_token.flatten().long()
    for module in experts:
        _IS_TOKEN[module] = marks


def count_tokens(experts: nn.Module, chosen: Tensor, num_experts: int) -> None:
    """Adds a forward's tokens without padding. No host waits for the device.

    Args:
        chosen: `[n, k]`, the experts of this rank's tokens, numbered over all ranks.
        num_experts: E of the layer, over all ranks.
    """
    if experts not in _TOKENS_OF:
        _TOKENS_OF[experts] = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    marks = _IS_TOKEN.get(experts)
    if marks is None or len(marks) != len(chosen):  # a forward outside of the engine, which marks every batch
        ones = torch.ones_like(chosen, dtype=torch.int64)
    else:
        ones = marks[:, None].expand_as(chosen)
    _TOKENS_OF[experts].scatter_add_(0, chosen.flatten().long(), ones.flatten())


def reset_token_counts(model: nn.Module) -> None:
    """Begins to count anew."""
    for tokens in _counted(model):
        tokens.zero_()


def measure_expert_load(model: nn.Module, num_sharing: int = 1) -> dict[str, float]:
    """The load of the fullest expert of a layer over the mean expert's, over all ranks; nothing for a model without
    experts that count. A collective.

    A layer that a backward has computed again counts twice, in all of its experts alike.

    Args:
        num_sharing: ranks of an expert-parallel group. If more than one, also the load of the fullest rank in a layer,
            over the mean rank's.
    """
    counted = _counted(model)
    if not counted:
        return {}
    sizes = [len(tokens) for tokens in counted]
    group, num_groups = layout.rank("shards") // num_sharing, layout.size("shards") // num_sharing
    # What each rank is sent by its own group; the other groups' places are filled in by the sum.
    of_ranks = torch.zeros(num_groups, len(counted), num_sharing, dtype=torch.int64, device=counted[0].device)
    of_ranks[group] = torch.stack([tokens.view(num_sharing, -1).sum(1) for tokens in counted])
    numbers = torch.cat([*counted, of_ranks.flatten()]).tolist()
    summed = torch.tensor(layout.sum_over("shards", numbers), dtype=torch.float64)
    of_experts, of_ranks = summed[: sum(sizes)].split(sizes), summed[sum(sizes) :].view(of_ranks.shape)
    loads = torch.stack([tokens.max() / tokens.mean() for tokens in of_experts])
    found = {"expert_load_max": loads.max().item(), "expert_load_mean": loads.mean().item()}
    if num_sharing > 1:
        loads = of_ranks.amax((0, 2)) / of_ranks.mean((0, 2))
        found |= {"expert_rank_load_max": loads.max().item(), "expert_rank_load_mean": loads.mean().item()}
    return found


def _counted(model: nn.Module) -> list[Tensor]:
    """By layer, in the model's order."""
    return [_TOKENS_OF[module] for module in model.modules() if module in _TOKENS_OF]


OUR_EXPERTS = "vcore_experts"
"""Name under which Hugging Face models find `experts_forward`."""


EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Grouped matrices `[E, out, in]` that `experts_forward` multiplies by."""


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of what each token's experts give of it, `[n, H]`; dual where an input or a parameter is.

    The router's choice is locally constant: the tangent is that of the experts that the values chose.

    Args:
        experts: a module that transformers' `use_experts_implementation` decorates.
        hidden_states: `[n, H]`.
        top_k_index: `[n, k]`, the experts of each token.
        top_k_weights: `[n, k]`.
    """
    count_tokens(experts, top_k_index, experts.num_experts)
    chosen, order = top_k_index.flatten().sort(stable=True)
    x = hidden_states[order // top_k_index.shape[-1]]
    if are_sharded(experts):
        x = run_at_experts(x, chosen, experts.num_experts, partial(_outputs, experts))
    else:
        x = _outputs(experts, x, chosen, expert_offsets(chosen, experts.num_experts))
    x = x * top_k_weights.flatten()[order, None]
    # Not `index_add`, whose order of summation is another one in every call on a GPU.
    return x[order.argsort()].unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


def can_replace_experts(module: nn.Module) -> bool:
    """Whether a module's forward is looked up by name, in transformers' interface for experts."""
    return hasattr(module, "is_transposed")


def uses_our_experts(module: nn.Module) -> bool:
    """Whether a module's forward is `experts_forward`."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return can_replace_experts(module) and implementation == OUR_EXPERTS


def _outputs(experts: Any, x: Tensor, chosen: Tensor, ends: Tensor) -> Tensor:
    """What each row's expert makes of it.

    Args:
        x: `[S, H]`, rows of an expert together.
        chosen: `[S]`, their experts, numbered as in this rank's parameters.
        ends: int32 `[E]`, where the rows of each of those experts end.
    """

    def project(x: Tensor, name: str) -> Tensor:
        adapter = _ADAPTERS_OF.get(experts, {}).get(name)
        weight, options = _parameter(experts, name), {"input_first": experts.is_transposed}
        if adapter is None:
            product = grouped_matmul(x, *weight, ends, **options)
        else:
            product = adapted_grouped_matmul(x, weight[0], adapter, ends, **options)
        return product + getattr(experts, f"{name}_bias")[chosen] if experts.has_bias else product

    x = project(x, "gate_up_proj" if experts.has_gate else "up_proj")
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
    x = project(x, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):  # transformers 5.17 knows none
        x = experts.post_expert_norm(x)
    return x


def grouped_matmul(
    x: Tensor, weight: Tensor, d_weight: Tensor | LowRank | None, ends: Tensor, *, input_first: bool = False
) -> Tensor:
    """Each row of `x` times the matrix of its expert, `[S, out]`: `d(x W) = dx W + x dW`.

    The value has a graph where gradients are enabled, the tangent has none.

    Args:
        x: `[S, in]`, may be dual; rows of an expert lie together.
        weight: `[E, out, in]`, the value.
        d_weight: its tangent, or None.
        ends: int32 `[E]`, where the rows of each expert end; the last is S.
        input_first: `weight` is `[E, in, out]`.
    """
    x, d_x = forward_ad.unpack_dual(x)
    x = x.to(weight.dtype)
    product = _GroupedMatmul.apply(x, weight, ends, input_first)
    with torch.no_grad():
        tangents = [] if d_x is None else [_products(d_x.to(weight.dtype), _input_first(weight, input_first), ends)]
        if isinstance(d_weight, LowRank):
            thin = d_weight if input_first else LowRank(d_weight.right.mT, d_weight.left.mT)
            tangents.append(_products(_products(x, thin.left, ends), thin.right, ends))
        elif d_weight is not None:
            tangents.append(_products(x, _input_first(d_weight, input_first), ends))
    if not tangents:
        return product
    return make_dual(product, tangents[0] if len(tangents) == 1 else tangents[0].add_(tangents[1]))


class ExpertsAdapter(NamedTuple):
    """Low-rank matrices that are added to those of all experts; both may be dual."""

    down: Tensor
    """`[E, r, in]`, or `[E, in, r]` where weights have their inputs first."""
    up: Tensor
    """`[E, out, r]`, or `[E, r, out]`."""
    scaling: float


_ADAPTERS_OF: WeakKeyDictionary[nn.Module, dict[str, ExpertsAdapter]] = WeakKeyDictionary()
"""Of experts that run, by the name of the adapted parameter."""


@contextmanager
def adapted(experts: nn.Module, name: str, adapter: ExpertsAdapter) -> Iterator[None]:
    """A context in which the experts compute with an adapter on their frozen parameter `name`."""
    adapters = _ADAPTERS_OF.setdefault(experts, {})
    adapters[name] = adapter
    try:
        yield
    finally:
        del adapters[name]


def adapted_grouped_matmul(
    x: Tensor, weight: Tensor, adapter: ExpertsAdapter, ends: Tensor, *, input_first: bool = False
) -> Tensor:
    """`x W + scaling (x A) B` of each row's expert, rounded once; shapes as in `grouped_matmul`.

    `x A` becomes r more columns of x, and B as many more rows of W, so that one product sums both.
    """
    down, d_down = forward_ad.unpack_dual(adapter.down)
    inner = adapter.scaling * grouped_matmul(x, down, d_down, ends, input_first=input_first)
    (x, d_x), (inner, d_inner), (up, d_up) = (forward_ad.unpack_dual(t) for t in (x, inner, adapter.up))
    x = x.to(weight.dtype)
    product = _AdaptedGroupedMatmul.apply(x, inner, weight, up, ends, input_first)
    with torch.no_grad():
        tangents = []
        if d_inner is not None:
            d_x = torch.zeros_like(x) if d_x is None else d_x.to(weight.dtype)
            joined = _input_first(_joined(weight, up, input_first), input_first)
            tangents.append(_products(torch.cat([d_x, d_inner], 1), joined, ends))
        if d_up is not None:
            tangents.append(_products(inner, _input_first(d_up, input_first), ends))
    if not tangents:
        return product
    return make_dual(product, tangents[0] if len(tangents) == 1 else tangents[0].add_(tangents[1]))


class _AdaptedGroupedMatmul(torch.autograd.Function):
    """The product of values. What is joined is joined again in the backward: kept, it would be a copy of all
    weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, inner: Tensor, weight: Tensor, up: Tensor, ends: Tensor, input_first: bool
    ) -> Tensor:
        ctx.save_for_backward(inner, weight, up, ends)
        ctx.input_first = input_first
        joined = _input_first(_joined(weight, up, input_first), input_first)
        return _products(torch.cat([x, inner], 1), joined, ends)

    @staticmethod
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor | None, Tensor, None, Tensor | None, None, None]:
        inner, weight, up, ends = ctx.saved_tensors
        joined = _input_first(_joined(weight, up, ctx.input_first), ctx.input_first)
        d_joined = _products(d_product, joined.transpose(1, 2), ends)
        d_x, d_inner = d_joined.split([d_joined.shape[1] - inner.shape[1], inner.shape[1]], 1)
        left, right = (inner, d_product) if ctx.input_first else (d_product, inner)
        return d_x, d_inner, None, _sums_of_outer_products(left, right, ends), None, None


def _joined(weight: Tensor, up: Tensor, input_first: bool) -> Tensor:
    return torch.cat([weight, up], 1 if input_first else 2)


class _GroupedMatmul(torch.autograd.Function):
    """The product of values. A Function, since PyTorch's own would keep a transposed view of the weight for the
    backward, and with it the memory of the gathered parameter, after ZeRO-3 has released it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, input_first: bool) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.input_first = input_first
        return _products(x, _input_first(weight, input_first), ends)

    @staticmethod
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = _products(d_product, _input_first(weight, ctx.input_first).transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            left, right = (x, d_product) if ctx.input_first else (d_product, x)
            d_weight = _sums_of_outer_products(left, right, ends)
        return d_x, d_weight, None, None


def _parameter(experts: nn.Module, name: str) -> tuple[Tensor, Tensor | LowRank | None]:
    """Value and tangent; under an adapter the parameter is computed, and no parameter of the module."""
    if (tangent := read_low_rank_tangent(experts, name)) is not None:
        return getattr(experts, name), tangent
    if name in experts._parameters:
        return unpack_parameter(experts, name)
    return forward_ad.unpack_dual(getattr(experts, name))


def _input_first(weight: Tensor, is_so: bool) -> Tensor:
    return weight if is_so else weight.transpose(1, 2)


def _has_kernel(x: Tensor) -> bool:
    # A rank of divided experts may have no rows at all, for which nobody promises that the kernel works.
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0


def _products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`[S, in]` times `[E, in, out]` by expert."""
    if _has_kernel(x):
        return nn.functional.grouped_mm(x, weight, offs=ends)
    product = x.new_empty(len(x), weight.shape[2])
    for expert, rows in _rows_by_expert(ends):
        product[rows] = x[rows] @ weight[expert]
    return product


def _sums_of_outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`[S, a]` and `[S, b]` to `[E, a, b]`."""
    if _has_kernel(left):
        return nn.functional.grouped_mm(left.t(), right, offs=ends)
    sums = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for expert, rows in _rows_by_expert(ends):
        sums[expert] = left[rows].t() @ right[rows]
    return sums


def _rows_by_expert(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have tokens, and their rows."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


ExpertsInterface.register(OUR_EXPERTS, experts_forward)
