"""Muon's update, and the probe directions for Muon and Adam, against autograd, an SVD and torch's optimizers."""

import pytest
import torch

from vcore_ds.method.optimizers import AdamStep, adam_direction, blend_momentum, muon_direction, muon_update

BETA = 0.95
SHAPES = [(6, 6), (5, 12), (12, 5), (3, 4, 7)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(32, 48), (48, 32)])
def test_three_steps_are_those_of_torch_optim_muon(shape: tuple[int, int]) -> None:
    """torch.optim.Muon computes the update in bf16, so it is computed in bf16 here; momentum and parameter are fp32."""
    parameter = torch.nn.Parameter(draw(*shape).float())
    ours, momentum = parameter.detach().clone(), torch.zeros(shape)
    optimizer = torch.optim.Muon([parameter], lr=0.1, weight_decay=0.1, momentum=BETA, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        gradient = draw(*shape, seed=step + 1).float()
        parameter.grad = gradient.clone()
        optimizer.step()
        update = muon_update(blend_momentum(gradient, momentum, BETA).bfloat16())
        momentum.lerp_(gradient, 1 - BETA)
        ours.mul_(1 - 0.1 * 0.1).sub_(update, alpha=0.1)
    assert (ours - parameter).norm() < 0.04 * (parameter - draw(*shape).float()).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_muons_update_has_the_singular_vectors_of_the_blend_and_values_of_one(shape: tuple[int, ...]) -> None:
    """By an SVD: the polynomial acts on each singular value separately."""
    blend = draw(*shape)
    u, s, v = torch.linalg.svd(blend, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    expected = 0.2 * max(shape[-2:]) ** 0.5 * (u * s[..., None, :]) @ v
    for scale in (1.0, 1e-6):  # whatever the gradients' scale
        torch.testing.assert_close(muon_update(scale * blend), expected, rtol=1e-9, atol=1e-9)
    assert float(s.min()) > 0.6 and float(s.max()) < 1.3


@pytest.mark.parametrize("shape", SHAPES)
def test_muons_direction_is_the_transposed_jacobian_times_the_gradient(shape: tuple[int, ...]) -> None:
    gradient, momentum, token_gradient = (draw(*shape, seed=seed) for seed in (1, 2, 3))

    def update(g: torch.Tensor) -> torch.Tensor:
        """Muon's update, line by line."""
        moved = BETA * momentum + (1 - BETA) * g
        x = BETA * moved + (1 - BETA) * g
        x = x / x.square().sum((-2, -1), keepdim=True).sqrt()
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return 0.2 * max(shape[-2:]) ** 0.5 * x

    ours = muon_direction(blend_momentum(gradient, momentum, BETA), gradient, BETA)
    _, pull = torch.func.vjp(update, gradient)
    torch.testing.assert_close(ours, pull(gradient)[0], rtol=1e-9, atol=1e-9)
    # Its product with a token's gradient is the change of the update by that gradient, seen from the probe's.
    _, change = torch.func.jvp(update, (gradient,), (token_gradient,))
    torch.testing.assert_close((ours * token_gradient).sum(), (gradient * change).sum(), rtol=1e-9, atol=1e-9)


def test_in_bf16_update_and_direction_stay_close() -> None:
    """The gradient has a decaying spectrum, as those of models do."""
    u, _ = torch.linalg.qr(draw(96, 96, seed=1))
    v, _ = torch.linalg.qr(draw(128, 96, seed=2))
    momentum = 1e-4 * (u / torch.arange(1, 97)) @ v.T
    gradient = momentum + 1e-6 * draw(96, 128, seed=3)
    blend = blend_momentum(gradient, momentum, BETA)

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double() * b).sum() / (a.double().norm() * b.norm()))

    assert cosine(muon_update(blend.bfloat16()), muon_update(blend)) > 0.998
    exact = muon_direction(blend, gradient, BETA)
    assert cosine(muon_direction(blend.bfloat16(), gradient.bfloat16(), BETA), exact) > 0.99


def test_a_zero_gradient_gives_a_zero_update_and_direction() -> None:
    """Experts without tokens have such a gradient."""
    zero = torch.zeros(2, 4, 3)
    assert not muon_update(zero).any() and not muon_direction(zero, zero, BETA).any()


BETAS, EPS = (0.9, 0.95), 1e-8


def make_adam_state(num_steps: int, numel: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    m, v = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for _ in range(num_steps):
        g = torch.randn(numel, generator=generator, dtype=torch.float64)
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
    return m, v


def compute_adam_update(g, m, v, k):
    """`d_k(g)` of the appendix "Explicit Jacobian for Adam", line by line."""
    m_k = BETAS[0] * m + (1 - BETAS[0]) * g
    v_k = BETAS[1] * v + (1 - BETAS[1]) * g * g
    return (m_k / (1 - BETAS[0] ** k)) / ((v_k / (1 - BETAS[1] ** k)).sqrt() + EPS)


@pytest.mark.parametrize("num_steps", [1, 2, 10, 500])
def test_adams_direction_is_the_jacobian_of_the_update_times_the_gradient(num_steps: int) -> None:
    numel, k = 40, num_steps + 1
    m, v = make_adam_state(num_steps, numel, seed=num_steps)
    g = torch.randn(numel, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: compute_adam_update(x, m, v, k), g)
    assert torch.equal(jacobian, jacobian.diagonal().diag())  # each coordinate by itself
    direction = adam_direction(g, m, v, AdamStep(k, BETAS, EPS))
    torch.testing.assert_close(direction, jacobian @ g, rtol=1e-10, atol=1e-12)
    slower = adam_direction(g, m, v, AdamStep(k, BETAS, EPS, rate=0.25))
    torch.testing.assert_close(slower, 0.25 * direction)


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
    direction = adam_direction(g, state["exp_avg"], state["exp_avg_sq"], AdamStep(step, BETAS, EPS))
    torch.testing.assert_close(direction, (forward - backward) / (2 * h), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_and_missing_gradients_give_a_finite_direction_of_adam(dtype: torch.dtype) -> None:
    g = torch.tensor([0.0, 1e-30, 1e-20, -1e-12, 1e-4], dtype=dtype)
    zero = torch.zeros_like(g)
    for v in (zero, torch.full_like(g, 1e-38)):
        direction = adam_direction(g, zero, v, AdamStep(3, BETAS, EPS))
        assert torch.isfinite(direction).all() and direction[0] == 0
