r"""Per-token cross-entropy from hidden states, a block of tokens at a time; and the entropy of the predictions.

`l[t] = logsumexp_j(z[t, j]) - z[t, y[t]]` (natural log; `\ell_t` of the paper's Preliminaries). Its logits are the
products `z[t, j] = h[t] . W[j]`, or what the architecture makes of them (`LogitTransform`).

Why our own: VCORE needs three things together that no fused loss offers. The gradient must be right for *arbitrary*
per-token upstream gradients, because the weights are known only after the forward (Liger's `reduction="none"` was
silently wrong there, https://github.com/linkedin/Liger-Kernel/issues/968). The tangent of every token's loss is needed
for exact utilities. And `[tokens, vocab]` must never exist whole: 16,384 tokens of a 151,936-word vocabulary are 9.3
GiB in fp32, and a naive loss holds two or three of them.

The blocks run over tokens with the whole vocabulary in one product, so no partial sums over the vocabulary are rounded.
The gradient by the hidden states is made in the forward, up to the upstream factor of each token; only that of the
weight recomputes logits in the backward.

Where ranks have a part of the vocabulary each (`VocabularyShard`), every block's normalizer is put together from those
of the parts, and the gradient by the hidden states is that of this part: its sum over the ranks is the whole one.

Shapes: N tokens, H hidden size, V vocabulary size, or the rows that this rank has of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.planning.memory import LOSS_BLOCK_BYTES


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens whose rows of the output embedding this rank has."""

    first: int
    """Id of the first of them."""
    num_tokens: int
    """At least 1; rows of the weight beyond are padding, which has no probability."""
    gather: Callable[[Tensor], Tensor]
    """`[...]` of each rank to `[ranks, ...]`, the same on all of them; a collective."""


@dataclass(frozen=True)
class LogitTransform:
    """Logits `softcap * tanh(scale * x / softcap)` of the products x with the output embedding; `scale * x` without a
    softcap (Gemma 2, section 2, https://arxiv.org/abs/2408.00118)."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, products: Tensor) -> Tensor:
        """The logits, in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)
        return products

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of each logit by its product, from the logit itself."""
        if self.softcap is None:
            return self.scale
        return logits.div(self.softcap).square_().neg_().add_(1.0).mul_(self.scale)


PLAIN = LogitTransform()
"""The products are the logits."""


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    transform: LogitTransform = PLAIN,
    part: VocabularyShard | None = None,
    weight_tangent: LowRank | None = None,
) -> Tensor:
    """Cross-entropy in nats of each token, fp32 (fp64 for fp64 input), shape `[N]`.

    Differentiable in reverse mode by `hidden`, `weight` and `bias`, and in forward mode: where an input is a dual
    tensor (`torch.autograd.forward_ad`), the result is one too.

    Args:
        hidden: `[N, H]`, the hidden states that predict the targets. N may be 0.
        weight: `[V, H]`, output embedding.
        targets: `[N]`, int64 in `[0, V)`.
        bias: `[V]` or None; added before the transform.
        transform: what the architecture does to the products before the softmax.
        part: where `weight` is a part of the output embedding, without a bias; None for all of it. The result is then
            the same on all ranks, and a collective; the gradient by `hidden` is to be summed over them.
        weight_tangent: tangent of a `weight` that is no dual tensor.
    """
    tangents: list[Tensor | LowRank | None] = [None, None, None]
    if forward_ad._current_level >= 0:
        hidden, tangents[0] = forward_ad.unpack_dual(hidden)
        weight, tangents[1] = forward_ad.unpack_dual(weight)
        if bias is not None:
            bias, tangents[2] = forward_ad.unpack_dual(bias)
    tangents[1] = weight_tangent or tangents[1]
    losses, d_losses = _TokenLoss.apply(hidden, weight, bias, targets, transform, part, *tangents)
    return losses if d_losses is None else forward_ad.make_dual(losses, d_losses)


@torch.no_grad()
def token_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transform: LogitTransform = PLAIN,
    part: VocabularyShard | None = None,
) -> Tensor:
    """Entropy in nats of the distribution that predicts each token, fp32 (fp64 for fp64 input), `[N]`, without a graph.

    It takes a second product with `weight`: losses are computed in every step, entropies in a few.

    Args: as for `token_loss`; no dual tensors. With a part the result is the same on all ranks, and a collective.
    """
    rows = _rows(weight, part)
    entropies = torch.empty(len(hidden), dtype=_accumulation_dtype(hidden), device=hidden.device)
    for start in range(0, len(hidden), size := _block_size(weight)):
        block = slice(start, start + size)
        logits = _logits(hidden[block], rows, bias, transform)
        log_normalizers = torch.logsumexp(logits, dim=-1)
        log_probabilities = logits.sub_(log_normalizers[:, None])
        # Not `log_normalizer - mean logit`: of a likely token hardly a digit would be left.
        own = -log_probabilities.exp().mul_(log_probabilities).sum(-1)
        del logits, log_probabilities  # before the next block's are made
        if part is not None:
            # Which part, then which token of it: entropies add up by the chain rule.
            of_parts, own_of_parts = part.gather(torch.stack([log_normalizers, own])).unbind(1)
            log_shares = of_parts - torch.logsumexp(of_parts, 0)
            own = (log_shares.exp() * (own_of_parts - log_shares)).sum(0)
        entropies[block] = own.clamp_min_(0.0)
    return entropies


def compute_raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Logits `[N, V]` of `hidden [N, H]` before any transform, as precise as those of `token_loss`; all at a time."""
    return _logits(hidden, weight, bias, LogitTransform())


def _block_size(weight: Tensor) -> int:
    return max(1, LOSS_BLOCK_BYTES // (4 * weight.shape[0]))


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` in fp32 (fp64 for fp64)."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        # Rounding logits to bf16 costs about 0.06 nats at a logit of 20.
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return (left @ right.t()).to(_accumulation_dtype(left))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    products = _product(hidden, weight)
    return transform.apply_(products if bias is None else products.add_(bias))


def _by_products(
    logits: Tensor,
    log_normalizers: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    part: VocabularyShard | None,
) -> Tensor:
    """Gradient of each token's loss by its products with the output embedding, in place of the logits."""
    slope = transform.slope(logits)
    gradient = _minus_target(logits.sub_(log_normalizers[:, None]).exp_(), targets, part)
    return gradient if transform == PLAIN else gradient.mul_(slope)


class _TokenLoss(torch.autograd.Function):
    """Losses, and their tangents, without a gradient; None where no input has a tangent.

    With `p` the probabilities, `e` the one-hot target and `s` the slope of the logits by the products with the output
    embedding (1 without a transform), a token's loss has the gradient `q = (p - e) s` by these products, `g = q W` by
    its hidden state, and the tangent

        dl = g . dh + (q dW) . h + q . db

    which takes as many products as `dh W^T + h dW^T`, the tangent of the products, and no second `[block, V]` but the
    slope of a softcap. And `g` serves the backward, in which the upstream gradient is a factor of each token. `p - e`
    is made in fp32: where a token is likely, rounding p to bf16 first would lose it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        part: VocabularyShard | None,
        d_hidden: Tensor | None,
        d_weight: Tensor | LowRank | None,
        d_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.transform, ctx.part, rows = transform, part, _rows(weight, part)
        losses = torch.empty(len(targets), dtype=_accumulation_dtype(hidden), device=hidden.device)
        log_normalizers = torch.empty_like(losses)
        has_tangent = any(tangent is not None for tangent in (d_hidden, d_weight, d_bias))
        d_losses = torch.zeros_like(losses) if has_tangent else None
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(targets), size := _block_size(weight)):
            block = slice(start, start + size)
            logits = _logits(hidden[block], rows, bias, transform)
            log_normalizers[block], of_targets = _normalizers_and_targets(logits, targets[block], part)
            losses[block] = log_normalizers[block] - of_targets
            if d_losses is not None or by_hidden is not None:
                d_products = _by_products(logits, log_normalizers[block], targets[block], transform, part)
                if d_losses is not None and d_bias is not None:
                    d_losses[block] += d_products @ d_bias.to(d_products.dtype)
                d_products = d_products.to(hidden.dtype)
                if d_hidden is not None or by_hidden is not None:
                    gradient = _product(d_products, rows.t())
                    if by_hidden is not None:
                        by_hidden[block] = gradient
                    if d_losses is not None and d_hidden is not None:
                        d_losses[block] += (gradient * d_hidden[block]).sum(-1)
                if d_losses is not None and isinstance(d_weight, LowRank):  # (q Q) . (B h)
                    inner = _product(hidden[block], d_weight.right)
                    d_losses[block] += (_product(d_products, _rows(d_weight.left, part).t()) * inner).sum(-1)
                elif d_losses is not None and isinstance(d_weight, Tensor):
                    d_losses[block] += (_product(d_products, _rows(d_weight, part).t()) * hidden[block]).sum(-1)
                del d_products
            del logits  # before the next block's are made, or two blocks would be whole at a time
        if d_losses is not None and part is not None:
            d_losses = part.gather(d_losses).sum(0)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizers, by_hidden)
        if d_losses is not None:
            ctx.mark_non_differentiable(d_losses)
        return losses, d_losses

    @staticmethod
    def backward(ctx: Any, d_losses: Tensor, _: None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normalizers, by_hidden = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        transform, part, rows = ctx.transform, ctx.part, _rows(weight, ctx.part)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        # The sum over blocks is kept in fp32: rounding each block's share to bf16 would bias training.
        d_weight = torch.zeros_like(weight, dtype=_accumulation_dtype(weight)) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=_accumulation_dtype(bias)) if needs_bias else None
        for start in range(0, len(targets), size := _block_size(weight)):
            block = slice(start, start + size)
            if d_hidden is not None:
                d_hidden[block] = by_hidden[block] * d_losses[block, None]
            if d_weight is None and d_bias is None:
                continue
            logits = _logits(hidden[block], rows, bias, transform)
            d_products = _by_products(logits, log_normalizers[block], targets[block], transform, part)
            d_products.mul_(d_losses[block, None])
            del logits
            if d_bias is not None:
                d_bias += d_products.sum(0)
            d_products = d_products.to(hidden.dtype)
            if d_weight is not None:
                _rows(d_weight, part).add_(d_products.t() @ hidden[block])
            del d_products  # before the next block's are made
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _rows(weight: Tensor, part: VocabularyShard | None) -> Tensor:
    """The rows that are tokens; a view."""
    return weight if part is None else weight[: part.num_tokens]


def _place(targets: Tensor, part: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Whether this rank has each target, `[block]`, and its column, `[block, 1]`; any column where it does not."""
    column = targets - part.first
    is_own = (column >= 0) & (column < part.num_tokens)
    return is_own, column.clamp(0, part.num_tokens - 1)[:, None]


def _normalizers_and_targets(logits: Tensor, targets: Tensor, part: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """`[block]` each: log of the normalizer over the whole vocabulary, and the target's logit."""
    log_normalizers = torch.logsumexp(logits, dim=-1)
    if part is None:
        return log_normalizers, logits.gather(1, targets[:, None]).squeeze(1)
    is_own, column = _place(targets, part)
    own = torch.where(is_own, logits.gather(1, column).squeeze(1), 0.0)
    of_parts, of_targets = part.gather(torch.stack([log_normalizers, own])).unbind(1)
    return torch.logsumexp(of_parts, 0), of_targets.sum(0)


def _minus_target(probabilities: Tensor, targets: Tensor, part: VocabularyShard | None) -> Tensor:
    """`p - e` of a block, in place."""
    if part is None:
        probabilities[torch.arange(len(targets), device=targets.device), targets] -= 1.0
        return probabilities
    is_own, column = _place(targets, part)
    return probabilities.scatter_add_(1, column, -is_own.to(probabilities.dtype)[:, None])
