"""The oracle: one VCORE step in plain PyTorch, in one process, with unsharded tensors and no code of the package.

Losses by `cross_entropy` over full logits, utilities by forward-mode differentiation of the whole model with eager
attention (or by finite differences), the budget's temperature by scipy's root finder, clipping and update by torch.
"""

import math

import torch
import torch.autograd.forward_ad as forward_ad
from scipy.optimize import brentq
from torch.func import functional_call
from torch.nn.functional import cross_entropy, kl_div, log_softmax


class Muon(torch.optim.Optimizer):
    """Muon on the matrices of the layers and AdamW on the rest, in fp64. Muon applies the polynomial of the
    Newton-Schulz iterations to the singular values of an SVD."""

    def __init__(self, named, lr, momentum, betas, eps, weight_decay=0.0):
        self.matrices = {p: None for name, p in named if ".layers." in name and p.ndim > 1}
        self.adamw = torch.optim.AdamW(
            [{"params": [p for _, p in named if p not in self.matrices and (p.ndim > 1) == is_matrix],
              "weight_decay": weight_decay * is_matrix} for is_matrix in (True, False)],
            lr=lr, betas=betas, eps=eps,
        )  # fmt: skip
        super().__init__(list(self.matrices), dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @staticmethod
    def blend(gradient, momentum, beta):
        return beta * (beta * momentum + (1 - beta) * gradient) + (1 - beta) * gradient

    @staticmethod
    def orthogonalize(x):
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        s = s / s.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-7)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return 0.2 * max(x.shape[-2:]) ** 0.5 * (u * s[..., None, :]) @ v

    @torch.no_grad()
    def step(self):
        self.adamw.step()
        (group,) = self.param_groups
        for p in group["params"]:
            gradient, beta = p.grad.double(), group["momentum"]
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(gradient))
            update = self.orthogonalize(self.blend(gradient, momentum, beta))
            momentum.mul_(beta).add_((1 - beta) * gradient)
            p.copy_(p.double() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update)

    def zero_grad(self):
        super().zero_grad()
        self.adamw.zero_grad()

    def direction(self, parameter, gradient):
        """`J^T g`, by autograd through the iterations; None before the first step."""
        if not self.state[parameter]:
            return None
        (group,), g = self.param_groups, gradient.double().requires_grad_()
        x = self.blend(g, self.state[parameter]["momentum"], group["momentum"])
        x = x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp_min(1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        (pulled,) = torch.autograd.grad(0.2 * max(x.shape[-2:]) ** 0.5 * x, g, gradient.double())
        return pulled.to(parameter.dtype)


def differentiate_padding(model):
    """Make autograd differentiate `model` with respect to all rows of its embeddings, as forward mode does."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


class Reference:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = differentiate_padding(model), optimizer
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.start = {name: p.detach().clone() for name, p in self.trained.items()}
        self.direction = {name: torch.zeros_like(p) for name, p in self.trained.items()}

    @staticmethod
    def targets(batch):
        """Supervised tokens of each row, `[n_i]`."""
        return [labels[labels != -100] for labels in batch.labels[:, 1:]]

    def logits(self, batch, parameters=None):
        """Logits of the supervised tokens of each row, `[n_i, V]`.

        One forward of all rows: they are padded on the right, which causal attention does not see.
        """
        inputs = dict(input_ids=batch.input_ids)
        if parameters is None:
            logits = self.model(**inputs).logits[:, :-1]
        else:
            logits = functional_call(self.model, parameters, (), inputs, tie_weights=True).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return [row[labels != -100] for row, labels in zip(logits, batch.labels[:, 1:], strict=True)]

    def losses(self, batch, parameters=None):
        """Loss of each supervised token of each row, `[n_i]`."""
        pairs = zip(self.logits(batch, parameters), self.targets(batch), strict=True)
        return [cross_entropy(logits, targets, reduction="none") for logits, targets in pairs]

    def divergences(self, batch):
        """`KL(model without adapters || model)` of each supervised token of each row, as LLaMA-Factory computes it.

        In fp64: it is the small difference of two large sums.
        """
        with torch.no_grad(), self.model.disable_adapter():
            bases = [log_softmax(logits.double(), -1) for logits in self.logits(batch)]
        pairs = zip(self.logits(batch), bases, strict=True)
        return [kl_div(log_softmax(x.double(), -1), base.exp(), reduction="none").sum(-1) for x, base in pairs]

    def gradient(self, batch, weights, shares, kl_weight=0.0):
        """`sum_i share_i (sum_t weights[i][t] * grad l[i,t] + kl_weight * mean_t grad kl[i,t])`."""
        self.optimizer.zero_grad()
        divergences = self.divergences(batch) if kl_weight else [torch.zeros_like(w) for w in weights]
        rows = zip(self.losses(batch), divergences, weights, shares, strict=True)
        sum(
            share * ((w * losses).sum() + kl_weight * divergence.mean())
            for losses, divergence, w, share in rows
            if len(w)
        ).backward()
        return {name: p.grad.clone() for name, p in self.trained.items()}

    @torch.no_grad()
    def factors(self, batch, method, min_probability):
        """Factors of the tokens' uniform weights, from all probabilities, in fp64; `[n_i]` of each row."""
        pairs = zip(self.logits(batch), self.targets(batch), strict=True)
        return [self.factors_of_row(logits, targets, method, min_probability) for logits, targets in pairs]

    @staticmethod
    def factors_of_row(logits, targets, method, min_probability):
        log_p = log_softmax(logits.double(), -1)
        target_probabilities = log_p.gather(1, targets[:, None])[:, 0].exp()
        if method in ("dft", "asft"):
            factors = target_probabilities
        elif method == "custom":  # `weightings.focal`, gamma 2
            factors = (1 - target_probabilities) ** 2
        elif method == "profit":
            factors = (target_probabilities >= min_probability).double()
        elif method == "deft":
            a = log_p.exp().square().sum(-1)
            factors = target_probabilities**a * a / (a + 1e-6)
        elif method == "eaft":
            top = log_p.sort(-1, descending=True).values[:, :20].exp()
            top = top / top.sum(-1, keepdim=True)
            factors = -(top * top.log()).sum(-1) / math.log(20)
        else:
            factors = torch.ones_like(target_probabilities)
        return factors.to(logits.dtype)

    def utilities(self, batch, direction, epsilon=None):
        with torch.no_grad():
            if epsilon is not None:
                shifted = {name: p - epsilon * direction[name] for name, p in self.trained.items()}
                both = zip(self.losses(batch), self.losses(batch, shifted), strict=True)
                return [(loss - shifted_loss) / epsilon for loss, shifted_loss in both]
            with forward_ad.dual_level():
                dual = {name: forward_ad.make_dual(p.detach(), direction[name]) for name, p in self.trained.items()}
                out = self.losses(batch, dual)
                return [torch.zeros_like(s) if (t := forward_ad.unpack_dual(s).tangent) is None else t for s in out]

    def jacobian_times(self, gradient):
        """`J^T g`, with the Jacobian by autograd through the update of Adam, as its paper writes it, or of Muon; g
        itself before the first step."""
        muon, products = self.optimizer if isinstance(self.optimizer, Muon) else None, {}
        adam = self.optimizer if muon is None else muon.adamw
        group = adam.param_groups[0]
        (b1, b2), eps = group["betas"], group["eps"]
        for name, parameter in self.trained.items():
            if muon is not None and parameter in muon.matrices:
                products[name] = muon.direction(parameter, gradient[name])
                continue
            state = adam.state.get(parameter)
            if not state:
                return gradient
            k, g = int(state["step"]) + 1, gradient[name].double().requires_grad_()
            m = (b1 * state["exp_avg"].double() + (1 - b1) * g) / (1 - b1**k)
            v = (b2 * state["exp_avg_sq"].double() + (1 - b2) * g * g) / (1 - b2**k)
            (diagonal,) = torch.autograd.grad((m / (v.sqrt() + eps)).sum(), g)
            product = torch.where(g == 0, 0.0, diagonal * g)  # autograd's square root has no slope at 0
            products[name] = product.detach().to(parameter.dtype)
        return products

    def take(self, gradient, clip, optimizer):
        """Set the direction from a gradient."""
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        if clip is not None and norm > clip:
            gradient = {name: g * (clip / norm) for name, g in gradient.items()}
        self.direction = gradient if optimizer == "sgd" else self.jacobian_times(gradient)

    def reference_losses(self, batch):
        """Losses of the model without its adapters, or with the parameters from which training started."""
        with torch.no_grad():
            if hasattr(self.model, "disable_adapter"):
                with self.model.disable_adapter():
                    return self.losses(batch)
            return self.losses(batch, self.start)

    def measured(self, batch, method, direction, *, temperature, kl_budget, epsilon, kept, min_probability):
        """Losses, entropies, utilities and weights of each row of a batch that is not trained on."""
        rows = []
        utilities = None if direction is None else self.utilities(batch, direction, epsilon)
        before = self.reference_losses(batch) if method == "iw_sft" else None
        factors = self.factors(batch, method, min_probability)
        with torch.no_grad():
            pairs = list(zip(self.losses(batch), self.logits(batch), strict=True))
        for i, (losses, logits) in enumerate(pairs):
            log_p = torch.log_softmax(logits.double(), -1)
            weights = factors[i] / len(losses)
            if method == "vcore":
                s = utilities[i]
                weights = tilted(s, weights, temperature or tau(s, weights, kl_budget))
            elif method == "iw_sft":
                weights = weights * (before[i] - losses).mean().exp().clamp(0, 16)
            elif method == "random":
                weights = kept[i] / kept[i].sum()
            elif method == "stored":
                weights = weights * kept[i]
            entropies = -(log_p.exp() * log_p).sum(-1)
            rows.append(dict(losses=losses, entropies=entropies, utilities=utilities and utilities[i], weights=weights))
        return rows

    def step(self, main, probe, *, method="vcore", temperature=None, kl_budget=None, normalization="sequence",
             alpha="loss_ratio", cap=1.0, clip=None, epsilon=None, kept=None, optimizer="sgd", probe_clip=None,
             groups=None, base_measure="uniform", batch_kl_budget=None, probe_loss="uniform",
             followed=None, followed_kept=None, kl_weight=0.0, min_probability=None):  # fmt: skip
        """`kept`: for each row, `[n_i]`: a mask for method `random`, factors of the losses for `stored`. `groups`: the
        rows of each micro-batch, if every micro-batch has a separate alpha. `followed`: rows that are measured after
        the update, along the step's direction, see `measured`."""

        def counts(batch):
            return (batch.labels[:, 1:] != -100).sum(1)

        def uniform(batch):
            return [torch.ones(int(n)) / n for n in counts(batch)]

        def shares(n):
            return (n / n.sum() if normalization == "token" else (n > 0) / (n > 0).sum()).tolist()

        with torch.no_grad():
            losses = self.losses(main)
        utilities, weights, scales = None, uniform(main), shares(counts(main))
        plain_scales = list(scales)
        plain = sum(w * loss.mean() for w, loss in zip(scales, losses, strict=True) if len(loss))
        factors = self.factors(main, method, min_probability)
        weights = [factor * u for factor, u in zip(factors, weights, strict=True)]
        if method == "iw_sft":
            before = self.reference_losses(main)
            ratios = [(r - x).mean().exp().clamp(0, 16) for r, x in zip(before, losses, strict=True)]
            weights = [ratio * u for ratio, u in zip(ratios, weights, strict=True)]
        if method == "random":
            weights = [mask / mask.sum() if len(mask) else mask.float() for mask in kept]
            scales = shares(torch.stack([mask.sum() for mask in kept]))
        if method == "stored":
            weights = [factor * u for factor, u in zip(kept, weights, strict=True)]
        factors, direction = [1.0] * len(losses), None
        if method == "vcore":
            if probe is not None:
                probe_weights = uniform(probe)
                if probe_loss == "dft":
                    with torch.no_grad():
                        probabilities = [torch.exp(-loss) for loss in self.losses(probe)]
                    probe_weights = [p * u for p, u in zip(probabilities, probe_weights, strict=True)]
                self.take(self.gradient(probe, probe_weights, shares(counts(probe))), probe_clip, optimizer)
            direction = self.direction
            utilities = self.utilities(main, direction, epsilon)
            bases = [torch.full_like(loss, 1 / max(len(loss), 1)) for loss in losses]
            if base_measure == "dft":
                bases = [torch.softmax(-loss, 0) for loss in losses]
            weights = [
                tilted(s, b, temperature or tau(s, b, kl_budget)) if len(s) else s
                for s, b in zip(utilities, bases, strict=True)
            ]
            if batch_kl_budget is not None:
                rows = [i for i, s in enumerate(utilities) if len(s)]
                gains = torch.stack([(weights[i] * utilities[i]).sum() for i in rows])
                base = torch.tensor([scales[i] for i in rows])
                shared = tilted(gains, base, tau(gains, base, batch_kl_budget))
                for i, share in zip(rows, shared.tolist(), strict=True):
                    scales[i] = share
            if alpha == "effective_sample_size":
                factors = [1 / math.sqrt(len(q) * float(q.square().sum())) if len(q) else 1.0 for q in weights]
            for rows in groups or [range(len(losses))]:
                rows = [i for i in rows if len(losses[i])]
                if alpha == "loss_ratio":
                    part = [
                        (plain_scales[i] * losses[i].mean(), scales[i] * (weights[i] * losses[i]).sum()) for i in rows
                    ]
                    factor = sum(a for a, _ in part) / sum(b for _, b in part) if rows else 1.0
                elif alpha == "variance":
                    mean = torch.stack([utilities[i].mean() for i in rows]).double()
                    weighted = torch.stack([(weights[i] * utilities[i]).sum() for i in rows]).double()
                    factor = mean.std() / weighted.std() if len(rows) > 1 else 1.0
                else:
                    continue
                for i in rows:
                    factors[i] = min(float(factor), cap or math.inf)
        parts = [w * float((q * x).sum()) for w, q, x in zip(scales, weights, losses, strict=True)]
        anchor, base_kl = 0.0, None
        if method == "asft":
            anchor = kl_weight
            with torch.no_grad():
                base_kl = sum(w * float(x.mean()) for w, x in zip(scales, self.divergences(main), strict=True) if w)
        gradient = self.gradient(main, weights, [f * w for f, w in zip(factors, scales, strict=True)], anchor)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), clip)
        self.optimizer.step()
        measured_followed = followed and self.measured(
            followed, method, direction, temperature=temperature, kl_budget=kl_budget, epsilon=epsilon,
            kept=followed_kept, min_probability=min_probability,
        )  # fmt: skip
        effect = sum(f * x for f, x in zip(factors, parts, strict=True)) / sum(parts)
        return dict(utilities=utilities, weights=weights, alpha=effect, gradient=gradient, loss=float(plain),
                    followed=measured_followed, base_kl=base_kl)  # fmt: skip


def tilted(s, base, tau):
    """`base * exp(tau s)`, normalised."""
    return torch.softmax(base.log() + tau * s, 0)


def tau(s, base, kl_budget):
    """The root of `KL(tilted || base) = kl_budget`; 0 if all utilities are equal."""
    s, base = s.double(), base.double()

    def excess(t):
        q = tilted(s, base, t)
        return float((q * (q / base).log()).sum()) - kl_budget

    if float(s.max() - s.min()) == 0:
        return 0.0
    high = 1.0 / float(s.std())
    while excess(high) < 0:
        high *= 2
    return brentq(excess, 0.0, high, xtol=1e-15, rtol=1e-14)
