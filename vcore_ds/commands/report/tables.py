"""The page and the text of a report: results, costs, tokens by weight, differences of recipes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vcore_ds.commands.report import traces
from vcore_ds.commands.report.curves import Chart, make_charts
from vcore_ds.commands.report.page import (
    NOTHING,
    Bars,
    Block,
    Code,
    Drawing,
    Fold,
    Grid,
    Notes,
    Page,
    Section,
    Table,
    format_number,
)
from vcore_ds.commands.report.read import Group, ReportedRun, differences, format_value, group_runs
from vcore_ds.commands.report.tokens import Row, TokenTables
from vcore_ds.common.text import count
from vcore_ds.config.load import dump_recipe
from vcore_ds.training.run_folder import PROFILES


def make_page(runs: Sequence[ReportedRun], *first: Section, title: str | None = None, has_traces: bool = True) -> Page:
    """Make the report of the runs, at least one; the sections `first` stand before its own. `has_traces`: whether it
    holds the recorded tokens, which its text does not show."""
    names = [run.name for run in runs]
    title = title or (names[0] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}")
    with_texts = [run for run in runs if run.texts is not None and has_traces]
    tokens = [traces.encode_recorded(run, traces.MOST_TOKENS // len(with_texts)) for run in with_texts]
    encoded = [traces.encode_followed(run, traces.MOST_FOLLOWED_TOKENS // len(with_texts)) for run in with_texts]
    followed = [one for one in encoded if one is not None]
    groups = group_runs(runs)
    charts = make_charts(groups)
    data = {
        "groups": [group.label for group in groups],
        "curves": [asdict(chart) for chart in charts if not chart.is_constant()],
        "tokens": [description for description, _ in tokens],
        "followed": [description for description, _ in followed],
        "weightRange": traces.weight_range(with_texts),
    }
    blobs = {f"tokens-{place}": blob for place, (_, blob) in enumerate(tokens)}
    blobs |= {f"followed-{place}": blob for place, (_, blob) in enumerate(followed)}
    movement: list[Block] = [ABOUT_MOVEMENT, Drawing("followed")]
    has_utilities = any("utility" in description["measures"] for description, _ in tokens)
    no_utilities = [] if has_utilities else ["No utilities were recorded: only `method.name: vcore` has them."]
    recipes = [Fold(f"recipe.yaml of {run.name}", [Code(run.name, dump_recipe(run.recipe))]) for run in runs]
    sections = [
        *first,
        Section("learnt", "", "", [results_table(runs), explain_results(runs), *_find_notes(runs)]),
        *([Section("movement", "The same tokens over the run", "Over the run", movement, False)] if followed else []),
        Section("traces", "Tokens trained on", "Tokens", [Drawing("viewer", _explain_missing_tables(runs))]),
        Section("gained", "What gained and lost weight", "Gained and lost", _compare_weights(runs)),
        Section("map", "Utility against loss", "Utility and loss", [Drawing("density", no_utilities)], in_text=False),
        Section("curves", "Curves", "Curves", _show_curves(groups, charts), in_text=False),
        Section("cost", "Time by phase", "Time", [*make_phases(runs), *_list_profiles(runs)]),
        Section("recipe", "Recipe", "Recipe", [*_difference_table(runs), *recipes]),
        Section("environment", "Environment", "Environment", [environment_table(runs)], in_text=False),
    ]
    return Page(f"Report on {title}", summary(runs), sections, data, blobs)


ABOUT_MOVEMENT = (
    "A few traces, measured after each recorded step, along its direction: a row for each step, then the trace itself "
    "at one. Those that are held out are not trained on; their weights are what they would have been."
)


def _show_curves(groups: Sequence[Group], charts: Sequence[Chart]) -> list[Block]:
    """Where the curves are drawn, how to read them, and the values of those that are constant."""
    about = "By optimizer step. Point at a curve, or select it and press the arrow keys, to read all at one step."
    if any(len(group.runs) > 1 for group in groups):
        about += " A line is the mean of the seeds of a recipe, and its band goes from the lowest to the highest."
    labels = [group.label for group in groups]
    constants = [f"{chart.title} {chart.format_values(labels)}" for chart in charts if chart.is_constant()]
    values = [f"Constant over the run: {'; '.join(constants)}."] if constants else []
    return [about, Drawing("charts"), *values]


def _find_notes(runs: Sequence[ReportedRun]) -> list[Notes]:
    return [Notes(f"Warnings on {run.name}", run.notes) for run in runs if run.notes]


def _explain_missing_tables(runs: Sequence[ReportedRun]) -> list[str]:
    return [f"{run.name}: {run.why_no_tables}" for run in runs if run.why_no_tables]


PHASES = {
    "probe": "seconds_probe",
    "utilities": "seconds_utility",
    "main pass": "seconds_main",
    "update": "seconds_step",
}
"""Name of a phase -> key of metrics.jsonl."""
BESIDE = {"followed traces": "seconds_followed", "saving": "seconds_checkpoint"}
"""The same of what is no part of `seconds`."""


def make_phases(runs: Sequence[ReportedRun]) -> list[Block]:
    """Mean seconds of a step by phase, without the first step, unless it is the only one, as text, bars and table. The
    widths of the bars are in percent of the slowest run."""
    names = [*PHASES, *BESIDE, "rest"]
    seconds = [_mean_seconds(run) for run in runs]
    slowest = max(sum(one) for one in seconds) or 1.0
    rows, bars = [], []
    for run, phases in zip(runs, seconds, strict=True):
        numbers = [format_number(value) for value in phases]
        rows.append([run.name, *numbers, format_number(sum(phases)), _median_speed(run)])
        label = ", ".join(f"{name} {number} s" for name, number in zip(names, numbers, strict=True))
        bars.append((run.name, [f"{100 * value / slowest:.2f}" for value in phases], f"{run.name}: {label}"))
    note = (
        "Mean over all steps but the first, which allocates and compiles. Followed traces are measured, and "
        "checkpoints saved, in some steps only; rest is the remaining time of a step. Utilities that are computed in "
        "the main pass (utility.fused) are part of its time."
    )
    return [note, Bars(names, bars), Table("Seconds of a step", ["", *names, "total", "supervised tokens/s"], rows)]


def _mean_seconds(run: ReportedRun) -> list[float]:
    lines = run.metrics[1:] or run.metrics

    def mean(key: str) -> float:
        return sum(line.get(key) or 0.0 for line in lines) / len(lines)

    parts = [mean(key) for key in PHASES.values()]
    return [*parts, *map(mean, BESIDE.values()), max(0.0, mean("seconds") - sum(parts))]


def _median_speed(run: ReportedRun) -> str:
    """Supervised tokens per second, median over the steps."""
    speeds = [speed for line in run.metrics if (speed := line.get("supervised_tokens_per_second")) is not None]
    return format_number(float(np.median(speeds)) if speeds else None)


def _compare_weights(runs: Sequence[ReportedRun]) -> list[Block]:
    """What gained and lost weight: several runs side by side, then each. The text of several has the former only."""
    with_tables = [(run, run.tables) for run in runs if run.tables is not None]
    folds: list[Block] = [
        _fold_tokens(run, tables, is_open=number == 0, in_text=len(runs) == 1)
        for number, (run, tables) in enumerate(with_tables)
    ]
    about = (
        "Relative weight: the share of the loss that training gave to these tokens, over the share that uniform "
        "weights give them; 1 is uniform. Means of utility and loss count a token as uniform training does."
    )
    return [about, *compare_tables(runs), *(folds or ["No run here has tokens that gained or lost weight."])]


def _fold_tokens(run: ReportedRun, tables: TokenTables, *, is_open: bool, in_text: bool) -> Fold:
    """Tables of the tokens that gained and lost weight in one run."""
    often = f"at least {tables.min_count} times"
    shown = [
        (f"Tokens that gained most weight ({often})", tables.tokens.gained),
        (f"Tokens that lost most weight ({often})", tables.tokens.lost),
        ("By kind of token", tables.kinds),
        ("By position in the trace", tables.positions),
        *([("By source of the sequence", tables.sources)] if tables.sources else []),
    ]
    more = [
        (f"Phrases that gained most weight ({often})", tables.phrases.gained),
        (f"Phrases that lost most weight ({often})", tables.phrases.lost),
    ]
    if tables.first_third:
        for title, extremes in (("Tokens", tables.tokens), ("Phrases", tables.phrases)):
            more.append((f"{title} whose weight rose most over the run", extremes.rose))
            more.append((f"{title} whose weight fell most over the run", extremes.fell))
    steps, first, last = map(_join_steps, (tables.steps, tables.first_third, tables.last_third))
    heading = f"{run.name}: {count(tables.num_tokens, 'token')} of {count(tables.num_sequences, 'sequence')}, at step"
    heading += f"{'s' if len(tables.steps) > 1 else ''} {steps}"
    if tables.first_third:
        heading += f" (first third of the records: {first}; last third: {last})"
    if abs(tables.relative_weight - 1.0) >= 0.005:
        heading += f"; their mean relative weight is {tables.relative_weight:.2f}, and `gained` means above it"
    about_more = "Phrases" + (", and weights that rose or fell over the run" if tables.first_third else "")
    others = Fold(about_more, [Grid([_token_table(*one) for one in more])])
    return Fold(heading, [Grid([_token_table(*one) for one in shown]), others], is_open, in_text)


def _join_steps(steps: Sequence[int]) -> str:
    return ", ".join(f"{step:,}" for step in steps)


def _token_table(caption: str, rows: Sequence[Row]) -> Table:
    head = ["", "weight", "count", "of weight", "of tokens", "utility", "loss", "first third", "last third"]
    cells = []
    for row in rows:
        counts = [f"{row.count:,}", f"{row.share_of_weight:.2%}", f"{row.share_of_tokens:.2%}"]
        means = map(format_number, (row.utility, row.loss, row.first_third, row.last_third))
        cells.append([row.name, format_number(row.relative_weight), *counts, *means])
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
        cells = [[name, *(format_number(by_name.get(name)) for by_name in weights)] for name in names]
        compared.append(Table(f"Relative weight by {title}", ["", *(name for name, _ in with_tables)], cells))
    return [table for table in compared if table.rows]


def _list_profiles(runs: Sequence[ReportedRun]) -> list[str]:
    """Where the profiles of steps are."""
    files = [str(path) for run in runs for path in sorted((run.folder / PROFILES).glob("step_*"))]
    return [f"Profiled steps, for Perfetto (ui.perfetto.dev): {', '.join(files)}."] if files else []


def _difference_table(runs: Sequence[ReportedRun]) -> list[Table]:
    """The keys in which the recipes differ, if any."""
    rows = [[key, *map(format_value, values)] for key, values in differences(runs).items()]
    return [Table("Keys in which the recipes differ", ["", *(run.name for run in runs)], rows)] if rows else []


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
        rows = [[name, before, after, change] for name, (before, after, change) in measured[0].items()]
        return Table("What was learnt", ["", "before", "after", "change"], rows)
    names = list(dict.fromkeys(name for results in measured for name in results))
    rows = []
    for run, results in zip(runs, measured, strict=True):
        facts = [run.name, run.recipe.method.name, str(run.recipe.run.seed), f"{_num_steps(run):,}", _duration(run)]
        ends = [results.get(name, (NOTHING, NOTHING, NOTHING)) for name in names]
        rows.append([*facts, *(after if before == NOTHING else f"{before} → {after}" for before, after, _ in ends)])
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


def _measure_results(run: ReportedRun) -> dict[str, tuple[str, str, str]]:
    """Name -> a loss or accuracy before and after training, and its change."""
    before, after, mean = run.held_out.before, run.held_out.after, MEANS[run.held_out.normalization]
    losses: dict[str, tuple[float | None, float | None]] = {
        f"held-out loss{name and f', {name}'} (nats{mean})": (before.get(name), after[name]) for name in after
    }
    ends, mean = [run.metrics[place].get("loss") for place in (0, -1)], MEANS[run.recipe.method.normalization]
    losses[f"training loss, first and last step (nats{mean})"] = (ends[0], ends[1])
    results = {}
    for title, (first, last) in losses.items():
        change = NOTHING if first is None or last is None else f"{last - first:+.4f}"
        results[title] = (_format_loss(first), _format_loss(last), change)
    for name, task in run.evaluated.items():
        results[f"accuracy, {name} ({count(task.num_problems, 'problem')})"] = (
            NOTHING,
            f"{task.accuracy:.1%}",
            NOTHING,
        )
    return results


def _format_loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


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
