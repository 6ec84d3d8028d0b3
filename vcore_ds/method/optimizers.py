"""Muon's update of a weight matrix, and the probe directions matched to Muon and Adam.

Muon: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the scale of Liu et al. 2025 (arXiv
2502.16982): the numbers of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which needs whole matrices and computes
in bf16 only.
"""

from typing import NamedTuple

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
SMALLEST_NORM = 1e-7
"""Norm below which a matrix is not scaled to norm 1."""


def blend_momentum(gradient: Tensor, momentum: Tensor, beta: float) -> Tensor:
    """Nesterov's blend of a gradient and the momentum before it, which Muon orthogonalizes: the momentum becomes
    `M = beta * momentum + (1 - beta) * gradient`, and the blend is `beta * M + (1 - beta) * gradient`."""
    return gradient.lerp(momentum.lerp(gradient, 1 - beta), beta)


def muon_update(blend: Tensor) -> Tensor:
    """The update per unit of learning rate: the blend, orthogonalized by five Newton-Schulz iterations (singular values
    become about 1, between 0.7 and 1.2), times `0.2 sqrt(max(rows, columns))`, which gives it the root mean square of
    AdamW's updates. `blend`: `[..., rows, columns]`, of any floating-point dtype, in which the update is computed."""
    orthogonal = _iterate(_scale_to_one(_transpose_tall(blend, blend))[0])
    return _transpose_tall(blend, orthogonal) * rms_factor(blend.shape)


def muon_direction(blend: Tensor, gradient: Tensor, beta: float) -> Tensor:
    """`J^T g`: the probe direction matched to Muon, with `J` the Jacobian of `muon_update` by the gradient.

    A token's weight changes the update by `J` times the token's gradient, so its effect on the probe's loss is the
    inner product of that gradient with `J^T g`. For Adam `J` is diagonal and `J^T = J`; here they differ (cosine of
    0.76 to 0.999 on random matrices). The iterations apply an odd function to the singular values, the derivative of
    another function of them, so their Jacobian is symmetric, and forward mode computes `J^T g` without a graph.

    `blend`: `[..., rows, columns]`, `blend_momentum` of the gradient, at which `J` is evaluated. `gradient`: `g`, of
    the same shape and dtype. `beta`: the momentum's decay rate; the blend's derivative by the gradient is `1 - beta^2`.
    """
    x, norm = _scale_to_one(_transpose_tall(blend, blend))
    # Scaled to norm 1: matrix multiplications of small gradients would underflow, and the Jacobian is linear.
    d_x, size = _scale_to_one(_transpose_tall(gradient, gradient))
    d_x = _differentiate(x, d_x)
    # The Jacobian of X / |X| is symmetric as well; it comes last, since this is the transpose.
    along = (d_x * x).sum((-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    d_x = torch.where(norm > SMALLEST_NORM, d_x - x * along.to(x.dtype), d_x)
    scale = size / norm.clamp(min=SMALLEST_NORM) * ((1 - beta**2) * rms_factor(blend.shape))
    return _transpose_tall(gradient, d_x * scale)


def rms_factor(shape: torch.Size) -> float:
    """Factor of the orthogonalized matrix; the same for its transpose, so that layers which store the transposed weight
    are trained alike."""
    return 0.2 * float(max(shape[-2:])) ** 0.5


def _iterate(x: Tensor) -> Tensor:
    """Newton-Schulz iterations of `x [..., rows, columns]`, of Frobenius norm at most 1."""
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def _differentiate(x: Tensor, d_x: Tensor) -> Tensor:
    """Derivative of `_iterate` at `x` along `d_x`."""
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram, half = x @ x.mT, d_x @ x.mT
        d_gram = half + half.mT
        square = d_gram @ gram
        polynomial = b * gram + c * (gram @ gram)
        d_x = a * d_x + polynomial @ d_x + (b * d_gram + c * (square + square.mT)) @ x
        x = a * x + polynomial @ x
    return d_x


def _scale_to_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices scaled to a Frobenius norm of 1, and their norms before, `[..., 1, 1]`, in fp32 or fp64."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x / norm.clamp(min=SMALLEST_NORM)).to(x.dtype), norm


def _transpose_tall(matrix: Tensor, x: Tensor) -> Tensor:
    """Transpose `x` if `matrix` has more rows than columns: `x @ x.mT` is smaller for wide matrices."""
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x


class AdamStep(NamedTuple):
    """What the upcoming update of a parameter by Adam depends on, besides gradient and moments. Decoupled weight decay
    does not depend on the gradient."""

    step: int  # number of the upcoming step, from 1
    betas: tuple[float, float]
    eps: float
    rate: float = 1.0  # learning rate, relative to the largest of all parameters


def adam_direction(gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, settings: AdamStep) -> Tensor:
    """`v_k = J_k g`, times the relative rate: the probe direction matched to Adam (appendix "From the SGD Derivation to
    AdamW Implementation").

    `J_k` is the diagonal Jacobian of Adam's update `d_k(g) = m_hat(g) / (sqrt(v_hat(g)) + eps)`,

        J = c1 / r - c2 * g * m_hat(g) / (r^2 * sqrt(v_hat(g))),   r = sqrt(v_hat(g)) + eps,
        c1 = (1 - beta1) / (1 - beta1^k),   c2 = (1 - beta2) / (1 - beta2^k).

    The paper evaluates it at the main batch's uniform gradient, which would cost one more backward; here it is
    evaluated at the probe gradient. `J` is negative where the second moment grows faster with the gradient than the
    first, so that a larger gradient makes a smaller step.

    `gradient`: `g`, any shape, fp32. `exp_avg`, `exp_avg_sq`: the optimizer's buffers `m_{k-1}` and `v_{k-1}`, before
    this step. At the first step of all parameters (k = 1) Adam's update is the sign of the gradient and `J` vanishes up
    to eps: use the gradient itself then.
    """
    step, (beta1, beta2), eps, rate = settings
    c1, c2 = (1 - beta1) / (1 - beta1**step), (1 - beta2) / (1 - beta2**step)
    m_hat = (exp_avg * beta1 + gradient * (1 - beta1)) / (1 - beta1**step)
    root = ((exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)) / (1 - beta2**step)).sqrt()
    r = root + eps
    # In this order, because g / root is bounded; otherwise small gradients underflow to 0 / 0. Where root is 0, g is 0.
    reaction = torch.where(root > 0, gradient / torch.where(root > 0, root, 1.0), 0.0) * (m_hat / r) / r
    return (c1 / r - c2 * reaction) * (gradient if rate == 1.0 else gradient * rate)
