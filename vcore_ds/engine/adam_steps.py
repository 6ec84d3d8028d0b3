"""What the next update of another trainer's Adam depends on."""

import inspect
from collections.abc import Sequence
from typing import Any

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import nn
from torch.optim import Adam, Optimizer

from vcore_ds.common.errors import UserError
from vcore_ds.method.optimizers import AdamStep
from vcore_ds.models.causal_lm import MODEL_PREFIX


class StepsOfTrainer:
    """The parts of `Engine` on optimizer steps, where another trainer takes them."""

    _steps: list[AdamStep]  # upcoming, of each flat tensor; empty for directions that are gradients

    @property
    def num_updates(self) -> int:
        """Number of the trainer's steps so far."""
        return max((step.step - 1 for step in self._steps), default=0)

    def adam_steps(self, sub_groups: Sequence[int]) -> list[AdamStep]:
        """The trainer's upcoming update of each of these flat tensors."""
        return [self._steps[i] for i in sub_groups]


def find_groups(
    optimizer: Optimizer, trained: Sequence[tuple[str, nn.Parameter]]
) -> tuple[Optimizer, list[dict[str, Any]]]:
    """Return the optimizer without wrappers, and the group of each trained parameter. Raises UserError if one has
    none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # accelerate's wrapper
        optimizer = inner
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in trained if id(parameter) not in group_of]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        names = f"{missing[0].removeprefix(MODEL_PREFIX)}{more}, of which the model requires gradients"
        raise _refuse_optimizer(f"{type(optimizer).__name__} without {names}")
    return optimizer, [group_of[id(parameter)] for _, parameter in trained]


def read_adam_steps(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]
) -> list[AdamStep]:
    """Read what the optimizer's upcoming update of each tensor depends on, from its group and its state. Raises
    UserError for an optimizer with another update than that of `adam_direction`."""
    kind = type(optimizer)
    has_step_of_adam = inspect.unwrap(kind.step) is inspect.unwrap(Adam.step)  # PyTorch wraps it for its profiler
    if not (has_step_of_adam or kind in (FusedAdam, DeepSpeedCPUAdam)):
        raise _refuse_optimizer(kind.__name__)
    for group in groups:
        is_decoupled = group.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", False))
        decay = 0 if is_decoupled else group["weight_decay"]
        options = {name: group.get(name) for name in ("maximize", "amsgrad")}
        options |= {f"weight_decay {decay}": decay, "bias_correction false": not group.get("bias_correction", True)}
        for name, is_set in options.items():
            if is_set:
                raise _refuse_optimizer(f"{kind.__name__} with {name}")
    rates = [float(group["lr"]) for group in groups]
    largest = max(rates)  # 0 at the start of a warm-up
    return [
        AdamStep(
            int(state.get("step", 0)) + 1,
            (float(group["betas"][0]), float(group["betas"][1])),
            float(group["eps"]),
            rate / largest if largest else 1.0,
        )
        for group, state, rate in zip(groups, states, rates, strict=True)
    ]


def _refuse_optimizer(found: str) -> UserError:
    return UserError(
        f"optimizer: found {found}; expected AdamW of torch or DeepSpeed, or Adam without coupled weight decay, of all "
        "trained parameters, without amsgrad and maximize; or None, for the gradient itself"
    )
