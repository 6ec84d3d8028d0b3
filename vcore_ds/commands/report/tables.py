"""The tables of the page, as text: what a step cost, what gained and lost weight, what differs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vcore_ds.commands.report.read import ReportedRun, differences, shown
from vcore_ds.commands.report.tokens import Row, TokenTables
from vcore_ds.common.text import align_columns

PHASES = {
    "probe": "seconds_probe",
    "utilities": "seconds_utility",
    "main pass": "seconds_main",
    "update": "seconds_step",
    "followed traces": "seconds_followed",
}
"""Name -> key of metrics.jsonl."""
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Cells as they are shown."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """The table for a terminal, names cut to 48 characters."""
        rows = [[name if len(name) <= 48 else f"{name[:45]}...", *cells] for name, *cells in self.rows]
        return "\n  ".join([self.caption, *(align_columns([self.head, *rows]) if rows else ["none"])])


@dataclass(frozen=True)
class Phases:
    """Where the time of a step went."""

    note: str
    names: list[str]
    head: list[str]
    rows: list[list[str]]
    runs: list[dict[str, Any]]
    """For each run: its name, the widths of its bars in percent of the slowest run, and the same in words."""


def phases_of(runs: Sequence[ReportedRun]) -> Phases:
    """Mean seconds of a step by phase. The first step is left out where there are others: it allocates and compiles."""
    names = [*PHASES, "saving", "rest"]
    seconds = [_seconds_of(run) for run in runs]
    slowest = max(sum(one) for one in seconds) or 1.0
    return Phases(
        note="Mean over the steps, without the first, which allocates and compiles. Saving is the time of checkpoints, "
        "spread over the steps; rest is what remains of a step. Utilities that are computed in the main pass "
        "itself (utility.fused) have no time of their own.",
        names=names,
        head=["", *names, "whole step", "supervised tokens/s"],
        rows=[
            [run.name, *map(_number, one), _number(sum(one)), _speed_of(run)]
            for run, one in zip(runs, seconds, strict=True)
        ],
        runs=[
            {
                "name": run.name,
                "widths": [f"{100 * value / slowest:.2f}" for value in one],
                "label": f"{run.name}: "
                + ", ".join(f"{name} {_number(value)} s" for name, value in zip(names, one, strict=True)),
            }
            for run, one in zip(runs, seconds, strict=True)
        ],
    )


def _seconds_of(run: ReportedRun) -> list[float]:
    lines = run.metrics[1:] or run.metrics

    def mean(key: str) -> float:
        return sum(line.get(key) or 0.0 for line in lines) / len(lines)

    parts = [mean(key) for key in PHASES.values()]
    return [*parts, mean("seconds_checkpoint"), max(0.0, mean("seconds") - sum(parts))]


def _speed_of(run: ReportedRun) -> str:
    """The median over the steps."""
    speeds = [speed for line in run.metrics if (speed := line.get("supervised_tokens_per_second")) is not None]
    return _number(float(np.median(speeds)) if speeds else None)


def tables_of(run: ReportedRun, tables: TokenTables) -> dict[str, Any]:
    """What gained and lost in one run: its tables, and `more` that the page shows on demand."""
    often = f"at least {tables.min_count} times"
    titles = [
        (f"Tokens that gained most weight ({often})", tables.tokens.gained),
        (f"Tokens that lost most weight ({often})", tables.tokens.lost),
        ("By kind of token", tables.kinds),
        ("By position in the trace", tables.positions),
    ]
    more = [
        (f"Phrases that gained most weight ({often})", tables.phrases.gained),
        (f"Phrases that lost most weight ({often})", tables.phrases.lost),
    ]
    if tables.sources:
        titles.append(("By source of the sequence", tables.sources))
    if tables.first_third:
        more += [
            ("Tokens whose weight rose most over the run", tables.tokens.rose),
            ("Tokens whose weight fell most over the run", tables.tokens.fell),
            ("Phrases whose weight rose most over the run", tables.phrases.rose),
            ("Phrases whose weight fell most over the run", tables.phrases.fell),
        ]
    steps, first, last = map(_listed, (tables.steps, tables.first_third, tables.last_third))
    heading = f"{tables.num_tokens:,} tokens of {tables.num_sequences:,} sequences, of step"
    heading += f"{'s' if len(tables.steps) > 1 else ''} {steps}"
    if tables.first_third:
        heading += f" (first third of the records: {first}; last third: {last})"
    if abs(tables.relative_weight - 1.0) >= 0.005:
        heading += f"; their mean relative weight is {tables.relative_weight:.2f}, and `gained` means above it"
    return {
        "name": run.name,
        "heading": heading,
        "tables": [_token_table(title, rows) for title, rows in titles],
        "more": [_token_table(title, rows) for title, rows in more],
        "about_more": "Phrases" + (", and weights that rose or fell over the run" if tables.first_third else ""),
    }


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(f"{step:,}" for step in steps)


def _token_table(caption: str, rows: Sequence[Row]) -> Table:
    head = ["", "weight", "count", "of weight", "of tokens", "utility", "loss", "first third", "last third"]
    cells = [
        [
            row.name,
            _number(row.relative_weight),
            f"{row.count:,}",
            f"{row.share_of_weight:.2%}",
            f"{row.share_of_tokens:.2%}",
            _number(row.utility),
            _number(row.loss),
            _number(row.first_third),
            _number(row.last_third),
        ]
        for row in rows
    ]
    return Table(caption, head, cells)


def compare_tables(runs: Sequence[ReportedRun]) -> list[Table]:
    """Relative weights of several runs by kind and position; none of a single run."""
    found = [(run.name, run.tables) for run in runs if run.tables is not None]
    if len(found) < 2:
        return []
    tables = []
    for caption, rows_of in (
        ("Relative weight by kind of token", [tables.kinds for _, tables in found]),
        ("Relative weight by position in the trace", [tables.positions for _, tables in found]),
        ("Relative weight by source of the sequence", [tables.sources for _, tables in found]),
    ):
        by_name = [{row.name: row.relative_weight for row in rows} for rows in rows_of]
        names = list(dict.fromkeys(name for own in by_name for name in own))
        rows = [[name, *(_number(own.get(name)) for own in by_name)] for name in names]
        tables.append(Table(caption, ["", *(name for name, _ in found)], rows))
    return [table for table in tables if table.rows]


def difference_table(runs: Sequence[ReportedRun]) -> Table:
    """The keys in which recipes differ; without rows where they do not."""
    rows = [[key, *map(shown, values)] for key, values in differences(runs).items()]
    return Table("Keys in which the recipes differ", ["", *(run.name for run in runs)], rows)


def environment_table(runs: Sequence[ReportedRun]) -> Table:
    """Commands, versions, commits and devices."""
    flat = []
    for run in runs:
        values = {key: value for key, value in run.environment.items() if key not in ("packages", "resumed")}
        packages = run.environment.get("packages")
        flat.append(values | (packages if isinstance(packages, dict) else {}))
    keys = list(dict.fromkeys(key for values in flat for key in values))
    rows = [[key, *(_words(values.get(key)) for values in flat)] for key in keys]
    return Table("Environment", ["", *(run.name for run in runs)], rows)


def _words(value: Any) -> str:
    if isinstance(value, list):
        different = list(dict.fromkeys(map(str, value)))
        return " ".join(different if len(different) > 1 else map(str, value))
    return NOTHING if value is None else str(value)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


# What was learnt, with which a report opens: losses and accuracies before and after training.


@dataclass(frozen=True)
class Result:
    """A measure before and after training; None for what was not measured, or was not finite."""

    before: float | None
    after: float | None
    is_share: bool = False

    def ends(self) -> list[str]:
        return [self._shown(self.before), self._shown(self.after)]

    def change(self) -> str:
        if self.before is None or self.after is None:
            return NOTHING
        return f"{self.after - self.before:+.4f}"

    def _shown(self, value: float | None) -> str:
        return NOTHING if value is None else f"{value:.1%}" if self.is_share else f"{value:.4f}"


def summary(runs: Sequence[ReportedRun]) -> str:
    """One sentence: the model, the method, and how much was trained."""
    models = ", ".join(dict.fromkeys(_model_name(run.recipe.model.path) for run in runs))
    methods = ", ".join(dict.fromkeys(run.recipe.method.name for run in runs))
    if len(runs) > 1:
        return f"{models} fine-tuned with {methods}."
    (run,) = runs
    kind = "all parameters" if run.recipe.lora is None else f"LoRA of rank {run.recipe.lora.rank}"
    counts = [_count(_num_steps(run), "optimizer step")]
    for key, name in (("sequences", "sequence"), ("supervised_tokens", "supervised token")):
        if total := run.total(key):
            counts.append(_count(total, name))
    ranks = run.environment.get("world_size")
    where = f" on {_count(ranks, 'rank')}" if isinstance(ranks, int) else ""
    return f"{models} fine-tuned with {methods}, {kind}: {', '.join(counts)} in {_duration(run)}{where}."


def results_table(runs: Sequence[ReportedRun]) -> Table:
    """Of one run a row for each measure; of several a row for each run."""
    measured = [_results_of(run) for run in runs]
    if len(runs) == 1:
        rows = [[name, *result.ends(), result.change()] for name, result in measured[0].items()]
        return Table("What was learnt", ["", "before", "after", "change"], rows)
    names = list(dict.fromkeys(name for found in measured for name in found))
    rows = []
    for run, found in zip(runs, measured, strict=True):
        of_run = [run.name, run.recipe.method.name, str(run.recipe.run.seed), f"{_num_steps(run):,}", _duration(run)]
        cells = [" → ".join(found[name].ends()).removeprefix(f"{NOTHING} → ") if name in found else NOTHING
                 for name in names]  # fmt: skip
        rows.append([*of_run, *cells])
    return Table("What was learnt", ["", "method", "seed", "steps", "training time", *names], rows)


def _results_of(run: ReportedRun) -> dict[str, Result]:
    """By name of the measure."""
    before, after = run.held_out.before, run.held_out.after
    found = {f"held-out loss{name and f', {name}'} (nats)": Result(before.get(name), after[name]) for name in after}
    losses = [line.get("loss") for line in run.metrics]
    found["training loss, first and last step (nats)"] = Result(losses[0], losses[-1])
    for name, task in run.evaluated.items():
        found[f"accuracy, {name} ({_count(task.num_problems, 'problem')})"] = Result(None, task.accuracy, is_share=True)
    return found


def _model_name(path: str) -> str:
    """A hub id as it is; of a folder the last name."""
    parts = path.rstrip("/").split("/")
    return path if len(parts) <= 2 else parts[-1]


def _num_steps(run: ReportedRun) -> int:
    return int(run.metrics[-1]["step"] or 0)


def _duration(run: ReportedRun) -> str:
    """Of all steps."""
    seconds = run.total("seconds")
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def _count(number: float, name: str) -> str:
    return f"{number:,.0f} {name}{'' if number == 1 else 's'}"
