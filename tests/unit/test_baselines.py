"""Weights of dft, iw_sft and random against hand-computed numbers and independent implementations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_weights import make_index
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.method.baselines import (
    IMPORTANCE_RATIO_CAP,
    deft_weights,
    dft_weights,
    eaft_weights,
    iw_sft_weights,
    profit_weights,
    random_mask,
    random_weights,
)
from vcore_ds.method.objective import GlobalCounts, effective_sample_size, sequence_shares, token_coefficients


def compute_loss(weights, losses, index, lengths, counts, normalization) -> float:
    shares = sequence_shares(torch.tensor(lengths), counts, normalization)
    return float((token_coefficients(weights, index, shares) * losses).sum())


# ---- dft -----------------------------------------------------------------------------------------------------------


def test_dft_weights_and_loss_by_hand() -> None:
    # Probabilities 1/2, 1/4 and 1/8: 1/2 * log 2, 1/4 * 2 log 2, 1/8 * 3 log 2.
    losses, index, lengths = torch.tensor([2.0, 4.0, 8.0]).log(), make_index([2, 1]), [2, 1]
    weights = dft_weights(losses, index, 2)
    assert weights.tolist() == pytest.approx([1 / 4, 1 / 8, 1 / 8])
    counts, log2 = GlobalCounts(2, 3), math.log(2)
    per_token = [log2 / 2, log2 / 2, 3 * log2 / 8]
    assert compute_loss(weights, losses, index, lengths, counts, "token") == pytest.approx(sum(per_token) / 3)
    by_sequence = (sum(per_token[:2]) / 2 + per_token[2]) / 2
    assert compute_loss(weights, losses, index, lengths, counts, "sequence") == pytest.approx(by_sequence)


def test_dft_is_the_published_loss_over_the_global_token_count() -> None:
    """`exp(-nll).detach() * nll` over the tokens of all ranks, value and gradient; this rank has 9 tokens of 25."""
    logits = torch.randn(9, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (9,))
    lengths = [4, 0, 5]

    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    published = ((-nll).exp().detach() * nll).sum() / 25
    (expected,) = torch.autograd.grad(published, logits)

    losses = -torch.log_softmax(logits, -1)[torch.arange(9), targets]
    index = make_index(lengths)
    weights = dft_weights(losses, index, 3)
    assert not weights.requires_grad
    shares = sequence_shares(torch.tensor(lengths), GlobalCounts(7, 25), "token")
    loss = (token_coefficients(weights, index, shares) * losses).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == pytest.approx(float(published.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)


# ---- eaft, deft, profit: by hand, and the gradient of their authors' loss over the tokens of all ranks --------------


def draw_logits_and_targets() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """9 tokens of 3 sequences; the batch has 25."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(9, 31, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), torch.randint(0, 31, (9,), generator=generator), [4, 0, 5]


def compute_gradient(weights: torch.Tensor, losses: torch.Tensor, logits: torch.Tensor, lengths: list[int]):
    """Gradient of this rank's share of the loss, with the coefficients of a step."""
    assert not weights.requires_grad
    shares = sequence_shares(torch.tensor(lengths), GlobalCounts(7, 25), "token")
    (gradient,) = torch.autograd.grad((token_coefficients(weights, make_index(lengths), shares) * losses).sum(), logits)
    return gradient


def test_eaft_by_hand_and_as_published() -> None:
    gates = torch.tensor([1.0, 0.5, 0.25])
    assert eaft_weights(gates, make_index([2, 1]), 2).tolist() == [0.5, 0.25, 0.25]

    logits, targets, lengths = draw_logits_and_targets()
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    top = logits.detach().topk(20).values  # LLaMA-Factory's lines, with ln 20 where it has 3.0
    log_top = top - torch.logsumexp(top, -1, keepdim=True)
    gates = -(log_top.exp() * log_top).sum(-1) / math.log(20)
    (expected,) = torch.autograd.grad((nll * gates).sum() / 25, logits, retain_graph=True)
    gradient = compute_gradient(eaft_weights(gates, make_index(lengths), 3), nll, logits, lengths)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)


def test_deft_by_hand_and_as_published() -> None:
    # Probability 1/4 and concentration 1/2: (1/4)^(1/2) = 1/2, but for the 1e-6.
    weights = deft_weights(torch.tensor([4.0]).log(), torch.tensor([0.5]), make_index([1]), 1)
    assert weights.tolist() == pytest.approx([0.5 * 0.5 / 0.500001])

    logits, targets, lengths = draw_logits_and_targets()
    log_p = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    concentrations = logits.detach().softmax(-1).square().sum(-1)
    published = -((concentrations * log_p).exp() - 1) / (concentrations + 1e-6)
    (expected,) = torch.autograd.grad(published.sum() / 25, logits, retain_graph=True)
    weights = deft_weights(-log_p.detach(), concentrations, make_index(lengths), 3)
    torch.testing.assert_close(compute_gradient(weights, -log_p, logits, lengths), expected, rtol=1e-6, atol=1e-12)


def test_profit_by_hand_and_as_published() -> None:
    losses = -torch.tensor([0.5, 0.09, 0.11, 0.01], dtype=torch.float64).log()
    assert profit_weights(losses, 0.1, make_index([3, 1]), 2).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0])
    assert profit_weights(torch.tensor([2.0]).log(), 0.5, make_index([1]), 1).tolist() == [1.0]  # at least

    logits, targets, lengths = draw_logits_and_targets()
    p = logits.detach().softmax(-1).gather(1, targets[:, None])[:, 0]
    kept_targets = targets.masked_fill(p < 0.1, -100)
    assert 0 < int((kept_targets == -100).sum()) < 9
    published = torch.nn.functional.cross_entropy(logits, kept_targets, ignore_index=-100, reduction="sum") / 25
    (expected,) = torch.autograd.grad(published, logits, retain_graph=True)
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    weights = profit_weights(nll.detach(), 0.1, make_index(lengths), 3)
    torch.testing.assert_close(compute_gradient(weights, nll, logits, lengths), expected, rtol=1e-6, atol=1e-12)


# ---- iw-SFT --------------------------------------------------------------------------------------------------------


def test_the_importance_ratio_by_hand() -> None:
    # Mean log-probability -1 now against -1.5 and -0.5 before, of sequences of 2 and 4 tokens: e^0.5 and e^-0.5.
    losses, index = torch.tensor([0.5, 1.5, 1.0, 1.0, 1.0, 1.0]), make_index([2, 4])
    weights = iw_sft_weights(losses, torch.tensor([-3.0, -2.0]), index, 2)
    assert weights.tolist() == pytest.approx([math.exp(0.5) / 2] * 2 + [math.exp(-0.5) / 4] * 4)


def test_a_model_equal_to_its_reference_has_the_weights_of_sft() -> None:
    losses, index = torch.rand(7), make_index([3, 4])
    reference = -torch.stack([losses[:3].sum(), losses[3:].sum()])
    assert iw_sft_weights(losses, reference, index, 2).tolist() == pytest.approx([1 / 3] * 3 + [1 / 4] * 4)


def test_the_importance_ratio_is_clipped_at_16_as_its_authors_do() -> None:
    weights = iw_sft_weights(torch.zeros(2), torch.tensor([-50.0]), make_index([2]), 1)
    assert weights.tolist() == [IMPORTANCE_RATIO_CAP / 2] * 2 == [8.0, 8.0]


def test_a_sequence_without_tokens_has_no_ratio_and_does_not_affect_others() -> None:
    weights = iw_sft_weights(torch.ones(2), torch.tensor([0.0, -2.0, 0.0]), torch.tensor([1, 1]), 3)
    assert weights.tolist() == pytest.approx([0.5, 0.5])


# ---- random --------------------------------------------------------------------------------------------------------


def make_generator(seed: int, sequence_id: int) -> np.random.Generator:
    return generator(Stream.RANDOM_MASK, seed, sequence_id)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 40), st.floats(0.01, 1.0), st.integers(0, 2**40), st.integers(0, 10**9))
def test_the_answer_is_kept_and_the_share_is_met(num_tokens, num_answer, share, seed, sequence_id) -> None:
    in_answer = np.zeros(num_tokens, dtype=np.bool_)
    in_answer[num_tokens - min(num_answer, num_tokens) :] = num_answer > 0
    kept = random_mask(in_answer, share, make_generator(seed, sequence_id))
    assert kept[in_answer].all()
    assert kept.sum() == max(1, round(share * num_tokens), in_answer.sum())
    assert (random_mask(in_answer, share, make_generator(seed, sequence_id)) == kept).all()


def test_the_mask_depends_on_seed_and_sequence_and_keeps_all_positions_equally_often() -> None:
    in_answer = np.zeros(50, dtype=np.bool_)
    masks = [random_mask(in_answer, 0.2, make_generator(3, i)) for i in range(2000)]
    share_of_each_token = np.mean(masks, axis=0)
    assert abs(share_of_each_token - 0.2).max() < 0.05  # 5.6 standard deviations
    assert (random_mask(in_answer, 0.2, make_generator(4, 0)) != masks[0]).any()
    assert (masks[1] != masks[0]).any()


def test_random_weights_by_hand() -> None:
    kept = torch.tensor([True, False, False, True, False, True, False])
    index = make_index([3, 4])
    weights = random_weights(kept, index, 2)
    assert weights.tolist() == [1, 0, 0, 0.5, 0, 0.5, 0]
    losses = torch.tensor([1.0, 9, 9, 2, 9, 4, 9])
    kept_counts = GlobalCounts(2, 3)
    assert compute_loss(weights, losses, index, [1, 2], kept_counts, "token") == pytest.approx(7 / 3)
    assert compute_loss(weights, losses, index, [1, 2], kept_counts, "sequence") == pytest.approx(2.0)


def test_the_effective_sample_size_does_not_depend_on_the_weights_scale() -> None:
    index = make_index([4])
    for scale in (1.0, 0.01):
        assert float(effective_sample_size(torch.tensor([1.0, 1, 0, 0]) * scale, index, 1)[0]) == pytest.approx(2.0)
