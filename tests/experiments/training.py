"""One run of the experiment: a small Qwen3, one process, one thread, fp32, exact utilities by forward mode."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.experiments import task
from tests.experiments.directions import ADAM_EPS, BETAS, CLIP, Direction, make_small_qwen3, token_losses
from tests.experiments.settings import BATCH_SIZE, Setting, learning_rate_factor
from tests.experiments.task import Traces, TraceStream
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.method.weights import Tokens, segment_sum
from vcore_ds.training.weighting import alpha_of_micro_batch, sequence_weights, token_weights

NUM_PROBLEMS = 256  # number of clean problems on which a model is evaluated, the same for all runs
REPORTED, CHOOSING = 0, 1
"""Draws of held-out problems: for the tables, and to choose learning rates."""
START = {"num_steps": 700, "learning_rate": 3e-3}  # schedule of the SFT runs whose models the others start from
MAIN_STREAM, PROBE_STREAM, POOL_STREAM, START_STREAM, HELD_OUT_STREAM, TRUSTED_STREAM = range(6)


class Run:
    """A model, its optimizer and the streams of one setting."""

    def __init__(self, setting: Setting, model: PreTrainedModel):
        self.setting, self.model = setting, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=BETAS, eps=ADAM_EPS, weight_decay=0.0)
        self.direction = Direction(setting, dict(model.named_parameters()), self.optimizer)
        new = self.make_stream(MAIN_STREAM, setting.num_traces or None)
        self.main = self.make_pool(MAIN_STREAM) if setting.main_data == "pool" else new
        self.trusted = self.make_pool(TRUSTED_STREAM)
        self.probe = self.make_pool(PROBE_STREAM) if setting.probe_data == "pool" else self.make_stream(PROBE_STREAM)
        self.last_utilities: Tensor | None = None
        """Utilities of the last step, `[N]`; None if its method has none."""

    def make_stream(self, stream: int, pool_size: int | None = None, draws: list[int] | None = None) -> TraceStream:
        """A stream of training traces, or of the pool."""
        setting = self.setting
        share = setting.pool_wrong_traces if stream == POOL_STREAM else setting.wrong_traces
        author = {"wrong_traces": share, "systematic": setting.noise == "systematic"}
        return TraceStream([stream, setting.seed], **author, pool_size=pool_size, draws=draws)

    def make_pool(self, draws: int) -> TraceStream:
        """The pool, with a separate generator for its draws."""
        return self.make_stream(POOL_STREAM, self.setting.pool_size, [draws, self.setting.seed])

    def step(self, k: int) -> tuple[Traces, Tensor]:
        """Take step k, from 0; returns the batch and its token weights `[N]` (times the weight of their sequence,
        relative to uniform ones)."""
        setting = self.setting
        traces = self.main.take(BATCH_SIZE)
        if setting.trusted_share > 0:
            traces = task.join(traces, self.trusted.take(setting.num_trusted()))
        num_sequences, index = len(traces), traces.sequence_index
        method = setting.method_config()
        self.last_utilities = self.utilities(k, traces) if method.name == "vcore" else None
        losses = token_losses(self.model, traces)
        tokens = Tokens(losses.detach(), index, num_sequences, self.last_utilities, None, None)
        weights = token_weights(method, tokens).weights
        shares = sequence_shares(method, tokens, weights)
        alpha = torch.as_tensor(alpha_of_micro_batch(method, tokens, weights, shares))  # scalar or one per sequence
        coefficients = weights * shares[index]
        self.optimizer.zero_grad()
        (coefficients * alpha.expand(num_sequences)[index] * losses).sum().backward()
        if setting.probe_source == "previous_step":
            self.direction.take([parameter.grad for parameter in self.model.parameters()])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = setting.learning_rate * learning_rate_factor(k, setting.num_steps)
        self.optimizer.step()
        return traces, coefficients * num_sequences

    def utilities(self, k: int, traces: Traces) -> Tensor:
        """Utilities `[N]`, along a new direction if this step takes one."""
        if self.setting.probe_source == "batch" and k % self.setting.probe_every == 0:
            self.direction.take_probe(self.model, self.probe.take(self.setting.probe_size))
        return self.direction.utilities(self.model, traces)


def sequence_shares(method: MethodConfig, tokens: Tokens, weights: Tensor) -> Tensor:
    """Shares of the batch's loss, `[num_sequences]`: equal, or tilted if the method weights sequences too."""
    equal = torch.full((tokens.num_sequences,), 1 / tokens.num_sequences)
    if not method.weights_sequences:
        return equal
    assert tokens.utilities is not None
    gains = segment_sum(weights * tokens.utilities, tokens.sequence_index, tokens.num_sequences)
    return sequence_weights(method, gains.double(), equal.double()).weights.float()


@torch.no_grad()
def evaluate(model: PreTrainedModel, draw: int = REPORTED) -> dict[str, float]:
    """Loss on clean problems in nats per token, and accuracy of greedy answers."""
    traces = TraceStream([HELD_OUT_STREAM, draw]).take(NUM_PROBLEMS)
    prompts = traces.input_ids[:, : task.PROMPT_LENGTH]
    generated = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=2 * task.TRACE_LENGTH, do_sample=False
    )
    right = task.answers_match(generated[:, task.PROMPT_LENGTH :], traces)
    return {"accuracy": float(right.double().mean()), "held_out_loss": float(token_losses(model, traces).mean())}


def load_start_model(setting: Setting, folder: Path) -> PreTrainedModel:
    """A model that has learnt both authors by SFT on separate traces, trained once per seed and kept in `folder`."""
    start = Setting(noise=setting.noise, wrong_traces=setting.wrong_traces, seed=setting.seed, **START)
    path = folder / f"base_{setting.noise}_{setting.wrong_traces:g}_{setting.seed}.pt"
    model = make_small_qwen3(setting.seed)
    if not path.exists():
        run = Run(start, model)
        run.main = run.make_stream(START_STREAM)
        for k in range(start.num_steps):
            run.step(k)
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
    return model


# ---- scores of traces, and selection of those to train on ------------------------------------------------------------

KEEP_SHARE = 0.25
# Settings of SFT on the pool; how far it lowers a trace's loss is the score `fall`
FALL = {"num_steps": 20, "learning_rate": 1e-3}


def keep(setting: Setting, model: PreTrainedModel, run: Run) -> Tensor:
    """Restrict the run's main stream to the traces that `setting.keep` selects; returns the scores, `[num_traces]`."""
    traces = run.main.whole_pool()
    scores = score(setting, model, traces, run.trusted.whole_pool())
    num_kept = int((~traces.wrong).sum()) if setting.keep == "right" else round(KEEP_SHARE * len(traces))
    run.main.keep(scores.argsort(descending=True)[:num_kept].numpy())
    return scores


def score(setting: Setting, model: PreTrainedModel, traces: Traces, pool: Traces) -> Tensor:
    """Scores of the traces, `[B]`; higher is better."""
    scores: dict[str, Callable[[], Tensor]] = {
        "random": lambda: torch.rand(len(traces), generator=torch.Generator().manual_seed(setting.seed)),
        "right": lambda: (~traces.wrong).float(),
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
    """First-order decrease of the pool's loss by a step on each trace, per token of it, `[B]`: along the pool's
    gradient or with `sign` along its sign, Adam's first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    direction = Direction(Setting(direction="sgd"), dict(model.named_parameters()), optimizer)
    direction.take_probe(model, pool)
    if sign:
        for vector in direction.vector.values():
            vector.sign_()
    return traces.mean(direction.utilities(model, traces))


def train_on_pool(setting: Setting, model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model`, after `sft` on the pool."""
    run = Run(replace(setting, method="sft", main_data="pool", trusted_share=0.0, **FALL), copy.deepcopy(model))
    for k in range(run.setting.num_steps):
        run.step(k)
    return run.model
