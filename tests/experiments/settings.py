"""Settings of a run of the experiment on wrong traces, and the package's configuration of its steps."""

import math
from dataclasses import dataclass, fields

from tests.experiments.task import CLEAN, ERRING_AUTHOR
from vcore_ds.config.sections import MethodConfig

BATCH_SIZE = 16  # training sequences a step; trusted ones are additional
WARMUP_RATIO = 0.1


@dataclass(frozen=True)
class Setting:
    """Settings that distinguish one run from another."""

    learning_rate: float = 6e-3
    num_steps: int = 600
    noise: str = "random"  # random or systematic errors of the erring author
    wrong_traces: float = 0.0  # share of wrong training traces, also of the model to start from
    num_traces: int = 0  # number of different training traces; 0 for new ones in every step
    main_data: str = "training"  # training; pool, only the trusted pool
    # `data.trusted_share`: share of the batch from the pool, in addition to BATCH_SIZE training sequences
    trusted_share: float = 0.0
    pool_size: int = 64  # number of different sequences in the pool
    pool_wrong_traces: float = 0.0  # share of wrong traces in the pool; the rest is clean
    keep: str = ""
    """Which of the training traces are trained on (`selection.py`): random, loss, utility, utility_sign or fall keep
    the highest KEEP_SHARE of `num_traces`; right keeps all that are right; empty keeps all."""
    keep_again: bool = False  # whether traces are scored again half-way, by the model at that time
    method: str = "sft"  # sft, dft or vcore
    kl_budget: float = 0.0  # nats per sequence
    batch_kl_budget: float = 0.0  # nats over the batch; above 0, `method.scope` is sequence_and_batch
    direction: str = "sgd"  # sgd or adam
    probe_size: int = 4  # sequences
    probe_data: str = "training"  # training or pool
    probe_every: int = 1  # steps that share a direction
    probe_rank: int = 0  # rank of the approximation of each matrix of the direction; 0 for full rank
    probe_decay: float = 0.0  # decay of the running mean over directions
    probe_source: str = "batch"  # batch, or previous_step: the gradient that the optimizer consumed last
    seed: int = 0

    def changed(self) -> dict[str, object]:
        """Settings that differ from the defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def label(self) -> str:
        """Name of a row: the changed settings without the seed."""
        return " ".join(f"{name}={value}" for name, value in self.changed().items() if name != "seed")

    def erring_author(self, share: float) -> dict[str, float]:
        """Arguments of `TraceStream` with that share of wrong traces."""
        return {**ERRING_AUTHOR, "systematic": self.noise == "systematic", "wrong_traces": share} if share else CLEAN

    def num_trusted(self) -> int:
        """Number of sequences of the pool in each batch, a share `trusted_share` of it."""
        return round(BATCH_SIZE * self.trusted_share / (1 - self.trusted_share))

    def method_config(self) -> MethodConfig:
        """The package's configuration of a step. The batch is one micro-batch, so its alpha is the step's."""
        if self.method != "vcore":
            return MethodConfig(name=self.method)
        batch = {"scope": "sequence_and_batch", "batch_kl_budget": self.batch_kl_budget}
        return MethodConfig(
            kl_budget=self.kl_budget,
            alpha="loss_ratio",
            alpha_scope="micro_batch",
            **(batch if self.batch_kl_budget > 0 else {}),
        )


def learning_rate_factor(k: int, num_steps: int) -> float:
    """Linear warm-up, then cosine to 0."""
    warmup = max(1, round(WARMUP_RATIO * num_steps))
    return (k + 1) / warmup if k < warmup else 0.5 * (1 + math.cos(math.pi * (k - warmup) / (num_steps - warmup)))
