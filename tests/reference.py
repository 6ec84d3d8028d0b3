"""The oracle: one VCORE step in plain PyTorch, one process, whole tensors, no code of ours.

Losses by `cross_entropy` over full logits, utilities by forward-mode differentiation of the whole model with its own
eager attention (or by the difference), the budget's temperature by scipy's root finder, clipping and update by torch.
"""

import math

import torch
import torch.autograd.forward_ad as forward_ad
from scipy.optimize import brentq
from torch.func import functional_call
from torch.nn.functional import cross_entropy


class Reference:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @staticmethod
    def rows(batch):
        return list(zip(batch.input_ids, batch.labels, strict=True))

    def losses(self, row, labels, parameters=None):
        """Loss of each supervised token of one row, `[n_i]`."""
        inputs = dict(input_ids=row[None])
        if parameters is None:
            logits = self.model(**inputs).logits[0, :-1]
        else:
            logits = functional_call(self.model, parameters, (), inputs, tie_weights=True).logits[0, :-1]
        loss = cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels[1:], reduction="none")
        return loss[labels[1:] != -100]

    def gradient(self, batch, weights, shares):
        """`sum_i share_i sum_t weights[i][t] * grad l[i,t]`."""
        self.optimizer.zero_grad()
        rows = zip(batch.input_ids, batch.labels, weights, shares, strict=True)
        sum(share * (w * self.losses(row, labels)).sum() for row, labels, w, share in rows if len(w)).backward()
        return {name: p.grad.clone() for name, p in self.trained.items()}

    def utilities(self, batch, direction, epsilon=None):
        with torch.no_grad():
            if epsilon is not None:
                shifted = {name: p - epsilon * direction[name] for name, p in self.trained.items()}
                both = [(self.losses(x, y), self.losses(x, y, shifted)) for x, y in self.rows(batch)]
                return [(at - below) / epsilon for at, below in both]
            with forward_ad.dual_level():
                dual = {name: forward_ad.make_dual(p.detach(), direction[name]) for name, p in self.trained.items()}
                out = [self.losses(x, y, dual) for x, y in self.rows(batch)]
                return [torch.zeros_like(s) if (t := forward_ad.unpack_dual(s).tangent) is None else t for s in out]

    def step(self, main, probe, *, method="vcore", temperature=None, kl_budget=None, normalization="sequence",
             alpha="loss_ratio", cap=1.0, clip=None, epsilon=None):  # fmt: skip
        def uniform(batch):
            return [torch.ones(int(n)) / n for n in (batch.labels[:, 1:] != -100).sum(1)]

        def shares(batch):
            n = (batch.labels[:, 1:] != -100).sum(1)
            return (n / n.sum() if normalization == "token" else (n > 0) / (n > 0).sum()).tolist()

        utilities, weights = None, uniform(main)
        if method == "vcore":
            direction = self.gradient(probe, uniform(probe), shares(probe))
            utilities = self.utilities(main, direction, epsilon)
            weights = [torch.softmax((temperature or tau(s, kl_budget)) * s, 0) if len(s) else s for s in utilities]
        with torch.no_grad():
            losses = [self.losses(x, y) for x, y in self.rows(main)]
            plain = sum(w * loss.mean() for w, loss in zip(shares(main), losses, strict=True) if len(loss))
            tilted = sum(w * (q * loss).sum() for w, q, loss in zip(shares(main), weights, losses, strict=True))
        factor = min(float(plain / tilted), cap or math.inf) if method == "vcore" and alpha == "loss_ratio" else 1.0
        gradient = self.gradient(main, weights, [factor * w for w in shares(main)])
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), clip)
        self.optimizer.step()
        return dict(utilities=utilities, weights=weights, alpha=factor, gradient=gradient, loss=float(plain))


def tau(s, kl_budget):
    """Root of KL(softmax(tau s) || uniform) = budget."""
    s = s.double()

    def excess(t):
        q = torch.softmax(t * s, 0)
        return float((q * (q * len(s)).log()).sum()) - kl_budget

    high = 1.0 / float(s.std())
    while excess(high) < 0:
        high *= 2
    return brentq(excess, 0.0, high, xtol=1e-15, rtol=1e-14)
