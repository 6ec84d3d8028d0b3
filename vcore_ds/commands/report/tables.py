"""The tables of a report, for the page and as text: results, costs, tokens by weight, differences of recipes."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands.report.read import ReportedRun, differences, format_value
from vcore_ds.commands.report.tokens import Row, TokenTables
from vcore_ds.common.text import align_columns, count

PHASES = {
    "probe": "seconds_probe",
    "utilities": "seconds_utility",
    "main pass": "seconds_main",
    "update": "seconds_step",
}
"""Name of a phase -> key of metrics.jsonl."""
BESIDE = {"followed traces": "seconds_followed", "saving": "seconds_checkpoint"}
"""The same of what is no part of `seconds`."""
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """A table of formatted cells."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Format for a terminal, with names truncated to 48 characters."""
        rows = [[name if len(name) <= 48 else f"{name[:45]}...", *cells] for name, *cells in self.rows]
        return "\n  ".join([self.caption, *(align_columns([self.head, *rows]) if rows else ["none"])])


def make_phases(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Mean seconds of a step by phase, without the first step, unless it is the only one: a note, the names of the
    phases, the table, and for each run the widths of its bars in percent of the slowest run, and their text."""
    names = [*PHASES, *BESIDE, "rest"]
    seconds = [_mean_seconds(run) for run in runs]
    slowest = max(sum(one) for one in seconds) or 1.0
    rows, bars = [], []
    for run, phases in zip(runs, seconds, strict=True):
        numbers = [_format_number(value) for value in phases]
        rows.append([run.name, *numbers, _format_number(sum(phases)), _median_speed(run)])
        label = ", ".join(f"{name} {number} s" for name, number in zip(names, numbers, strict=True))
        widths = [f"{100 * value / slowest:.2f}" for value in phases]
        bars.append({"name": run.name, "widths": widths, "label": f"{run.name}: {label}"})
    return {
        "note": "Mean over all steps but the first, which allocates and compiles. Followed traces are measured, and "
        "checkpoints saved, in some steps only; rest is the remaining time of a step. Utilities that are computed in "
        "the main pass (utility.fused) are part of its time.",
        "names": names,
        "table": Table("Seconds of a step", ["", *names, "total", "supervised tokens/s"], rows),
        "runs": bars,
    }


def _mean_seconds(run: ReportedRun) -> list[float]:
    lines = run.metrics[1:] or run.metrics

    def mean(key: str) -> float:
        return sum(line.get(key) or 0.0 for line in lines) / len(lines)

    parts = [mean(key) for key in PHASES.values()]
    return [*parts, *map(mean, BESIDE.values()), max(0.0, mean("seconds") - sum(parts))]


def _median_speed(run: ReportedRun) -> str:
    """Supervised tokens per second, median over the steps."""
    speeds = [speed for line in run.metrics if (speed := line.get("supervised_tokens_per_second")) is not None]
    return _format_number(float(np.median(speeds)) if speeds else None)


def make_token_tables(run: ReportedRun, tables: TokenTables) -> dict[str, Any]:
    """Tables of the tokens that gained and lost weight in one run, and `more`, which the page shows on demand."""
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
        for title, extremes in (("Tokens", tables.tokens), ("Phrases", tables.phrases)):
            more.append((f"{title} whose weight rose most over the run", extremes.rose))
            more.append((f"{title} whose weight fell most over the run", extremes.fell))
    steps, first, last = map(_join_steps, (tables.steps, tables.first_third, tables.last_third))
    heading = f"{count(tables.num_tokens, 'token')} of {count(tables.num_sequences, 'sequence')}, at step"
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


def _join_steps(steps: Sequence[int]) -> str:
    return ", ".join(f"{step:,}" for step in steps)


def _token_table(caption: str, rows: Sequence[Row]) -> Table:
    head = ["", "weight", "count", "of weight", "of tokens", "utility", "loss", "first third", "last third"]
    cells = []
    for row in rows:
        counts = [f"{row.count:,}", f"{row.share_of_weight:.2%}", f"{row.share_of_tokens:.2%}"]
        means = map(_format_number, (row.utility, row.loss, row.first_third, row.last_third))
        cells.append([row.name, _format_number(row.relative_weight), *counts, *means])
    return Table(caption, head, cells)


def compare_tables(runs: Sequence[ReportedRun]) -> list[Table]:
    """Relative weights of several runs side by side, by kind, position and source; none for a single run."""
    with_tables = [(run.name, run.tables) for run in runs if run.tables is not None]
    if len(with_tables) < 2:
        return []
    compared = []
    titles = {"kinds": "kind of token", "positions": "position in the trace", "sources": "source of the sequence"}
    for key, title in titles.items():
        weights = [{row.name: row.relative_weight for row in getattr(tables, key)} for _, tables in with_tables]
        names = list(dict.fromkeys(name for by_name in weights for name in by_name))
        cells = [[name, *(_format_number(by_name.get(name)) for by_name in weights)] for name in names]
        compared.append(Table(f"Relative weight by {title}", ["", *(name for name, _ in with_tables)], cells))
    return [table for table in compared if table.rows]


@dataclass(frozen=True)
class ProfileTable:
    """The profile of a step: a table of its operations, and its files."""

    table: Table
    files: list[tuple[str, str]]  # what a file is, and where, relative to the page


def make_profiles(runs: Sequence[ReportedRun], folder: Path) -> list[ProfileTable]:
    profiles = []
    for run in runs:
        for profile in run.profiles:
            paths = [(path.suffix, os.path.relpath(path.resolve(), folder.resolve())) for path in profile.files]
            files = [(_PROFILE_FILES[suffix], path) for suffix, path in paths]
            prefix = f"{run.name}: " if len(runs) > 1 else ""
            caption = f"{prefix}operations of step {profile.step:,} on rank {profile.rank}, by phase"
            rows = [
                [f"{row.phase}: {row.operation}", f"{row.calls:,}", f"{row.seconds:.4f}", f"{row.share:.1%}"]
                for row in profile.rows
            ]
            profiles.append(ProfileTable(Table(caption, ["", "calls", "seconds", "of the phase"], rows), files))
    return profiles


_PROFILE_FILES = {
    ".gz": "trace (Perfetto, chrome://tracing)",
    ".pickle": "record of memory (pytorch.org/memory_viz)",
    ".csv": "this table",
}


def difference_table(runs: Sequence[ReportedRun]) -> Table:
    """The keys in which the recipes differ; no rows if they are the same."""
    rows = [[key, *map(format_value, values)] for key, values in differences(runs).items()]
    return Table("Keys in which the recipes differ", ["", *(run.name for run in runs)], rows)


def environment_table(runs: Sequence[ReportedRun]) -> Table:
    flat = []
    for run in runs:
        values: dict[str, Any] = {}
        for key, value in run.environment.items():
            if isinstance(value, dict):
                prefix = "" if key == "packages" else f"{key}: "
                values |= {f"{prefix}{name}": entry for name, entry in value.items()}
            elif key != "resumed":
                values[key] = value
        flat.append(values)
    keys = list(dict.fromkeys(key for values in flat for key in values))
    rows = [[key, *(_format_entry(values.get(key)) for values in flat)] for key in keys]
    return Table("Environment", ["", *(run.name for run in runs)], rows)


def _format_entry(value: Any) -> str:
    if isinstance(value, list):
        different = list(dict.fromkeys(map(str, value)))
        return " ".join(different if len(different) > 1 else map(str, value))
    return NOTHING if value is None else str(value)


def _format_number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Result:
    """A loss or accuracy before and after training; None if not measured or not finite."""

    before: float | None
    after: float | None
    is_share: bool = False

    def ends(self) -> list[str]:
        return [self._format(self.before), self._format(self.after)]

    def change(self) -> str:
        if self.before is None or self.after is None:
            return NOTHING
        return f"{self.after - self.before:+.4f}"

    def _format(self, value: float | None) -> str:
        return NOTHING if value is None else f"{value:.1%}" if self.is_share else f"{value:.4f}"


def summary(runs: Sequence[ReportedRun]) -> str:
    """One sentence: the model, the method, and the amount of training."""
    models = ", ".join(dict.fromkeys(_model_name(run.recipe.model.path) for run in runs))
    methods = ", ".join(dict.fromkeys(run.recipe.method.name for run in runs))
    if len(runs) > 1:
        return f"{models} fine-tuned with {methods}."
    (run,) = runs
    kind = "all parameters" if run.recipe.lora is None else f"LoRA of rank {run.recipe.lora.rank}"
    counts = [count(_num_steps(run), "optimizer step")]
    for key, name in (("sequences", "sequence"), ("supervised_tokens", "supervised token")):
        if total := run.total(key):
            counts.append(count(total, name))
    ranks = run.environment.get("world_size")
    on_ranks = f" on {count(ranks, 'rank')}" if isinstance(ranks, int) else ""
    return f"{models} fine-tuned with {methods}, {kind}: {', '.join(counts)} in {_duration(run)}{on_ranks}."


def results_table(runs: Sequence[ReportedRun]) -> Table:
    """For one run, a row per measure; for several, a row per run."""
    measured = [_measure_results(run) for run in runs]
    if len(runs) == 1:
        rows = [[name, *result.ends(), result.change()] for name, result in measured[0].items()]
        return Table("What was learnt", ["", "before", "after", "change"], rows)
    names = list(dict.fromkeys(name for results in measured for name in results))
    rows = []
    for run, results in zip(runs, measured, strict=True):
        facts = [run.name, run.recipe.method.name, str(run.recipe.run.seed), f"{_num_steps(run):,}", _duration(run)]
        cells = [" → ".join(results[name].ends()).removeprefix(f"{NOTHING} → ") if name in results else NOTHING
                 for name in names]  # fmt: skip
        rows.append([*facts, *cells])
    return Table("What was learnt", ["", "method", "seed", "steps", "training time", *names], rows)


def explain_results(runs: Sequence[ReportedRun]) -> str:
    """How to read the losses of `results_table`, and their limits."""
    means = [MEANINGS[name] for name in dict.fromkeys(run.recipe.method.normalization for run in runs)]
    text = (
        f"Losses are {' or '.join(means)}. They fall, by any method, as the model learns the form of the traces, right "
        "or wrong. Whether its answers get better is for accuracy to say (vcore-ds eval)"
    )
    if all(run.recipe.method.uses_utilities for run in runs):
        text += ", and what VCORE adds for a report with a run of plain SFT beside it (methods/sft.yaml)"
    return f"{text}."


MEANINGS = {"sequence": "means over sequences of the nats per token", "token": "means over all tokens in nats"}
"""Of a run's losses, by `method.normalization`."""

MEANS = {"sequence": "", "token": ", mean over tokens"}
"""What the name of a loss says of its `method.normalization`: losses of another one have another name, so that no table
compares the two."""


def _measure_results(run: ReportedRun) -> dict[str, Result]:
    before, after, mean = run.held_out.before, run.held_out.after, MEANS[run.held_out.normalization]
    results = {
        f"held-out loss{name and f', {name}'} (nats{mean})": Result(before.get(name), after[name]) for name in after
    }
    losses, mean = [line.get("loss") for line in run.metrics], MEANS[run.recipe.method.normalization]
    results[f"training loss, first and last step (nats{mean})"] = Result(losses[0], losses[-1])
    for name, task in run.evaluated.items():
        title = f"accuracy, {name} ({count(task.num_problems, 'problem')})"
        results[title] = Result(None, task.accuracy, is_share=True)
    return results


def _model_name(path: str) -> str:
    """A hub id unchanged; the last part of a folder's path."""
    parts = path.rstrip("/").split("/")
    return path if len(parts) <= 2 else parts[-1]


def _num_steps(run: ReportedRun) -> int:
    return int(run.metrics[-1]["step"] or 0)


def _duration(run: ReportedRun) -> str:
    seconds = run.total("seconds")
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def format_text(runs: Sequence[ReportedRun]) -> str:
    return "\n\n".join(_paragraphs(runs))


def _paragraphs(runs: Sequence[ReportedRun]) -> Iterator[str]:
    yield summary(runs)
    yield results_table(runs).text()
    yield explain_results(runs)
    for run in runs:
        lines = [f"warning: {note}" for note in run.notes if note != run.why_no_tables]
        lines += [run.why_no_tables] if run.why_no_tables is not None else []
        if lines:
            yield "\n".join(f"{run.name}: {line}" for line in lines)
    for table in compare_tables(runs):
        yield table.text()
    if len(runs) > 1:
        yield "Report one run for its tokens and phrases."
    elif runs[0].tables is not None:
        tokens = make_token_tables(runs[0], runs[0].tables)
        yield f"Recorded: {tokens['heading']}. Weight 1 is the uniform weight."
        for table in tokens["tables"] + tokens["more"]:
            yield table.text()
    yield make_phases(runs)["table"].text()
    for profile in make_profiles(runs, Path()):
        yield profile.table.text()
        yield "\n".join(f"{what}: {path}" for what, path in profile.files)
    if len(runs) > 1 and (differing := difference_table(runs)).rows:
        yield differing.text()
