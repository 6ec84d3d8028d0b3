"""The optimizer over the trainable parameters, built before DeepSpeed shards them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vcore_ds.config.sections import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, or SGD without momentum, over the trainable parameters, with weight decay on matrices only.

    AdamW is fused, one kernel for all tensors: under ZeRO-3 it updates a few large shards.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if _num_axes(parameter) >= 2]
    vectors = [parameter for parameter in trainable if _num_axes(parameter) < 2]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if parameters
    ]
    if config.weight_decay == 0.0:
        groups = [{"params": trainable, "weight_decay": 0.0}]  # one group, so fewer flat shards
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def make_moments(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> None:
    """AdamW's moments of zeros and counters at 0, as its first step makes them where there are none.

    Made at the start, so that a run for which they are too large fails there and not after its first backward.

    Args:
        masters: the fp32 shards that the optimizer will update, each on the device where its moments are to be.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return  # SGD without momentum keeps nothing
    for master in masters:
        optimizer.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
        }


def _num_axes(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))  # a sharded parameter looks empty
