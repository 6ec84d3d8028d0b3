"""Curves over optimizer steps, one for each group of runs: what the page and the pictures draw."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vcore_ds.commands.report.read import Group, ReportedRun, group_runs
from vcore_ds.commands.report.traces import utilities_of
from vcore_ds.common.paths import writing
from vcore_ds.common.text import COLOURS, check_matplotlib, new_figure

MOST_POINTS = 600
"""Points of a curve. Longer ones are drawn as the means of that many parts, which a screen cannot tell apart."""
SECTIONS = ("Learning", "Weights", "Utilities", "Speed and memory", "Other measures")
CONSTANT_TOLERANCE = 1e-4
"""A curve is constant where its values differ by at most this share of the largest: they are shown with four digits."""


@dataclass(frozen=True)
class Series:
    """A curve of one group."""

    group: int
    """Place of the group in its list."""
    steps: list[int]
    values: list[float]
    bands: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Lower and upper edge, the widest first: the range over seeds, or quantiles of tokens."""


@dataclass(frozen=True)
class Chart:
    """Curves of one quantity."""

    key: str
    title: str
    unit: str
    section: str
    note: str
    series: list[Series]

    def is_constant(self) -> bool:
        """Whether no curve moves. One with a single point is a measurement, and no constant."""
        return all(len(one.steps) > 1 and _is_constant(one) for one in self.series)

    def values(self, labels: Sequence[str]) -> str:
        """The values of curves that are constant, with the groups' labels where they differ."""
        shown = [f"{one.values[-1]:.4g}{self.unit and ' '}{self.unit}" for one in self.series]
        if len(set(shown)) == 1:
            return shown[0]
        return ", ".join(f"{value} ({labels[one.group]})" for value, one in zip(shown, self.series, strict=True))


def _is_constant(series: Series) -> bool:
    numbers = np.concatenate([series.values, *(edge for band in series.bands for edge in band)])
    return bool(np.ptp(numbers) <= CONSTANT_TOLERANCE * np.abs(numbers).max())


@dataclass(frozen=True)
class _Measure:
    """A key of metrics.jsonl with its title and explanation."""

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
    _Measure("alpha", "Alpha", "", "Weights", "What the weighted loss is multiplied by"),
    _Measure("effective_sample_size", "Effective sample size", "tokens", "Weights", "Tokens that a sequence's weights "
             "amount to, mean over sequences"),
    _Measure("kl", "KL from uniform weights", "nats", "Weights", "Mean over sequences"),
    _Measure("tau", "Temperature tau", "", "Weights", "Mean over sequences"),
    _Measure("total_weight", "Total weight of a sequence", "", "Weights", "1 where weights are a distribution"),
    _Measure("num_saturated", "KL budget out of reach", "sequences", "Weights"),
    _Measure("probe_loss", "Probe loss", "nats", "Utilities", "On the batch that gives the direction"),
    _Measure("utility_mean", "Mean utility", "", "Utilities", "Over the tokens of the batch"),
    _Measure("utility_std", "Standard deviation of utility", "", "Utilities", "Over the tokens of the batch"),
    _Measure("probe_grad_norm", "Norm of the probe's gradient", "", "Utilities"),
    _Measure("direction_energy", "Share of the direction's squared norm that its rank keeps", "", "Utilities"),
    _Measure("signal_to_noise", "Signal to noise", "", "Utilities", "Finite difference: 3 is needed"),
    _Measure("supervised_tokens_per_second", "Throughput", "supervised tokens/s", "Speed and memory"),
    _Measure("tokens_per_second", "Throughput with prompts", "tokens/s", "Speed and memory"),
    _Measure("utilization", "Share of the peak (MFU)", "", "Speed and memory", "Products that the step needs, over "
             "what the devices' peak would do in its time"),
    _Measure("utilization_training", "Share of the peak without the method's own passes", "", "Speed and memory",
             "Forward and backward of the main batch alone"),
    _Measure("seconds", "Time of a step", "s", "Speed and memory"),
    _Measure("peak_memory_bytes", "Peak memory of rank 0", "GiB", "Speed and memory", scale=2.0**-30),
    _Measure("rank_imbalance", "Imbalance of ranks", "", "Speed and memory", "1 is even"),
    _Measure("expert_load_mean", "Load of the fullest expert", "", "Speed and memory", "Tokens over those of the mean "
             "expert, mean over layers; 1 is even"),
    _Measure("expert_load_max", "Load of the fullest expert, most uneven layer", "", "Speed and memory", "The same"),
    _Measure("expert_rank_load_mean", "Load of the fullest rank", "", "Speed and memory", "With expert parallelism: "
             "tokens that its experts are sent over the mean rank's, mean over layers"),
    _Measure("expert_rank_load_max", "Load of the fullest rank, most uneven layer", "", "Speed and memory", "The same"),
)  # fmt: skip
"""In the order of the page, after the loss and the held-out losses."""
_ELSEWHERE = (
    "step", "epoch", "seconds_", "peak_memory_bytes_", "checkpoint_bytes", "sequences", "sequence_parallel", "flops_",
)  # fmt: skip
"""Beginnings of keys that are no curve or are shown as time by phase."""


def make_charts(groups: Sequence[Group]) -> list[Chart]:
    """Charts in the order of `SECTIONS`: every number in metrics.jsonl, constants included, and the distribution of
    utilities in the records of tokens."""
    keys = dict.fromkeys(key for group in groups for run in group.runs for line in run.metrics for key in line)
    known = {measure.key for measure in (_LOSS, *_MEASURES)}
    others = [_other(key) for key in keys if key not in known and not key.startswith(_ELSEWHERE)]
    charts = []
    for measure in (_LOSS, *others, *_MEASURES):
        series = [_of_metrics(group, i, measure) for i, group in enumerate(groups)]
        series = [one for one in series if one.steps]
        if series:
            charts.append(Chart(measure.key, measure.title, measure.unit, measure.section, measure.note, series))
    charts += _of_records(groups)
    return sorted(charts, key=lambda chart: SECTIONS.index(chart.section))


def _other(key: str) -> _Measure:
    if key.startswith("validation_loss"):
        name = key.removeprefix("validation_loss").lstrip("_")
        return _Measure(key, f"Held-out loss{name and f', {name}'}", "nats", "Learning")
    title = key.replace("_", " ").capitalize()
    return _Measure(key, title, "", SECTIONS[-1], f"{key} in metrics.jsonl")


def _of_metrics(group: Group, place: int, measure: _Measure) -> Series:
    def values(run: ReportedRun) -> dict[int, float]:
        found = {int(line["step"] or 0): line.get(measure.key) for line in run.metrics}
        return {step: value * measure.scale for step, value in found.items() if value is not None}

    return _mean_over_seeds([values(run) for run in group.runs], place)


def _mean_over_seeds(of_run: Sequence[dict[int, float]], place: int) -> Series:
    """The mean with its range, at the steps that all runs have."""
    steps = sorted(set.intersection(*map(set, of_run)))
    if not steps:
        return Series(place, [], [])
    table = np.array([[values[step] for step in steps] for values in of_run])
    edges = [(table.min(0), table.max(0))] if len(of_run) > 1 else []
    return _series(place, np.array(steps), table.mean(0), edges)


def _of_records(groups: Sequence[Group]) -> Iterator[Chart]:
    """Quantiles of utilities at the recorded steps, and the share of negative ones."""

    def series(of_tokens: Callable[[np.ndarray], np.ndarray]) -> Iterator[Series]:
        for place, group in enumerate(groups):
            of_run = [_by_step(run, of_tokens) for run in group.runs]
            steps = sorted(set.intersection(*map(set, of_run)))
            if steps:
                table = np.array([[values[step] for step in steps] for values in of_run])
                middle, *edges = np.moveaxis(table.mean(0), 1, 0)
                pairs = list(zip(edges[::2], edges[1::2], strict=True))
                yield _series(place, np.array(steps), middle, pairs)

    shares = list(series(lambda utilities: np.array([100 * np.mean(utilities < 0)])))
    if shares:
        note = "Recorded tokens whose learning raises the loss on the probe"
        yield Chart("negative", "Negative utilities", "% of tokens", "Utilities", note, shares)
        quantiles = list(series(lambda utilities: np.quantile(utilities, [0.5, 0.05, 0.95, 0.25, 0.75])))
        note = "Recorded tokens: median, middle half, and 5% to 95%"
        yield Chart("quantiles", "Distribution of utilities", "", "Utilities", note, quantiles)


def _by_step(run: ReportedRun, of_tokens: Callable[[np.ndarray], np.ndarray]) -> dict[int, np.ndarray]:
    found = {}
    for record in run.records:
        utilities = utilities_of(record)
        if utilities is not None:
            found[record.step] = of_tokens(utilities)
    return found


def _series(
    place: int, steps: np.ndarray, values: np.ndarray, edges: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Series:
    """A series of at most `MOST_POINTS` points, each at the last step of its part."""
    cuts = np.linspace(0, len(steps), min(len(steps), MOST_POINTS) + 1).astype(int)
    parts = list(itertools.pairwise(cuts))

    def means(numbers: np.ndarray) -> list[float]:
        return [float(f"{numbers[begin:end].mean():.6g}") for begin, end in parts]

    return Series(
        place,
        [int(steps[end - 1]) for _, end in parts],
        means(values),
        [(means(low), means(high)) for low, high in edges],
    )


# The curves of a report for a paper: a PNG and a PDF each.


if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = ("-", "--", ":", "-.")


def write_pictures(runs: Sequence[ReportedRun], folder: Path) -> list[Path]:
    """Writes the curves of the runs that are not constant, and returns the files.

    Raises:
        UserError: matplotlib is missing, or the folder cannot be written.
    """
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
    # Names are the user's, and not formulas where they hold `$`.
    axes.set_ylabel(chart.title + (f" ({chart.unit})" if chart.unit else ""), parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    if len(labels) > 1:
        for text in axes.legend(frameon=False, fontsize="small").get_texts():
            text.set_parse_math(False)
