"""The page and the text of a report: results, costs, tokens by weight, differences of recipes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from vcore_ds.commands.page import (
    NOTHING,
    Bars,
    Block,
    Code,
    Drawing,
    Fold,
    Notes,
    Page,
    PageSection,
    PageTrace,
    Table,
    encode_traces,
    format_number,
)
from vcore_ds.commands.report.runs import ReportedRun, differences, group_runs, make_charts, show_value
from vcore_ds.commands.tokens import KIND, POSITION, SOURCE, SOURCES, Row, TokenTables, TokenTexts
from vcore_ds.common.text import count, duration
from vcore_ds.config.load import dump_recipe
from vcore_ds.training.token_records import SequenceTokens, TokenRecord

MOST_TOKENS = 1_600_000
"""Maximum recorded tokens of a page, about 8 MB: 12 records of the size that a run writes, and half as many tokens of
followed traces. Beyond it, complete sequences are omitted, with the same number of tokens kept in each record."""


def make_page(
    runs: Sequence[ReportedRun], *first: PageSection, title: str | None = None, has_traces: bool = True
) -> Page:
    """Make the report of the runs, at least one; the sections `first` stand before its own, whose tables are then
    folded. `has_traces`: whether it holds the recorded tokens, which its text does not show."""
    names = [run.name for run in runs]
    title = title or (names[0] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}")
    with_texts = [run for run in runs if run.texts is not None and has_traces]
    most = MOST_TOKENS // max(1, len(with_texts))
    encoded = {
        "tokens": [encode_records(run, run.records, most) for run in with_texts],
        "followed": [encode_records(run, run.followed, most // 2) for run in with_texts if run.followed],
    }
    descriptions = {kind: [description for description, _ in some] for kind, some in encoded.items()}
    groups = group_runs(runs)
    labels, charts = [label for label, _ in groups], make_charts(groups)
    constants = [f"{chart.title} {chart.format_values(labels)}" for chart in charts if chart.is_constant()]
    data = descriptions | {
        "groups": labels,
        "curves": [asdict(chart) for chart in charts if not chart.is_constant()],
        "weightRange": weight_range(with_texts),
        **{key: value for section in first for key, value in section.data.items()},
    }
    has_utilities = any("utility" in description["measures"] for description in descriptions["tokens"])
    missing = [f"{run.name}: {run.why_no_tokens}" for run in runs if run.why_no_tokens]
    values = [[key, *map(show_value, values)] for key, values in differences(runs).items()]
    differing = Table("Keys in which the recipes differ", ["", *names], values)
    warnings = list_warnings(runs, len(groups))
    recipes = [Fold(f"recipe.yaml of {run.name}", [Code(run.name, dump_recipe(run.recipe))]) for run in runs]
    environments = [
        Fold(f"environment.json of {run.name}", [Code(run.name, json.dumps(run.environment, indent=2))]) for run in runs
    ]
    movement: list[Block] = [ABOUT_MOVEMENT, Drawing("followed")]
    over_run = [PageSection("movement", "The same tokens over the run", "Over the run", movement)]
    sections = [
        PageSection("losses", "", "", [Drawing("losses-charts")], in_text=False),
        PageSection("learnt", "", "", [results_table(runs), describe_results(runs)]),
        *([PageSection("warnings", "", "Warnings", warnings)] if warnings else []),
        *([PageSection("differences", "", "Differences", [differing])] if values else []),
        *(over_run if encoded["followed"] else []),
        PageSection("traces", "Tokens trained on", "Tokens", [Drawing("viewer", missing)]),
        PageSection("gained", "What gained and lost weight", "Gained and lost", compare_weights(runs)),
        PageSection("map", "Utility against loss", "Utility and loss", [Drawing("density", [] if has_utilities else [
            "No utilities were recorded: the method does not use them."])], in_text=False),
        PageSection("curves", "Curves", "Curves", [ABOUT_CURVES, Drawing("charts"), *(
            [f"Constant over the run: {'; '.join(constants)}."] if constants else [])], in_text=False),
        PageSection("cost", "Time by phase", "Time", make_phases(runs)),
        PageSection("recipe", "Recipe", "Recipe", recipes, in_text=False),
        PageSection("environment", "Environment", "Environment", environments, in_text=False),
    ]  # fmt: skip
    blobs = {f"{kind}-{i}": blob for kind, some in encoded.items() for i, (_, blob) in enumerate(some)}
    if first:  # a sweep, whose many runs have a column or a row each
        folded = {section.id: [Fold("Each run", section.blocks)] for section in sections if section.id in OF_EACH_RUN}
        sections = [*first, *(replace(one, blocks=folded.get(one.id, one.blocks)) for one in sections)]
    return Page(f"Report on {title}", summarize(runs), sections, data, blobs)


OF_EACH_RUN = ("learnt", "differences", "gained", "cost", "recipe", "environment")
"""Sections with a column, row or table for each run."""
ABOUT_MOVEMENT = (
    "A few traces, measured after each recorded step, along its direction: a row for each step, then the trace at one. "
    "Held-out ones are not trained on; their weights are what they would have been."
)
ABOUT_CURVES = (
    "By optimizer step. Point at a curve, or select it and press the arrow keys, to read all at one step. The line is "
    "the mean of a recipe's seeds, its band their range."
)


def encode_records(run: ReportedRun, records: Sequence[TokenRecord], most_tokens: int) -> tuple[dict[str, Any], str]:
    """Encode the trained or the followed tokens of a run, at least one, up to `most_tokens`: of each record the
    first sequences that fit into its share of the tokens, at least one."""
    assert run.texts is not None
    chosen = []
    for record in records:
        ends = np.cumsum([len(sequence) for sequence in record.sequences])
        num_chosen = max(1, int(np.searchsorted(ends, most_tokens // len(records), side="right")))
        chosen += [_make_trace(run.texts, record, sequence) for sequence in record.sequences[:num_chosen]]
    description, blob = encode_traces(run.name, run.texts, chosen)
    return description | {"numRecorded": sum(record.num_tokens for record in records)}, blob


def _make_trace(texts: TokenTexts, record: TokenRecord, tokens: SequenceTokens) -> PageTrace:
    num_tokens, number, note = tokens.num_supervised_tokens or len(tokens), tokens.sequence_id, ""
    facts = [f"{len(tokens):,} tokens"]
    if tokens.source:  # a followed trace
        source = tokens.source
        shown = (
            f"all of {num_tokens:,}" if len(tokens) == num_tokens else f"the first {len(tokens):,} of {num_tokens:,}"
        )
        note = f"{'Held out, not trained on' if tokens.is_held_out else 'Training data'}: {shown} tokens"
    else:
        is_trusted = record.is_trusted(tokens)
        source, number = SOURCES[is_trusted], number - ((record.first_trusted_id or 0) if is_trusted else 0)
        facts.append(f"alpha {tokens.alpha:.4g}")
        if (share := f"{tokens.share / tokens.uniform_share:.4g}") != "1":
            facts.append(f"{share}× the uniform share of the batch")
    measures = {"weight": tokens.relative_weights, "loss": tokens.losses}
    optional = {"utility": tokens.utilities, "entropy": tokens.entropies}
    measures |= {name: values for name, values in optional.items() if values is not None}
    title, supervised = f"Step {record.step}, {source} {number}", np.ones(len(tokens), dtype=np.bool_)
    prompt = texts.read_prompt(tokens)
    return PageTrace(record.step, source, number, title, facts, tokens, measures, supervised, num_tokens, prompt, note)


def weight_range(runs: Sequence[ReportedRun]) -> float:
    """Range of the colour scale of weights, as a power of 2. It holds 98% of the recorded tokens of all runs together,
    so that a colour means the same in each."""
    weights = [sequence.relative_weights for run in runs for record in run.records for sequence in record.sequences]
    positive = np.concatenate([each[each > 0] for each in weights] or [np.ones(1)])
    return max(0.02, float(np.quantile(np.abs(np.log2(positive)), 0.98))) if len(positive) else 1.0


# ---- tables ----------------------------------------------------------------------------------------------------------

PHASES = {"probe": "seconds_probe", "utilities": "seconds_utility", "main": "seconds_main", "update": "seconds_step"}
"""Name of a phase -> key of metrics.jsonl."""
BESIDE = {"followed traces": "seconds_followed", "saving": "seconds_checkpoint"}
"""The same of what is no part of `seconds`."""


def make_phases(runs: Sequence[ReportedRun]) -> list[Block]:
    """Mean seconds of a step by phase, without the first step, unless it is the only one, as text, bars and table. The
    widths of the bars are in percent of the slowest run."""
    names, keys = [*PHASES, *BESIDE, "rest"], [*PHASES.values(), *BESIDE.values()]
    seconds, speeds = {}, {}
    for run in runs:
        lines = run.metrics[1:] or run.metrics
        means = {key: sum(line.get(key) or 0.0 for line in lines) / len(lines) for key in ("seconds", *keys)}
        rest = max(0.0, means["seconds"] - sum(means[key] for key in PHASES.values()))
        seconds[run.name] = [*(means[key] for key in keys), rest]
        known = [speed for line in run.metrics if (speed := line.get("supervised_tokens_per_second")) is not None]
        speeds[run.name] = float(np.median(known)) if known else None
    slowest = max(map(sum, seconds.values())) or 1.0
    rows, bars = [], []
    for name, phases in seconds.items():
        numbers = list(map(format_number, (*phases, sum(phases), speeds[name])))
        rows.append([name, *numbers])
        label = ", ".join(f"{phase} {number} s" for phase, number in zip(names, numbers, strict=False))
        bars.append((name, [f"{100 * value / slowest:.2f}" for value in phases], f"{name}: {label}"))
    note = (
        "Mean over all steps but the first, which allocates and compiles. Followed traces are measured, and "
        "checkpoints saved, in some steps only; rest is the remaining time of a step. Utilities that are computed in "
        "the main pass (utility.fused) are part of its time."
    )
    return [note, Bars(names, bars), Table("Seconds of a step", ["", *names, "total", "supervised tokens/s"], rows)]


ABOUT_WEIGHTS = (
    "Relative weight: the share of the loss that training gave to these tokens, over the share that uniform weights "
    "give them; 1 is uniform. Means of utility and loss count a token as uniform training does."
)


def compare_weights(runs: Sequence[ReportedRun]) -> list[Block]:
    """What gained and lost weight: several runs side by side by kind, position and source, then each."""
    all_tables = [(run, run.tables) for run in runs if run.tables is not None]
    with_tables = [(run, tables) for run, tables in all_tables if not tables.is_uniform]
    compared: list[Block] = []
    for title in (KIND, POSITION, SOURCE) if len(with_tables) > 1 else ():
        weights = [{row.name: row.relative_weight for row in tables.groups.get(title, [])} for _, tables in with_tables]
        names = list(dict.fromkeys(name for by_name in weights for name in by_name))
        cells = [[name, *(format_number(by_name.get(name)) for by_name in weights)] for name in names]
        if cells:
            compared.append(Table(f"Relative weight by {title}", ["", *(run.name for run, _ in with_tables)], cells))
    folds = [_fold_tokens(run, tables, is_open=number == 0) for number, (run, tables) in enumerate(with_tables)]
    uniform = ", ".join(run.name for run, tables in all_tables if tables.is_uniform)
    if not folds:
        return ["No run here has tokens that gained or lost weight."]
    return [ABOUT_WEIGHTS, *compared, *folds, *([f"Uniform weights: {uniform}."] if uniform else [])]


def _fold_tokens(run: ReportedRun, tables: TokenTables, *, is_open: bool) -> Fold:
    """Tables of the tokens that gained and lost weight in one run."""
    shown = {f"{title} (at least {tables.min_count} times)": rows for title, rows in tables.extremes.items()}
    shown |= {f"By {title}": rows for title, rows in tables.groups.items()}
    steps = [f"{record.step:,}" for record in run.records]
    num_tokens = sum(record.num_tokens for record in run.records)
    num_sequences = sum(len(record.sequences) for record in run.records)
    heading = f"{run.name}: {count(num_tokens, 'token')} of {count(num_sequences, 'sequence')}, at step"
    heading += f"{'s' if len(steps) > 1 else ''} {', '.join(steps)}"
    if n := tables.num_in_third:
        heading += f" (first third of the records: {', '.join(steps[:n])}; last third: {', '.join(steps[-n:])})"
    if abs(tables.relative_weight - 1.0) >= 0.005:
        heading += f"; their mean relative weight is {tables.relative_weight:.2f}, and `gained` means above it"
    return Fold(heading, [[_token_table(*one) for one in shown.items()]], is_open)


def _token_table(caption: str, rows: Sequence[Row]) -> Table:
    head = ["", "weight", "count", "of weight", "of tokens", "utility", "loss", "first third", "last third"]
    cells = []
    for row in rows:
        counts = [f"{row.count:,}", f"{row.share_of_weight:.2%}", f"{row.share_of_tokens:.2%}"]
        means = map(format_number, (row.utility, row.loss, row.first_third, row.last_third))
        cells.append([row.name, format_number(row.relative_weight), *counts, *means])
    return Table(caption, head, cells)


def summarize(runs: Sequence[ReportedRun]) -> str:
    """One sentence: the models and the methods."""
    models = dict.fromkeys(run.recipe.model.path for run in runs)
    return f"{', '.join(models)} fine-tuned with {', '.join(dict.fromkeys(run.recipe.method.title for run in runs))}."


def results_table(runs: Sequence[ReportedRun]) -> Table:
    """Losses and accuracies, and the amount of training; a column for each run."""
    measured = [_measure_results(run) for run in runs]
    names = dict.fromkeys(name for results in measured for name in results)
    rows = [[name, *(results.get(name, NOTHING) for results in measured)] for name in names]
    return Table("What was learnt, before → after", ["", *(run.name for run in runs)], rows)


ABOUT_LOSSES = "Losses fall, by any method, as the model learns the form of the traces, right or wrong. "
ABOUT_RESULTS = (
    "Whether answers get better is for accuracy to say (vcore-ds eval), and what VCORE adds for a report with a run of "
    "plain SFT beside it (methods/sft.yaml)."
)


def describe_results(runs: Sequence[ReportedRun]) -> str:
    """What the losses mean, if they fell in all runs; and what they do not say."""
    ends = [(run.metrics[0].get("loss"), run.metrics[-1].get("loss")) for run in runs]
    fell = all(first is not None and last is not None and last < first for first, last in ends)
    return ABOUT_LOSSES * fell + ABOUT_RESULTS


ONE_SEED = "Some recipes have one seed: differences between runs may be those between seeds (run.seed)."
MOST_NAMES = 5  # runs named in the title of their warnings


def list_warnings(runs: Sequence[ReportedRun], num_groups: int) -> list[Notes]:
    """The warnings on the runs, those of equal ones once, then on their comparison. `num_groups`: of runs whose recipes
    differ only in the seed."""
    by_notes: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        by_notes.setdefault(tuple(run.notes), []).append(run.name)
    one_seed = len(runs) < 2 * num_groups and num_groups > 1
    comparison = [Notes("Warnings on the comparison", [ONE_SEED])] if one_seed else []
    return comparison + [
        Notes(f"Warnings on {', '.join(names[:MOST_NAMES])}{', ...' * (len(names) > MOST_NAMES)}", notes)
        for notes, names in by_notes.items()
        if notes
    ]


MEANS = {"sequence": "", "token": ", mean over tokens"}
"""What the name of a loss says of its `method.normalization`: losses of another one have another name, so that no table
compares the two."""


def _measure_results(run: ReportedRun) -> dict[str, str]:
    """Name -> a loss before and after training, an accuracy, or an amount."""
    before, after, mean = run.held_out.before, run.held_out.after, MEANS[run.held_out.normalization]
    ends: dict[str, tuple[float | None, float | None]]
    ends = {f"held-out loss{name and f', {name}'} (nats{mean})": (before.get(name), after[name]) for name in after}
    title = f"training loss, first and last step (nats{MEANS[run.recipe.method.normalization]})"
    ends[title] = (run.metrics[0].get("loss"), run.metrics[-1].get("loss"))
    results = {name: " → ".join(format_number(loss, ".4f") for loss in losses) for name, losses in ends.items()}
    for name, task in run.evaluated.items():
        results[f"accuracy, {name} ({count(task.num_problems, 'problem')})"] = f"{task.accuracy:.1%}"
    amounts = {"step": run.num_steps, "sequence": run.total("sequences"), "token": run.total("supervised_tokens")}
    amounts["rank"] = run.environment.get("world_size") or 0
    amount = ", ".join(count(number, name) for name, number in amounts.items() if number)
    return results | {"training": f"{run.recipe.method.title}, {amount}: {duration(run.total('seconds'))}"}
