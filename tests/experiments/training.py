"""One run of the learning experiment: a small Qwen3, one process, one thread, fp32, exact utilities by forward mode."""

import copy
import functools
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedModel

from tests.experiments import task
from tests.experiments.directions import (
    ADAM_EPS,
    BETAS,
    CLIP,
    Direction,
    Muon,
    make_small_qwen3,
    mean_over_sequences,
    supervised_logits,
    token_losses,
)
from tests.experiments.settings import BATCH_SIZE, Setting, budget_factor, learning_rate_factor, method_config
from tests.experiments.task import Traces, TraceStream
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.config.sections import MethodConfig
from vcore_ds.method.baselines import random_mask
from vcore_ds.method.weights import Tokens, segment_sum
from vcore_ds.train.weighting import alpha_of_micro_batch, sequence_weights, token_weights

KEEP_SHARE = 0.2
"""Share of tokens that `random` keeps."""
NUM_HELD_OUT = 512
"""Clean problems, the same for all runs."""
REPORTED, CHOOSING = 0, 1
"""Draws of held-out problems: for the tables, and to choose learning rates and when `load_base_model` stops."""
BASE_STEPS, BASE_ACCURACY = 900, 0.5
"""`tuned` starts from SFT of this schedule, stopped at this accuracy."""
WHOLE_TRACES_BASE: dict[str, Any] = {"num_steps": 700, "learning_rate": 3e-3}
"""Schedule of `tuned` for entirely wrong traces."""
MAIN_STREAM, PROBE_STREAM, POOL_STREAM, BASE_STREAM, HELD_OUT_STREAM, TRUSTED_STREAM = range(6)


class Run:
    """A model, its optimizer and the streams of one setting."""

    def __init__(self, setting: Setting, model: PreTrainedModel):
        self.setting, self.model = setting, model
        parameters = dict(model.named_parameters())
        if setting.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=BETAS, eps=ADAM_EPS, weight_decay=0.0)
        elif setting.optimizer == "muon":
            self.optimizer = Muon(parameters)
        else:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.direction = Direction(setting, parameters, self.optimizer)
        self.reference = copy.deepcopy(model) if setting.method in ("iw_sft", "asft") else None
        self.low_precision = copy.deepcopy(model).bfloat16() if setting.utility == "bf16_difference" else None
        noise, seed = setting.make_training_noise(), setting.seed
        if setting.main_data == "pool":
            self.main = self.make_pool(MAIN_STREAM)
        else:
            self.main = TraceStream([MAIN_STREAM, seed], **noise, pool_size=setting.num_traces or None)
        self.trusted = self.make_pool(TRUSTED_STREAM)
        self.probe = {
            "training": lambda: TraceStream([PROBE_STREAM, seed], **noise),
            "clean": lambda: TraceStream([POOL_STREAM, seed], **task.CLEAN),
            "pool": lambda: self.make_pool(PROBE_STREAM),
        }[setting.probe_data]()
        self.last_utilities: Tensor | None = None
        """Utilities of the last step, `[N]`; None if its method has none."""
        self.stored_weights: dict[tuple[int, ...], Tensor] = {}
        """Tokens of a trace -> its weights under `method.name: stored`, `[n_i]`, 1 on average."""

    def make_pool(self, draws: int) -> TraceStream:
        """The pool, with a separate generator for its draws."""
        seed, size = self.setting.seed, self.setting.pool_size
        noise = self.setting.make_pool_noise()
        return TraceStream([POOL_STREAM, seed], **noise, pool_size=size, draws=[draws, seed])

    def step(self, k: int) -> tuple[Traces, Tensor, float]:
        """Take step k, from 0; returns the batch, its token weights `[N]` (times the weight of their sequence, relative
        to uniform ones) and alpha (its mean over the batch)."""
        setting = self.setting
        traces = self.main.take(BATCH_SIZE)
        if setting.method == "sft_mixed":
            traces = task.join(traces, self.probe.take(setting.probe_size))
        if setting.trusted_share > 0:
            traces = task.join(traces, self.trusted.take(setting.num_trusted()))
        num_sequences, index = len(traces), traces.sequence_index
        budget = setting.kl_budget * budget_factor(setting.budget_schedule, k / setting.num_steps)
        method = method_config(setting, budget)
        utilities = self.utilities(k, traces) if method.name == "vcore" else None
        self.last_utilities = utilities
        logits = supervised_logits(self.model, traces)
        losses = cross_entropy(logits, traces.input_ids[:, 1:][traces.supervised], reduction="none")
        tokens = self.tokens(k, traces, losses.detach(), utilities)
        tokens = replace(tokens, statistics=prediction_statistics(method, logits.detach()))
        if self.stored_weights:
            stored = [self.stored_weights[tuple(row)] for row in traces.input_ids.tolist()]
            tokens = replace(tokens, loss_weights=torch.cat(stored))
        weights = token_weights(method, tokens).weights
        shares = sequence_shares(method, tokens, weights)
        alpha = torch.as_tensor(alpha_of_micro_batch(method, tokens, weights, shares))  # scalar or one per sequence
        coefficients = weights * shares[index]
        loss = (coefficients * alpha.expand(num_sequences)[index] * losses).sum()
        if method.is_anchored:
            loss = loss + method.kl_weight * mean_over_sequences(self.divergences(traces, logits), traces)
        self.optimizer.zero_grad()
        loss.backward()
        if setting.probe_source == "previous_step":
            self.direction.take([parameter.grad for parameter in self.model.parameters()])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = setting.learning_rate * learning_rate_factor(k, setting.num_steps)
        self.optimizer.step()
        return traces, coefficients * num_sequences, float(alpha.mean())

    def utilities(self, k: int, traces: Traces) -> Tensor:
        """Utilities `[N]`, along a new direction if this step takes one."""
        setting = self.setting
        if setting.probe_source == "batch" and k % setting.probe_every == 0:
            self.direction.take_probe(self.model, self.probe.take(setting.probe_size))
        if self.low_precision is not None:
            return self.direction.bf16_utilities(self.low_precision, traces)
        return self.direction.utilities(self.model, traces)

    def divergences(self, traces: Traces, logits: Tensor) -> Tensor:
        """`KL(model at the start || model)` of each prediction, `[N]`."""
        assert self.reference is not None
        with torch.no_grad():
            log_q = log_softmax(supervised_logits(self.reference, traces), -1)
        return kl_div(log_softmax(logits, -1), log_q, reduction="none", log_target=True).sum(-1)

    def tokens(self, k: int, traces: Traces, losses: Tensor, utilities: Tensor | None) -> Tokens:
        index, num_sequences = traces.sequence_index, len(traces)
        kept = reference = None
        if self.setting.method == "random":
            masks = [
                random_mask(
                    traces.in_answer[index == row].numpy(),
                    KEEP_SHARE,
                    generator(Stream.RANDOM_MASK, self.setting.seed, k * BATCH_SIZE + row),
                )
                for row in range(num_sequences)
            ]
            kept = torch.cat([torch.from_numpy(mask) for mask in masks])
        if self.reference is not None and self.setting.method == "iw_sft":
            with torch.no_grad():
                reference = -segment_sum(token_losses(self.reference, traces), index, num_sequences)
        return Tokens(losses, index, num_sequences, utilities, kept, reference)


def prediction_statistics(method: MethodConfig, logits: Tensor) -> Tensor | None:
    """`models.token_loss.PredictionStatistic` of each prediction, `[N]`; None where the method reads none."""
    probabilities = logits.softmax(-1)
    if method.prediction_statistic == "concentration":
        return probabilities.square().sum(-1)
    if method.prediction_statistic == "top_entropy":
        num_top = min(20, logits.shape[-1])
        top = probabilities.topk(num_top).values
        return torch.special.entr(top / top.sum(-1, keepdim=True)).sum(-1) / math.log(num_top)
    return None


def sequence_shares(method: MethodConfig, tokens: Tokens, weights: Tensor) -> Tensor:
    """Shares of the batch's loss, `[num_sequences]`: equal, or tilted if the method weights sequences too."""
    equal = torch.full((tokens.num_sequences,), 1 / tokens.num_sequences)
    if not method.weights_sequences:
        return equal
    assert tokens.utilities is not None
    gains = segment_sum(weights * tokens.utilities, tokens.sequence_index, tokens.num_sequences)
    return sequence_weights(method, gains.double(), equal.double()).weights.float()


@torch.no_grad()
def evaluate(model: PreTrainedModel, draw: int = REPORTED, num_problems: int = NUM_HELD_OUT) -> dict[str, float]:
    """Evaluate on clean problems: loss in nats per token, of all tokens and of three kinds, and accuracy of greedy
    answers."""
    traces = draw_held_out_traces(draw, num_problems)
    prompts = traces.input_ids[:, : task.PROMPT_LENGTH]
    generated = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=2 * task.CLEAN_LENGTH, do_sample=False
    )
    right = task.answers_match(generated[:, task.PROMPT_LENGTH :], traces)
    losses = token_losses(model, traces).view(num_problems, task.CLEAN_LENGTH)
    steps = losses[:, : -task.ANSWER_LENGTH].view(num_problems, task.NUM_DIGITS, -1)
    return {
        "held_out_loss": float(losses.mean()),
        "loss_step_start": float(steps[..., 0].mean()),  # where an irrelevant part may begin
        "loss_sum_digit": float(steps[..., 3].mean()),  # where a wrong step is wrong
        "loss_answer": float(losses[:, -task.ANSWER_LENGTH :].mean()),
        "accuracy": float(right.double().mean()),
    }


def draw_held_out_traces(draw: int, num_problems: int = NUM_HELD_OUT) -> Traces:
    return TraceStream([HELD_OUT_STREAM, draw], **task.CLEAN).take(num_problems)


def load_base_model(setting: Setting, folder: Path) -> PreTrainedModel:
    """A model from SFT on separate traces with the setting's kind of noise, trained once per seed and kept in `folder`.
    If parts of all traces are spoiled, it is stopped half-way: at BASE_ACCURACY, or after BASE_STEPS. If entire traces
    are wrong, it has learnt both authors by WHOLE_TRACES_BASE."""
    base = Setting(num_steps=BASE_STEPS, noise=setting.noise, seed=setting.seed)
    kind = "" if setting.noise == "random" else f"{setting.noise}_"
    if setting.wrong_traces > 0:
        base = replace(base, wrong_traces=setting.wrong_traces, **WHOLE_TRACES_BASE)
        kind = f"{setting.noise}_{setting.wrong_traces:g}_"
    path, model = folder / f"base_{kind}{setting.seed}.pt", make_small_qwen3(setting.seed)
    if not path.exists():
        run = Run(base, model)
        run.main = TraceStream([BASE_STREAM, setting.seed], **base.make_training_noise())
        for k in range(base.num_steps):
            run.step(k)
            stops = base.wrong_traces == 0 and k % 50 == 49
            if stops and evaluate(model, CHOOSING, 256)["accuracy"] >= BASE_ACCURACY:
                break
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
    return model


def load_start_model(setting: Setting, folder: Path) -> PreTrainedModel:
    return make_small_qwen3(setting.seed) if setting.regime == "scratch" else load_base_model(setting, folder)


@functools.cache
def evaluate_start(start: Setting, folder: Path) -> dict[str, float]:
    return evaluate(load_start_model(start, folder))


def train(setting: Setting, folder: Path) -> dict[str, Any]:
    """Train once; returns the setting and the results, as one flat dictionary."""
    model = load_start_model(setting, folder)
    at_start = evaluate_start(Setting(regime=setting.regime, noise=setting.noise, seed=setting.seed), folder)
    run, start = Run(setting, model), time.process_time()
    records: dict[str, list[float]] = {name: [] for name in ("auc", "auc_wrong", "auc_irrelevant", "planted_mass")}
    alphas = []
    has_noise = setting.training_noise and setting.main_data == "training"
    for k in range(setting.num_steps):
        traces, weights, alpha = run.step(k)
        alphas.append(alpha)
        if k % (setting.num_steps // 20) == 0 and setting.method != "sft" and has_noise:
            records["auc"].append(task.measure_separation(weights, traces))
            records["auc_wrong"].append(task.measure_separation(weights, traces, task.WRONG_STEP))
            records["auc_irrelevant"].append(task.measure_separation(weights, traces, task.IRRELEVANT_PART))
            records["planted_mass"].append(task.measure_planted_mass(weights, traces))
    seconds = time.process_time() - start
    means = {name: sum(values) / len(values) for name, values in records.items() if values}
    with torch.no_grad():
        choosing_loss = float(token_losses(model, draw_held_out_traces(CHOOSING)).mean())
    result = {**asdict(setting), **evaluate(model), **means, "alpha_mean": sum(alphas) / len(alphas)}
    return {
        **result,
        "choosing_loss": choosing_loss,
        "loss_at_start": at_start["held_out_loss"],
        "accuracy_at_start": at_start["accuracy"],
        "seconds": round(seconds, 2),
    }


def train_and_record(setting: Setting, results: Path, folder: Path) -> None:
    """Train once and append the result to the file. Models to start from are kept in `folder`."""
    result = train(setting, folder)
    with results.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(
        f"{setting.label()} seed={setting.seed}: held-out loss {result['held_out_loss']:.4f}, "
        f"accuracy {result['accuracy']:.3f}, {result['seconds']:.0f} s",
        flush=True,
    )
