"""Muon's update and direction against torch.optim.Muon, singular values and autograd."""

import pytest
import torch

from vcore_ds.method.optimizers import blend_momentum, muon_direction, muon_update

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
def test_the_update_has_the_singular_vectors_of_the_blend_and_values_of_one(shape: tuple[int, ...]) -> None:
    """By an SVD: the polynomial acts on each singular value separately."""
    blend = draw(*shape)
    u, s, v = torch.linalg.svd(blend, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    expected = 0.2 * max(shape[-2:]) ** 0.5 * (u * s[..., None, :]) @ v
    torch.testing.assert_close(muon_update(blend), expected, rtol=1e-9, atol=1e-9)
    assert float(s.min()) > 0.6 and float(s.max()) < 1.3


@pytest.mark.parametrize("shape", SHAPES)
def test_the_direction_is_the_transposed_jacobian_times_the_gradient(shape: tuple[int, ...]) -> None:
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
