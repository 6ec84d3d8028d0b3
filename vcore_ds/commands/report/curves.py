"""Curves over optimizer steps, one per group of runs, for the page and for PNG and PDF files."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vcore_ds.commands.report.read import Group, ReportedRun, group_runs
from vcore_ds.commands.report.traces import join_utilities
from vcore_ds.common.paths import writing
from vcore_ds.common.text import COLOURS, check_matplotlib, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 600
"""Maximum points of a curve. A longer one is averaged over this number of intervals, which looks the same."""
SECTIONS = ("Learning", "Weights", "Utilities", "Speed and memory", "Other measures")
CONSTANT_TOLERANCE = 1e-4
"""A curve is constant if its values differ by at most this share of the largest: they are printed with four digits."""


@dataclass(frozen=True)
class Series:
    """A curve of one group."""

    group: int
    steps: list[int]
    values: list[float]
    bands: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Lower and upper edges, the widest band first: the range over seeds, or quantiles of tokens."""


@dataclass(frozen=True)
class Chart:
    """The curves of one quantity."""

    key: str
    title: str
    unit: str
    section: str
    note: str
    series: list[Series]

    def is_constant(self) -> bool:
        """Whether all curves are constant. A single point is a measurement, not a constant."""
        return all(len(one.steps) > 1 and _is_constant(one) for one in self.series)

    def format_values(self, labels: Sequence[str]) -> str:
        """The values of constant curves, with the groups' labels if they differ."""
        values = [f"{one.values[-1]:.4g}{self.unit and ' '}{self.unit}" for one in self.series]
        if len(set(values)) == 1:
            return values[0]
        return ", ".join(f"{value} ({labels[one.group]})" for value, one in zip(values, self.series, strict=True))


def _is_constant(series: Series) -> bool:
    numbers = np.concatenate([series.values, *(edge for band in series.bands for edge in band)])
    return bool(np.ptp(numbers) <= CONSTANT_TOLERANCE * np.abs(numbers).max())


@dataclass(frozen=True)
class _Measure:
    """A key of metrics.jsonl, its title and explanation."""

    key: str
    title: str
    unit: str
    section: str
    note: str = ""
    scale: float = 1.0


_LOSS = _Measure("loss", "Loss", "nats", "Learning", "Uniform cross-entropy of the main batch, whatever the method")
_MEASURES = (
    _Measure("grad_norm", "Gradient norm", "", "Learning", "Before clipping"),
    _Measure("learning_rate", "Learning rate", "", "Learning"),
    _Measure("weighted_loss", "Weighted loss", "nats", "Weights", "With the weights of the method, before alpha"),
    _Measure("alpha", "Alpha", "", "Weights", "Factor of the weighted loss"),
    _Measure("effective_sample_size", "Effective sample size", "tokens", "Weights", "Mean over sequences"),
    _Measure("kl", "KL from uniform weights", "nats", "Weights", "Mean over sequences"),
    _Measure("tau", "Temperature tau", "", "Weights", "Mean over sequences"),
    _Measure("total_weight", "Total weight of a sequence", "", "Weights", "1 if the weights are a distribution"),
    _Measure("num_saturated", "KL budget out of reach", "sequences", "Weights"),
    _Measure("probe_loss", "Probe loss", "nats", "Utilities", "On the probe batch, whose gradient is the direction"),
    _Measure("utility_mean", "Mean utility", "", "Utilities", "Over the tokens of the batch"),
    _Measure("utility_std", "Standard deviation of utility", "", "Utilities", "Over the tokens of the batch"),
    _Measure("probe_grad_norm", "Gradient norm of the probe", "", "Utilities"),
    _Measure("direction_energy", "Energy of the low-rank direction", "", "Utilities", "Share of the squared norm of "
             "the probe direction that probe.rank keeps"),
    _Measure("signal_to_noise", "Signal to noise", "", "Utilities", "Finite difference: 3 is needed"),
    _Measure("supervised_tokens_per_second", "Throughput", "supervised tokens/s", "Speed and memory"),
    _Measure("tokens_per_second", "Throughput with prompts", "tokens/s", "Speed and memory"),
    _Measure("utilization", "Model FLOPs utilization (MFU)", "", "Speed and memory", "Needed FLOP/s of the matrix "
             "multiplications over the devices' peak"),
    _Measure("utilization_training", "MFU without probe and utility passes", "", "Speed and memory",
             "Forward and backward of the main batch only"),
    _Measure("seconds", "Time of a step", "s", "Speed and memory"),
    _Measure("peak_memory_bytes", "Peak memory of rank 0", "GiB", "Speed and memory", scale=2.0**-30),
    _Measure("rank_imbalance", "Imbalance of ranks", "", "Speed and memory", "1 is balanced"),
    _Measure("expert_load_mean", "Load of the busiest expert", "", "Speed and memory", "Tokens of the busiest expert "
             "over the mean of all experts, mean over layers; 1 is balanced"),
    _Measure("expert_load_max", "Load of the busiest expert, least balanced layer", "", "Speed and memory",
             "The same for one layer"),
    _Measure("expert_rank_load_mean", "Load of the busiest rank", "", "Speed and memory", "Expert parallelism: tokens "
             "sent to the busiest rank's experts over the mean of all ranks, mean over layers"),
    _Measure("expert_rank_load_max", "Load of the busiest rank, least balanced layer", "", "Speed and memory",
             "The same for one layer"),
)  # fmt: skip
"""In the order of the page, after the loss and the held-out losses."""
_ELSEWHERE = (
    "step", "epoch", "seconds_", "peak_memory_bytes_", "checkpoint_bytes", "sequences", "sequence_parallel", "flops_",
)  # fmt: skip
"""Prefixes of keys without a curve: x axes, counts, and times that are shown by phase."""


_ON_THE_SCALE_OF_UTILITIES = ("tau", "utility_mean", "utility_std", "direction_norm", "quantiles")


def _omits_first_step(run: ReportedRun, key: str) -> bool:
    """Whether a curve leaves out step 1: the optimizer has no state there for its direction, and utilities another
    scale, often a hundred times smaller, beside which all other steps would be a flat line."""
    has_other_scale = run.recipe.method.uses_utilities and run.recipe.probe.direction != "sgd"
    return has_other_scale and key in _ON_THE_SCALE_OF_UTILITIES and len(run.metrics) > 1


def _add_note(groups: Sequence[Group], key: str, note: str) -> str:
    runs = [run for group in groups for run in group.runs]
    notes = [note] if note else []
    if any(_omits_first_step(run, key) for run in runs):
        notes.append("Without step 1, where the optimizer has no state yet and utilities another scale")
    if "loss" in key and len({run.recipe.method.normalization for run in runs}) > 1:
        notes.append("Means over sequences or over tokens (method.normalization), which do not compare")
    return ". ".join(notes)


def make_charts(groups: Sequence[Group]) -> list[Chart]:
    """Charts in the order of `SECTIONS`: all numbers of metrics.jsonl, including constants, and the distribution of
    the recorded tokens' utilities."""
    keys = dict.fromkeys(key for group in groups for run in group.runs for line in run.metrics for key in line)
    known = {measure.key for measure in (_LOSS, *_MEASURES)}
    others = [_describe_key(key) for key in keys if key not in known and not key.startswith(_ELSEWHERE)]
    charts = []
    for measure in (_LOSS, *others, *_MEASURES):
        series = [_metric_series(group, i, measure) for i, group in enumerate(groups)]
        series = [one for one in series if one.steps]
        if series:
            note = _add_note(groups, measure.key, measure.note)
            charts.append(Chart(measure.key, measure.title, measure.unit, measure.section, note, series))
    charts += _utility_charts(groups)
    return sorted(charts, key=lambda chart: SECTIONS.index(chart.section))


def _describe_key(key: str) -> _Measure:
    if key.startswith("validation_loss"):
        name = key.removeprefix("validation_loss").lstrip("_")
        return _Measure(key, f"Held-out loss{name and f', {name}'}", "nats", "Learning")
    title = key.replace("_", " ").capitalize()
    return _Measure(key, title, "", SECTIONS[-1], f"{key} in metrics.jsonl")


def _metric_series(group: Group, place: int, measure: _Measure) -> Series:
    """The mean over the group's runs with its range, at the steps that all runs have."""
    by_run = []
    for run in group.runs:
        values = {int(line["step"] or 0): line.get(measure.key) for line in run.metrics}
        if _omits_first_step(run, measure.key):
            values.pop(1, None)
        by_run.append({step: value * measure.scale for step, value in values.items() if value is not None})
    steps, table = _join_runs(by_run)
    if not len(steps):
        return Series(place, [], [])
    edges = [(table.min(0), table.max(0))] if len(by_run) > 1 else []
    return _make_series(place, steps, table.mean(0), edges)


def _join_runs(by_run: Sequence[Mapping[int, float | np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all runs have, and the values `[runs, steps, ...]` there."""
    steps = sorted(set.intersection(*map(set, by_run)))
    return np.array(steps), np.array([[values[step] for step in steps] for values in by_run])


def _utility_charts(groups: Sequence[Group]) -> Iterator[Chart]:
    """Quantiles of utilities at the recorded steps, and the share of negative ones."""

    def series(key: str, measure: Callable[[np.ndarray], np.ndarray]) -> Iterator[Series]:
        for place, group in enumerate(groups):
            steps, table = _join_runs([_measure_records(run, key, measure) for run in group.runs])
            if len(steps):
                middle, *edges = np.moveaxis(table.mean(0), 1, 0)
                yield _make_series(place, steps, middle, list(zip(edges[::2], edges[1::2], strict=True)))

    shares = list(series("negative", lambda utilities: np.array([100 * np.mean(utilities < 0)])))
    if shares:
        note = "Recorded tokens whose learning raises the probe loss"
        yield Chart("negative", "Negative utilities", "% of tokens", "Utilities", note, shares)
        quantiles = list(series("quantiles", lambda utilities: np.quantile(utilities, [0.5, 0.05, 0.95, 0.25, 0.75])))
        note = _add_note(groups, "quantiles", "Recorded tokens: median, middle half, and 5% to 95%")
        yield Chart("quantiles", "Distribution of utilities", "", "Utilities", note, quantiles)


def _measure_records(run: ReportedRun, key: str, measure: Callable[[np.ndarray], np.ndarray]) -> dict[int, np.ndarray]:
    """Step -> `measure` of the utilities of its recorded tokens."""
    utilities = {record.step: join_utilities(record) for record in run.records}
    if _omits_first_step(run, key):
        utilities.pop(1, None)
    return {step: measure(values) for step, values in utilities.items() if values is not None}


def _make_series(
    place: int, steps: np.ndarray, values: np.ndarray, edges: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Series:
    """A series of at most `MOST_POINTS` points, each at the last step of its interval."""
    cuts = np.linspace(0, len(steps), min(len(steps), MOST_POINTS) + 1).astype(int)
    parts = list(itertools.pairwise(cuts))

    def means(numbers: np.ndarray) -> list[float]:
        return [float(f"{numbers[begin:end].mean():.6g}") for begin, end in parts]

    bands = [(means(low), means(high)) for low, high in edges]
    return Series(place, [int(steps[end - 1]) for _, end in parts], means(values), bands)


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
            axes = figure.add_subplot()
            _draw(axes, chart, [group.label for group in groups])
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
