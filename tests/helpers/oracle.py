"""The oracle: one VCORE step in plain PyTorch, in one process, with whole tensors and no code of the package.

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
        self.start = {name: p.detach().clone() for name, p in self.trained.items()}

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

    def adam_jacobian_times(self, gradient):
        """`J_k g`, the Jacobian by autograd through Adam's update as its paper writes it; g before the first step."""
        group, found = self.optimizer.param_groups[0], {}
        (b1, b2), eps = group["betas"], group["eps"]
        for name, parameter in self.trained.items():
            state = self.optimizer.state.get(parameter)
            if not state:
                return gradient
            k, g = int(state["step"]) + 1, gradient[name].double().requires_grad_()
            m = (b1 * state["exp_avg"].double() + (1 - b1) * g) / (1 - b1**k)
            v = (b2 * state["exp_avg_sq"].double() + (1 - b2) * g * g) / (1 - b2**k)
            (diagonal,) = torch.autograd.grad((m / (v.sqrt() + eps)).sum(), g)
            product = torch.where(g == 0, 0.0, diagonal * g)  # autograd's square root has no slope at 0
            found[name] = product.detach().to(parameter.dtype)
        return found

    def reference_losses(self, batch):
        """Losses under the model without its adapters, or under the parameters that training started from."""
        with torch.no_grad():
            if hasattr(self.model, "disable_adapter"):
                with self.model.disable_adapter():
                    return [self.losses(x, y) for x, y in self.rows(batch)]
            return [self.losses(x, y, self.start) for x, y in self.rows(batch)]

    def step(self, main, probe, *, method="vcore", temperature=None, kl_budget=None, normalization="sequence",
             alpha="loss_ratio", cap=1.0, clip=None, epsilon=None, kept=None, optimizer="sgd", probe_clip=None,
             groups=None):  # fmt: skip
        """Args:
        kept: for method `random`, a mask `[n_i]` for each row.
        groups: the rows of each micro-batch, where every micro-batch has its own alpha.
        """

        def counts(batch):
            return (batch.labels[:, 1:] != -100).sum(1)

        def uniform(batch):
            return [torch.ones(int(n)) / n for n in counts(batch)]

        def shares(n):
            return (n / n.sum() if normalization == "token" else (n > 0) / (n > 0).sum()).tolist()

        with torch.no_grad():
            losses = [self.losses(x, y) for x, y in self.rows(main)]
        utilities, weights, scales = None, uniform(main), shares(counts(main))
        plain = sum(w * loss.mean() for w, loss in zip(scales, losses, strict=True) if len(loss))
        if method == "dft":
            weights = [torch.exp(-loss) / len(loss) for loss in losses]
        if method == "iw_sft":
            before = self.reference_losses(main)
            ratios = [(r - x).mean().exp().clamp(0, 16) for r, x in zip(before, losses, strict=True)]
            weights = [ratio * u for ratio, u in zip(ratios, weights, strict=True)]
        if method == "random":
            weights = [mask / mask.sum() if len(mask) else mask.float() for mask in kept]
            scales = shares(torch.stack([mask.sum() for mask in kept]))
        factors = [1.0] * len(losses)
        if method == "vcore":
            if probe is not None:
                self.direction = self.gradient(probe, uniform(probe), shares(counts(probe)))
                norm = math.sqrt(sum(float(g.square().sum()) for g in self.direction.values()))
                if probe_clip is not None and norm > probe_clip:
                    self.direction = {name: g * (probe_clip / norm) for name, g in self.direction.items()}
                if optimizer == "adam":
                    self.direction = self.adam_jacobian_times(self.direction)
            utilities = self.utilities(main, self.direction, epsilon)
            weights = [torch.softmax((temperature or tau(s, kl_budget)) * s, 0) if len(s) else s for s in utilities]
            if alpha == "effective_sample_size":
                factors = [1 / math.sqrt(len(q) * float(q.square().sum())) if len(q) else 1.0 for q in weights]
            for rows in groups or [range(len(losses))]:
                rows = [i for i in rows if len(losses[i])]
                if alpha == "loss_ratio":
                    part = [(scales[i] * losses[i].mean(), scales[i] * (weights[i] * losses[i]).sum()) for i in rows]
                    factor = sum(a for a, _ in part) / sum(b for _, b in part) if rows else 1.0
                elif alpha == "variance":
                    mean = torch.stack([utilities[i].mean() for i in rows]).double()
                    tilted = torch.stack([(weights[i] * utilities[i]).sum() for i in rows]).double()
                    factor = mean.std() / tilted.std() if len(rows) > 1 else 1.0
                else:
                    continue
                for i in rows:
                    factors[i] = min(float(factor), cap or math.inf)
        tilted = [w * float((q * x).sum()) for w, q, x in zip(scales, weights, losses, strict=True)]
        gradient = self.gradient(main, weights, [f * w for f, w in zip(factors, scales, strict=True)])
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), clip)
        self.optimizer.step()
        effect = sum(f * x for f, x in zip(factors, tilted, strict=True)) / sum(tilted)
        return dict(utilities=utilities, weights=weights, alpha=effect, gradient=gradient, loss=float(plain))


def tau(s, kl_budget):
    """The root of `KL(softmax(tau s) || uniform) = kl_budget`, for one sequence's utilities."""
    s = s.double()

    def excess(t):
        q = torch.softmax(t * s, 0)
        return float((q * (q * len(s)).log()).sum()) - kl_budget

    high = 1.0 / float(s.std())
    while excess(high) < 0:
        high *= 2
    return brentq(excess, 0.0, high, xtol=1e-15, rtol=1e-14)
