"""`python -m tests.models.routing`: errors of bf16 utilities on tiny MoE models, and the part that routing causes.

A token near the boundary between two experts goes to another one in bf16 than in fp64. To tell this from rounding
elsewhere, the bf16 computation is repeated with each token sent to its experts in fp64. The choice alone is replaced:
scores, weights of the experts and tangents stay those of bf16.

The models are those of the survey, with random parameters or trained on addition with written-out steps. All are
compared with plain transformers in fp64, for parameters rounded to bf16. The output is a table in Markdown.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig

from tests.experiments.task import PROMPT_LENGTH, TraceStream
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.models import families, measurement
from tests.models.measurement import MeasuredEngine, make_recipe, rank_correlation, relative_error
from tests.models.reference import Text, compute_expected, compute_gradient, compute_token_losses, load_plain_model
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.setup import load_model

FAMILIES = ("deepseek_v3", "gpt_oss", "qwen3_next")
DENSE = ", dense"
"""Suffix of a family's name: a dense MLP in place of its experts, where it has the choice."""
NUM_MAIN, NUM_PROBE = 12, 4
PADDING = 0
"""A token that occurs in no text, only after it."""

Choices = dict[tuple[int, ...], list[Tensor]]
"""The tokens of a text -> the experts `[T, k]` of every router, in increasing order."""


@contextmanager
def recording_routing(model: nn.Module, forced: Choices | None = None) -> Iterator[Choices]:
    """Record the experts that a model's routers choose, a text at a time; `forced`: experts that they must choose."""
    routers = [module for module in model.modules() if "Router" in type(module).__name__]
    choices: Choices = {}
    text: tuple[int, ...] = ()
    real_topk, running = torch.topk, None

    def begin(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal text
        text = tuple(token for token in arguments[0].flatten().tolist() if token != PADDING)
        choices[text] = [torch.empty(0)] * len(routers)

    def enter(number: int, *_: Any) -> None:
        nonlocal running
        running = number

    def leave(*_: Any) -> None:
        nonlocal running
        running = None

    def topk(x: Tensor, *arguments: Any, **options: Any) -> Any:
        values, chosen = real_topk(x, *arguments, **options)
        if running is None or x.shape[-1] != routers[running].num_experts:  # such as a choice of groups
            return torch.return_types.topk((values, chosen))
        if forced is not None and text in forced:
            chosen[: len(text)] = forced[text][running]
            values = x.gather(-1, chosen)
        choices[text][running] = chosen[: len(text)].sort(-1).values
        return torch.return_types.topk((values, chosen))

    (embedding,) = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [embedding.register_forward_pre_hook(begin)]
    for number, router in enumerate(routers):
        handles += [router.register_forward_pre_hook(partial(enter, number)), router.register_forward_hook(leave)]
    try:
        with patch.object(torch, "topk", topk):
            yield choices
    finally:
        for handle in handles:
            handle.remove()


def find_rerouted_tokens(choices: Choices, reference: Choices, texts: Sequence[Text]) -> Tensor:
    """bool `[tokens]`: whether a token of the texts has other experts than in the reference in any layer."""
    is_rerouted = []
    for text in texts:
        elsewhere = torch.zeros(len(text.tokens), dtype=torch.bool)
        key = tuple(text.tokens.tolist())
        for chosen, wanted in zip(choices[key], reference[key], strict=True):
            elsewhere |= (chosen != wanted).any(-1)
        is_rerouted.append(elsewhere)
    return torch.cat(is_rerouted)


def find_predicting_tokens(texts: Sequence[Text]) -> Tensor:
    """bool `[tokens]`: whether a token predicts a supervised one."""
    position = torch.cat([torch.arange(len(text.tokens)) - text.prompt + 1 for text in texts])
    end = torch.cat([torch.arange(len(text.tokens)) == len(text.tokens) - 1 for text in texts])
    return (position >= 0) & ~end


@dataclass
class Reference:
    """Results of plain transformers."""

    folder: Path
    main: list[Text]
    probe: list[Text]
    utilities: Tensor
    """fp64 `[N]`"""
    choices: Choices
    in_bf16: Tensor
    """Utilities by transformers in bf16, `[N]`."""
    choices_in_bf16: Choices
    forced: Tensor
    """The same with the experts of fp64."""


def make_reference(folder: Path, main: list[Text], probe: list[Text]) -> Reference:
    model = load_plain_model(folder, rounded_to=torch.bfloat16)
    with recording_routing(model) as choices:
        utilities = compute_utilities_along(model, main, compute_gradient(model, probe))
    model.bfloat16()
    with recording_routing(model) as choices_in_bf16:
        in_bf16 = compute_expected(model, main, probe).utilities
    with recording_routing(model, choices):
        forced = compute_expected(model, main, probe).utilities
    return Reference(folder, main, probe, utilities, choices, in_bf16, choices_in_bf16, forced)


def compute_utilities_along(model: nn.Module, texts: Sequence[Text], direction: dict[str, Tensor]) -> Tensor:
    """Utilities, fp64 `[N]`, as a derivative of the gradient, for all tokens of a text at a time."""
    trained = {name: parameter for name, parameter in model.named_parameters() if name in direction}
    utilities: list[Tensor] = []
    for text in texts:
        losses = compute_token_losses(model, text)
        weights = torch.ones_like(losses, requires_grad=True)
        options: dict[str, Any] = dict(create_graph=True, allow_unused=True)
        gradient = torch.autograd.grad((weights * losses).sum(), list(trained.values()), **options)
        pairs = zip(trained, gradient, strict=True)
        product = torch.stack([(direction[n] * vector).sum() for n, vector in pairs if vector is not None]).sum()
        utilities += torch.autograd.grad(product, weights)
    return torch.cat(utilities)


@dataclass
class Ours:
    """Results of the package in bf16."""

    separate: Tensor
    """Utilities, fp64 `[N]`."""
    fused: Tensor
    direction: dict[str, Tensor]
    choices: Choices


def run_ours(path: Path) -> list[tuple[Ours, Ours]]:
    """Measure with the experts of bf16 and with those of fp64, for each stored reference. A collective."""
    references: list[Reference] = torch.load(path, weights_only=False)
    return [(measure(one, None), measure(one, one.choices)) for one in references]


def measure(reference: Reference, forced: Choices | None) -> Ours:
    recipe = make_recipe(reference.folder, model={"precision": "bf16"})
    config = tiny.deepspeed_config(bf16=True)
    model = load_model(derive_plan_settings(recipe), config).train()
    engine = Engine(model, build_optimizer(model, recipe.optimizer), config)
    measured = MeasuredEngine(engine, reference.main, reference.probe, alone=True)
    try:
        with recording_routing(engine.module, forced) as choices:
            direction = measured.take_direction()
            separate, fused = (measured.compute_utilities(fused=fused)[1] for fused in (False, True))
    finally:
        engine.close()
    rank_choices = layout.gather_objects("shards", choices)
    return Ours(separate, fused, direction, {text: parts for one in rank_choices for text, parts in one.items()})


def draw_random_texts(seed: int, num: int) -> list[Text]:
    """Draw random texts with short prompts, so that each has supervised tokens."""
    return [Text(text.tokens, 4 + number % 3) for number, text in enumerate(measurement.draw_texts(num, seed))]


def draw_traces(seed: int, num: int) -> list[Text]:
    """Draw traces of the addition task."""
    taken = TraceStream(seed).take(num)
    lengths = PROMPT_LENGTH + torch.bincount(taken.sequence_index)
    rows = zip(taken.input_ids, lengths.tolist(), strict=True)
    return [Text(ids[:length] + families.FIRST_TOKEN, PROMPT_LENGTH) for ids, length in rows]


def train(model: nn.Module, num_steps: int) -> float:
    """Train on that task, in fp32, in place; returns the mean loss of the last ten steps, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    stream, losses = TraceStream(0), []
    for _ in range(num_steps):
        taken = stream.take(32)
        ids = taken.input_ids + families.FIRST_TOKEN
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits[taken.supervised], ids[:, 1:][taken.supervised])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def make_tiny_config(name: str) -> PretrainedConfig:
    config = families.make_tiny_config(name.removesuffix(DENSE))
    if name.endswith(DENSE):
        config.mlp_only_layers = list(range(config.num_hidden_layers))
    return config


def write_model(name: str, seed: int, num_steps: int, folder: Path) -> None:
    model = families.make_tiny_model(make_tiny_config(name), seed)
    if num_steps > 0:
        print(f"{name}, seed {seed}: loss {train(model, num_steps):.3f} after {num_steps} steps", flush=True)
    model.save_pretrained(folder)  # type: ignore[operator]


COLUMNS = (
    "model, seed, ranks",
    "elsewhere: transformers",
    "ours",
    "of the probe, ours",
    "Spearman: transformers",
    "separate",
    "fused",
    "fused, tokens with equal experts",
    "fused, of fp64's along our direction",
    "forced: transformers",
    "separate",
    "fused",
    "relative error, forced: transformers",
    "separate",
    "fused",
)


def measure_row(reference: Reference, free: Ours, forced: Ours) -> list[str]:
    main, wanted = reference.main, reference.utilities

    def share(choices: Choices, texts: Sequence[Text]) -> str:
        return f"{float(find_rerouted_tokens(choices, reference.choices, texts).double().mean()):.1%}"

    model = load_plain_model(reference.folder, rounded_to=torch.bfloat16)
    along = compute_utilities_along(model, main, free.direction)
    in_place = ~find_rerouted_tokens(free.choices, reference.choices, main)[find_predicting_tokens(main)]
    forced_ones = (reference.forced, forced.separate, forced.fused)
    pairs = [(x, wanted) for x in (reference.in_bf16, free.separate, free.fused)]
    pairs += [(free.fused[in_place], wanted[in_place]), (free.fused, along), *[(x, wanted) for x in forced_ones]]
    return [
        share(reference.choices_in_bf16, main),
        share(free.choices, main),
        share(free.choices, reference.probe),
        *[f"{rank_correlation(*pair):.3f}" for pair in pairs],
        *[f"{relative_error(utilities, wanted):.3f}" for utilities in forced_ones],
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="/".join(FAMILIES), help="separated by slashes")
    parser.add_argument("--seeds", default="0", help="of models and texts, separated by commas")
    parser.add_argument("--ranks", default="1", help="numbers of ranks, separated by commas")
    parser.add_argument("--steps", type=int, default=0, help="training steps on the addition task; 0: random models")
    parser.add_argument("--models", type=Path, help="folder of the models; missing ones are made")
    parsed = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in parsed.families.split("/"):
        with tempfile.TemporaryDirectory() as temporary:
            study(name, parsed, parsed.models or Path(temporary))


def study(name: str, parsed: argparse.Namespace, models: Path) -> None:
    references = {}
    for seed in map(int, parsed.seeds.split(",")):
        folder = models / f"{name}-{seed}-{parsed.steps}"
        if not folder.exists():
            write_model(name, seed, parsed.steps, folder)
        draw = draw_traces if parsed.steps > 0 else draw_random_texts
        references[seed] = make_reference(folder, draw(2 * seed + 1, NUM_MAIN), draw(2 * seed + 2, NUM_PROBE))
    stored = models / f"{name}.references"  # passed as arguments, each of the many tensors would take an open file
    torch.save(list(references.values()), stored)
    for num_ranks in map(int, parsed.ranks.split(",")):
        results = run_ranks(run_ours, num_ranks, stored)[0]
        for (seed, reference), (free, forced) in zip(references.items(), results, strict=True):
            print(
                "|",
                " | ".join([f"{name}, {seed}, {num_ranks}", *measure_row(reference, free, forced)]),
                "|",
                flush=True,
            )


if __name__ == "__main__":
    main()
