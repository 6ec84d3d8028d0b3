r"""Fused linear cross-entropy of each token with its JVP, entropies of the predictions, and their divergence from a
reference model's; all in blocks of tokens.

`l[t] = logsumexp_j(z[t, j]) - z[t, y[t]]` (natural log; `\ell_t` of the paper's Preliminaries). The logits are
`z[t, j] = h[t] . W[j]` (raw logits), or a function of them that the architecture defines (`LogitTransform`).

VCORE needs three properties that no fused loss combines. The gradient must be right for *arbitrary* per-token upstream
gradients, because the weights are known only after the forward (Liger's `reduction="none"` was silently wrong there,
https://github.com/linkedin/Liger-Kernel/issues/968). Exact utilities need the tangent of every token's loss. And
`[tokens, vocab]` must never be materialised: 16,384 tokens of a vocabulary of 151,936 are 9.3 GiB in fp32, and a naive
loss holds two or three such tensors.

A block has some tokens and the entire vocabulary in one matrix multiplication, so no partial sums over the vocabulary
are rounded. The gradient of the hidden states is computed in the forward, up to each token's upstream factor; that of
the weight recomputes logits in the backward, unless the forward keeps the losses' gradients by the logits
(`LossMemory`). On a GPU in half precision a kernel passes over plain logits (`token_loss_kernel`).

With a vocabulary sharded over ranks (`VocabularyShard`), each block combines the normalizers of all shards. The
gradient of the hidden states is the shard's, to be summed over the ranks.

Shapes: N tokens, H hidden size, V vocabulary size, or rows of this rank's vocabulary shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from vcore_ds.models.attention import runs_triton
from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.planning.settings import DEFAULT_LOSS_MEMORY, LossMemory

PredictionStatistic = Literal["entropy", "top_entropy", "concentration"]
"""`entropy`: in nats. `top_entropy`: entropy of the 20 most likely tokens, renormalised, as a share of
its maximum `ln 20` (`ln V` of a smaller vocabulary). `concentration`: `sum_v p(v)^2`. Both are in [0, 1]."""

NUM_TOP_TOKENS = 20
"""K of EAFT (arXiv 2601.02151). Its paper and Axolotl divide the entropy by `ln 20 = 2.996`, as here; its authors' code
and LLaMA-Factory by 3.0."""


@dataclass(frozen=True)
class VocabularyShard:
    """A rank's shard of the output embedding's rows."""

    first: int  # id of the first token
    num_tokens: int  # at least 1; further rows of the weight are padding, which has no probability
    all_gather: Callable[[Tensor], Tensor]  # `[...]` to `[ranks, ...]`

    def locate(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the shard has each target, `[block]`, and its column `[block, 1]`, clamped to the shard."""
        column = targets - self.first
        is_local = (column >= 0) & (column < self.num_tokens)
        return is_local, column.clamp(0, self.num_tokens - 1)[:, None]


@dataclass(frozen=True)
class LogitTransform:
    """Logits as a function of the raw logits x: `softcap * tanh(scale * x / softcap)`, or `scale * x` without a softcap
    (Gemma 2, section 2, https://arxiv.org/abs/2408.00118)."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, raw_logits: Tensor) -> Tensor:
        """Turn raw logits into logits, in place."""
        if self.scale != 1.0:
            raw_logits.mul_(self.scale)
        if self.softcap is not None:
            raw_logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw_logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of each logit by its raw logit."""
        if self.softcap is None:
            return self.scale
        return logits.div(self.softcap).square_().neg_().add_(1.0).mul_(self.scale)


PLAIN = LogitTransform()  # the identity


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    transform: LogitTransform = PLAIN,
    shard: VocabularyShard | None = None,
    weight_tangent: LowRank | None = None,
    memory: LossMemory | None = None,
) -> Tensor:
    """Compute each token's cross-entropy in nats, fp32 (fp64 for fp64 input), `[N]`, of `targets [N]` given the hidden
    states `[N, H]` that predict them; N may be 0. `weight`: output embedding `[V, H]`; `transform`: of the raw logits.

    Differentiable by `hidden` and `weight` in reverse mode and in forward mode: if an input is a dual tensor
    (`torch.autograd.forward_ad`), so is the result; `weight_tangent` is the low-rank tangent of a `weight` that is no
    dual tensor.

    With `shard`, `weight` is a shard of the output embedding. Then the call is a collective with the same result on all
    ranks, over which the caller has to sum the gradient of `hidden`. `memory` does not change a result but by rounding.
    """
    (hidden, d_hidden), (weight, d_weight) = forward_ad.unpack_dual(hidden), forward_ad.unpack_dual(weight)
    tangents = d_hidden, weight_tangent or d_weight
    losses, d_losses, _ = _TokenLoss.apply(
        hidden, weight, targets, transform, shard, *tangents, None, memory or DEFAULT_LOSS_MEMORY
    )
    return losses if d_losses is None else forward_ad.make_dual(losses, d_losses)


def loss_and_statistic(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    statistic: PredictionStatistic,
    *,
    transform: LogitTransform = PLAIN,
    shard: VocabularyShard | None = None,
    memory: LossMemory | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute losses as `token_loss` does and, from the same blocks of logits, a statistic of each prediction, without
    a graph, both `[N]`. No dual tensors."""
    options = transform, shard, None, None, statistic, memory or DEFAULT_LOSS_MEMORY
    losses, _, statistics = _TokenLoss.apply(hidden, weight, targets, *options)
    return losses, statistics


def reference_divergence(
    hidden: Tensor,
    weight: Tensor,
    reference_hidden: Tensor,
    *,
    transform: LogitTransform = PLAIN,
    memory: LossMemory | None = None,
) -> Tensor:
    """Compute `KL(reference || model)` over the vocabulary for each prediction in nats, fp32 (fp64 for fp64 input),
    `[N]`, differentiable by `hidden`. `weight` is that of both models, frozen; `reference_hidden [N, H]` has no graph.
    Takes three more matrix multiplications with `weight`, and three times the block memory of `token_loss`."""
    assert not weight.requires_grad
    divergences: Tensor = _ReferenceDivergence.apply(
        hidden, weight, reference_hidden, transform, memory or DEFAULT_LOSS_MEMORY
    )
    return divergences


def compute_raw_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute the raw logits `[N, V]` of `hidden [N, H]` in the precision of `token_loss`, unblocked."""
    return _matmul_t(hidden, weight)


def _block_size(weight: Tensor, memory: LossMemory) -> int:
    return max(1, memory.block_bytes // (4 * weight.shape[0]))


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _matmul_t(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` in fp32 (fp64 for fp64)."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        # Logits rounded to bf16 would be off by about 0.06 nats at a logit of 20.
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return (left @ right.t()).to(_accumulation_dtype(left))


def _add_matmul_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, in fp32 (fp64 for fp64)."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        # Within the matrix multiplication; apart from it, the sum would move 12 bytes for each element in each block.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)


def _logits(hidden: Tensor, weight: Tensor, transform: LogitTransform) -> Tensor:
    return transform.apply_(_matmul_t(hidden, weight))


def _raw_logit_gradient(
    logits: Tensor, log_normalizers: Tensor, targets: Tensor, transform: LogitTransform, shard: VocabularyShard | None
) -> Tensor:
    """Compute the gradient of each token's loss by its raw logits; overwrites `logits`."""
    slope = transform.slope(logits)
    gradient = _subtract_targets_(logits.sub_(log_normalizers[:, None]).exp_(), targets, shard)
    return gradient if transform == PLAIN else gradient.mul_(slope)


class _TokenLoss(torch.autograd.Function):
    """Losses, their tangents (None without tangents of inputs), and a statistic of the predictions (None if it is not
    requested); the last two are not differentiable.

    With `p` the probabilities, `e` the one-hot target and `s` the derivative of the logits by the raw logits (1 without
    a transform), a token's loss has the gradient `q = (p - e) s` by its raw logits, `g = q W` by its hidden state, and
    the tangent

        dl = g . dh + (q dW) . h

    That takes two matrix multiplications, like the tangent of the raw logits, `dh W^T + h dW^T`, but no second
    `[block, V]` except for the slope of a softcap. The backward reuses `g`, scaled by each token's upstream gradient.
    `p - e` is computed in fp32: for a likely token, rounding p to bf16 first would lose the difference. If `p - e` is
    kept in half precision, the weight's gradient is one matrix multiplication, `(p - e)^T (d h)`, with the upstream
    gradients `d`; summed over blocks, it is in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        shard: VocabularyShard | None,
        d_hidden: Tensor | None,
        d_weight: Tensor | LowRank | None,
        statistic: PredictionStatistic | None,
        memory: LossMemory,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.transform, ctx.shard, ctx.memory, rows = transform, shard, memory, _token_rows(weight, shard)
        ctx.uses_kernel = runs_triton(hidden) and transform == PLAIN and shard is None
        losses = torch.empty(len(targets), dtype=_accumulation_dtype(hidden), device=hidden.device)
        log_normalizers = torch.empty_like(losses)
        has_tangent = d_hidden is not None or d_weight is not None
        d_losses, statistics = torch.zeros_like(losses), torch.empty_like(losses)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        has_gradient = has_tangent or hidden_gradient is not None
        kept = None
        if ctx.uses_kernel and memory.keeps_logit_gradients and ctx.needs_input_grad[1]:
            kept = hidden.new_empty(len(targets), len(weight))
        for start in range(0, len(targets), size := _block_size(weight, memory)):
            block = slice(start, start + size)
            logits = _logits(hidden[block], rows, transform)
            d_raw_logits = None
            if ctx.uses_kernel:
                from vcore_ds.models.token_loss_kernel import losses_and_normalizers_kernel

                if kept is not None or has_gradient:
                    d_raw_logits = hidden.new_empty(logits.shape) if kept is None else kept[block]
                parts = logits, targets[block], losses[block], log_normalizers[block]
                losses_and_normalizers_kernel(*parts, d_raw_logits)
            else:
                log_normalizers[block], target_logits = _normalizers_and_targets(logits, targets[block], shard)
                losses[block] = log_normalizers[block] - target_logits
            if statistic is not None:
                statistics[block] = _compute_statistic(statistic, logits, log_normalizers[block], shard)
            if has_gradient:
                if d_raw_logits is None:
                    d_raw_logits = _raw_logit_gradient(logits, log_normalizers[block], targets[block], transform, shard)
                    d_raw_logits = d_raw_logits.to(hidden.dtype)
                if hidden_gradient is not None and d_hidden is None:
                    torch.mm(d_raw_logits, rows, out=hidden_gradient[block])
                elif d_hidden is not None:
                    gradient = _matmul_t(d_raw_logits, rows.t())
                    if hidden_gradient is not None:
                        hidden_gradient[block] = gradient
                    d_losses[block] += gradient.mul_(d_hidden[block]).sum(-1)
                    del gradient
                if isinstance(d_weight, LowRank):  # (q Q) . (B h)
                    by_factors = _matmul_t(d_raw_logits, _token_rows(d_weight.left, shard).t())
                    d_losses[block] += _matmul_t(hidden[block], d_weight.right).mul_(by_factors).sum(-1)
                elif d_weight is not None:
                    by_weight = _matmul_t(d_raw_logits, _token_rows(d_weight, shard).t())
                    d_losses[block] += by_weight.mul_(hidden[block]).sum(-1)
                    del by_weight
            del logits, d_raw_logits  # free this block before the next one is computed
        if has_tangent and shard is not None:
            d_losses = shard.all_gather(d_losses).sum(0)
        ctx.save_for_backward(hidden, weight, targets, log_normalizers, hidden_gradient, kept)
        ctx.mark_non_differentiable(d_losses, statistics)
        return losses, d_losses if has_tangent else None, None if statistic is None else statistics

    @staticmethod
    def backward(ctx: Any, d_losses: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_normalizers, hidden_gradient, kept = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        transform, shard, rows = ctx.transform, ctx.shard, _token_rows(weight, ctx.shard)
        d_hidden = _scale_rows(hidden_gradient, d_losses) if needs_hidden else None
        if not needs_weight:
            return d_hidden, *(None,) * 8
        if kept is not None:
            return d_hidden, kept.t() @ _scale_rows(hidden, d_losses), *(None,) * 7
        # The sum over blocks is in fp32: rounding each block's term to bf16 would bias training.
        d_weight = torch.zeros_like(weight, dtype=_accumulation_dtype(weight))
        for start in range(0, len(targets), size := _block_size(weight, ctx.memory)):
            block = slice(start, start + size)
            logits = _logits(hidden[block], rows, transform)
            if ctx.uses_kernel:
                from vcore_ds.models.token_loss_kernel import logit_gradient_kernel

                d_raw_logits = hidden.new_empty(logits.shape)
                logit_gradient_kernel(logits, targets[block], log_normalizers[block], d_losses[block], d_raw_logits)
            else:
                d_raw_logits = _raw_logit_gradient(logits, log_normalizers[block], targets[block], transform, shard)
                d_raw_logits = d_raw_logits.mul_(d_losses[block, None]).to(hidden.dtype)
            del logits
            _add_matmul_(_token_rows(d_weight, shard), d_raw_logits.t(), hidden[block])
            del d_raw_logits  # free this block before the next one is computed
        return d_hidden, d_weight.to(weight.dtype), *(None,) * 7


class _ReferenceDivergence(torch.autograd.Function):
    """`sum_v q(v) log(q(v) / p(v))`, whose gradient by the logits of p is `p - q`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, reference: Tensor, transform: LogitTransform, memory: LossMemory
    ) -> Tensor:
        divergences = torch.empty(len(hidden), dtype=_accumulation_dtype(hidden), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), size := _block_size(weight, memory)):
            block = slice(start, start + size)
            logits = _logits(hidden[block], weight, transform)
            reference_logits = _logits(reference[block], weight, transform)
            slope = transform.slope(logits)
            normalizers = torch.stack([torch.logsumexp(logits, -1), torch.logsumexp(reference_logits, -1)])
            log_p, log_q = logits.sub_(normalizers[0, :, None]), reference_logits.sub_(normalizers[1, :, None])
            log_ratios = log_q - log_p
            q = log_q.exp_()
            d_logits = log_p.exp_().sub_(q)
            # p - q sums to 0. With it the errors of the normalizers and logits, which are as large as those of the
            # losses while the divergence is much smaller, cancel to first order.
            divergences[block] = log_ratios.mul_(q).add_(d_logits).sum(-1)
            del log_ratios
            if hidden_gradient is not None:
                d_raw_logits = d_logits.mul_(slope).to(hidden.dtype)
                hidden_gradient[block] = _matmul_t(d_raw_logits, weight.t())
                del d_raw_logits
            # Free this block before the next one is computed.
            del logits, reference_logits, log_p, log_q, q, d_logits, slope
        ctx.save_for_backward(hidden_gradient)
        return divergences

    @staticmethod
    def backward(ctx: Any, d_divergences: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_gradient,) = ctx.saved_tensors
        return _scale_rows(hidden_gradient, d_divergences), *(None,) * 4


def _compute_statistic(
    statistic: PredictionStatistic, logits: Tensor, log_normalizers: Tensor, shard: VocabularyShard | None
) -> Tensor:
    """Compute a `PredictionStatistic`, `[block]`."""
    if statistic == "entropy":
        # Not `log_normalizer - mean logit`, which cancels nearly all digits for a likely token.
        size = -(-len(logits) // 8)  # an eighth of the block at a time, which needs little memory beside it
        pairs = zip(logits.split(size), log_normalizers[:, None].split(size), strict=True)
        log_probabilities = (part - normalizers for part, normalizers in pairs)
        entropy = torch.cat([-x.exp().mul_(x).sum(-1) for x in log_probabilities])
        return (entropy if shard is None else shard.all_gather(entropy).sum(0)).clamp_min_(0.0)
    if statistic == "concentration":
        concentration = (logits - log_normalizers[:, None]).exp_().square_().sum(-1)
        return concentration if shard is None else shard.all_gather(concentration).sum(0)
    top = logits.topk(min(NUM_TOP_TOKENS, logits.shape[1]), sorted=False).values
    if shard is not None:
        # All shards need the same shape; -inf has no probability.
        top = torch.nn.functional.pad(top, (0, NUM_TOP_TOKENS - top.shape[1]), value=-torch.inf)
        top = shard.all_gather(top).movedim(0, 1).flatten(1).topk(NUM_TOP_TOKENS, sorted=False).values
    largest = (top > -torch.inf).sum(-1).to(top.dtype).log_()
    return torch.special.entr(torch.softmax(top, -1)).sum(-1) / largest


def _scale_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row of `[N, H]` by one of `[N]`, rounding the products to the dtype of the rows."""
    return torch.mul(rows, factors[:, None], out=torch.empty_like(rows))


def _token_rows(weight: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Return a view of the rows without padding."""
    return weight if shard is None else weight[: shard.num_tokens]


def _normalizers_and_targets(logits: Tensor, targets: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Return the log-normalizer over the entire vocabulary and the target's logit, `[block]` each."""
    log_normalizers = torch.logsumexp(logits, dim=-1)
    if shard is None:
        return log_normalizers, logits.gather(1, targets[:, None]).squeeze(1)
    is_local, column = shard.locate(targets)
    target_logits = torch.where(is_local, logits.gather(1, column).squeeze(1), 0.0)
    shard_normalizers, shard_targets = shard.all_gather(torch.stack([log_normalizers, target_logits])).unbind(1)
    return torch.logsumexp(shard_normalizers, 0), shard_targets.sum(0)


def _subtract_targets_(probabilities: Tensor, targets: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Compute `p - e` of a block, in place."""
    if shard is None:
        probabilities[torch.arange(len(targets), device=targets.device), targets] -= 1.0
        return probabilities
    is_local, column = shard.locate(targets)
    return probabilities.scatter_add_(1, column, -is_local.to(probabilities.dtype)[:, None])
