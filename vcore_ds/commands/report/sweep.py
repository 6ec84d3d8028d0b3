"""The results of a sweep: pictures, and tables of means over seeds with intervals."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from vcore_ds.commands.compare import format_p_value
from vcore_ds.commands.page import NOTHING, Block, Drawing, PageSection, Table, format_number
from vcore_ds.commands.report.runs import (
    Axis,
    Chart,
    ReportedRun,
    Series,
    find_settings,
    make_label,
    name_key,
    show_value,
)
from vcore_ds.commands.report.tables import MEANS
from vcore_ds.commands.sweep.folder import SweepFolder
from vcore_ds.commands.sweep.scaling import Fit, fit_laws
from vcore_ds.common.statistics import cell, holm, paired, t_estimate
from vcore_ds.planning.known_models import find_shape
from vcore_ds.planning.passes import parameter_counts
from vcore_ds.training.run_notes import list_losses

# ---- cells -----------------------------------------------------------------------------------------------------------

N, D = "model parameters", "supervised tokens"
SIZES = {
    N: ("model.path",),
    D: ("data.train_path", "schedule.num_steps", "schedule.num_epochs", "checkpoint.branch_from"),
}
"""Name of a size -> the keys that set it."""
SIZE_KEYS = [key for keys in SIZES.values() for key in keys]


@dataclass(frozen=True, eq=False)
class SettingRuns:
    """The finished runs of a cell."""

    name: str
    runs: list[ReportedRun]
    settings: dict[str, Any]  # the keys that tell the cells apart
    line: str  # in pictures: label of all settings but sizes and the x axis
    places: dict[str, float]  # size, or key of the x axis -> value, where it is known
    losses: dict[str, dict[int, float]]  # title -> seed -> loss
    rises: dict[str, list[float]]  # title -> loss at the end above that at the start, of the seeds where it is known

    def label(self, keys: Collection[str]) -> str:
        return make_label({key: value for key, value in self.settings.items() if key in keys})

    def mean(self, title: str) -> float:
        return float(np.mean([*self.losses[title].values()]))

    def spread(self, title: str) -> float:
        """Difference between the losses of the worst and the best seed."""
        return float(np.ptp([*self.losses[title].values()]))

    def has_risen(self, title: str) -> bool:
        """Whether the loss was higher at the end than at the start, in the mean over seeds."""
        rises = self.rises.get(title, [])
        return len(rises) > 0 and float(np.mean(rises)) > 0


def group_cells(runs: Sequence[ReportedRun]) -> tuple[list[SettingRuns], str]:
    """Group the runs of a sweep by its cells; and find the key of the pictures' x axis: the numeric one with most
    values that is no size, the learning rate first; empty if there is none."""
    by_cell: dict[str, list[ReportedRun]] = {}
    for run in runs:
        by_cell.setdefault(run.name.rpartition("/")[0], []).append(run)
    settings = find_settings([members[0] for members in by_cell.values()])
    numbers = {key: {value for value in values if type(value) in (int, float)} for key, values in settings.items()}
    candidates = [key for key in settings if key not in SIZE_KEYS and len(numbers[key]) > 1]
    x = max(candidates, key=lambda key: (len(numbers[key]), key == "optimizer.learning_rate"), default="")
    cells = []
    for number, (name, members) in enumerate(by_cell.items()):
        cell_settings = {key: values[number] for key, values in settings.items()}
        line = make_label({key: value for key, value in cell_settings.items() if key not in (x, *SIZE_KEYS)})
        shape, _ = find_shape(members[0].recipe.model.path) or (None, "")
        places = {D: float(np.mean([run.total("supervised_tokens") for run in members]))}
        if shape and shape.hidden_size:
            places[N] = float(parameter_counts(shape).all)
        if type(cell_settings.get(x)) in (int, float):
            places[x] = cell_settings[x]
        losses: dict[str, dict[int, float]] = {}
        rises: dict[str, list[float]] = {}
        for run in members:
            for title, (start, end) in _losses(run).items():
                losses.setdefault(title, {})[run.recipe.run.seed] = end
                rises.setdefault(title, []).extend([] if start is None else [end - start])
        cells.append(
            SettingRuns(name, members, cell_settings, line or members[0].recipe.method.name, places, losses, rises)
        )
    return cells, x


def _group(cells: Iterable[SettingRuns], label: Callable[[SettingRuns], str]) -> dict[str, list[SettingRuns]]:
    groups: dict[str, list[SettingRuns]] = {}
    for one in cells:
        groups.setdefault(label(one), []).append(one)
    return groups


def rank_cells(cells: Iterable[SettingRuns], title: str, *, by_line: bool = True) -> list[list[SettingRuns]]:
    """The cells of each size (and line) by their mean loss, the smallest first; those that ended above their start are
    last."""
    measured = [one for one in cells if title in one.losses]
    groups = _group(measured, lambda one: f"{one.line if by_line else ''} {one.label(SIZE_KEYS)}")
    return [sorted(group, key=lambda one: (one.has_risen(title), one.mean(title))) for group in groups.values()]


def find_best(cells: Iterable[SettingRuns], title: str) -> list[SettingRuns]:
    """Of each line at each size, the cell with the smallest mean loss."""
    return [group[0] for group in rank_cells(cells, title)]


def judge_cells(cells: Iterable[SettingRuns], title: str, *, by_line: bool) -> dict[str, str]:
    """Name of a cell -> `best` of its size (and line), or why it could not be called so; none for the others."""
    verdicts = {}
    for group in rank_cells(cells, title, by_line=by_line):
        for one, following in zip_longest(group, group[1:]):
            if one.has_risen(title):
                verdicts[one.name] = ROSE
            elif following is not None and one.spread(title) > abs(following.mean(title) - one.mean(title)):
                verdicts[one.name] = OVERLAPS
        if len(group) > 1:
            verdicts.setdefault(group[0].name, "best")
    return verdicts


def _losses(run: ReportedRun) -> dict[str, tuple[float | None, float]]:
    """Title -> loss at the start, if it is known, and at the end: each held-out loss, then the mean uniform
    cross-entropy of the first and of the last steps, at least one. Means of another `method.normalization` have other
    titles."""
    mean, before = MEANS[run.held_out.normalization], run.held_out.before
    losses: dict[str, tuple[float | None, float]] = {
        f"held-out loss{name and f', {name}'}{mean}": (before.get(name), loss)
        for name, loss in run.held_out.after.items()
        if loss is not None
    }
    if steps := list_losses(run.metrics):
        num_last = max(1, round(LAST_SHARE * len(steps)))
        title = f"training loss{MEANS[run.recipe.method.normalization]}"
        losses[title] = float(np.mean(steps[:num_last])), float(np.mean(steps[-num_last:]))
    return losses


# ---- pictures and power laws -----------------------------------------------------------------------------------------

SMALLEST_RANGE = 1.5
"""Minimum ratio of a size's largest to its smallest value; a smaller one counts as constant."""
LOG_RANGE = 4
"""The same of a logarithmic axis."""
NUM_CURVE_POINTS = 30  # of a power law

Laws = tuple[list[str], list[Fit]]
"""The sizes that vary along a line, and its power laws, the best first."""


def fit_lines(best: Sequence[SettingRuns], title: str) -> dict[str, Laws]:
    """Fit the loss along each line; no laws for too few sizes, or models of unknown size."""
    laws: dict[str, Laws] = {}
    for line, cells in _group(best, lambda one: one.line).items():
        sizes = {axis: [one.places.get(axis, 0.0) for one in cells] for axis in SIZES}
        axes = [axis for axis, values in sizes.items() if max(values) >= SMALLEST_RANGE * min(values) > 0]
        known = [(i, loss) for i, one in enumerate(cells) for loss in one.losses[title].values() if loss > 0]
        if not axes or not known or (len({one.runs[0].recipe.model.path for one in cells}) > 1 and not all(sizes[N])):
            laws[line] = [], []
            continue
        points = [[sizes[axis][i] for axis in axes] for i, _ in known]
        laws[line] = axes, fit_laws(points, [loss for _, loss in known], ["ND"[axis == D] for axis in axes])
    return laws


def make_charts(cells: Sequence[SettingRuns], x: str, laws: Mapping[str, Laws], title: str) -> list[Chart]:
    """Charts of a loss: of all cells against `x`, and of the best against each size, with a panel for each value of the
    other sizes. `laws`: of each line."""
    charts = []
    for axis in (x, *SIZES) if x else SIZES:
        others = [key for key in SIZE_KEYS if key not in SIZES.get(axis, ())]
        shown = find_best(cells, title) if axis in SIZES else [one for one in cells if title in one.losses]
        for panel in dict.fromkeys(one.label(others) for one in shown):
            members = [one for one in shown if one.label(others) == panel]
            xs = sorted({one.places[axis] for one in members if axis in one.places})
            if len(xs) > 1 and (axis == x or xs[-1] >= SMALLEST_RANGE * xs[0]):
                charts.append(_make_chart(axis, panel, members, xs, laws, title))
    return charts


def _make_chart(
    axis: str, panel: str, cells: Sequence[SettingRuns], xs: Sequence[float], laws: Mapping[str, Laws], title: str
) -> Chart:
    """`xs`: all places of the cells, ascending."""
    is_log, series = xs[0] > 0 and xs[-1] >= LOG_RANGE * xs[0], []

    def place(values: Iterable[float]) -> list[float]:
        return [round(math.log10(value), 9) if is_log else value for value in values]

    for line, members in _group(cells, lambda one: one.line).items():
        points = {one.places[axis]: one for one in members if axis in one.places}
        if axis not in SIZES and not points:  # SFT has no KL budget: its line is level
            points = dict.fromkeys(xs, members[0])
        losses = [list(points[at].losses[title].values()) for at in sorted(points)]
        bands = [([min(one) for one in losses], [max(one) for one in losses])] if any(one[1:] for one in losses) else []
        (axes, fits), curve = laws[line], None
        if axis in axes and fits and len(points) > 1:
            at = np.tile([np.mean([one.places[other] for one in members]) for other in axes], (NUM_CURVE_POINTS, 1))
            at[:, axes.index(axis)] = np.geomspace(min(points), max(points), NUM_CURVE_POINTS)
            curve = {"steps": place(at[:, axes.index(axis)]), "values": fits[0].predict(at).tolist()}
        means = [float(np.mean(one)) for one in losses]
        series.append(Series([*laws].index(line), place(sorted(points)), means, bands, curve))
    name, names = (axis, map(_format_size, xs)) if axis in SIZES else (name_key(axis), (f"{x:g}" for x in xs))
    heading = f"{title[0].upper()}{title[1:]} against {name}"
    return Chart(f"{name} {panel}", panel or title, "nats", heading, "", series, Axis(name, place(xs), list(names)))


def _format_size(value: float) -> str:
    """Such as `35.4M` or `1.7B`."""
    power = min(3, int(math.log10(value)) // 3)
    return f"{value / 1000**power:,.4g}{('', 'k', 'M', 'B')[power]}"


# ---- tables ----------------------------------------------------------------------------------------------------------

LAST_SHARE = 0.1  # share of the last steps over which the training loss is averaged
DIGITS = 4
ROSE, OVERLAPS = "ended above its start", "seeds differ by more than the distance to the next"
"""Why a cell is not called best."""
ABOUT_CHARTS = (
    "A line is the mean over seeds, its band their range. Against a size it shows the best cells, from four sizes on "
    "with a power law that is fitted without the largest. The tables have the numbers."
)
NOTE = (
    "± is half of the 95% interval of the mean (Student's t over seeds, from three seeds on). Differences are paired "
    "by seed, from the best cells in the table of those, and bold if their interval excludes 0; p is adjusted for the "
    "rows (Holm). Spread is the difference between the worst and the best seed. A cell that ended above its start, or "
    "whose seeds differ by more than its distance to the next cell, is not called best. The training loss is the mean "
    f"of the last {LAST_SHARE:.0%} of the steps."
)


def sweep_section(sweep: SweepFolder, runs: Sequence[ReportedRun]) -> PageSection:
    """The section of a sweep: missing runs, pictures, the best cells, and all cells."""
    cells, x = group_cells(runs)
    titles = list(dict.fromkeys(title for one in cells for title in one.losses))
    first = next(iter(titles), "training loss")  # the first held-out loss, if there is one
    best = find_best(cells, first)
    laws = fit_lines(best, first)
    by_name = {one.name: one for one in cells}
    bases = {name: by_name[base] for name, base in sweep.references.items() if base in by_name}
    compared_with = {base.line for base in bases.values()}
    best_bases = {one.label(SIZE_KEYS): one for one in best if one.line in compared_with}
    bases_of_best = {one.name: best_bases.get(one.label(SIZE_KEYS), one) for one in best}
    verdicts = judge_cells(cells, first, by_line=bool(x))
    blocks: list[Block] = []
    if len(runs) < len(sweep.runs):
        blocks.append(f"{len(runs)} of {len(sweep.runs)} runs are done; vcore-ds sweep ... --status names the others.")
    if charts := make_charts(cells, x, laws, first):
        blocks += [Drawing("sweep-charts"), ABOUT_CHARTS]
    if x and best:
        caption = f"Lowest {first} over {name_key(x)}, losses in nats"
        blocks.append(_make_table(caption, best, [first], bases_of_best, verdicts))
    blocks += [
        *(_make_fit_table(f"Power law of the {first}: {line}", fits) for line, (_, fits) in laws.items() if fits),
        _make_table("All cells, losses in nats", cells, titles, bases, verdicts),
        NOTE,
    ]
    data = {"sweep": {"lines": list(laws), "charts": [asdict(chart) for chart in charts]}}
    return PageSection("sweep", "Sweep", "Sweep", blocks, in_text=False, data=data)


def sweep_markdown(sweep: SweepFolder, section: PageSection) -> str:
    """The section without its pictures."""
    blocks = [block.markdown() if isinstance(block, Table) else block for block in section.blocks]
    texts = [block for block in blocks if isinstance(block, str) and block != ABOUT_CHARTS]
    return "\n\n".join([f"# Sweep {sweep.folder.resolve().name}", *texts]) + "\n"


def sweep_text(section: PageSection) -> str:
    """The same for the screen."""
    return replace(section, blocks=[block for block in section.blocks if block != ABOUT_CHARTS]).text()


def _make_table(
    caption: str,
    cells: Sequence[SettingRuns],
    titles: Sequence[str],
    bases: Mapping[str, SettingRuns],
    verdicts: Mapping[str, str],
) -> Table:
    """Settings, mean losses and costs. `bases`: name of a cell -> the one that it is compared with; `verdicts`: of
    `judge_cells`."""
    columns = [(name_key(key), [_show_setting(one, key) for one in cells]) for key in cells[0].settings]
    columns.append(("seeds", [str(len(one.runs)) for one in cells]))
    for title in titles:
        losses = [one.losses.get(title, {}) for one in cells]
        columns.append((title, [cell(list(known.values()), DIGITS) if known else NOTHING for known in losses]))
        if any(len(known) > 1 for known in losses):
            spreads = [f"{one.spread(title):.{DIGITS}f}" if len(one.losses.get(title, ())) > 1 else "" for one in cells]
            columns.append(("spread", spreads))
        differences = [
            paired(known, base.losses.get(title, {})) if (base := bases.get(one.name, one)) is not one else []
            for one, known in zip(cells, losses, strict=True)
        ]
        p_values = [t_estimate(values).p_value if values else None for values in differences]
        adjusted = iter(holm([p_value for p_value in p_values if p_value is not None]))
        if any(differences):
            texts = [cell(values, DIGITS, difference=True) if values else "" for values in differences]
            columns.append(("difference", texts))
        if any(p_value is not None for p_value in p_values):
            columns.append(("p", ["" if p is None else format_p_value(next(adjusted)) for p in p_values]))
    # A step that was lost and repeated counts once. The first step, which allocates and compiles, is included.
    seconds = [float(np.mean([run.total("seconds") for run in one.runs])) for one in cells]
    num_steps = [float(np.mean([run.num_steps for run in one.runs])) for one in cells]
    ranks = [one.runs[0].environment.get("world_size") for one in cells]
    hours = [each * rank / 3600 if isinstance(rank, int) else None for each, rank in zip(seconds, ranks, strict=True)]
    columns.append(("s a step", [f"{s / max(1.0, n):.3g}" for s, n in zip(seconds, num_steps, strict=True)]))
    columns.append(("hours x ranks", [format_number(each, ".3g") for each in hours]))
    if any(one.name in verdicts for one in cells):
        columns.append(("verdict", [verdicts.get(one.name, "") for one in cells]))
    rows = zip(*(texts for _, texts in columns), strict=True)
    return Table(caption, [name for name, _ in columns], [list(row) for row in rows])


def _show_setting(one: SettingRuns, key: str) -> str:
    value = "" if one.settings[key] is None else show_value(one.settings[key])
    size = one.places.get(N) if key == "model.path" else None
    return f"{value} ({_format_size(size)})" if size else value


def _make_fit_table(caption: str, fits: Sequence[Fit]) -> Table:
    rows = []
    for fit in fits:
        values = zip(fit.values, fit.intervals, strict=True)
        cells = [f"{value:.3f} ({low:.3f} to {high:.3f})" for value, (low, high) in values]
        predicted = "{:.4f} ({:.4f} to {:.4f})".format(fit.predicted, *fit.predicted_interval)
        rows.append([fit.law, *cells, predicted, f"{fit.measured:.4f}", f"{fit.error:+.2%}"])
    return Table(caption, ["law", *fits[0].names, "largest, predicted", "largest, measured", "error"], rows)
