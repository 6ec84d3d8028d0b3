"""What a tiny model computes in plain transformers: fp64, eager attention and experts, one sequence at a time.

No code of the package: losses by `cross_entropy` over the model's own logits, gradients by autograd, a token's utility
by the reverse-mode gradient of its loss, times the direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from tests.models.families import auto_class


@dataclass(frozen=True)
class Text:
    """A sequence of tokens of which the last are supervised."""

    tokens: Tensor
    """int64 `[T]`"""
    prompt: int
    """Tokens that are not supervised."""


@dataclass(frozen=True)
class Expected:
    """Of the main sequences, one after the other, and of the probe."""

    losses: Tensor
    """fp64 `[N]`, nats"""
    utilities: Tensor
    """fp64 `[N]`"""
    gradient: dict[str, Tensor]
    """Of the mean over sequences of their tokens' mean loss."""
    direction: dict[str, Tensor]
    """The same of the probe."""


def plain_model(folder: Path, *, rounded_to: torch.dtype = torch.float32) -> nn.Module:
    """The stored model in fp64, its parameters rounded to a precision first."""
    options = dict(attn_implementation="eager", experts_implementation="eager", dtype=torch.float64)
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, **options).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(rounded_to).double()
    return model


def expected(model: nn.Module, main: Sequence[Text], probe: Sequence[Text]) -> Expected:
    """What the model in `eval` mode gives for its parameters that require a gradient."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    direction, losses = mean_gradient(model, probe), []
    utilities: list[float] = []
    for text in main:
        own = token_losses(model, text)
        losses.append(own.detach())
        for loss in own:
            of_token = _gradient(loss, trained, keep=True)
            utilities.append(sum(_dot(direction[name], of_token[name]) for name in trained))
    return Expected(torch.cat(losses), torch.tensor(utilities), mean_gradient(model, main), direction)


def mean_gradient(model: nn.Module, texts: Sequence[Text]) -> dict[str, Tensor]:
    """Of the mean over sequences of their tokens' mean loss, for the parameters that require one."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return _gradient(torch.stack([token_losses(model, text).mean() for text in texts]).mean(), trained)


def token_losses(model: nn.Module, text: Text) -> Tensor:
    """`[T - prompt]`"""
    logits = model(input_ids=text.tokens[None], use_cache=False).logits[0, text.prompt - 1 : -1]
    return cross_entropy(logits.double(), text.tokens[text.prompt :], reduction="none")


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _gradient(loss: Tensor, parameters: dict[str, nn.Parameter], keep: bool = False) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
