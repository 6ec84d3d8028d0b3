"""The probe direction for Adam against autograd through its written-out update, and against torch.optim.AdamW."""

import pytest
import torch

from vcore_ds.method.optimizers import adam_direction

BETAS, EPS = (0.9, 0.95), 1e-8


def make_state(num_steps: int, numel: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    m, v = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for _ in range(num_steps):
        g = torch.randn(numel, generator=generator, dtype=torch.float64)
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
    return m, v


def compute_update(g, m, v, k):
    """`d_k(g)` of the appendix "Explicit Jacobian for Adam", line by line."""
    m_k = BETAS[0] * m + (1 - BETAS[0]) * g
    v_k = BETAS[1] * v + (1 - BETAS[1]) * g * g
    return (m_k / (1 - BETAS[0] ** k)) / ((v_k / (1 - BETAS[1] ** k)).sqrt() + EPS)


@pytest.mark.parametrize("num_steps", [1, 2, 10, 500])
def test_the_direction_is_the_jacobian_of_the_update_times_the_gradient(num_steps: int) -> None:
    numel, k = 40, num_steps + 1
    m, v = make_state(num_steps, numel, seed=num_steps)
    g = torch.randn(numel, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: compute_update(x, m, v, k), g)
    assert torch.equal(jacobian, jacobian.diagonal().diag())  # each coordinate by itself
    direction = adam_direction(g, m, v, step=k, betas=BETAS, eps=EPS)
    torch.testing.assert_close(direction, jacobian @ g, rtol=1e-10, atol=1e-12)


def test_the_direction_is_the_derivative_of_adamws_real_step() -> None:
    """theta moves by -lr * d_k(g); along g, d_k changes by J g, here by a central difference of AdamW's real step."""
    numel, learning_rate, h = 30, 0.5, 1e-6
    gradients = torch.randn(4, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def measure_update(last_gradient: torch.Tensor) -> tuple[torch.Tensor, dict]:
        parameter = torch.zeros(numel, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.AdamW([parameter], lr=learning_rate, betas=BETAS, eps=EPS, weight_decay=0.0)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        state = {key: optimizer.state[parameter][key].clone() for key in ("exp_avg", "exp_avg_sq", "step")}
        before = parameter.detach().clone()
        parameter.grad = last_gradient
        optimizer.step()
        return (before - parameter.detach()) / learning_rate, state

    g = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    forward, state = measure_update((1 + h) * g)
    backward, _ = measure_update((1 - h) * g)
    step = int(state["step"]) + 1
    direction = adam_direction(g, state["exp_avg"], state["exp_avg_sq"], step=step, betas=BETAS, eps=EPS)
    torch.testing.assert_close(direction, (forward - backward) / (2 * h), rtol=1e-5, atol=1e-7)


def test_the_direction_matches_numbers_worked_out_by_hand() -> None:
    """k = 2, m = v = 0 before (a parameter that had no gradient): d = c1 g / (sqrt(c2) |g| + eps), a sign, so J g = 0.
    With v = 1 and g = 0.1 in one coordinate the numbers are worked out below."""
    zero = torch.zeros(1, dtype=torch.float64)
    g = torch.tensor([0.1], dtype=torch.float64)
    assert float(adam_direction(g, zero, zero, step=2, betas=BETAS, eps=EPS).abs()) < 1e-6
    # c1 = 0.1/0.19, c2 = 0.05/0.0975; m_hat = 0.01/0.19; v_hat = (0.95 + 0.05 * 0.01)/0.0975 = 9.748718, r = 3.122294
    # J = c1/r - c2 g m_hat/(r^2 sqrt(v_hat)) = 0.168570 - 0.0000887 = 0.168481; times g
    direction = adam_direction(g, zero, torch.ones(1, dtype=torch.float64), step=2, betas=BETAS, eps=EPS)
    assert float(direction) == pytest.approx(0.0168481, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_and_missing_gradients_give_a_finite_direction(dtype: torch.dtype) -> None:
    g = torch.tensor([0.0, 1e-30, 1e-20, -1e-12, 1e-4], dtype=dtype)
    zero = torch.zeros_like(g)
    for v in (zero, torch.full_like(g, 1e-38)):
        direction = adam_direction(g, zero, v, step=3, betas=BETAS, eps=EPS)
        assert torch.isfinite(direction).all() and direction[0] == 0
