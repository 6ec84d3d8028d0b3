"""How unevenly tokens go to the experts of an MoE model: counted on the device in every forward, read once a step.

All ranks wait for the fullest one in each layer's exchange where experts are divided (`parallel.expert`).
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vcore_ds.distributed import layout

_TOKENS_OF: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Of the experts of a layer, `[E]` int64: this rank's tokens that were sent to each, since counting began."""

_IS_TOKEN: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Of the experts of a layer, int64 `[n]`: 1 for each token of the current batch, 0 for padding."""


def mark_padding(experts: Iterable[nn.Module], is_token: Tensor) -> None:
    """Tells layers of experts which of the tokens they get next are padding, which is not counted.

    The marks are kept until the next call: a layer that is recomputed in the backward counts its tokens again.

    Args:
        is_token: bool `[b, t]`, of this rank's columns, on the device.
    """
    marks = is_token.flatten().long()
    for module in experts:
        _IS_TOKEN[module] = marks


def count_tokens(experts: nn.Module, chosen: Tensor, num_experts: int) -> None:
    """Adds a forward's tokens without padding. No host waits for the device.

    Args:
        chosen: `[n, k]`, the experts of this rank's tokens, numbered over all ranks.
        num_experts: E of the layer, over all ranks.
    """
    if experts not in _TOKENS_OF:
        _TOKENS_OF[experts] = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    marks = _IS_TOKEN.get(experts)
    ones = torch.ones_like(chosen, dtype=torch.int64) if marks is None else marks[:, None].expand_as(chosen)
    _TOKENS_OF[experts].scatter_add_(0, chosen.flatten().long(), ones.flatten())


def forget_tokens(model: nn.Module) -> None:
    """Begins to count anew."""
    for tokens in _counted(model):
        tokens.zero_()


def load_of_experts(model: nn.Module, num_sharing: int = 1) -> dict[str, float]:
    """The load of the fullest expert of a layer over the mean expert's, over all ranks; nothing for a model without
    experts that count. A collective.

    A layer that a backward has computed again counts twice, in all of its experts alike.

    Args:
        num_sharing: ranks of an expert-parallel group. If more than one, also the load of the fullest rank in a layer,
            over the mean rank's.
    """
    counted = _counted(model)
    if not counted:
        return {}
    sizes = [len(tokens) for tokens in counted]
    group, num_groups = layout.rank("shards") // num_sharing, layout.size("shards") // num_sharing
    # What each rank is sent by its own group; the other groups' places are filled in by the sum.
    of_ranks = torch.zeros(num_groups, len(counted), num_sharing, dtype=torch.int64, device=counted[0].device)
    of_ranks[group] = torch.stack([tokens.view(num_sharing, -1).sum(1) for tokens in counted])
    numbers = torch.cat([*counted, of_ranks.flatten()]).tolist()
    summed = torch.tensor(layout.sum_over("shards", numbers), dtype=torch.float64)
    of_experts, of_ranks = summed[: sum(sizes)].split(sizes), summed[sum(sizes) :].view(of_ranks.shape)
    loads = torch.stack([tokens.max() / tokens.mean() for tokens in of_experts])
    found = {"expert_load_max": loads.max().item(), "expert_load_mean": loads.mean().item()}
    if num_sharing > 1:
        loads = of_ranks.amax((0, 2)) / of_ranks.mean((0, 2))
        found |= {"expert_rank_load_max": loads.max().item(), "expert_rank_load_mean": loads.mean().item()}
    return found


def _counted(model: nn.Module) -> list[Tensor]:
    """By layer, in the model's order."""
    return [_TOKENS_OF[module] for module in model.modules() if module in _TOKENS_OF]
