"""Effect of a small temperature: the weighted gradient of a sequence is `g + tau * C v` up to O(tau^2).

`g` is the sequence's uniform gradient, `v` the probe direction, `C = mean_t (g_t - g)(g_t - g)^T` the covariance of its
token gradients: with q = softmax(tau * s) and s_t = <v, g_t> the weights are (1 + tau * (s_t - mean s)) / n to first
order. Token gradients are taken one by one in fp64, so that nothing but the remainder is seen.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.helpers import tiny
from vcore_ds.method.weights import gibbs_weights, uniform_weights

NUM_TOKENS = 17


@pytest.fixture(scope="module")
def token_gradients():
    """`[NUM_TOKENS, num_parameters]` of one sequence, and the probe direction `[num_parameters]` from another."""
    model = tiny.qwen3(tied=True, dtype=torch.float64)
    parameters = list(model.parameters())

    def losses(seed):
        tokens = torch.randint(0, tiny.VOCABULARY, (NUM_TOKENS + 1,), generator=torch.Generator().manual_seed(seed))
        return cross_entropy(model(input_ids=tokens[None]).logits[0, :-1], tokens[1:], reduction="none")

    def gradient(loss):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])

    return torch.stack([gradient(loss) for loss in losses(seed=5)]), gradient(losses(seed=6).mean())


def compute_weighted_gradient(gradients, utilities, tau):
    q = gibbs_weights(utilities, torch.zeros(NUM_TOKENS, dtype=torch.long), 1, tau).weights
    return q @ gradients


def test_weighted_gradient_is_uniform_gradient_plus_tau_covariance_times_direction(token_gradients):
    gradients, v = token_gradients
    s = gradients @ v
    g = uniform_weights(torch.zeros(NUM_TOKENS, dtype=torch.long), 1, torch.float64) @ gradients
    covariance_v = (gradients - g).T @ ((gradients - g) @ v) / NUM_TOKENS

    assert torch.equal(compute_weighted_gradient(gradients, s, 0.0), g)
    relative_errors = []
    for tau in [1e-2, 1e-3, 1e-4]:  # in units of 1 / (standard deviation of s): there the tilt is small
        tau = tau / float(s.std())
        change = compute_weighted_gradient(gradients, s, tau) - g
        relative_errors.append(float((change - tau * covariance_v).norm() / (tau * covariance_v).norm()))

    # The remainder is quadratic in tau, so relative to the first-order term it falls linearly: ten times each.
    assert relative_errors[0] < 0.05
    assert relative_errors[0] / relative_errors[1] == pytest.approx(10, rel=0.1)
    assert relative_errors[1] / relative_errors[2] == pytest.approx(10, rel=0.1)


def test_tilt_gains_the_variance_of_the_utilities_along_the_direction(token_gradients):
    """`<v, C v> = Var_t(s)`: the first-order decrease that the tilt adds, never negative."""
    gradients, v = token_gradients
    s = gradients @ v
    tau = 1e-4 / float(s.std())
    gained = v @ (compute_weighted_gradient(gradients, s, tau) - gradients.mean(0))
    assert float(gained) == pytest.approx(tau * float(s.var(correction=0)), rel=1e-3)
    assert float(gained) > 0
