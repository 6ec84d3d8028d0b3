"""Both estimators against the derivative of each token loss, on a tiny model in fp64 and one process."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from scipy.stats import spearmanr
from torch import Tensor, nn

from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import IGNORED_LABEL, Batch
from vcore_ds.distributed import layout
from vcore_ds.models.attention import FORWARD_MODE_ATTENTION
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.utility.fused_forward import UnrecordedTangents

EPSILONS = (1e-2, 1e-3, 1e-4, 1e-5)
Parameters = dict[str, Tensor]


@pytest.fixture(params=["full", "full, tied", "lora", "lora, tied"])
def model(request: pytest.FixtureRequest) -> TokenLossModel:
    lora, tied = "lora" in request.param, "tied" in request.param
    model = tiny.token_loss_model(lora=lora, tied=tied, dtype=torch.float64).double().eval()
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            # Hugging Face's norm computes in fp32 whatever the model's dtype, too coarse for an epsilon of 1e-5.
            module.forward = make_exact_rms_norm(module)
    return model


def make_exact_rms_norm(norm: nn.Module):
    return lambda x: norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def read_trained(model: nn.Module) -> Parameters:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def compute_losses(model: TokenLossModel, parameters: Parameters, batch: Batch) -> Tensor:
    return torch.func.functional_call(model, parameters, tiny.inputs(batch))


def compute_direction(model: TokenLossModel, batch: Batch) -> Parameters:
    """The probe direction: gradient of the mean over sequences of the mean token loss."""
    parameters = read_trained(model)
    losses, index = model(*tiny.inputs(batch)), batch.sequence_index()
    loss = (losses / batch.num_supervised_tokens()[index]).sum() / batch.num_sequences
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def run_forward_mode(model: TokenLossModel, direction: Parameters, batch: Batch) -> tuple[Tensor, Tensor]:
    """(losses, utilities) as in the engine: dual parameters, and attention that carries tangents."""
    config = model.base.config
    before, config._attn_implementation = config._attn_implementation, FORWARD_MODE_ATTENTION
    with torch.no_grad(), forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p.detach(), direction[name]) for name, p in read_trained(model).items()}
        losses, utilities = forward_ad.unpack_dual(compute_losses(model, duals, batch))
    config._attn_implementation = before
    return losses, utilities


def iter_token_gradients(model: TokenLossModel, batch: Batch) -> Iterator[tuple[float, list[Tensor]]]:
    """Loss and gradient of each token, from logits of the Hugging Face model."""
    hidden = model.decoder(input_ids=batch.input_ids, use_cache=False).last_hidden_state  # under eager attention
    logits = nn.functional.linear(hidden, model.base.get_output_embeddings().weight)
    for row, column in (batch.labels[:, 1:] != IGNORED_LABEL).nonzero().tolist():
        loss = nn.functional.cross_entropy(logits[row, column], batch.labels[row, column + 1])
        yield (
            float(loss.detach()),
            list(torch.autograd.grad(loss, list(read_trained(model).values()), retain_graph=True)),
        )


def test_forward_mode_gives_the_direction_times_each_tokens_gradient(model: TokenLossModel) -> None:
    batch = tiny.make_batch(3, num_tokens=16)
    direction = compute_direction(model, tiny.make_batch(4, seed=8))
    losses, utilities = run_forward_mode(model, direction, batch)
    model.base.config._attn_implementation = "eager"
    per_token = list(iter_token_gradients(model, batch))
    expected = [
        sum(float((v * g).sum()) for v, g in zip(direction.values(), gradients, strict=True))
        for _, gradients in per_token
    ]
    assert losses.tolist() == pytest.approx([loss for loss, _ in per_token], rel=1e-6)
    # Hugging Face's eager attention rounds its softmax to fp32, so not to the last digit.
    assert utilities.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6 * float(utilities.abs().max()))
    assert float(utilities.std()) > 0


def test_the_finite_difference_converges_linearly_to_forward_mode(model: TokenLossModel) -> None:
    batch = tiny.make_batch(4)
    direction = compute_direction(model, tiny.make_batch(4, seed=8))
    losses, utilities = run_forward_mode(model, direction, batch)
    model.base.config._attn_implementation = FORWARD_MODE_ATTENTION  # for the losses too: it is fp64 throughout
    errors, correlations = [], []
    with torch.no_grad():
        assert torch.equal(compute_losses(model, read_trained(model), batch), losses)
        for epsilon in EPSILONS:
            shifted = {name: p - epsilon * direction[name] for name, p in read_trained(model).items()}
            difference = (losses - compute_losses(model, shifted, batch)) / epsilon
            errors.append(float((difference - utilities).norm() / utilities.norm()))
            correlations.append(float(spearmanr(difference, utilities).statistic))
    print("\nrelative error", [f"{error:.2e}" for error in errors], "Spearman", [f"{c:.6f}" for c in correlations])
    ratios = [before / after for before, after in itertools.pairwise(errors)]
    assert ratios == pytest.approx([10.0] * 3, rel=0.2)
    assert errors[-1] < 1e-4
    assert correlations[EPSILONS.index(1e-4)] >= 0.9999


CLEAR, NOISE, EXACT, NOTHING, CURVED = range(5)


def measure_signal_to_noise() -> list[float]:
    """Losses of 20,000 tokens a rank whose change and rounding are known."""
    from vcore_ds.utility.estimators import signal_to_noise

    generator = torch.Generator().manual_seed(layout.rank("shards"))
    scale = 1 + 2 * layout.rank("shards")

    def losses(signal: float, rounding: float, curvature: float = 0.0) -> list[Tensor]:
        base = torch.full((20_000,), 2.0, dtype=torch.float64)
        change = signal * scale * torch.randn(20_000, generator=generator, dtype=torch.float64)
        exact = [base - change + curvature, base, base + change + curvature]
        return [x + rounding * torch.randn(20_000, generator=generator, dtype=torch.float64) for x in exact]

    cases = [(0.3, 0.01), (0.0, 0.05), (0.25, 0.0), (0.0, 0.0), (0.25, 0.0, 0.5)]
    return [signal_to_noise(*losses(*case)) for case in cases]


@pytest.mark.dist
def test_signal_to_noise_of_known_losses_over_all_ranks() -> None:
    first, second = run_ranks(measure_signal_to_noise, 2)
    assert first == second
    # The second rank's signal is three times the first's: rms over both is sqrt((1 + 9) / 2) times the first's.
    rms = 5**0.5
    assert first[CLEAR] == pytest.approx(rms * 0.3 / (2**0.5 * 0.01), rel=0.02)
    assert first[NOISE] < 0.1
    # Losses of 2 +- 0.25 times a normal number are rounded at 1e-16: as good as exact.
    assert first[EXACT] > 1e12
    assert first[NOTHING] == 0.0
    # A symmetric change counts as error: (2 * 0.5)^2 / 6 is taken for the rounding's variance.
    signal = 5 * 0.25**2 - 1 / 12
    assert first[CURVED] == pytest.approx((signal / (2 / 6)) ** 0.5, rel=0.02)


@pytest.mark.parametrize("with_grad", [True, False])
def test_adding_a_number_to_a_dual_tensor_copies_its_tangent(with_grad: bool) -> None:
    x, d_x = torch.randn(3, 4, requires_grad=with_grad), torch.randn(3, 4)
    with torch.set_grad_enabled(with_grad), forward_ad.dual_level(), UnrecordedTangents():
        dual = forward_ad.make_dual(x, d_x)
        sums = {"x + 2": dual + 2, "2 + x": 2 + dual, "x - 2": dual - 2, "2 - x": 2 - dual}
        for name, total in sums.items():
            value, tangent = forward_ad.unpack_dual(total)
            assert torch.equal(value, eval(name, {"x": x})) and value.requires_grad == with_grad
            assert torch.equal(tangent, -d_x if name == "2 - x" else d_x) and not tangent.requires_grad
        sums["x + 2"].mul_(3.0)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, d_x)
