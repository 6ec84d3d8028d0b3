"""Settings of a run of the learning experiment, and the package's configuration that they correspond to."""

import math
from dataclasses import dataclass, fields

from tests.experiments.task import CLEAN, ERRING_AUTHOR, RANDOM_NOISE, SYSTEMATIC_NOISE
from vcore_ds.config.sections import MethodConfig

BATCH_SIZE = 16
"""Training sequences a step; trusted ones are additional."""
WARMUP_RATIO = 0.1
BASELINES = ("sft", "dft", "asft", "eaft", "deft", "profit", "iw_sft", "random")
"""Methods with the package's defaults."""


@dataclass(frozen=True)
class Setting:
    """Settings that distinguish one run from another."""

    regime: str = "scratch"
    """scratch, or tuned: from the model of `load_base_model`."""
    optimizer: str = "adamw"
    """adamw, sgd, or muon for the matrices of the layers with AdamW for the rest."""
    learning_rate: float = 6e-3
    num_steps: int = 600
    training_noise: bool = True
    """Whether the main batch has planted noise."""
    noise: str = "random"
    """random, unlikely under the model; systematic, likely under it. Also the noise of the model to start from."""
    wrong_traces: float = 0.0
    """Share of entirely wrong training traces, with that noise; 0 spoils parts of all traces instead."""
    num_traces: int = 0
    """Number of different training traces; 0 for new ones in every step."""
    main_data: str = "training"
    """training; pool, only the trusted pool."""
    trusted_share: float = 0.0
    """`data.trusted_share`: share of the batch from the pool, in addition to BATCH_SIZE training sequences."""
    pool_size: int = 64
    """Number of different sequences in the pool."""
    pool_wrong_traces: float = 0.0
    """Share of entirely wrong traces in the pool; the rest is clean."""
    keep: str = ""
    """Which of the training traces are trained on (`selection.py`): random, loss, utility, utility_sign or fall keep
    the highest KEEP_SHARE of `num_traces`; right keeps all that are right; empty keeps all."""
    keep_again: bool = False
    """Whether traces are scored again half-way, by the model at that time."""
    stored: str = ""
    """When the token weights of all training traces are computed, from utilities along the pool's gradient: start, once
    with the model before training; finished, once with the model of a finished `sft` run; epoch, at the start of each.
    Empty: weights follow the model in every step."""
    method: str = "sft"
    """vcore, one of BASELINES, or sft_mixed: sft on the batch and the probe's sequences together."""
    kl_budget: float = 0.0
    """Nats per sequence."""
    budget_schedule: str = "constant"
    """constant; rising, from 0 over the first half of the steps; falling, to 0 over the first half."""
    base_measure: str = "uniform"
    batch_kl_budget: float = 0.0
    """Nats over the batch; above 0, `method.scope` is sequence_and_batch."""
    direction: str = "sgd"
    alpha: str = "loss_ratio"
    utility: str = "jvp"
    """jvp, or bf16_difference: the paper's finite difference at eps 1e-4 in bf16."""
    probe_size: int = 4
    """Sequences."""
    probe_data: str = "training"
    """training; clean, without planted noise and always new; pool, the pool of `pool_size`."""
    probe_loss: str = "uniform"
    """Token weights of the probe's loss: uniform; dft, the tokens' probabilities; answer, only the answer's digits."""
    probe_every: int = 1
    """Steps that share a direction."""
    probe_rank: int = 0
    """Rank of the approximation of each matrix of the direction; 0 for full rank."""
    probe_decay: float = 0.0
    """Decay of the running mean over directions."""
    probe_source: str = "batch"
    """batch, or previous_step: the gradient that the optimizer consumed last."""
    seed: int = 0

    def label(self) -> str:
        """Name of a row: the settings that differ from the defaults, without the seed."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default and f.name != "seed"]
        return " ".join(f"{name}={getattr(self, name)}" for name in changed)

    def make_training_noise(self) -> dict[str, float]:
        """Arguments of `TraceStream`."""
        if not self.training_noise:
            return CLEAN
        if self.wrong_traces > 0:
            return self._erring_author(self.wrong_traces)
        return {"random": RANDOM_NOISE, "systematic": SYSTEMATIC_NOISE}[self.noise]

    def make_pool_noise(self) -> dict[str, float]:
        """Arguments of `TraceStream`."""
        return self._erring_author(self.pool_wrong_traces) if self.pool_wrong_traces > 0 else CLEAN

    def _erring_author(self, share: float) -> dict[str, float]:
        return {**ERRING_AUTHOR, "systematic": self.noise == "systematic", "wrong_traces": share}

    def num_trusted(self) -> int:
        """Number of sequences of the pool in each batch, a share `trusted_share` of it."""
        return round(BATCH_SIZE * self.trusted_share / (1 - self.trusted_share))


def method_config(setting: Setting, kl_budget: float) -> MethodConfig:
    """The package's configuration of a step. The batch is a single micro-batch, so a micro-batch's alpha is the step's.

    Without a budget `vcore` is plain fine-tuning, and so is `sft_mixed` on its larger batch.
    """
    if setting.method == "vcore" and kl_budget > 0:
        batch = {"scope": "sequence_and_batch", "batch_kl_budget": setting.batch_kl_budget}
        return MethodConfig(
            kl_budget=kl_budget,
            base_measure=setting.base_measure,
            alpha=setting.alpha,
            alpha_scope="micro_batch",
            **(batch if setting.batch_kl_budget > 0 else {}),
        )
    return MethodConfig(name=setting.method if setting.method in (*BASELINES, "stored") else "sft")


def learning_rate_factor(k: int, num_steps: int) -> float:
    """Linear warm-up, then cosine to 0."""
    warmup = max(1, round(WARMUP_RATIO * num_steps))
    return (k + 1) / warmup if k < warmup else 0.5 * (1 + math.cos(math.pi * (k - warmup) / (num_steps - warmup)))


def budget_factor(schedule: str, progress: float) -> float:
    """Share of the KL budget when `progress` of the steps are done."""
    return {"constant": 1.0, "rising": min(1.0, 2 * progress), "falling": max(0.0, 1.0 - 2 * progress)}[schedule]
