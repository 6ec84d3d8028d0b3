"""The update of Adam as a map of the gradient, and its derivative."""

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
    evaluated at the probe gradient itself. `J` may be negative: a coordinate whose second moment grows faster with
    the gradient than its first moment does takes a smaller step.

    Args:
        gradient: `g`, any shape, fp32.
        exp_avg, exp_avg_sq: the optimizer's buffers `m_{k-1}` and `v_{k-1}`, before this step.
        step: `k`, number of the step that is being prepared, from 1. At k = 1 the map is a sign and `J` vanishes up
            to eps: use the gradient itself then.
    """
    beta1, beta2 = betas
    c1, c2 = (1 - beta1) / (1 - beta1**step), (1 - beta2) / (1 - beta2**step)
    m_hat = (exp_avg * beta1 + gradient * (1 - beta1)) / (1 - beta1**step)
    root = ((exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)) / (1 - beta2**step)).sqrt()
    r = root + eps
    # g / root is bounded; in another order, small gradients underflow to 0 / 0. Where the root is 0, so is g.
    reaction = torch.where(root > 0, gradient / torch.where(root > 0, root, 1.0), 0.0) * (m_hat / r) / r
    return (c1 / r - c2 * reaction) * gradient
