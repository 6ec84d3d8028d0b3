"""Dropout whose mask is a function of the token, and not of the rank that computes it or of the batch around it.

With a generator for each rank, a run would draw other masks at another world size or in other rows. Here the mask
of a token is made from the run's seed, the step, the token's sequence and its position in it, so that any layout of the
same batch computes the same losses. A recomputed layer draws the same mask again without a generator's state.
"""

import torch
from torch import Tensor, nn

from vcore_ds.common.errors import UserError

_WORD = 1 << 32


class TokenDropout(nn.Dropout):
    """`torch.nn.Dropout` on `[b, t, F]` or `[b * t, F]`, with a mask for each token.

    Attributes:
        token_keys: int32 `[b, t]` of the tokens that come next, from `token_keys`; set by the engine for each forward.
        first_feature: number of x's first feature among those of the layer, 0 unless ranks have a part of them each.

    The mask of token i and feature j is `key_i * feature_key_j mod 2^32 < (1 - p) * 2^32`. Both factors are random odd
    numbers, so each product is uniform over the odd numbers, and two of one token, or of one feature, are independent:
    what dropout asks of its mask. It is one product and one comparison for each element, on any device alike.
    """

    def __init__(self, p: float, number: int):
        """`number`: this module's place among the model's dropouts, so that each draws a mask of its own."""
        super().__init__(p)
        self.number, self.first_feature = number, 0
        self.token_keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keys = self.token_keys
        if keys is None or keys.numel() != x.shape[:-1].numel():
            raise UserError(
                f"model.path: found a dropout on {list(x.shape)}; expected dropout on the features of each token only. "
                "Set lora.dropout, or the dropout in the model's config.json, to 0"
            )
        return self.dropped(x, keys.reshape(x.shape[:-1]))

    def dropped(self, x: Tensor, keys: Tensor) -> Tensor:
        """`x [..., F]` under the masks of tokens with `keys [...]`."""
        features = self.first_feature + torch.arange(x.shape[-1], dtype=torch.int64, device=x.device)
        feature_keys = _odd_words(_mix(features + (self.number + 1) * _WORD))
        # Products are signed, and a threshold of 2^31 would wrap too.
        threshold = min(round((1 - self.p) * _WORD) - _WORD // 2, _WORD // 2 - 1)
        kept = keys[..., None] * feature_keys < threshold
        return x * kept * (1 / (1 - self.p))


def use_token_dropout(model: nn.Module) -> None:
    """Replaces every dropout of a model that drops anything, in place."""
    number = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout and child.p > 0:
                setattr(module, name, TokenDropout(child.p, number).train(child.training))
                number += 1


def make_token_keys(seed: int, sequence_ids: Tensor, positions: Tensor) -> Tensor:
    """A random odd int32 for each token, a function of the three alone.

    Args:
        seed: of the step.
        sequence_ids, positions: int64 `[b, T]`, the sequence of each token and its place in it.
    """
    signed = (seed + 2**63) % 2**64 - 2**63
    return _odd_words(_mix(_mix(sequence_ids ^ signed) + positions))


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), on int64 that wraps."""
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros: torch fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _odd_words(x: Tensor) -> Tensor:
    return (_shift(x, 32) | 1).to(torch.int32)
