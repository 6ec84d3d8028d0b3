"""Statistics of predictions for EAFT, DEFT and ASFT, against plain PyTorch in fp64."""

import importlib
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear

from tests.helpers.allocations import Allocations
from vcore_ds.models.token_loss import PLAIN, LogitTransform, loss_and_statistic, reference_divergence, token_loss
from vcore_ds.planning.settings import LossMemory

module = importlib.import_module("vcore_ds.models.token_loss")

NUM_TOKENS, HIDDEN, VOCABULARY = 23, 7, 50


@pytest.fixture(params=[23, 8], ids=lambda size: f"{size} tokens a block", autouse=True)
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEFAULT_LOSS_MEMORY", LossMemory(4 * VOCABULARY * request.param + 3))


def draw_inputs(num_tokens: int = NUM_TOKENS, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, those of a reference, weight, targets; fp64."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_tokens, HIDDEN), (num_tokens, HIDDEN), (vocabulary, HIDDEN)
    hidden, change, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return hidden, hidden + 0.3 * change, weight, targets


# ---- by hand -------------------------------------------------------------------------------------------------------


def compute_statistic(statistic: str, *probabilities: float) -> float:
    """The statistic of a prediction with these probabilities: hidden state 1, log-probabilities as weights."""
    weight = torch.tensor(probabilities, dtype=torch.float64).log()[:, None]
    hidden, target = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    return float(loss_and_statistic(hidden, weight, target, statistic)[1])


def test_statistics_by_hand() -> None:
    assert compute_statistic("top_entropy", *[1 / 30] * 30) == pytest.approx(1.0)  # 20 equal ones, over ln 20
    # 20 of probability 1/40 and many smaller ones, which do not count.
    assert compute_statistic("top_entropy", *[1 / 200] * 100, *[1 / 40] * 20) == pytest.approx(1.0)
    # A vocabulary of 3 is smaller than 20: 1/2, 1/4, 1/4 have 1.5 ln 2 nats of at most ln 3.
    assert compute_statistic("top_entropy", 0.5, 0.25, 0.25) == pytest.approx(1.5 * math.log(2) / math.log(3))
    assert compute_statistic("concentration", 0.5, 0.25, 0.25) == pytest.approx(0.375)
    assert compute_statistic("concentration", *[1 / 30] * 30) == pytest.approx(1 / 30)


def test_divergence_by_hand() -> None:
    # Reference 3/4 and 1/4, model 1/2 and 1/2; the gradient by the logits is p - q = (-1/4, 1/4).
    hidden = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    reference = torch.full((1, 1), math.log(3), dtype=torch.float64)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    divergence = reference_divergence(hidden, weight, reference)
    assert float(divergence.detach()) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    divergence.sum().backward()
    assert hidden.grad is not None and float(hidden.grad) == pytest.approx(-0.25)


# ---- against plain PyTorch -----------------------------------------------------------------------------------------


def transform_logits(logits: Tensor, transform: LogitTransform) -> Tensor:
    logits = transform.scale * logits
    return logits if transform.softcap is None else transform.softcap * torch.tanh(logits / transform.softcap)


TRANSFORMED = pytest.mark.parametrize(
    "transform", [PLAIN, LogitTransform(scale=0.5, softcap=4.0)], ids=["plain", "scaled and capped"]
)


@TRANSFORMED
@pytest.mark.parametrize("statistic", ["entropy", "top_entropy", "concentration"])
def test_statistics_come_with_the_loss_and_its_gradient(statistic: str, transform: LogitTransform) -> None:
    hidden, _, weight, targets = draw_inputs()
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    losses, statistics = loss_and_statistic(leaves[0], leaves[1], targets, statistic, transform=transform)
    losses.square().sum().backward()
    assert not statistics.requires_grad

    plain_leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected_losses = token_loss(*plain_leaves, targets, transform=transform)
    expected_losses.square().sum().backward()
    assert torch.equal(losses, expected_losses)
    for leaf, plain_leaf in zip(leaves, plain_leaves, strict=True):
        assert torch.equal(leaf.grad, plain_leaf.grad)

    p = transform_logits(linear(hidden, weight), transform).softmax(-1)
    top = p.sort(-1, descending=True).values[:, :20]
    top = top / top.sum(-1, keepdim=True)
    expected = {
        "entropy": -(p * p.log()).sum(-1),
        "top_entropy": -(top * top.log()).sum(-1) / math.log(20),
        "concentration": p.square().sum(-1),
    }[statistic]
    torch.testing.assert_close(statistics, expected, rtol=1e-12, atol=1e-12)
    in_fp32 = loss_and_statistic(hidden.float(), weight.float(), targets, statistic, transform=transform)
    assert in_fp32[1].dtype == torch.float32
    assert float((in_fp32[1] - expected).abs().max()) < 1e-5


@TRANSFORMED
def test_divergence_and_its_gradient_are_those_of_kl_div(transform: LogitTransform) -> None:
    hidden, reference, weight, _ = draw_inputs()
    upstream = torch.randn(NUM_TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf, plain_leaf = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    divergences = reference_divergence(leaf, weight, reference, transform=transform)
    divergences.backward(upstream)
    log_p, log_q = (
        transform_logits(linear(values, weight), transform).log_softmax(-1) for values in (plain_leaf, reference)
    )
    expected = kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    expected.backward(upstream)
    torch.testing.assert_close(divergences, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(leaf.grad, plain_leaf.grad, rtol=1e-10, atol=1e-12)


def test_divergence_from_a_model_close_by_is_not_rounding_noise() -> None:
    """Adapters begin at no difference: the losses' errors in fp32 are as large as such a divergence."""
    hidden, _, weight, _ = draw_inputs(200)
    reference = hidden.float() * (1 + 1e-3)
    hidden, weight = hidden.float(), weight.float()
    expected = reference_divergence(hidden.double(), weight.double(), reference.double()).mean()
    assert 1e-8 < float(expected) < 1e-5
    assert float(reference_divergence(hidden, weight, reference).mean()) == pytest.approx(float(expected), rel=0.01)


def test_a_model_equal_to_its_reference_and_no_tokens_have_no_divergence() -> None:
    hidden, _, weight, targets = draw_inputs()
    leaf = hidden.clone().requires_grad_()
    divergence = reference_divergence(leaf, weight, hidden)
    divergence.sum().backward()
    assert not divergence.any() and not leaf.grad.any()
    assert reference_divergence(hidden[:0], weight, hidden[:0]).shape == (0,)
    assert loss_and_statistic(hidden[:0], weight, targets[:0], "top_entropy")[1].shape == (0,)


def test_logits_exist_for_a_block_of_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    block_tokens, vocabulary = 8, 2000
    monkeypatch.setattr(module, "DEFAULT_LOSS_MEMORY", LossMemory(4 * vocabulary * block_tokens + 3))
    hidden, reference, weight, targets = (t.float() for t in draw_inputs(256, vocabulary))
    for statistic in ("top_entropy", "concentration", None):
        leaf = hidden.clone().requires_grad_()
        with Allocations() as allocations:
            if statistic is None:
                reference_divergence(leaf, weight, reference).sum().backward()
            else:
                loss_and_statistic(leaf, weight, targets.long(), statistic)[0].sum().backward()
        assert allocations.largest_numel == block_tokens * vocabulary
        print(f"{statistic}: peak {allocations.peak_bytes / (4 * block_tokens * vocabulary):.2f} blocks")
        assert allocations.peak_bytes < 4 * 4 * block_tokens * vocabulary
