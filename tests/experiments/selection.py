"""Scores of whole traces, which of them are kept to be trained on, and token weights that are stored."""

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
from vcore_ds.method.weights import gibbs_weights_for_budget

KEEP_SHARE = 0.25
FALL = {"num_steps": 20, "learning_rate": 1e-3}
"""SFT on the pool whose fall of the loss is a score."""
SFT_RATE = 3e-4
"""That `sft` has in the tables of whole-traces.md."""


def keep(setting: Setting, model: PreTrainedModel, run: Run) -> Tensor:
    """Leaves the traces that `setting.keep` names to the run's main stream. Returns the scores, `[num_traces]`."""
    traces = run.main.whole_pool()
    scores = score(setting, model, traces, run.trusted.whole_pool())
    num_kept = int((~traces.wrong()).sum()) if setting.keep == "right" else round(KEEP_SHARE * len(traces))
    run.main.keep(scores.argsort(descending=True)[:num_kept].numpy())
    return scores


def store(setting: Setting, model: PreTrainedModel, run: Run) -> Tensor:
    """Store in the run the token weights of all training traces, made with `model` as `vcore-ds keep --weights` makes
    them. Returns the traces' mean utilities, `[num_traces]`."""
    traces = run.main.whole_pool()
    utilities = token_utilities(model, traces, run.trusted.whole_pool(), sign=False)
    weights = gibbs_weights_for_budget(utilities, traces.sequence_index, len(traces), setting.kl_budget).weights
    num_tokens = torch.bincount(traces.sequence_index).tolist()
    rows = zip(traces.input_ids.tolist(), weights.split(num_tokens), strict=True)
    run.stored_weights = {tuple(tokens): (len(part) * part).half().float() for tokens, part in rows}
    return traces.mean(utilities)


def score(setting: Setting, model: PreTrainedModel, traces: Traces, pool: Traces) -> Tensor:
    """`[B]`, higher is better."""
    scores: dict[str, Callable[[], Tensor]] = {
        "random": lambda: torch.rand(len(traces), generator=torch.Generator().manual_seed(setting.seed)),
        "right": lambda: (~traces.wrong()).float(),
        "loss": lambda: -mean_losses(model, traces),
        "utility": lambda: mean_utilities(model, traces, pool, sign=False),
        "utility_sign": lambda: mean_utilities(model, traces, pool, sign=True),
        "fall": lambda: mean_losses(model, traces) - mean_losses(trained_on_pool(setting, model), traces),
    }
    return scores[setting.keep]()


@torch.no_grad()
def mean_losses(model: PreTrainedModel, traces: Traces) -> Tensor:
    """`[B]`, nats per token."""
    return traces.mean(token_losses(model, traces))


def mean_utilities(model: PreTrainedModel, traces: Traces, pool: Traces, *, sign: bool) -> Tensor:
    """`[B]`: by how much a step on a trace, per token of it, lowers the loss of the pool, to first order."""
    return traces.mean(token_utilities(model, traces, pool, sign=sign))


def token_utilities(model: PreTrainedModel, traces: Traces, pool: Traces, *, sign: bool) -> Tensor:
    """`[N]`: by how much a step on a token lowers the loss of the pool, to first order.

    Args:
        sign: along the sign of the pool's gradient, Adam's first step, instead of the gradient.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    direction = Direction(Setting(direction="sgd"), dict(model.named_parameters()), optimizer)
    direction.take_probe(model, pool)
    if sign:
        for vector in direction.vector.values():
            vector.sign_()
    return direction.utilities(model, traces)


def trained_on_pool(setting: Setting, model: PreTrainedModel) -> PreTrainedModel:
    return _trained(replace(setting, method="sft", main_data="pool", trusted_share=0.0, **FALL), model)


def trained_on_all(setting: Setting, model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model`, after `sft` on all training traces for `setting.num_steps` steps."""
    return _trained(replace(setting, method="sft", stored="", learning_rate=SFT_RATE), model)


def _trained(setting: Setting, model: PreTrainedModel) -> PreTrainedModel:
    run = Run(setting, copy.deepcopy(model))
    for k in range(setting.num_steps):
        run.step(k)
    return run.model
