"""Dropout whose mask is a function of the token alone, independent of ranks and of the layout of the batch.

With one random generator per rank, masks would depend on the world size and the packing. Here a token's mask is a hash
of the run's seed, the step, the token's sequence and its position in it, so that every layout of the same batch has the
same losses. A layer that is recomputed in the backward gets the same mask without a saved generator state.
"""

import torch
from torch import Tensor, nn

from vcore_ds.common.errors import UserError

_WORD = 1 << 32


class TokenDropout(nn.Dropout):
    """`torch.nn.Dropout` on `[b, t, F]` or `[b * t, F]`, with masks by token.

    Attributes:
        token_keys: int32 `[b, t]`, keys of the tokens of the next forward (`make_token_keys`), set by the engine.

    The mask of token i and feature j is `key_i * feature_key_j mod 2^32 < (1 - p) * 2^32`. Both factors are random odd
    numbers, so each product is uniform over the odd numbers, and two products of one token, or of one feature, are
    independent, as a dropout mask has to be. One multiplication and one comparison per element, on every device alike.
    """

    def __init__(self, p: float, number: int):
        """`number`: index of this module among the model's dropouts, so that each has different masks."""
        super().__init__(p)
        self.number = number
        self.token_keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keys = self.token_keys
        if keys is None or keys.numel() != x.shape[:-1].numel():
            raise UserError(
                f"model.path: found a dropout on {list(x.shape)}; expected dropout of the features of tokens only. "
                "Set lora.dropout, or the dropout in the model's config.json, to 0"
            )
        features = torch.arange(x.shape[-1], dtype=torch.int64, device=x.device)
        feature_keys = _odd_words(_mix(features + (self.number + 1) * _WORD))
        # The products are signed int32, so the threshold is shifted; 2^31 itself would wrap.
        threshold = min(round((1 - self.p) * _WORD) - _WORD // 2, _WORD // 2 - 1)
        mask = keys.reshape(x.shape[:-1])[..., None] * feature_keys < threshold
        return x * mask * (1 / (1 - self.p))


def is_modified(module: nn.Module) -> bool:
    """Whether a module has hooks or a forward that was set on it, which a replacement would lose. Hooks of ZeRO-3 do
    not count: they gather the module's weights, of which a dropout has none."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    modules = [getattr(hook, "__module__", "") or "" for by_id in hooks for hook in by_id.values()]
    return "forward" in vars(module) or not all(name.startswith("deepspeed.") for name in modules)


def use_token_dropout(model: nn.Module) -> None:
    """Replace every dropout module with p > 0 of a model, in place; not those that have been modified."""
    number = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout and child.p > 0 and not is_modified(child):
                setattr(module, name, TokenDropout(child.p, number).train(child.training))
                number += 1


def make_token_keys(seed: int, sequence_ids: Tensor, positions: Tensor) -> Tensor:
    """Hash the step's seed, and each token's sequence and position in it (int64 `[b, T]`), to a random odd int32."""
    signed = (seed + 2**63) % 2**64 - 2**63
    return _odd_words(_mix(_mix(sequence_ids ^ signed) + positions))


def _mix(x: Tensor) -> Tensor:
    """Finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), on wrapping int64."""
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's `>>` is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _odd_words(x: Tensor) -> Tensor:
    return (_shift(x, 32) | 1).to(torch.int32)
