"""Scores of traces, and selection of the traces to train on."""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.experiments.directions import Direction, token_losses
from tests.experiments.settings import Setting
from tests.experiments.task import Traces
from tests.experiments.training import Run

KEEP_SHARE = 0.25
# Settings of SFT on the pool; how far it lowers a trace's loss is the score `fall`
FALL = {"num_steps": 20, "learning_rate": 1e-3}


def keep(setting: Setting, model: PreTrainedModel, run: Run) -> Tensor:
    """Restrict the run's main stream to the traces that `setting.keep` selects; returns the scores, `[num_traces]`."""
    traces = run.main.whole_pool()
    scores = score(setting, model, traces, run.trusted.whole_pool())
    num_kept = int((~traces.wrong()).sum()) if setting.keep == "right" else round(KEEP_SHARE * len(traces))
    run.main.keep(scores.argsort(descending=True)[:num_kept].numpy())
    return scores


def score(setting: Setting, model: PreTrainedModel, traces: Traces, pool: Traces) -> Tensor:
    """Scores of the traces, `[B]`; higher is better."""
    scores: dict[str, Callable[[], Tensor]] = {
        "random": lambda: torch.rand(len(traces), generator=torch.Generator().manual_seed(setting.seed)),
        "right": lambda: (~traces.wrong()).float(),
        "loss": lambda: -mean_losses(model, traces),
        "utility": lambda: mean_utilities(model, traces, pool, sign=False),
        "utility_sign": lambda: mean_utilities(model, traces, pool, sign=True),
        "fall": lambda: mean_losses(model, traces) - mean_losses(train_on_pool(setting, model), traces),
    }
    return scores[setting.keep]()


@torch.no_grad()
def mean_losses(model: PreTrainedModel, traces: Traces) -> Tensor:
    """Mean loss of each trace, `[B]`, nats per token."""
    return traces.mean(token_losses(model, traces))


def mean_utilities(model: PreTrainedModel, traces: Traces, pool: Traces, *, sign: bool) -> Tensor:
    """First-order decrease of the pool's loss by a step on each trace, per token of it, `[B]`."""
    return traces.mean(token_utilities(model, traces, pool, sign=sign))


def token_utilities(model: PreTrainedModel, traces: Traces, pool: Traces, *, sign: bool) -> Tensor:
    """First-order decrease of the pool's loss by a step on each token, `[N]`, along the pool's gradient or with `sign`
    along its sign, Adam's first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    direction = Direction(Setting(direction="sgd"), dict(model.named_parameters()), optimizer)
    direction.take_probe(model, pool)
    if sign:
        for vector in direction.vector.values():
            vector.sign_()
    return direction.utilities(model, traces)


def train_on_pool(setting: Setting, model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model`, after `sft` on the pool."""
    run = Run(
        replace(setting, method="sft", main_data="pool", trusted_share=0.0, **FALL),
        copy.deepcopy(model),
    )
    for k in range(run.setting.num_steps):
        run.step(k)
    return run.model
