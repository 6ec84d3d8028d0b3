"""The probe direction for Adam: its update's Jacobian times the gradient."""

import torch
from torch import Tensor


def adam_direction(
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """`v_k = J_k g`: the probe direction matched to Adam (appendix "From the SGD Derivation to AdamW Implementation").

    `J_k` is the diagonal Jacobian of Adam's update `d_k(g) = m_hat(g) / (sqrt(v_hat(g)) + eps)`,

        J = c1 / r - c2 * g * m_hat(g) / (r^2 * sqrt(v_hat(g))),   r = sqrt(v_hat(g)) + eps,
        c1 = (1 - beta1) / (1 - beta1^k),   c2 = (1 - beta2) / (1 - beta2^k).

    The paper evaluates it at the main batch's uniform gradient, which would cost one more backward; here it is
    evaluated at the probe gradient itself. `J` is negative for a coordinate whose second moment grows faster with the
    gradient than its first moment, so that a larger gradient makes a smaller step.

    Args:
        gradient: `g`, any shape, fp32.
        exp_avg, exp_avg_sq: the optimizer's buffers `m_{k-1}` and `v_{k-1}`, before this step.
        step: `k`, number of the upcoming step, from 1. At k = 1 Adam's update is the sign of the gradient and `J`
            vanishes up to eps: use the gradient itself then.
    """
    beta1, beta2 = betas
    c1, c2 = (1 - beta1) / (1 - beta1**step), (1 - beta2) / (1 - beta2**step)
    m_hat = (exp_avg * beta1 + gradient * (1 - beta1)) / (1 - beta1**step)
    root = ((exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)) / (1 - beta2**step)).sqrt()
    r = root + eps
    # In this order, because g / root is bounded; otherwise small gradients underflow to 0 / 0. Where root is 0, g is 0.
    reaction = torch.where(root > 0, gradient / torch.where(root > 0, root, 1.0), 0.0) * (m_hat / r) / r
    return (c1 / r - c2 * reaction) * gradient
