"""Curves over optimizer steps, one for each group of runs: what the page and the pictures draw."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vcore_ds.commands.report.read import Group, ReportedRun
from vcore_ds.commands.report.traces import utilities_of

MOST_POINTS = 600
"""Points of a curve. Longer ones are drawn as the means of that many parts, which a screen cannot tell apart."""
SECTIONS = ("Learning", "Weights", "Utilities", "Cost", "Other measures")


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


@dataclass(frozen=True)
class _Measure:
    """A key of metrics.jsonl with its words."""

    key: str
    title: str
    unit: str
    section: str
    note: str = ""
    scale: float = 1.0
    can_be_constant: bool = True
    """False: a curve that never moves is left out."""


_MEASURES = (
    _Measure("loss", "Loss", "nats", "Learning", "Uniform cross-entropy of the main batch, whatever the method"),
    _Measure("weighted_loss", "Weighted loss", "nats", "Learning", "With the weights of the method, before alpha"),
    _Measure("alpha", "Alpha", "", "Learning", "What the weighted loss is multiplied by", can_be_constant=False),
    _Measure("grad_norm", "Gradient norm", "", "Learning", "Before clipping"),
    _Measure("learning_rate", "Learning rate", "", "Learning", can_be_constant=False),
    _Measure("probe_loss", "Probe loss", "nats", "Learning", "On the batch that gives the direction"),
    _Measure("effective_sample_size", "Effective sample size", "tokens", "Weights", "Tokens that a sequence's weights "
             "amount to, mean over sequences"),
    _Measure("kl", "KL from uniform weights", "nats", "Weights", "Mean over sequences"),
    _Measure("tau", "Temperature tau", "", "Weights", "Mean over sequences"),
    _Measure("total_weight", "Total weight of a sequence", "", "Weights", "1 where weights are a distribution",
             can_be_constant=False),
    _Measure("num_saturated", "KL budget out of reach", "sequences", "Weights", can_be_constant=False),
    _Measure("utility_mean", "Mean utility", "", "Utilities", "Over the tokens of the batch"),
    _Measure("utility_std", "Standard deviation of utility", "", "Utilities", "Over the tokens of the batch"),
    _Measure("probe_grad_norm", "Norm of the probe's gradient", "", "Utilities"),
    _Measure("signal_to_noise", "Signal to noise", "", "Utilities", "Finite difference: 3 is needed"),
    _Measure("supervised_tokens_per_second", "Throughput", "supervised tokens/s", "Cost"),
    _Measure("tokens_per_second", "Throughput with prompts", "tokens/s", "Cost"),
    _Measure("utilization", "Share of the peak (MFU)", "", "Cost", "Products that the step needs, over what the "
             "devices' peak would do in its time"),
    _Measure("utilization_training", "Share of the peak without the method's own passes", "", "Cost", "Forward and "
             "backward of the main batch alone"),
    _Measure("seconds", "Time of a step", "s", "Cost"),
    _Measure("peak_memory_bytes", "Peak memory of rank 0", "GiB", "Cost", scale=2.0**-30),
    _Measure("rank_imbalance", "Imbalance of ranks", "", "Cost", "1 is even", can_be_constant=False),
)  # fmt: skip
_ELSEWHERE = (
    "step", "epoch", "seconds_", "peak_memory_bytes_", "checkpoint_bytes", "sequences", "sequence_parallel", "flops_",
)  # fmt: skip
"""Beginnings of keys that are no curve or are shown as time by phase."""


def make_charts(groups: Sequence[Group]) -> list[Chart]:
    """Charts in the order of `SECTIONS`: every number in metrics.jsonl that says something, and the distribution of
    utilities in the records of tokens."""
    keys = dict.fromkeys(key for group in groups for run in group.runs for line in run.metrics for key in line)
    known = {measure.key for measure in _MEASURES}
    others = [key for key in keys if key not in known and not key.startswith(_ELSEWHERE)]
    charts = []
    for measure in (*_MEASURES, *map(_other, others)):
        series = [_of_metrics(group, i, measure) for i, group in enumerate(groups)]
        series = [one for one in series if one.steps]
        moves = any(value != series[0].values[0] for one in series for value in one.values)
        if series and (moves or measure.can_be_constant):
            charts.append(Chart(measure.key, measure.title, measure.unit, measure.section, measure.note, series))
    charts += _of_records(groups)
    return sorted(charts, key=lambda chart: SECTIONS.index(chart.section))


def _other(key: str) -> _Measure:
    if key.startswith("validation_loss"):
        name = key.removeprefix("validation_loss").lstrip("_")
        return _Measure(key, f"Held-out loss{name and f', {name}'}", "nats", "Learning")
    title = key.replace("_", " ").capitalize()
    return _Measure(key, title, "", SECTIONS[-1], f"{key} in metrics.jsonl", can_be_constant=False)


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
    parts = list(zip(cuts, cuts[1:], strict=False))

    def means(numbers: np.ndarray) -> list[float]:
        return [float(f"{numbers[begin:end].mean():.6g}") for begin, end in parts]

    return Series(
        place,
        [int(steps[end - 1]) for _, end in parts],
        means(values),
        [(means(low), means(high)) for low, high in edges],
    )
