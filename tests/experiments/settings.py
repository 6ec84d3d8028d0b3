"""Settings of a run of the experiment on wrong traces, the package's configuration of its steps, and results."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands.page import Table, format_number
from vcore_ds.common.statistics import cell, paired
from vcore_ds.config.method_section import MethodConfig

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
    """Which of the training traces are trained on (`training.keep`): random, loss, utility, utility_sign or fall keep
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


Result = dict[str, Any]
BySeed = dict[int, Result]


def read_results(results: Path) -> list[Result]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def parse_setting(result: Result) -> Setting:
    """The setting of a result, which has the fields that differ from the defaults."""
    return Setting(**{field.name: result.get(field.name, field.default) for field in fields(Setting)})


def find_results(row: Setting, results: Sequence[Result]) -> BySeed:
    """Seed -> result of `row` at its learning rate."""
    settings = [(parse_setting(result), result) for result in results]
    return {setting.seed: result for setting, result in settings if replace(setting, seed=0) == row}


def choose_rate(row: Setting, rates: Sequence[float], results: Sequence[Result], seeds: Sequence[int]) -> float:
    """The learning rate with the highest mean accuracy over `seeds`, and the lowest loss among equals. Raises
    ValueError where one of the seeds has not been run at all rates."""
    badness = {}
    for rate in rates:
        by_seed = find_results(replace(row, learning_rate=rate), results)
        if not by_seed.keys() >= set(seeds):
            raise ValueError(
                f"{row.changed()} at {rate:g}: found seeds {sorted(by_seed)}, expected {list(seeds)} first"
            )
        measures = (("accuracy", -1), ("held_out_loss", 1))
        badness[rate] = tuple(sign * float(np.mean([by_seed[seed][key] for seed in seeds])) for key, sign in measures)
    return min(badness, key=badness.__getitem__)


def whole_traces_table(
    rows: Mapping[str, Setting], rates: Mapping[str, float], results: Sequence[Result], seeds: Sequence[int]
) -> str:
    """Markdown: accuracy and loss of each row at its rate, and their differences to `sft` and to `sft + trusted` on the
    same seeds. `wrong` is the share of the weight on wrong traces, `cost` CPU time relative to `sft`. Rows that have
    not been run are left out."""
    by_row: dict[str, BySeed] = {}
    for name in rows:
        if name in rates:
            by_seed = find_results(replace(rows[name], learning_rate=rates[name]), results)
            by_row[name] = {seed: by_seed[seed] for seed in seeds if seed in by_seed}
    references = [name for name in ("sft", "sft + trusted") if name in rows]
    differences = [f"to {name}" for name in references]
    head = ["row", "rate", "seeds", "accuracy %", *differences, "loss", *differences, "AUC", "wrong", "cost"]
    table = []
    for name, by_seed in by_row.items():
        cells = [name, f"{rates[name]:g}" if rows[name].num_steps > 0 else "", str(len(by_seed))]
        for key, unit, digits in (("accuracy", 100, 1), ("held_out_loss", 1, 4)):
            values = {row: {seed: unit * result[key] for seed, result in some.items()} for row, some in by_row.items()}
            cells.append(cell(list(values[name].values()), digits))
            for reference in references:
                differing = paired(values[name], values[reference])
                cells.append(cell(differing, digits, difference=True) if differing and name != reference else "")
        cost = (_mean(by_seed, "seconds") or 0.0) / (_mean(by_row.get("sft", {}), "seconds") or np.nan)
        measured = [_mean(by_seed, key) for key in ("auc", "weight_on_wrong")]
        table.append([*cells, *(format_number(value, ".2f") for value in measured), f"{cost:.1f}"])
    return Table("", head, table).markdown()


def _mean(by_seed: BySeed, key: str) -> float | None:
    values = [result[key] for result in by_seed.values() if key in result]
    return float(np.mean(values)) if values else None
