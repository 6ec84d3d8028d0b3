"""Results of a tiny model in plain transformers: fp64, eager attention and experts, one sequence at a time.

It uses no code of the package: losses are `cross_entropy` of the model's logits, gradients come from autograd, and a
token's utility is the reverse-mode gradient of its loss times the direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from tests.helpers.oracle import differentiate_padding
from tests.models.families import find_auto_class


@dataclass(frozen=True)
class Text:
    """A sequence of tokens whose last ones are supervised."""

    tokens: Tensor
    """int64 `[T]`"""
    prompt: int
    """Number of tokens that are not supervised."""


@dataclass(frozen=True)
class Expected:
    """Results of the main sequences, one after the other, and of the probe."""

    losses: Tensor
    """fp64 `[N]`, nats"""
    utilities: Tensor
    """fp64 `[N]`"""
    gradient: dict[str, Tensor]
    """Gradient of the mean over sequences of their tokens' mean loss."""
    direction: dict[str, Tensor]
    """The same gradient of the probe."""


def load_plain_model(folder: Path) -> nn.Module:
    """Load the stored model in fp64."""
    options = dict(attn_implementation="eager", experts_implementation="eager", dtype=torch.float64)
    model = find_auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, **options).eval()
    differentiate_padding(model)
    return model


def compute_expected(model: nn.Module, main: Sequence[Text], probe: Sequence[Text]) -> Expected:
    """Compute the results of the model in `eval` mode for the parameters that require a gradient."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    direction, losses = compute_gradient(model, probe), []
    utilities: list[float] = []
    for text in main:
        text_losses = compute_token_losses(model, text)
        losses.append(text_losses.detach())
        for loss in text_losses:
            token_gradient = _differentiate(loss, trained, keep=True)
            utilities.append(sum(_dot(direction[name], token_gradient[name]) for name in trained))
    return Expected(torch.cat(losses), torch.tensor(utilities), compute_gradient(model, main), direction)


def compute_gradient(model: nn.Module, texts: Sequence[Text]) -> dict[str, Tensor]:
    """Gradient of the mean over sequences of their tokens' mean loss, for the parameters that require one."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return _differentiate(torch.stack([compute_token_losses(model, text).mean() for text in texts]).mean(), trained)


def compute_token_losses(model: nn.Module, text: Text) -> Tensor:
    """Losses of the supervised tokens, `[T - prompt]`."""
    logits = model(input_ids=text.tokens[None], use_cache=False).logits[0, text.prompt - 1 : -1]
    return cross_entropy(logits.double(), text.tokens[text.prompt :], reduction="none")


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _differentiate(loss: Tensor, parameters: dict[str, nn.Parameter], keep: bool = False) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }
