"""Run folders for reports, written without training, with given tokens and numbers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from tests.helpers.recipes import smallest_recipe
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.training.token_records import SequenceTokens, TokenRecord, write_record


def write_run(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    metrics: Sequence[Mapping[str, Any]],
    records: Mapping[int, Sequence[SequenceTokens]],
    *,
    followed: Mapping[int, Sequence[SequenceTokens]] | None = None,
    environment: Mapping[str, Any] | None = None,
    **changes: Mapping[str, Any],
) -> Path:
    """Write the folder of a finished run. `records`, `followed`: sequences by step; `changes`: sections of the recipe,
    merged over the smallest one."""
    folder.mkdir(parents=True)
    recipe = smallest_recipe()
    recipe["run"]["output_dir"] = str(folder)
    for section, values in changes.items():
        recipe[section] = recipe.get(section, {}) | values
    (folder / "recipe.yaml").write_text(dump_recipe(Recipe.model_validate(recipe)))
    (folder / "environment.json").write_text(json.dumps(environment or {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    result = "adapter" if recipe.get("lora") else "model"
    tokenizer.save_pretrained(folder / result)
    for kind, sequences_by_step in (("step", records), ("followed", followed or {})):
        for step, sequences in sequences_by_step.items():
            record = TokenRecord(step, None, len(sequences), sum(map(len, sequences)), sequences)
            write_record(folder, record, kind)
    return folder


def random_sequence(ids: Sequence[int], sequence_id: int, seed: int, share: float = 1.0) -> SequenceTokens:
    """Random losses and utilities of given tokens, and weights derived from the utilities."""
    generator = np.random.default_rng(seed)
    n = len(ids)
    utilities = generator.standard_t(3, n)
    weights = np.exp(0.3 * utilities)
    return SequenceTokens(
        sequence_id,
        share,
        share,
        0.9,
        positions=np.arange(5, 5 + n, dtype=np.int32),
        token_ids=np.array(ids, dtype=np.int32),
        losses=generator.exponential(0.8, n).astype(np.float32),
        utilities=utilities.astype(np.float32),
        weights=(weights / weights.sum()).astype(np.float32),
    )


def random_trace(ids: Sequence[int], sequence_id: int, seed: int, source: str) -> SequenceTokens:
    """`random_sequence` as a followed trace, all of whose tokens are in the file."""
    entropies = np.random.default_rng(seed).exponential(0.5, len(ids)).astype(np.float32)
    measured = dict(entropies=entropies, source=source, num_supervised_tokens=len(ids))
    return replace(random_sequence(ids, sequence_id, seed), **measured)


def step_line(step: int, **values: float | None) -> dict[str, float | None]:
    """A line of metrics.jsonl with the metrics that every run has."""
    return {
        "step": step,
        "loss": 2.0 / step,
        "weighted_loss": 2.1 / step,
        "alpha": 0.95,
        "grad_norm": 0.5 + 0.1 * step,
        "effective_sample_size": 100.0 - step,
        "kl": 0.05,
        "seconds": 4.0,
        "seconds_probe": 1.0,
        "seconds_utility": 0.5,
        "seconds_main": 2.0,
        "seconds_step": 0.25,
        "supervised_tokens_per_second": 250.0,
        **values,
    }
