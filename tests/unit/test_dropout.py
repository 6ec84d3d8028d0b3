"""Dropout whose mask belongs to the token: its statistics, and what it depends on."""

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import tiny
from vcore_ds.common.errors import UserError
from vcore_ds.models.dropout import TokenDropout, make_token_keys, use_token_dropout

NUM_TOKENS, NUM_FEATURES = 1024, 768


def make_mask(p: float, *, seed: int = 0, number: int = 0, first: int = 0, num_tokens: int = NUM_TOKENS) -> Tensor:
    """bool `[num_tokens, F]`: which values of consecutive tokens of one sequence are kept."""
    dropout = TokenDropout(p, number)
    dropout.token_keys = make_token_keys(
        seed, torch.full((1, num_tokens), 5), torch.arange(first, first + num_tokens)[None]
    )
    return dropout(torch.ones(1, num_tokens, NUM_FEATURES))[0] != 0


@pytest.mark.parametrize("p", [0.01, 0.05, 0.1, 0.5, 0.9])
def test_values_are_kept_independently_with_the_given_probability(p: float) -> None:
    kept = make_mask(p)
    count = kept.numel()
    assert float(kept.double().mean()) == pytest.approx(1 - p, abs=5 * (p * (1 - p) / count) ** 0.5)
    for axis, num_draws in ((0, NUM_TOKENS), (1, NUM_FEATURES)):
        shares = kept.double().mean(axis)
        # The spread of the shares of single tokens and features is that of independent draws.
        assert float(shares.std()) == pytest.approx((p * (1 - p) / num_draws) ** 0.5, rel=0.15)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
def test_tokens_and_features_are_independent(p: float) -> None:
    """Correlation of the masks of neighbours and of random pairs, and of the four corners of rectangles: their keys
    are related, since `(a b)(c d) = (a d)(c b)`."""
    x = (make_mask(p).double() - (1 - p)) / (p * (1 - p)) ** 0.5
    generator = torch.Generator().manual_seed(1)
    tokens, features = (
        torch.randperm(NUM_TOKENS, generator=generator),
        torch.randperm(NUM_FEATURES, generator=generator),
    )
    bound = 5 / (x.numel()) ** 0.5
    assert abs(float((x[1:] * x[:-1]).mean())) < bound
    assert abs(float((x[:, 1:] * x[:, :-1]).mean())) < bound
    assert abs(float((x * x[tokens]).mean())) < bound + 1 / NUM_TOKENS  # a permutation may keep a few
    assert abs(float((x * x[:, features]).mean())) < bound + 1 / NUM_FEATURES
    corners = x[::2, ::2] * x[1::2, ::2] * x[::2, 1::2] * x[1::2, 1::2]
    assert abs(float(corners.mean())) < 5 / corners.numel() ** 0.5


def test_a_mask_depends_on_seed_module_sequence_and_position_alone() -> None:
    kept = make_mask(0.5)
    assert torch.equal(make_mask(0.5), kept)
    assert torch.equal(make_mask(0.5, first=100, num_tokens=50), kept[100:150])  # the columns of another rank
    changed_masks = [
        make_mask(0.5, seed=1),
        make_mask(0.5, seed=2**63 + 1),
        make_mask(0.5, number=1),
        make_mask(0.5, first=1),
    ]
    for changed in changed_masks:
        assert float((changed == kept).double().mean()) == pytest.approx(0.5, abs=0.01)


def test_kept_values_are_scaled_and_gradients_masked() -> None:
    dropout = TokenDropout(0.2, 0)
    dropout.token_keys = make_token_keys(0, torch.zeros(2, 8, dtype=torch.int64), torch.arange(8).expand(2, 8))
    x = torch.randn(2, 8, 16, requires_grad=True)
    out = dropout(x)
    kept = out != 0
    torch.testing.assert_close(out[kept], x[kept] / 0.8)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, kept / 0.8)
    assert torch.equal(dropout.eval()(x), x)


def test_flattened_tokens_have_the_same_masks() -> None:
    dropout = TokenDropout(0.5, 0)
    # The columns of a rank, a part of a larger tensor.
    dropout.token_keys = make_token_keys(0, torch.zeros(2, 8, dtype=torch.int64), torch.arange(8).expand(2, 8))[:, 2:6]
    x = torch.randn(2, 4, 16)
    assert torch.equal(dropout(x.flatten(0, 1)), dropout(x).flatten(0, 1))
    with pytest.raises(UserError, match=r"found a dropout on \[2, 3, 4, 4\]"):
        dropout(torch.ones(2, 3, 4, 4))


def test_a_probability_below_the_resolution_drops_almost_nothing() -> None:
    assert float(make_mask(1e-12).double().mean()) > 0.9999


def test_every_dropout_of_a_model_is_replaced() -> None:
    model = tiny.with_lora(tiny.qwen3(), dropout=0.1)
    assert sum(type(module) is nn.Dropout for module in model.modules()) == 14  # of two layers of seven projections
    use_token_dropout(model)
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout) and module.p > 0]
    assert [type(module) for module in dropouts] == [TokenDropout] * 14
    assert sorted(module.number for module in dropouts) == list(range(14))
