"""One run of the learning experiment: a small Qwen3, one process, one thread, fp32, exact utilities by forward mode."""

import copy
import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from tests.experiments import task
from tests.experiments.task import Traces, TraceStream
from vcore_ds.config.schema import MethodConfig
from vcore_ds.method import Tokens, adam_direction, random_mask, segment_sum, uniform_weights
from vcore_ds.random_streams import Stream, generator
from vcore_ds.weighting import alpha_of_micro_batch, token_weights

BATCH_SIZE = 16  # sequences
CLIP = 1.0  # 2-norm of the gradient, and of the probe gradient
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
WARMUP_RATIO = 0.1
KEEP_SHARE = 0.2  # of `random`
FINITE_DIFFERENCE_EPS = 1e-4
NUM_HELD_OUT = 512  # clean problems, the same for all runs
BASE_STEPS, BASE_ACCURACY = 900, 0.5  # `tuned` starts from SFT of this schedule, stopped at this accuracy
MAIN_STREAM, PROBE_STREAM, POOL_STREAM, BASE_STREAM, HELD_OUT_STREAM = range(5)


@dataclass(frozen=True)
class Setting:
    """What distinguishes one run from another."""

    regime: str = "scratch"
    """scratch, or tuned: from the model of `base_model`."""
    optimizer: str = "adamw"
    learning_rate: float = 6e-3
    num_steps: int = 600
    training_noise: bool = True
    """Whether the main batch has planted noise."""
    method: str = "sft"
    """sft, dft, iw_sft, random or vcore; sft_mixed: sft on the batch and the probe's sequences together."""
    kl_budget: float = 0.0
    """Nats per sequence."""
    budget_schedule: str = "constant"
    """constant; rising, from 0 over the first half of the steps; falling, to 0 over the first half."""
    direction: str = "sgd"
    alpha: str = "loss_ratio"
    utility: str = "jvp"
    """jvp, or bf16_difference: the paper's finite difference at eps 1e-4 in bf16."""
    probe_size: int = 4
    """Sequences."""
    probe_data: str = "training"
    """training; clean, without planted noise; clean_64, a fixed pool of 64 clean sequences."""
    probe_loss: str = "uniform"
    """Token weights of the probe's loss: uniform; dft, the tokens' probabilities; answer, the answer's digits alone."""
    seed: int = 0

    def label(self) -> str:
        """The settings that differ from the defaults, seed aside: the name of a row."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default and f.name != "seed"]
        return " ".join(f"{name}={getattr(self, name)}" for name in changed)


def small_qwen3(seed: int) -> PreTrainedModel:
    """About 0.1M parameters, tied embeddings, fp32."""
    config = Qwen3Config(
        vocab_size=task.VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        attn_implementation="eager",  # has a forward-mode derivative
        bos_token_id=None,
        eos_token_id=task.END,
        pad_token_id=task.END,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def token_losses(model: PreTrainedModel, traces: Traces, parameters: dict[str, Tensor] | None = None) -> Tensor:
    """Nats of each supervised token, `[N]` fp32; at `parameters`, where given."""
    inputs = {"input_ids": traces.input_ids, "use_cache": False}
    if parameters is None:
        logits = model(**inputs).logits
    else:
        logits = functional_call(model, parameters, (), inputs, tie_weights=True).logits
    targets = traces.input_ids[:, 1:][traces.supervised]
    return cross_entropy(logits[:, :-1][traces.supervised].float(), targets, reduction="none")


def mean_over_sequences(values: Tensor, traces: Traces) -> Tensor:
    """`mean_i mean_t`, scalar."""
    return (values * uniform_weights(traces.sequence_index, len(traces), values.dtype)).sum() / len(traces)


class Run:
    """A model, its optimizer and the streams of one setting."""

    def __init__(self, setting: Setting, model: PreTrainedModel):
        self.setting, self.model = setting, model
        self.parameters = dict(model.named_parameters())
        if setting.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=BETAS, eps=ADAM_EPS, weight_decay=0.0)
        else:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        noise = {} if setting.training_noise else {"wrong": 0.0, "irrelevant": 0.0}
        self.main = TraceStream([MAIN_STREAM, setting.seed], **noise)
        self.reference = copy.deepcopy(model) if setting.method == "iw_sft" else None
        self.low_precision = copy.deepcopy(model).bfloat16() if setting.utility == "bf16_difference" else None
        if setting.probe_data == "training":
            self.probe = TraceStream([PROBE_STREAM, setting.seed], **noise)
        else:
            pool_size = 64 if setting.probe_data == "clean_64" else None
            self.probe = TraceStream([POOL_STREAM, setting.seed], wrong=0.0, irrelevant=0.0, pool_size=pool_size)

    def step(self, k: int) -> tuple[Traces, Tensor, float]:
        """Step k, from 0. Returns the batch, its token weights `[N]` and alpha (its mean over the batch)."""
        setting = self.setting
        traces = self.main.take(BATCH_SIZE)
        if setting.method == "sft_mixed":
            traces = task.join(traces, self.probe.take(setting.probe_size))
        budget = setting.kl_budget * budget_factor(setting.budget_schedule, k / setting.num_steps)
        utilities = None
        if setting.method == "vcore" and budget > 0:
            utilities = self.utilities(traces, self.probe_direction(self.probe.take(setting.probe_size)))
        losses = token_losses(self.model, traces)
        method = method_config(setting, budget)
        tokens = self.tokens(k, traces, losses.detach(), utilities)
        weights = token_weights(method, tokens).weights
        shares = torch.full((len(traces),), 1 / len(traces))
        alpha = torch.as_tensor(alpha_of_micro_batch(method, tokens, weights, shares))  # scalar or one per sequence
        scaled = weights * alpha.expand(len(traces))[traces.sequence_index]
        self.optimizer.zero_grad()
        ((scaled * losses).sum() / len(traces)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = setting.learning_rate * learning_rate_factor(k, setting.num_steps)
        self.optimizer.step()
        return traces, weights, float(alpha.mean())

    def probe_direction(self, traces: Traces) -> dict[str, Tensor]:
        losses = token_losses(self.model, traces)
        if self.setting.probe_loss == "dft":
            losses = losses * torch.exp(-losses.detach())
        elif self.setting.probe_loss == "answer":
            losses = losses * traces.in_answer
        loss = mean_over_sequences(losses, traces)  # its scale does not matter: the KL budget is free of scale
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        gradients = [g * (CLIP / norm).clamp_max(1.0) for g in gradients]
        direction = {}
        for (name, parameter), g in zip(self.parameters.items(), gradients, strict=True):
            state = self.optimizer.state.get(parameter)
            if self.setting.direction == "adam" and state:
                moments = (state["exp_avg"], state["exp_avg_sq"])
                g = adam_direction(g, *moments, step=int(state["step"]) + 1, betas=BETAS, eps=ADAM_EPS)
            direction[name] = g
        return direction

    @torch.no_grad()
    def utilities(self, traces: Traces, direction: dict[str, Tensor]) -> Tensor:
        """`s = <v, grad l>`, `[N]`."""
        if self.low_precision is not None:
            shifts = (0.0, FINITE_DIFFERENCE_EPS)
            at, below = (self.bf16_losses(traces, direction, shift) for shift in shifts)
            return (at - below) / FINITE_DIFFERENCE_EPS
        with forward_ad.dual_level():
            dual = {name: forward_ad.make_dual(p.detach(), direction[name]) for name, p in self.parameters.items()}
            return forward_ad.unpack_dual(token_losses(self.model, traces, dual)).tangent

    def bf16_losses(self, traces: Traces, direction: dict[str, Tensor], eps: float) -> Tensor:
        """At `theta - eps * v`, taken in fp32 and rounded."""
        rounded = {name: (p.detach() - eps * direction[name]).bfloat16() for name, p in self.parameters.items()}
        return token_losses(self.low_precision, traces, rounded)

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
        if self.reference is not None:
            with torch.no_grad():
                reference = -segment_sum(token_losses(self.reference, traces), index, num_sequences)
        return Tokens(losses, index, num_sequences, utilities, kept, reference)


def method_config(setting: Setting, kl_budget: float) -> MethodConfig:
    """The product's description of a step. The batch is a single micro-batch, so a micro-batch's alpha is the step's.

    Without a budget `vcore` is plain fine-tuning, and so is `sft_mixed` on its larger batch.
    """
    if setting.method == "vcore" and kl_budget > 0:
        return MethodConfig(kl_budget=kl_budget, alpha=setting.alpha, alpha_scope="micro_batch")
    return MethodConfig(name=setting.method if setting.method in ("dft", "iw_sft", "random") else "sft")


def learning_rate_factor(k: int, num_steps: int) -> float:
    """Linear warm-up, then cosine to 0."""
    warmup = max(1, round(WARMUP_RATIO * num_steps))
    return (k + 1) / warmup if k < warmup else 0.5 * (1 + math.cos(math.pi * (k - warmup) / (num_steps - warmup)))


def budget_factor(schedule: str, progress: float) -> float:
    """Share of the KL budget when `progress` of the steps are done."""
    return {"constant": 1.0, "rising": min(1.0, 2 * progress), "falling": max(0.0, 1.0 - 2 * progress)}[schedule]


@torch.no_grad()
def evaluate(model: PreTrainedModel, draw: int = 0, num_problems: int = NUM_HELD_OUT) -> dict[str, float]:
    """On clean problems: loss of the trace in nats per token, of all and of three kinds of them, and the share of right
    answers when it is written greedily."""
    traces = TraceStream([HELD_OUT_STREAM, draw], wrong=0.0, irrelevant=0.0).take(num_problems)
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


def base_model(seed: int, folder: Path) -> PreTrainedModel:
    """A model stopped half-way through SFT on spoiled traces of its own: at BASE_ACCURACY on problems that serve for
    nothing else. Trained once per seed and kept in `folder`."""
    path, model = folder / f"base_{seed}.pt", small_qwen3(seed)
    if not path.exists():
        run = Run(Setting(num_steps=BASE_STEPS, seed=seed), model)
        run.main = TraceStream([BASE_STREAM, seed])
        for k in range(BASE_STEPS):
            run.step(k)
            if k % 50 == 49 and evaluate(model, draw=1, num_problems=256)["accuracy"] >= BASE_ACCURACY:
                break
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
    return model


def train(setting: Setting, folder: Path) -> dict[str, Any]:
    """One run. Returns the setting and what came out, as one flat dictionary."""
    model = small_qwen3(setting.seed) if setting.regime == "scratch" else base_model(setting.seed, folder)
    at_start = evaluate(model)
    run, start = Run(setting, model), time.process_time()
    records: dict[str, list[float]] = {name: [] for name in ("auc", "auc_wrong", "auc_irrelevant", "planted_mass")}
    alphas = []
    for k in range(setting.num_steps):
        traces, weights, alpha = run.step(k)
        alphas.append(alpha)
        if k % (setting.num_steps // 20) == 0 and setting.method != "sft" and setting.training_noise:
            records["auc"].append(task.separation(weights, traces))
            records["auc_wrong"].append(task.separation(weights, traces, task.WRONG_STEP))
            records["auc_irrelevant"].append(task.separation(weights, traces, task.IRRELEVANT_PART))
            records["planted_mass"].append(task.planted_mass(weights, traces))
    seconds = time.process_time() - start
    means = {name: sum(values) / len(values) for name, values in records.items() if values}
    result = {**asdict(setting), **evaluate(model), **means, "alpha_mean": sum(alphas) / len(alphas)}
    return {
        **result,
        "loss_at_start": at_start["held_out_loss"],
        "accuracy_at_start": at_start["accuracy"],
        "seconds": round(seconds, 2),
    }
