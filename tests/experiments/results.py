"""Results of the experiments: lines of JSON, the choice of learning rates, and the table of whole traces."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.experiments.settings import Setting
from vcore_ds.common import statistics
from vcore_ds.common.statistics import cell

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
            raise ValueError(f"{row.label()} at {rate:g}: found seeds {sorted(by_seed)}, expected {list(seeds)} first")
        measures = (("accuracy", -1), ("held_out_loss", 1))
        badness[rate] = tuple(sign * float(np.mean([by_seed[seed][key] for seed in seeds])) for key, sign in measures)
    return min(badness, key=badness.__getitem__)


def paired(row: BySeed, reference: BySeed, key: str) -> list[float]:
    return statistics.paired(*({seed: result[key] for seed, result in by_seed.items()} for by_seed in (row, reference)))


def whole_traces_table(
    rows: Mapping[str, Setting], rates: Mapping[str, float], results: Sequence[Result], seeds: Sequence[int]
) -> str:
    """Markdown: accuracy and loss of each row at its rate, and their differences to `sft` and to `sft + trusted` on the
    same seeds. `wrong` is the share of the weight on wrong traces, `cost` CPU time relative to `sft`."""
    by_row: dict[str, BySeed] = {name: {} for name in rows}
    for name in rows.keys() & rates.keys():
        by_seed = find_results(replace(rows[name], learning_rate=rates[name]), results)
        by_row[name] = {seed: by_seed[seed] for seed in seeds if seed in by_seed}
    references = [name for name in ("sft", "sft + trusted") if name in rows]
    differences = [f"to {name}" for name in references]
    columns = ["row", "rate", "seeds", "accuracy %", *differences, "loss", *differences, "AUC", "wrong", "cost"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, by_seed in by_row.items():
        if not by_seed:
            lines.append(f"| {name} | | not run |" + " |" * (len(columns) - 3))
            continue
        cells = [name, f"{rates[name]:g}" if rows[name].num_steps > 0 else "", str(len(by_seed))]
        for key, unit, digits in (("accuracy", 100, 1), ("held_out_loss", 1, 4)):
            cells.append(cell([unit * result[key] for result in by_seed.values()], digits))
            for reference in references:
                values = [unit * value for value in paired(by_seed, by_row[reference], key)]
                cells.append(cell(values, digits, difference=True) if values and name != reference else "")
        cells += [_mean(by_seed, "auc"), _mean(by_seed, "weight_on_wrong")]
        cells.append(f"{_mean_seconds(by_seed) / _mean_seconds(by_row['sft']):.1f}" if by_row["sft"] else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(by_seed: BySeed, key: str) -> str:
    values = [result[key] for result in by_seed.values() if key in result]
    return f"{np.mean(values):.2f}" if values else ""


def _mean_seconds(by_seed: BySeed) -> float:
    return float(np.mean([result["seconds"] for result in by_seed.values()]))
