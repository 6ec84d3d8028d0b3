"""Make the tables of docs/reports/experiments-tables.md and steering-tables.md from the results of the runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from tests.experiments.settings import Setting
from vcore_ds.common import statistics
from vcore_ds.common.statistics import cell

Result = dict[str, Any]
BySeed = dict[int, Result]

CHOOSING_SEEDS = (0, 1)
"""Seeds that are run at all learning rates in the experiment of docs/reports/steering-experiments.md."""
REFERENCES = ("sft", "sft + trusted", "dft + trusted", "sft on the pool alone", "vcore, B' all")
"""Rows of that experiment which others are compared with."""


def parse_setting(result: Result) -> Setting:
    """The setting of a line of results.jsonl. Fields that an older line lacks have their defaults."""
    values = {field.name: result.get(field.name, field.default) for field in fields(Setting)}
    if values["probe_data"] == "clean_64":  # the name of the pool of 64 before pools of other sizes
        values["probe_data"] = "pool"
    return Setting(**values)


def paired(row: BySeed, reference: BySeed, key: str) -> list[float]:
    return statistics.paired(*({seed: result[key] for seed, result in by_seed.items()} for by_seed in (row, reference)))


def table(part: Sequence[Setting], results: Sequence[Result]) -> str:
    """Markdown: a row per setting, differences to `sft` on the same seeds."""
    by_row: dict[Setting, BySeed] = {}
    for result in results:
        setting = parse_setting(result)
        by_row.setdefault(replace(setting, seed=0), {})[setting.seed] = result
    first = part[0]
    rates = [row for row in by_row if replace(row, learning_rate=0.0) == _training(first)]
    best = min(rates, key=lambda row: np.mean([result["held_out_loss"] for result in by_row[row].values()]))
    lines = [
        "| row | rate | seeds | held-out loss | to sft, same rate | to best sft | accuracy % | to sft, same rate "
        "| AUC | planted mass |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in part:
        if row not in by_row:
            continue
        by_seed = by_row[row]
        same = by_row.get(replace(_training(row), learning_rate=row.learning_rate), {})

        def difference(reference: BySeed, key: str, digits: int, by_seed: BySeed = by_seed) -> str:
            values = paired(by_seed, reference, key)
            if key == "accuracy":
                values = [100 * value for value in values]
            return cell(values, digits, difference=True) if values and by_seed is not reference else ""

        columns = [
            describe_row(row),
            f"{row.learning_rate:g}",
            str(len(by_seed)),
            cell([result["held_out_loss"] for result in by_seed.values()], 4),
            difference(same, "held_out_loss", 4),
            difference(by_row[best], "held_out_loss", 4),
            cell([100 * result["accuracy"] for result in by_seed.values()], 1),
            difference(same, "accuracy", 1),
            *(_mean(by_seed, key) for key in ("auc", "planted_mass")),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    at_start = {
        result["seed"]: result for result in results if _training(parse_setting(result)) == _training(first)
    }.values()
    loss, accuracy = (cell([r[key] for r in at_start], 3) for key in ("loss_at_start", "accuracy_at_start"))
    return f"Before training: held-out loss {loss}, accuracy {accuracy}.\n\n" + "\n".join(lines)


def kinds_table(part: Sequence[Setting], results: Sequence[Result]) -> str:
    """Markdown: loss by kind of token on the held-out traces, for the runs that recorded it; means over their seeds."""
    keys = ("loss_step_start", "loss_sum_digit", "loss_answer", "held_out_loss")
    lines = [
        "| row | rate | seeds | start of a step | digit of the sum | answer | all |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in part:
        recorded = [r for r in results if replace(parse_setting(r), seed=0) == row and keys[0] in r]
        if recorded:
            means = [f"{np.mean([result[key] for result in recorded]):.3f}" for key in keys]
            seeds = " ".join(str(seed) for seed in sorted(result["seed"] for result in recorded))
            lines.append("| " + " | ".join([describe_row(row), f"{row.learning_rate:g}", seeds, *means]) + " |")
    return "\n".join(lines)


def describe_row(row: Setting) -> str:
    if row.method == "sft_mixed":
        return f"sft on the batch and {row.probe_size} clean sequences"
    if row.method != "vcore":
        return row.method
    extras: list[Callable[[], str | None]] = [
        lambda: f"alpha {row.alpha}" if row.alpha != "loss_ratio" else None,
        lambda: f"budget {row.budget_schedule}" if row.budget_schedule != "constant" else None,
        lambda: f"probe of {row.probe_size}" if row.probe_size != Setting.probe_size else None,
        lambda: f"probe {row.probe_data}" if row.probe_data == "clean" else None,
        lambda: f"probe clean_{row.pool_size}" if row.probe_data == "pool" else None,
        lambda: f"probe loss {row.probe_loss}" if row.probe_loss != "uniform" else None,
        lambda: "utilities bf16 noise" if row.utility != "jvp" else None,
    ]
    described = [text for text in (extra() for extra in extras) if text is not None]
    return ", ".join([f"vcore {row.direction} {row.kl_budget:g}", *described])


def find_results(row: Setting, results: Sequence[Result]) -> BySeed:
    """Seed -> result of `row` at its learning rate."""
    settings = [(parse_setting(result), result) for result in results]
    return {setting.seed: result for setting, result in settings if replace(setting, seed=0) == row}


def choose_rate(
    row: Setting,
    rates: Sequence[float],
    results: Sequence[Result],
    seeds: Sequence[int] = CHOOSING_SEEDS,
    *,
    by_accuracy: bool = False,
) -> float:
    """The learning rate with the lowest mean loss on the choosing problems over `seeds`.

    Args:
        by_accuracy: take the highest accuracy instead, and the lowest loss among equals; for runs that no table
        reports.

    Raises:
        ValueError: one of the seeds has not been run at all rates.
    """
    badness = {}
    for rate in rates:
        by_seed = find_results(replace(row, learning_rate=rate), results)
        if not by_seed.keys() >= set(seeds):
            raise ValueError(f"{row.label()} at {rate:g}: found seeds {sorted(by_seed)}, expected {list(seeds)} first")
        measures = (("accuracy", -1), ("held_out_loss", 1)) if by_accuracy else (("choosing_loss", 1),)
        badness[rate] = tuple(sign * float(np.mean([by_seed[seed][key] for seed in seeds])) for key, sign in measures)
    return min(badness, key=badness.__getitem__)


def steering_table(
    rows: Mapping[str, Setting],
    rates: Sequence[float],
    results: Sequence[Result],
    choosing_seeds: Sequence[int] = CHOOSING_SEEDS,
) -> str:
    """Markdown: each row at its best rate, differences to REFERENCES at theirs, on the same seeds. `cost` is CPU
    time relative to `sft`."""
    best: dict[str, tuple[float, BySeed]] = {}
    for name, row in rows.items():
        try:
            rate = choose_rate(row, rates, results, choosing_seeds)
        except ValueError:
            continue  # not yet run
        best[name] = rate, find_results(replace(row, learning_rate=rate), results)
    if "sft" not in best:
        return "Not yet run."
    references = [name for name in REFERENCES if name in best]
    # Key, unit, digits, and the rows to which differences are taken.
    measures = (("held_out_loss", 1, 4, references), ("accuracy", 100, 1, references[:2]))
    lines = []
    for name, (rate, by_seed) in best.items():
        cells = [name, f"{rate:g}", str(len(by_seed))]
        for key, unit, digits, compared in measures:
            cells.append(cell([unit * result[key] for result in by_seed.values()], digits))
            for reference in compared:
                values = [unit * value for value in paired(by_seed, best[reference][1], key)]
                cells.append(cell(values, digits, difference=True) if name != reference else "")
        cost = _mean_seconds(by_seed) / _mean_seconds(best["sft"][1])
        cells += [_mean(by_seed, "auc"), _mean(by_seed, "planted_mass"), f"{cost:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    differences = [[f"to {reference}" for reference in compared] for *_, compared in measures]
    columns = ["row", "rate", "seeds", "loss", *differences[0], "accuracy %", *differences[1]]
    columns += ["AUC", "planted mass", "cost"]
    header = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    at_start = best["sft"][1].values()
    loss, accuracy = (cell([result[key] for result in at_start], 3) for key in ("loss_at_start", "accuracy_at_start"))
    return f"Before training: held-out loss {loss}, accuracy {accuracy}.\n\n" + "\n".join(header + lines)


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


def _training(row: Setting) -> Setting:
    """The fields that all rows of a table share, with plain `sft` and learning rate 0."""
    shared = ("regime", "optimizer", "num_steps", "training_noise")
    return Setting(learning_rate=0.0, **{name: getattr(row, name) for name in shared})


def _mean(by_seed: BySeed, key: str) -> str:
    values = [result[key] for result in by_seed.values() if key in result]
    return f"{np.mean(values):.2f}" if values else ""


def _mean_seconds(by_seed: BySeed) -> float:
    return float(np.mean([result["seconds"] for result in by_seed.values()]))
