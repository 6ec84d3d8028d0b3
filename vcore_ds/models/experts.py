"""Experts of MoE models as grouped GEMMs with a forward-mode rule, expert parallelism, and token counts per expert.

Hugging Face's MoE models find `experts_forward` by name, as they find attention. Their own implementation uses
PyTorch's grouped GEMM, which has no forward-mode rule, or a fallback that silently drops tangents.

Expert parallelism: each rank of an expert-parallel group has a block of the experts of every MoE layer. A layer needs
three all-to-alls: of the number of rows, of the rows, and of their outputs. Values and tangents share them, and
gradients take the same way back. All ranks of a group take part in all exchanges, even without tokens.

Shapes: n tokens, k experts per token, S = n k rows (one for each token and expert), E experts, H hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from vcore_ds.distributed import layout
from vcore_ds.models.dual_tensors import LowRank, apply_linear_map, make_dual, unpack_weight


def mark_sharded(experts: nn.Module) -> None:
    """Mark an experts module as holding only this rank's shard of the experts."""
    experts._are_sharded = True  # type: ignore[assignment]


def expert_offsets(chosen: Tensor, num_experts: int) -> Tensor:
    """Return the end offsets of each expert's rows, int32 `[E]`, the `offs` of `grouped_mm`, without a host-device
    synchronisation. `chosen [S]` is the expert of each row, sorted."""
    numbers = torch.arange(num_experts, device=chosen.device)
    return torch.searchsorted(chosen, numbers, right=True, out_int32=True)


def run_at_experts(
    x: Tensor, chosen: Tensor, num_experts: int, compute: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Compute the outputs `[S, H]` of the rows' experts on all ranks of the expert-parallel group. A collective over
    `expert`. The rows `x [S, H]` are sorted by expert, `chosen [S]`, of all E. `compute` returns the experts' outputs,
    given rows sorted by expert, their experts counted from this rank's first, and their `expert_offsets`. The result is
    dual if `x` or a parameter is, on any rank of the group."""
    num_ranks = layout.size("expert")
    num_local = num_experts // num_ranks
    counts = expert_offsets(chosen, num_experts).long().diff(prepend=chosen.new_zeros(1)).view(num_ranks, num_local)
    # The ranks agree on whether to send tangents: an idle rank may have none where others do, and the row sizes of the
    # all-to-all would differ.
    is_dual = counts.new_full((num_ranks, 1), forward_ad.unpack_dual(x).tangent is not None)
    received_counts, are_dual = layout.all_to_all("expert", torch.cat([counts, is_dual], 1)).split([num_local, 1], 1)
    # The only host-device synchronisation: the all-to-all takes its sizes from the host.
    sent, received, dual = torch.stack([counts.sum(1), received_counts.sum(1), are_dual[:, 0]]).tolist()
    x = _exchange(x, sent, received, is_dual=any(dual))
    numbers = torch.arange(num_local, device=chosen.device).repeat(num_ranks)
    numbers = numbers.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    local_experts, order = numbers.sort(stable=True)
    y = compute(x[order], local_experts, expert_offsets(local_experts, num_local))
    # Without tangents of the rows, y has one exactly if the parameters have, which is the same on all ranks.
    return _exchange(y[order.argsort()], received, sent, is_dual=forward_ad.unpack_dual(y).tangent is not None)


def _exchange(x: Tensor, sent: list[int], received: list[int], *, is_dual: bool) -> Tensor:
    """All-to-all of rows `[x | dx]` with the given counts per rank."""
    value, tangent = forward_ad.unpack_dual(x)
    if is_dual and tangent is None:
        x = make_dual(value, torch.zeros_like(value))

    def send(value: Tensor, tangent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if tangent is None:
            return layout.exchange_rows("expert", value, sent, received), None
        both = layout.exchange_rows("expert", torch.cat([value, tangent], 1), sent, received)
        value, tangent = (half.contiguous() for half in both.chunk(2, 1))
        return value, tangent

    return apply_linear_map(x, send, lambda gradient: layout.exchange_rows("expert", gradient, received, sent))


_TOKEN_COUNTS: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""By experts module, int64 `[E]` on the device: this rank's tokens routed to each expert since the last reset."""

_IS_TOKEN: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""By experts module, int64 `[n]`: 1 for tokens of the current batch, 0 for padding."""


def mark_padding(experts: Iterable[nn.Module], is_token: Tensor) -> None:
    """Exclude padding from the token counts of the forwards until the next call, also of layers that are recomputed in
    the backward, which count their tokens again. `is_token`: bool `[b, t]`, of this rank's columns, on the device."""
    weights = is_token.flatten().long()
    for module in experts:
        _IS_TOKEN[module] = weights


def count_tokens(experts: nn.Module, chosen: Tensor, num_experts: int) -> None:
    """Count a forward's tokens without padding, without a host-device synchronisation. `chosen [n, k]`: the experts of
    this rank's tokens, of all E."""
    if experts not in _TOKEN_COUNTS:
        _TOKEN_COUNTS[experts] = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    is_token = _IS_TOKEN.get(experts)
    if is_token is None or len(is_token) != len(chosen):  # a forward outside of the engine, which marks every batch
        ones = torch.ones_like(chosen, dtype=torch.int64)
    else:
        ones = is_token[:, None].expand_as(chosen)
    _TOKEN_COUNTS[experts].scatter_add_(0, chosen.flatten().long(), ones.flatten())


def reset_token_counts(model: nn.Module) -> None:
    """Set all counts to zero."""
    for tokens in _read_counts(model):
        tokens.zero_()


def measure_expert_load(model: nn.Module, expert_parallel: int = 1) -> dict[str, float]:
    """Measure the routing balance over all ranks. A collective, and a host-device synchronisation.

    Returns maximum over mean load of a layer's experts: maximum and mean over the layers. If the expert-parallel size
    exceeds 1, also for the ranks of a group, which all wait for the most loaded one in each layer's exchange. Empty for
    a model without counts. A layer recomputed in the backward counts twice, for all of its experts alike.
    """
    counts = _read_counts(model)
    if not counts:
        return {}
    sizes = [len(tokens) for tokens in counts]
    group, num_groups = layout.rank("shards") // expert_parallel, layout.size("shards") // expert_parallel
    # Tokens sent to each rank by this rank's group; the sum over all ranks adds the other groups' rows.
    rank_tokens = torch.zeros(num_groups, len(counts), expert_parallel, dtype=torch.int64, device=counts[0].device)
    rank_tokens[group] = torch.stack([tokens.view(expert_parallel, -1).sum(1) for tokens in counts])
    numbers = torch.cat([*counts, rank_tokens.flatten()]).tolist()
    summed = torch.tensor(layout.sum_over("shards", numbers), dtype=torch.float64)
    expert_tokens, rank_tokens = summed[: sum(sizes)].split(sizes), summed[sum(sizes) :].view(rank_tokens.shape)
    loads = torch.stack([tokens.max() / tokens.mean() for tokens in expert_tokens])
    metrics = {"expert_load_max": loads.max().item(), "expert_load_mean": loads.mean().item()}
    if expert_parallel > 1:
        loads = rank_tokens.amax((0, 2)) / rank_tokens.mean((0, 2))
        metrics |= {"expert_rank_load_max": loads.max().item(), "expert_rank_load_mean": loads.mean().item()}
    return metrics


def _read_counts(model: nn.Module) -> list[Tensor]:
    """Return the counts of each MoE layer, in the model's order."""
    return [_TOKEN_COUNTS[module] for module in model.modules() if module in _TOKEN_COUNTS]


OUR_EXPERTS = "vcore_experts"
"""Name under which Hugging Face models find `experts_forward`."""

EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters `[E, out, in]` that `experts_forward` multiplies by."""


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the weighted sum of each token's experts, `[n, H]`; dual if an input or a parameter is. The routing is
    locally constant, so the tangent is that of the chosen experts. `experts`: a module decorated by transformers'
    `use_experts_implementation`; `hidden_states [n, H]`; experts of each token and their weights, `[n, k]`."""
    count_tokens(experts, top_k_index, experts.num_experts)
    chosen, order = top_k_index.flatten().sort(stable=True)
    x = hidden_states[order // top_k_index.shape[-1]]
    if getattr(experts, "_are_sharded", False):
        x = run_at_experts(x, chosen, experts.num_experts, partial(_compute_experts, experts))
    else:
        x = _compute_experts(experts, x, chosen, expert_offsets(chosen, experts.num_experts))
    x = x * top_k_weights.flatten()[order, None]
    # Not `index_add`, whose order of summation is nondeterministic on a GPU.
    return x[order.argsort()].unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


def can_replace_experts(module: nn.Module) -> bool:
    """Whether a module looks up its forward by name in transformers' `ExpertsInterface`."""
    return hasattr(module, "is_transposed")


def uses_our_experts(module: nn.Module) -> bool:
    """Whether a module's forward is `experts_forward`."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return can_replace_experts(module) and implementation == OUR_EXPERTS


def _compute_experts(experts: Any, x: Tensor, chosen: Tensor, offsets: Tensor) -> Tensor:
    """Compute the output of each row's expert. `x [S, H]`, sorted by expert; `chosen [S]`: their experts, as indices
    into this rank's parameters; `offsets`: see `expert_offsets`."""

    def project(x: Tensor, name: str) -> Tensor:
        adapter = _ADAPTERS.get(experts, {}).get(name)
        weight, options = _unpack_weight(experts, name), {"is_transposed": experts.is_transposed}
        if adapter is None:
            output = grouped_matmul(x, *weight, offsets, **options)
        else:
            output = adapted_grouped_matmul(x, weight[0], adapter, offsets, **options)
        return output + getattr(experts, f"{name}_bias")[chosen] if experts.has_bias else output

    x = project(x, "gate_up_proj" if experts.has_gate else "up_proj")
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
    x = project(x, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):  # not in transformers 5.17
        x = experts.post_expert_norm(x)
    return x


def grouped_matmul(
    x: Tensor, weight: Tensor, d_weight: Tensor | LowRank | None, offsets: Tensor, *, is_transposed: bool = False
) -> Tensor:
    """Multiply each row of `x [S, in]`, which may be dual and is sorted by expert, by the weight of its expert, to `[S,
    out]`: `d(x W) = dx W + x dW`. `weight`: the values `[E, out, in]`, with `is_transposed` `[E, in, out]`; `offsets`:
    see `expert_offsets`. The value is differentiable if gradients are enabled; the tangent is not recorded."""
    x, d_x = forward_ad.unpack_dual(x)
    x = x.to(weight.dtype)
    output = _GroupedMatmul.apply(offsets, is_transposed, x, weight)
    with torch.no_grad():
        tangents = (
            [] if d_x is None else [_grouped_mm(d_x.to(weight.dtype), _as_in_out(weight, is_transposed), offsets)]
        )
        if isinstance(d_weight, LowRank):
            factors = d_weight if is_transposed else LowRank(d_weight.right.mT, d_weight.left.mT)
            tangents.append(_grouped_mm(_grouped_mm(x, factors.left, offsets), factors.right, offsets))
        elif d_weight is not None:
            tangents.append(_grouped_mm(x, _as_in_out(d_weight, is_transposed), offsets))
    return _attach_sum(output, tangents)


def _attach_sum(value: Tensor, tangents: list[Tensor]) -> Tensor:
    """Make a dual tensor with the sum of up to two tangents, which it overwrites; `value` if there are none."""
    if not tangents:
        return value
    return make_dual(value, tangents[0] if len(tangents) == 1 else tangents[0].add_(tangents[1]))


class ExpertsAdapter(NamedTuple):
    """LoRA factors for one weight of all experts; both may be dual."""

    down: Tensor  # A: `[E, r, in]`, or `[E, in, r]` if the weights are transposed
    up: Tensor  # B: `[E, out, r]`, or `[E, r, out]` if the weights are transposed
    scaling: float


_ADAPTERS: WeakKeyDictionary[nn.Module, dict[str, ExpertsAdapter]] = WeakKeyDictionary()
"""By running experts module, and by the name of the adapted parameter."""


@contextmanager
def use_adapter(experts: nn.Module, name: str, adapter: ExpertsAdapter) -> Iterator[None]:
    """Context in which the experts compute with an adapter on their frozen parameter `name`."""
    adapters = _ADAPTERS.setdefault(experts, {})
    adapters[name] = adapter
    try:
        yield
    finally:
        del adapters[name]


def adapted_grouped_matmul(
    x: Tensor, weight: Tensor, adapter: ExpertsAdapter, offsets: Tensor, *, is_transposed: bool = False
) -> Tensor:
    """Compute `x W + scaling (x A) B` for each row's expert, rounded once; shapes as in `grouped_matmul`.

    `x A` is appended to the columns of x, and B to the rows of W, so that one grouped GEMM sums both.
    """
    down, d_down = forward_ad.unpack_dual(adapter.down)
    inner = adapter.scaling * grouped_matmul(x, down, d_down, offsets, is_transposed=is_transposed)
    (x, d_x), (inner, d_inner), (up, d_up) = (forward_ad.unpack_dual(t) for t in (x, inner, adapter.up))
    x = x.to(weight.dtype)
    output = _GroupedMatmul.apply(offsets, is_transposed, x, weight, inner, up)
    with torch.no_grad():
        tangents = []
        if d_inner is not None:
            d_x = torch.zeros_like(x) if d_x is None else d_x.to(weight.dtype)
            joined = _join([weight, up], is_transposed)
            tangents.append(_grouped_mm(torch.cat([d_x, d_inner], 1), joined, offsets))
        if d_up is not None:
            tangents.append(_grouped_mm(inner, _as_in_out(d_up, is_transposed), offsets))
    return _attach_sum(output, tangents)


class _GroupedMatmul(torch.autograd.Function):
    """The sum of `x_i W_i` for `factors` x_1, W_1, x_2, W_2, ... in one grouped GEMM.

    The backward joins the weights again: saving the result would keep a copy of them. PyTorch's own backward would save
    a transposed view of a weight, and so keep the memory of the gathered parameter after ZeRO-3 has released it.
    """

    @staticmethod
    def forward(ctx: Any, offsets: Tensor, is_transposed: bool, *factors: Tensor) -> Tensor:
        xs, weights, needs_weights = factors[::2], factors[1::2], ctx.needs_input_grad[3::2]
        ctx.is_transposed, ctx.widths = is_transposed, [x.shape[1] for x in xs]
        saved = [x if needed else None for x, needed in zip(xs, needs_weights, strict=True)]
        ctx.save_for_backward(offsets, *weights, *saved)
        x = xs[0] if len(xs) == 1 else torch.cat(xs, 1)
        return _grouped_mm(x, _join(weights, is_transposed), offsets)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        offsets, *saved = ctx.saved_tensors
        weights, xs = saved[: len(ctx.widths)], saved[len(ctx.widths) :]
        d_xs: Sequence[Tensor | None] = [None] * len(xs)
        if any(ctx.needs_input_grad[2::2]):
            d_joined = _grouped_mm(d_output, _join(weights, ctx.is_transposed).transpose(1, 2), offsets)
            d_xs = d_joined.split(ctx.widths, 1)
        gradients: list[Tensor | None] = []
        for x, d_x in zip(xs, d_xs, strict=True):
            left, right = (x, d_output) if ctx.is_transposed else (d_output, x)
            gradients += [d_x, None if x is None else _grouped_mm_of_transposed(left, right, offsets)]
        return None, None, *gradients


def _join(weights: tuple[Tensor, ...] | list[Tensor], is_transposed: bool) -> Tensor:
    """Concatenate weights to `[E, sum of in, out]`."""
    return _as_in_out(weights[0] if len(weights) == 1 else torch.cat(weights, 1 if is_transposed else 2), is_transposed)


def _unpack_weight(experts: nn.Module, name: str) -> tuple[Tensor, Tensor | LowRank | None]:
    """Return a weight's value and tangent. Under peft's adapter it is a computed tensor, not a parameter."""
    if name in experts._parameters:
        return unpack_weight(experts, name)
    return forward_ad.unpack_dual(getattr(experts, name))


def _as_in_out(weight: Tensor, is_transposed: bool) -> Tensor:
    return weight if is_transposed else weight.transpose(1, 2)


def _has_kernel(x: Tensor) -> bool:
    # A rank of an expert-parallel group may have no rows; grouped_mm is not documented for empty inputs.
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0


def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply `[S, in]` by `[E, in, out]`, by expert, to `[S, out]`."""
    if _has_kernel(x):
        return nn.functional.grouped_mm(x, weight, offs=offsets)
    output = x.new_empty(len(x), weight.shape[2])
    for expert, rows in _iter_expert_rows(offsets):
        output[rows] = x[rows] @ weight[expert]
    return output


def _grouped_mm_of_transposed(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the transpose of `[S, a]` by `[S, b]`, by expert, to `[E, a, b]`: gradients of weights."""
    if _has_kernel(left):
        return nn.functional.grouped_mm(left.t(), right, offs=offsets)
    sums = left.new_zeros(len(offsets), left.shape[1], right.shape[1])
    for expert, rows in _iter_expert_rows(offsets):
        sums[expert] = left[rows].t() @ right[rows]
    return sums


def _iter_expert_rows(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, and their rows."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


ExpertsInterface.register(OUR_EXPERTS, experts_forward)
