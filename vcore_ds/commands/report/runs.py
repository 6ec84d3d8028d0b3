"""The runs of a report: read from their folders, grouped by recipe, and their curves over optimizer steps."""

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vcore_ds.commands.tokens import TokenTables, TokenTexts, make_tables
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import writing
from vcore_ds.common.text import COLOURS, check_matplotlib, new_figure
from vcore_ds.config.problems import show
from vcore_ds.config.schema import Recipe, flat_values
from vcore_ds.training import run_folder
from vcore_ds.training.evaluation_folder import TaskResult, find_evaluations
from vcore_ds.training.run_notes import list_notes
from vcore_ds.training.token_records import TokenRecord, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OF_A_SEED = ("run.seed", "run.output_dir", "track.trackers", "track.project", "track.group", "track.tags")
"""Keys in which the runs of a group may differ."""
MUCH_TRUNCATED = 0.05  # share of an evaluation's answers
FIRST_KEYS = ("model.path", "method.name")  # of a label; the others are in the order of the schema


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """The content of a run's folder that a report shows."""

    name: str  # the folder's name, or its path if several have the same name; in a sweep `CELL/seed_N`
    recipe: Recipe
    environment: dict[str, Any]
    metrics: list[dict[str, float | None]]  # lines of metrics.jsonl, at least one
    held_out: run_folder.HeldOutLosses
    evaluated: dict[str, TaskResult]
    """By task, with the folder where a task was evaluated several times: all finished evaluations of the result."""
    records: list[TokenRecord]
    followed: list[TokenRecord]  # one trace a sequence
    texts: TokenTexts | None  # None without records, or without a tokenizer that has their tokens
    tables: TokenTables | None
    why_no_tokens: str | None
    notes: list[str]

    def total(self, key: str) -> float:
        """Sum of a key over metrics.jsonl; missing values count as 0."""
        return sum(line.get(key) or 0.0 for line in self.metrics)

    @property
    def num_steps(self) -> int:
        return int(self.metrics[-1]["step"] or 0)


def read_runs(folders: Sequence[Path], names: Sequence[str] | None = None, **options: Any) -> list[ReportedRun]:
    """Read the runs, one per distinct folder. `names`: of a sweep's runs, `CELL/seed_N`, one per folder; `options`: as
    of `write_report`. Raises UserError where a folder holds no run, or a file in it is missing or damaged."""
    distinct = {folder.resolve(): folder for folder in folders}
    if names is None:
        last = [path.name for path in distinct]
        names = [path.name if last.count(path.name) == 1 else str(folder) for path, folder in distinct.items()]
    return [_read_run(folder, name, **options) for folder, name in zip(distinct.values(), names, strict=True)]


def _read_run(folder: Path, name: str, tokenizer_path: str | None = None, **options: Any) -> ReportedRun:
    recipe = run_folder.read_run_recipe(folder)
    environment, metrics = run_folder.read_environment(folder), run_folder.read_run_metrics(folder)
    result = run_folder.export_folder(folder, is_adapter=recipe.lora is not None)
    notes = list_notes(folder, result.is_dir(), environment, metrics)
    held_out = run_folder.read_held_out_losses(folder)
    evaluated: dict[str, TaskResult] = {}
    for place, evaluation in find_evaluations(folder, result).items():
        for task, measured in evaluation.tasks.items():
            evaluated[f"{task}, {place.name}" if task in evaluated else task] = measured
            if measured.truncated_share >= MUCH_TRUNCATED:
                share = f"{measured.truncated_share:.0%} of the answers to {task} ({place.name})"
                notes.append(f"{share} ended at the limit on new tokens: accuracy may be higher with a higher one.")
    records, traces = read_records(folder), read_records(folder, "followed")
    finite = [replace(one, sequences=[trace for trace in one.sequences if trace.is_finite]) for one in traces]
    followed = [record for record in finite if record.sequences]
    texts, tables, why = None, None, None
    if not records:
        is_off = recipe.run.num_token_records == 0
        cause = "run.num_token_records is 0" if is_off else f"{run_folder.TOKENS}/ is empty or missing"
        why = f"No tokens were recorded: {cause}."
    else:
        try:
            tokenizer = run_folder.load_run_tokenizer(folder, recipe.model.path, tokenizer_path)
            texts = TokenTexts(tokenizer, [one for record in (*records, *followed) for one in record.sequences])
            tables = make_tables(records, texts, **options)
        except UserError as error:
            if tokenizer_path is not None:
                raise
            # The model may be on another machine, and curves and costs need no tokenizer.
            why = f"The recorded tokens cannot be shown: {error}"
            notes.append(why)
    tokens = (records, followed, texts, tables, why)
    return ReportedRun(name, recipe, environment, metrics, held_out, evaluated, *tokens, notes)


Group = tuple[str, list[ReportedRun]]
"""A label, and one or more runs whose recipes differ only in the seed."""


def group_runs(runs: Sequence[ReportedRun]) -> list[Group]:
    """Groups in the order of their first runs, labelled by the values in which their recipes differ."""
    by_recipe: dict[str, list[ReportedRun]] = {}
    for run in runs:
        values = {key: value for key, value in flat_values(run.recipe).items() if key not in OF_A_SEED}
        by_recipe.setdefault(repr(sorted(values.items())), []).append(run)
    settings = find_settings([members[0] for members in by_recipe.values()])
    groups = []
    for number, members in enumerate(by_recipe.values()):
        label = make_label({key: values[number] for key, values in settings.items()})
        label = label or members[0].name.removesuffix(f"/seed_{members[0].recipe.run.seed}")  # of a sweep
        groups.append((label + (f" ({len(members)} runs)" if len(members) > 1 else ""), members))
    return groups


def find_settings(runs: Sequence[ReportedRun]) -> dict[str, list[Any]]:
    """Dotted key -> its value in each run, for the fewest keys that tell the recipes apart. A key that follows from
    those before it, such as the KL budget of a method, is left out; paths are without the folders that all share."""
    differing = differences(runs, ignored=OF_A_SEED)
    settings: dict[str, list[Any]] = {}
    parts = [""] * len(runs)  # equal for runs that agree in `settings`
    for key in [key for key in FIRST_KEYS if key in differing] + [key for key in differing if key not in FIRST_KEYS]:
        finer = [part + repr(value) for part, value in zip(parts, differing[key], strict=True)]
        if len(set(finer)) > len(set(parts)):
            parts, values = finer, differing[key]
            if key.endswith("path") and all(isinstance(value, str) for value in values):
                start = os.path.commonprefix(values).rfind("/") + 1  # noqa: RUF071  (of strings, not paths)
                values = [value[start:] for value in values]
            settings[key] = values
    return settings


def name_key(key: str) -> str:
    """Such as `method` for method.name, `model` for model.path, and `kl_budget` for method.kl_budget."""
    section, _, name = key.partition(".")
    return section if name in ("name", "path") else name


def make_label(values: Mapping[str, Any]) -> str:
    """Such as `vcore, kl_budget 0.1`, from settings of one run; null is left out."""
    names = {key: "" if key.endswith((".name", ".path")) else f"{name_key(key)} " for key in values}
    return ", ".join(f"{names[key]}{show_value(value)}" for key, value in values.items() if value is not None)


def show_value(value: Any) -> str:
    """A value of a recipe as in YAML."""
    return show(value).strip('"')


def differences(runs: Sequence[ReportedRun], ignored: Sequence[str] = ("run.output_dir",)) -> dict[str, list[Any]]:
    """Dotted key -> its value in each run, for keys in which the recipes differ."""
    flat = [flat_values(run.recipe) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    values_of = {key: [values.get(key) for values in flat] for key in keys if key not in ignored}
    return {key: values for key, values in values_of.items() if any(value != values[0] for value in values)}


# ---- curves ----------------------------------------------------------------------------------------------------------

MOST_POINTS = 600
"""Maximum points of a curve. A longer one is averaged over this number of intervals, which looks the same."""
CONSTANT_TOLERANCE = 1e-4
"""A curve is constant if its values differ by at most this share of the largest: they are printed with four digits."""


@dataclass(frozen=True)
class Axis:
    """An x axis that does not count steps: names of places, in ascending order."""

    title: str
    values: list[float]
    names: list[str]


@dataclass(frozen=True)
class Series:
    """A curve of one group."""

    group: int
    steps: Sequence[float]  # or places on the chart's axis
    values: list[float]
    bands: list[tuple[list[float], list[float]]]
    """Lower and upper edges, the widest band first: the range over seeds, or quantiles of tokens."""
    line: dict[str, list[float]] | None = None  # `steps` and `values` of a fitted curve, drawn instead


@dataclass(frozen=True)
class Chart:
    """The curves of one quantity."""

    key: str
    title: str
    unit: str
    section: str
    note: str
    series: list[Series]
    axis: Axis | None = None

    def is_constant(self) -> bool:
        """Whether all curves are constant. A single point is a measurement, not a constant."""
        numbers = [np.array([one.values, *(edge for band in one.bands for edge in band)]) for one in self.series]
        return all(each.shape[1] > 1 and np.ptp(each) <= CONSTANT_TOLERANCE * np.abs(each).max() for each in numbers)

    def format_values(self, labels: Sequence[str]) -> str:
        """The values of constant curves, with the groups' labels if they differ."""
        values = [f"{one.values[-1]:.4g} {self.unit}".rstrip() for one in self.series]
        if len(set(values)) == 1:
            return values[0]
        return ", ".join(f"{value} ({labels[one.group]})" for value, one in zip(values, self.series, strict=True))


MEASURES = {
    "Losses": (("loss", "Training loss", "nats", "Uniform cross-entropy of the main batch, whatever the method"),),
    "Learning": (
        ("grad_norm", "Gradient norm", "", "Before clipping"),
        ("learning_rate", "Learning rate", "", ""),
    ),
    "Weights": (
        ("weighted_loss", "Weighted loss", "nats", "With the weights of the method, before alpha"),
        ("alpha", "Alpha", "", "Factor of the weighted loss"),
        ("effective_sample_size", "Effective sample size", "tokens", "Mean over sequences"),
        ("kl", "KL from uniform weights", "nats", "Mean over sequences"),
        ("tau", "Temperature tau", "", "Mean over sequences"),
    ),
    "Utilities": (
        ("probe_loss", "Probe loss", "nats", "On the probe batch, whose gradient is the direction"),
        ("utility_mean", "Mean utility", "", "Over the tokens of the batch"),
        ("utility_std", "Standard deviation of utility", "", "Over the tokens of the batch"),
        ("probe_grad_norm", "Gradient norm of the probe", "", ""),
        ("direction_energy", "Energy of the low-rank direction", "", "Share of its squared norm that probe.rank keeps"),
        ("signal_to_noise", "Signal to noise", "", "Finite difference: 3 is needed"),
        ("negative", "Negative utilities", "% of tokens", "Recorded tokens whose learning raises the probe loss"),
        ("quantiles", "Distribution of utilities", "", "Recorded tokens: median, middle half, and 5% to 95%"),
    ),
    "Speed and memory": (
        ("supervised_tokens_per_second", "Throughput", "supervised tokens/s", ""),
        ("tokens_per_second", "Throughput with prompts", "tokens/s", ""),
        ("utilization", "Model FLOPs utilization (MFU)", "", "Of matrix multiplications, over the devices' peak"),
        ("seconds", "Time of a step", "s", ""),
        ("peak_memory_bytes", "Peak memory of rank 0", "GiB", ""),
        ("rank_imbalance", "Imbalance of ranks", "", "1 is balanced"),
    ),
}  # fmt: skip
"""Section -> keys with title, unit and note, in the order of the page: those of metrics.jsonl, and two measures of
recorded tokens."""
_WITHOUT_CURVE = (
    "step", "epoch", "seconds_", "peak_memory_bytes_", "checkpoint_bytes", "sequences", "sequence_parallel", "flops_",
)  # fmt: skip
"""Prefixes of keys without a curve: x axes, counts, and times that are shown by phase."""
_OF_RECORDS: dict[str, Callable[[np.ndarray], Any]] = {
    "negative": lambda utilities: 100 * np.mean(utilities < 0),
    "quantiles": lambda utilities: np.quantile(utilities, [0.5, 0.05, 0.95, 0.25, 0.75]),
}
"""Functions of a record's utilities: the value of the curve, perhaps with the edges of bands."""
_ON_THE_SCALE_OF_UTILITIES = ("tau", "utility_mean", "utility_std", "direction_norm", "quantiles")


def make_charts(groups: Sequence[Group]) -> list[Chart]:
    """Charts in the order of `MEASURES`: all numbers of metrics.jsonl, including constants, and the distribution of
    the recorded tokens' utilities. Held-out losses follow the loss, and measures that no list names are the last."""
    measures = [(section, *one) for section, some in MEASURES.items() for one in some]
    known = {key for _, key, *_ in measures}
    keys = dict.fromkeys(key for _, members in groups for run in members for line in run.metrics for key in line)
    others = [key for key in keys if key not in known and not key.startswith(_WITHOUT_CURVE)]
    held_out = [key for key in others if key.startswith("validation_loss")]
    measures[1:1] = [("Losses", key, _title(key), "nats", "") for key in held_out]
    others = [key for key in others if key not in held_out]
    measures += [("Other measures", key, _title(key), "", f"{key} in metrics.jsonl") for key in others]
    charts = []
    for section, key, title, unit, note in measures:
        series = [one for place, (_, group) in enumerate(groups) if (one := _make_series(place, group, key))]
        if series:
            charts.append(Chart(key, title, unit, section, _add_note(groups, key, note), series))
    return charts


def _title(key: str) -> str:
    text = key.replace("validation_loss", "held-out loss").replace("_", " ")
    return text[0].upper() + text[1:]


def _omits_first_step(run: ReportedRun, key: str) -> bool:
    """Whether a curve leaves out step 1: the optimizer has no state there for its direction, and utilities another
    scale, often a hundred times smaller, beside which all other steps would be a flat line."""
    has_other_scale = run.recipe.method.uses_utilities and run.recipe.probe.direction != "sgd"
    return has_other_scale and key in _ON_THE_SCALE_OF_UTILITIES and len(run.metrics) > 1


def _add_note(groups: Sequence[Group], key: str, note: str) -> str:
    runs = [run for _, members in groups for run in members]
    notes = [note] if note else []
    if any(_omits_first_step(run, key) for run in runs):
        notes.append("Without step 1, where the optimizer has no state yet and utilities another scale")
    if "loss" in key and len({run.recipe.method.normalization for run in runs}) > 1:
        notes.append("Means over sequences or over tokens (method.normalization), which do not compare")
    return ". ".join(notes)


def _make_series(place: int, runs: Sequence[ReportedRun], key: str) -> Series | None:
    """The mean over a group's runs, with its range or the bands of the measure, at the steps that all runs have; at
    most `MOST_POINTS` points, each at the last step of its interval."""
    by_run = [_read_values(run, key) for run in runs]
    steps = sorted(set.intersection(*map(set, by_run)))
    if not steps:
        return None
    table = np.array([[np.atleast_1d(values[step]) for step in steps] for values in by_run])  # [runs, steps, 1 + edges]
    middle, *edges = np.moveaxis(table.mean(0), 1, 0)
    if not edges and len(by_run) > 1:
        edges = [table.min(0)[:, 0], table.max(0)[:, 0]]
    cuts = np.linspace(0, len(steps), min(len(steps), MOST_POINTS) + 1).astype(int)
    parts = list(itertools.pairwise(cuts))

    def means(numbers: np.ndarray) -> list[float]:
        return [float(f"{numbers[begin:end].mean():.6g}") for begin, end in parts]

    bands = [(means(low), means(high)) for low, high in zip(edges[::2], edges[1::2], strict=True)]
    return Series(place, [steps[end - 1] for _, end in parts], means(middle), bands)


def _read_values(run: ReportedRun, key: str) -> dict[int, Any]:
    """The values of a measure by step: a number, or the numbers of `_OF_RECORDS`."""
    values: dict[int, Any] = {}
    if key in _OF_RECORDS:
        for record in run.records:
            utilities = [sequence.utilities for sequence in record.sequences if sequence.utilities is not None]
            if len(utilities) == len(record.sequences):  # methods without utilities have none
                values[record.step] = _OF_RECORDS[key](np.concatenate(utilities).astype(np.float64))
    else:
        scale = 2.0**-30 if key == "peak_memory_bytes" else 1.0
        lines = {int(line["step"] or 0): line.get(key) for line in run.metrics}
        values = {step: value * scale for step, value in lines.items() if value is not None}
        before = run.held_out.before.get(key.removeprefix("validation_loss").removeprefix("_"))
        if key.startswith("validation_loss") and before is not None:
            values[0] = before
    if _omits_first_step(run, key):
        values.pop(1, None)
    return values


DASHES = ("-", "--", ":", "-.")


def write_pictures(runs: Sequence[ReportedRun], folder: Path) -> list[Path]:
    """Write each curve that is not constant as PNG and PDF, and return the files. Raises UserError where matplotlib is
    missing, or the folder cannot be written."""
    check_matplotlib("--png")
    groups = group_runs(runs)
    written = []
    with writing("--png", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for chart in make_charts(groups):
            if chart.is_constant():
                continue
            figure = new_figure(4.0, 2.8)
            _draw(figure.add_subplot(), chart, [label for label, _ in groups])
            for ending in (".png", ".pdf"):
                path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', chart.key)}{ending}"
                figure.savefig(path, dpi=200)
                written.append(path)
    return written


def _draw(axes: "Axes", chart: Chart, labels: Sequence[str]) -> None:
    for one in chart.series:
        colour = COLOURS[one.group % len(COLOURS)]
        style = DASHES[one.group % len(DASHES)] if len(one.steps) > 1 else "o"
        axes.plot(one.steps, one.values, style, color=colour, label=labels[one.group], linewidth=1.5)
        for low, high in one.bands:
            axes.fill_between(one.steps, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel("step")
    # Titles and labels are the user's: `$` in them does not mark a formula.
    axes.set_ylabel(chart.title + (f" ({chart.unit})" if chart.unit else ""), parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    if len(labels) > 1:
        for text in axes.legend(frameon=False, fontsize="small").get_texts():
            text.set_parse_math(False)
