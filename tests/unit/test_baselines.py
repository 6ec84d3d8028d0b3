"""Weights of the baselines: by hand, the gradients of their authors' losses, and the masks of random."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.unit.test_weights import make_index
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.method.baselines import random_mask, random_weights
from vcore_ds.method.objective import GlobalCounts, sequence_shares, token_coefficients
from vcore_ds.method.weights import Tokens
from vcore_ds.training.weighting import token_weights

LOG2 = math.log(2)
HALVES = torch.tensor([2.0, 4.0, 8.0]).log()
"""Losses of tokens with probabilities 1/2, 1/4 and 1/8."""
EQUAL = torch.rand(7, generator=torch.Generator().manual_seed(0))
SUMS_OF_EQUAL = [EQUAL[:3].sum(), EQUAL[3:].sum()]
RISEN = torch.tensor([0.5, 1.5, 1.0, 1.0, 1.0, 1.0])
KEPT = torch.tensor([True, False, False, True, False, True, False])


def weigh(name: str, losses: Tensor, index: Tensor, num_sequences: int, **others: object) -> Tensor:
    """The weights of a method; `others`: its keys in a recipe, or fields of `Tokens`."""
    keys = {key: value for key, value in others.items() if key in MethodConfig.model_fields}
    fields = {key: torch.as_tensor(value) for key, value in others.items() if key not in keys}
    return token_weights(MethodConfig(name=name, **keys), Tokens(losses, index, num_sequences, **fields)).weights


BY_HAND = {
    "dft": (weigh("dft", HALVES, make_index([2, 1]), 2), [1 / 4, 1 / 8, 1 / 8]),
    "eaft": (weigh("eaft", HALVES, make_index([2, 1]), 2, statistics=[1.0, 0.5, 0.25]), [0.5, 0.25, 0.25]),
    # Probability 1/4 and concentration 1/2: (1/4)^(1/2) = 1/2, but for the 1e-6.
    "deft": (weigh("deft", HALVES[1:2], make_index([1]), 1, statistics=[0.5]), [0.5 * 0.5 / 0.500001]),
    "profit": (
        weigh("profit", -torch.tensor([0.5, 0.09, 0.11, 0.01]).log(), make_index([3, 1]), 2, min_probability=0.1),
        [1 / 3, 0, 1 / 3, 0],
    ),
    "profit, at least the probability": (weigh("profit", HALVES[:1], make_index([1]), 1, min_probability=0.5), [1.0]),
    # Mean log-probability -1 now against -1.5 and -0.5 before, of sequences of 2 and 4 tokens: e^0.5 and e^-0.5.
    "iw_sft": (
        weigh("iw_sft", RISEN, make_index([2, 4]), 2, reference_log_probability=[-3.0, -2.0]),
        [math.exp(0.5) / 2] * 2 + [math.exp(-0.5) / 4] * 4,
    ),
    "iw_sft, a model equal to its reference": (
        weigh("iw_sft", EQUAL, make_index([3, 4]), 2, reference_log_probability=-torch.stack(SUMS_OF_EQUAL)),
        [1 / 3] * 3 + [1 / 4] * 4,
    ),
    "iw_sft, sequences without tokens": (
        weigh("iw_sft", torch.ones(2), torch.tensor([1, 1]), 3, reference_log_probability=[0.0, -2.0, 0.0]),
        [0.5, 0.5],
    ),
    "iw_sft, bounded": (weigh("iw_sft", EQUAL[:1], make_index([1]), 1, reference_log_probability=[-9.0]), [16.0]),
    "random": (random_weights(KEPT, make_index([3, 4]), 2), [1, 0, 0, 0.5, 0, 0.5, 0]),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_weights_by_hand(case: str) -> None:
    weights, expected = BY_HAND[case]
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "losses", "lengths", "counts", "by_token", "by_sequence"),
    [
        # 1/2 * log 2, 1/4 * 2 log 2, 1/8 * 3 log 2.
        (BY_HAND["dft"][0], HALVES, [2, 1], (2, 3), 11 / 24 * LOG2, 7 / 16 * LOG2),
        # Counts of kept tokens: losses 1 of the first sequence, 2 and 4 of the second.
        (BY_HAND["random"][0], torch.tensor([1.0, 9, 9, 2, 9, 4, 9]), [1, 2], (2, 3), 7 / 3, 2.0),
    ],
    ids=["dft", "random"],
)
def test_losses_by_hand(weights, losses, lengths, counts, by_token: float, by_sequence: float) -> None:
    index = make_index([2, 1] if len(losses) == 3 else [3, 4])
    for normalization, expected in (("token", by_token), ("sequence", by_sequence)):
        shares = sequence_shares(torch.tensor(lengths), GlobalCounts(*counts), normalization)
        assert float((token_coefficients(weights, index, shares) * losses).sum()) == pytest.approx(expected)


# Losses of tokens as their authors write them, and our weights, from logits, targets and the tokens' cross entropies.
LENGTHS = [4, 0, 5]
INDEX = make_index(LENGTHS)


def publish_dft(logits: Tensor, targets: Tensor, nll: Tensor) -> tuple[Tensor, Tensor]:
    return (-nll).exp().detach() * nll, weigh("dft", nll.detach(), INDEX, 3)


def publish_eaft(logits: Tensor, targets: Tensor, nll: Tensor) -> tuple[Tensor, Tensor]:
    top = logits.detach().topk(20).values  # LLaMA-Factory's lines, with ln 20 where it has 3.0
    log_top = top - torch.logsumexp(top, -1, keepdim=True)
    gates = -(log_top.exp() * log_top).sum(-1) / math.log(20)
    return nll * gates, weigh("eaft", nll.detach(), INDEX, 3, statistics=gates)


def publish_deft(logits: Tensor, targets: Tensor, nll: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    concentrations = logits.detach().softmax(-1).square().sum(-1)
    published = -((concentrations * log_p).exp() - 1) / (concentrations + 1e-6)
    return published, weigh("deft", -log_p.detach(), INDEX, 3, statistics=concentrations)


def publish_profit(logits: Tensor, targets: Tensor, nll: Tensor) -> tuple[Tensor, Tensor]:
    p = logits.detach().softmax(-1).gather(1, targets[:, None])[:, 0]
    kept_targets = targets.masked_fill(p < 0.1, -100)
    assert 0 < int((kept_targets == -100).sum()) < 9
    published = cross_entropy(logits, kept_targets, ignore_index=-100, reduction="none")
    return published, weigh("profit", nll.detach(), INDEX, 3, min_probability=0.1)


@pytest.mark.parametrize("publish", [publish_dft, publish_eaft, publish_deft, publish_profit])
def test_the_gradient_is_that_of_the_published_loss(publish: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Over the tokens of all ranks; this rank has 9 tokens of 25."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, 31, dtype=torch.float64, generator=generator)).requires_grad_()
    targets = torch.randint(0, 31, (9,), generator=generator)
    nll = cross_entropy(logits, targets, reduction="none")
    published, weights = publish(logits, targets, nll)
    assert not weights.requires_grad
    (expected,) = torch.autograd.grad(published.sum() / 25, logits, retain_graph=True)
    shares = sequence_shares(torch.tensor(LENGTHS), GlobalCounts(7, 25), "token")
    (gradient,) = torch.autograd.grad((token_coefficients(weights, INDEX, shares) * nll).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)


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
    assert abs(np.mean(masks, axis=0) - 0.2).max() < 0.05  # 5.6 standard deviations
    assert (random_mask(in_answer, 0.2, make_generator(4, 0)) != masks[0]).any()
    assert (masks[1] != masks[0]).any()
