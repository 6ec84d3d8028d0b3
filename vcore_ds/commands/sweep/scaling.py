"""The tables of a sweep: means over seeds with intervals, costs, and power laws of the loss in model and data size.

The power laws are `A N^-n D^-d + E`, which fine-tuning follows (arXiv:2402.17193), and Chinchilla's
`A N^-n + B D^-d + E`, with model size N and data size D; if one of them is constant, both are `A D^-d + E`. The fit
minimises the Huber loss of the residuals of log(loss) from many starts: an optimizer that stopped early has given
intervals that were too narrow (arXiv:2404.10102).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vcore_ds.commands.report.page import NOTHING, Block, Section, Table, format_number
from vcore_ds.commands.report.runs import ReportedRun
from vcore_ds.commands.report.tables import MEANS
from vcore_ds.commands.sweep.folder import SweepFolder
from vcore_ds.common.statistics import cell, paired
from vcore_ds.config.schema import flat_values
from vcore_ds.planning.known_models import find_shape
from vcore_ds.planning.passes import parameter_counts

HUBER_DELTA = 1e-3  # larger residuals of log(loss) count linearly, as in Chinchilla's fit
NUM_STEPS = 200
NUM_RESAMPLES = 200
START_EXPONENTS = (0.05, 0.2, 0.8)
START_SHARES = (0.05, 0.5, 0.9)  # start values of E, as shares of the smallest loss

Terms = tuple[tuple[int, ...], ...]  # of each but E, the columns of its product: ((0, 1),) or ((0,), (1,))


@dataclass(frozen=True)
class Fit:
    """A power law, fitted without the largest point."""

    law: str
    names: list[str]  # names of the exponents, then E
    values: list[float]
    intervals: list[tuple[float, float]]  # 95% intervals over bootstrap resamples
    predicted: float  # predicted loss of the largest point
    predicted_interval: tuple[float, float]
    measured: float  # measured loss of the largest point, mean over its runs

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def fit_laws(sizes: Sequence[Sequence[float]], losses: Sequence[float], columns: Sequence[str]) -> list[Fit]:
    """Fit the laws to all runs except those of the largest point, and sort by the error of its prediction; empty if
    there are too few points for any law. `sizes`: for each run, a value above 0 per column; `columns`: `N` and `D`, or
    one of them; none is constant."""
    x, y = np.log(np.asarray(sizes, dtype=float)), np.log(np.asarray(losses, dtype=float))
    largest = x.sum(1) == x.sum(1).max()
    num_points = len(np.unique(x[~largest], axis=0))
    product = f"A {' '.join(f'{name}^-{name.lower()}' for name in columns)} + E"
    laws: dict[str, Terms] = {product: (tuple(range(len(columns))),)}
    if len(columns) > 1:
        laws["A N^-n + B D^-d + E"] = tuple((i,) for i in range(len(columns)))
    fits = []
    for law, terms in laws.items():
        if num_points > len(terms) + len(columns):
            best, at_largest = _fit_law(terms, x - x[~largest].mean(0), y, largest)
            shown = np.hstack([best[:, len(terms) : -1], np.exp(best[:, -1:]), np.exp(at_largest)])
            intervals = [(low, high) for low, high in np.quantile(shown[1:], [0.025, 0.975], axis=0).T.tolist()]
            *numbers, predicted = shown[0].tolist()
            names, measured = [*(name.lower() for name in columns), "E"], float(np.exp(y[largest]).mean())
            fits.append(Fit(law, names, numbers, intervals[:-1], predicted, intervals[-1], measured))
    return sorted(fits, key=lambda fit: abs(fit.error))


def _fit_law(terms: Terms, x: np.ndarray, y: np.ndarray, largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parameters of all runs but the largest, and of resamples of them; and their log(loss) at the largest."""
    features, known = _make_features(x, terms), y[~largest]
    draws = np.random.default_rng(0).integers(len(known), size=(NUM_RESAMPLES, len(known)))
    counts = np.stack([np.ones(len(known)), *(np.bincount(draw, minlength=len(known)) for draw in draws)])
    fit = _minimise(features[:, ~largest], known, counts[:1], _choose_starts(known, len(terms), x.shape[1]))
    # A resample differs little: its fits start from the best of all runs, with that E and with each start's, instead of
    # from every start again, which takes ten times as long.
    near = np.repeat(fit, 1 + len(START_SHARES), axis=0)
    near[1:, -1] = np.log(START_SHARES) + known.min()
    best = np.concatenate([fit, _minimise(features[:, ~largest], known, counts[1:], near)])
    return best, _predict(features[:, largest][:, :1], best)[0]


def _make_features(x: np.ndarray, terms: Terms) -> np.ndarray:
    """Factors of the parameters (log A of each term, the exponents, log E) in the log of each term at each point, the
    last term being E: `[terms + 1, points, parameters]`."""
    num_terms = len(terms)
    features = np.zeros((num_terms + 1, len(x), num_terms + x.shape[1] + 1))
    for number, term in enumerate(terms):
        features[number, :, number] = 1.0
        features[number][:, [num_terms + column for column in term]] = -x[:, list(term)]
    features[-1, :, -1] = 1.0
    return features


def _choose_starts(y: np.ndarray, num_terms: int, num_exponents: int) -> np.ndarray:
    """Start parameters: [starts, parameters]."""
    grid = np.array(list(itertools.product(START_SHARES, *[START_EXPONENTS] * num_exponents)))
    shares = grid[:, :1]
    factors = np.log((np.exp(y).mean() - shares * np.exp(y).min()) / num_terms)
    return np.hstack([np.repeat(factors, num_terms, axis=1), grid[:, 1:], np.log(shares) + y.min()])


def _predict(features: np.ndarray, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log(loss) at the points and its derivative: [fits, points] and [fits, points, parameters]."""
    logs = parameters @ features.transpose(0, 2, 1)
    top = logs.max(0)
    shares = np.exp(logs - top)
    total = shares.sum(0)
    derivative = (shares / total).transpose(2, 1, 0) @ features.transpose(1, 0, 2)
    return top + np.log(total), derivative.transpose(1, 0, 2)


def _minimise(features: np.ndarray, y: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Minimise the Huber loss with Levenberg-Marquardt, reweighting iteratively, from each start for each row of counts
    `[fits, runs]`; return the best parameters of each row."""
    weights = np.repeat(counts, len(starts), axis=0)
    parameters = np.tile(starts, (len(counts), 1))
    damping = np.full((len(parameters), 1, 1), 1e-2)
    cost = _huber(_predict(features, parameters)[0] - y, weights)
    identity = np.eye(parameters.shape[1])
    for _ in range(NUM_STEPS):
        predicted, derivative = _predict(features, parameters)
        residuals = predicted - y
        weighted = weights * np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-300))
        transposed = (derivative * weighted[..., None]).transpose(0, 2, 1)
        normal, gradient = transposed @ derivative, transposed @ residuals[..., None]
        scale = np.trace(normal, axis1=1, axis2=2)[:, None, None] / len(identity) + 1e-30
        step = np.linalg.solve(normal + damping * scale * identity, gradient)[..., 0]
        tried = parameters - np.clip(step, -1.0, 1.0)
        tried_cost = _huber(_predict(features, tried)[0] - y, weights)
        better = tried_cost < cost
        parameters = np.where(better[:, None], tried, parameters)
        cost = np.where(better, tried_cost, cost)
        damping = np.clip(damping * np.where(better, 1 / 3, 4)[:, None, None], 1e-12, 1e6)
    best = cost.reshape(len(counts), len(starts)).argmin(1)
    return parameters.reshape(len(counts), len(starts), -1)[np.arange(len(counts)), best]


def _huber(residuals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    size = np.abs(residuals)
    each = np.where(size <= HUBER_DELTA, 0.5 * size**2, HUBER_DELTA * (size - 0.5 * HUBER_DELTA))
    return (weights * each).sum(1)


SIZE_KEYS = {
    "model.path", "data.train_path", "schedule.num_steps", "schedule.num_epochs", "checkpoint.branch_from", "run.seed",
    "run.output_dir",
}  # fmt: skip
"""Keys in which cells of the same fit may differ."""
SMALLEST_RANGE = 1.5
"""Minimum ratio of a size's largest to its smallest value; a smaller one counts as constant."""


def scaling_tables(
    by_cell: Mapping[str, Mapping[int, ReportedRun]], title: str, value_of: Callable[[ReportedRun], float | None]
) -> list[Table]:
    """A table for each group of cells that differ only in size, if they are enough for a fit. `title`: name of the
    loss; `value_of`: the loss of a run, or None."""
    families: dict[str, dict[str, list[ReportedRun]]] = {}
    for name, by_seed in by_cell.items():
        for run in by_seed.values():
            rest = {key: value for key, value in flat_values(run.recipe).items() if key not in SIZE_KEYS}
            families.setdefault(repr(rest), {}).setdefault(name, []).append(run)
    tables = []
    for family in families.values():
        sizes, points, losses = _find_sizes(list(family.values())), [], []
        for number, runs in enumerate(family.values()):
            known = [loss for run in runs if (loss := value_of(run) or 0.0) > 0]
            points += [[column[number] for column in sizes.values()]] * len(known)
            losses += known
        if fits := fit_laws(points, losses, [title[0] for title in sizes]) if sizes and losses else []:
            caption = f"Power law of the {title}, {' and '.join(sizes)}: {', '.join(family)}"
            head = ["law", *fits[0].names, "largest, predicted", "largest, measured", "error"]
            tables.append(Table(caption, head, [_format_fit(fit) for fit in fits]))
    return tables


def _find_sizes(cells: Sequence[Sequence[ReportedRun]]) -> dict[str, list[float]]:
    """The sizes that vary, in each cell; none where models differ in unknown sizes."""
    paths = [runs[0].recipe.model.path for runs in cells]
    shapes = [known and known[0] for known in map(find_shape, paths)]
    parameters = [float(parameter_counts(shape).all) if shape and shape.hidden_size else 0.0 for shape in shapes]
    if len(set(paths)) > 1 and not all(parameters):
        return {}
    tokens = [float(np.mean([run.total("supervised_tokens") for run in runs])) for runs in cells]
    sizes = {"N model parameters": parameters, "D supervised tokens": tokens}
    return {
        title: values for title, values in sizes.items() if all(values) and max(values) >= SMALLEST_RANGE * min(values)
    }


def _format_fit(fit: Fit) -> list[str]:
    values = zip(fit.values, fit.intervals, strict=True)
    cells = [f"{value:.3f} ({low:.3f} to {high:.3f})" for value, (low, high) in values]
    predicted = "{:.4f} ({:.4f} to {:.4f})".format(fit.predicted, *fit.predicted_interval)
    return [fit.law, *cells, predicted, f"{fit.measured:.4f}", f"{fit.error:+.2%}"]


LAST_SHARE = 0.1  # share of the last steps over which the training loss is averaged
DIGITS = 4
NOTE = (
    "± is half of the 95% interval of the mean (Student's t over seeds, from three seeds on). Differences are paired "
    "by seed, and bold if their interval excludes 0; in a table of many rows some are bold by chance."
)


def sweep_section(sweep: SweepFolder, runs: Sequence[ReportedRun]) -> Section:
    """The runs that are missing, if any, the tables of a sweep, and how to read them."""
    by_cell: dict[str, dict[int, ReportedRun]] = {name: {} for name in sweep.references}
    for run in sorted(runs, key=lambda run: run.recipe.run.seed):
        by_cell[run.name.rpartition("/")[0]][run.recipe.run.seed] = run
    done = {run.name for run in runs}
    missing = [f"{name} ({sweep.state(name)})" for name in sweep.runs if name not in done]
    titles = list(dict.fromkeys(title for run in runs for title in _losses(run)))
    costs = [[name, *_costs(list(by_seed.values()))] for name, by_seed in by_cell.items() if by_seed]
    blocks: list[Block] = [
        *([f"{len(runs)} of {len(sweep.runs)} runs are done; missing: {', '.join(missing)}."] if missing else []),
        _result_table(sweep, by_cell, titles),
        Table("Cost, mean over seeds", COSTS, costs),
        # of a held-out loss, or the training loss if there is none
        *(scaling_tables(by_cell, titles[0], lambda run: _losses(run).get(titles[0])) if titles else []),
        NOTE,
    ]
    return Section("sweep", "Sweep", "Sweep", blocks, in_text=False)


def sweep_markdown(sweep: SweepFolder, section: Section) -> str:
    blocks = (block.markdown() if isinstance(block, Table) else str(block) for block in section.blocks)
    return "\n\n".join([f"# Sweep {sweep.folder.resolve().name}", *blocks]) + "\n"


def _losses(run: ReportedRun) -> dict[str, float]:
    """Title -> loss: each held-out loss, then the mean uniform cross-entropy of the last steps, at least one. Means of
    another `method.normalization` have other titles."""
    mean, measured = MEANS[run.held_out.normalization], run.held_out.after
    losses = {f"held-out loss{name and f', {name}'}{mean}": loss for name, loss in measured.items() if loss is not None}
    if steps := [loss for line in run.metrics if (loss := line.get("loss")) is not None]:
        title = f"training loss, last {LAST_SHARE:.0%} of the steps{MEANS[run.recipe.method.normalization]}"
        losses[title] = float(np.mean(steps[-max(1, round(LAST_SHARE * len(steps))) :]))
    return losses


def _result_table(sweep: SweepFolder, by_cell: Mapping[str, Mapping[int, ReportedRun]], titles: Sequence[str]) -> Table:
    """Means over seeds, and differences from the cell that each is compared with, paired by seed."""
    has_references = any(sweep.references.values())
    losses = {name: {seed: _losses(run) for seed, run in runs.items()} for name, runs in by_cell.items()}
    head, rows = ["cell", "seeds"], [[name, str(len(by_seed))] for name, by_seed in losses.items()]
    if has_references:
        head.append("compared with")
        rows = [[*row, sweep.references[row[0]] or ""] for row in rows]
    for title in titles:
        head += [title, "difference"] if has_references else [title]
        values = {
            name: {seed: one[title] for seed, one in by_seed.items() if title in one}
            for name, by_seed in losses.items()
        }
        for row in rows:
            known = values[row[0]]
            row.append(cell(list(known.values()), DIGITS) if known else NOTHING)
            if has_references:
                differences = paired(known, values.get(sweep.references[row[0]] or "", {}))
                row.append(cell(differences, DIGITS, difference=True) if differences else "")
    return Table("Losses, nats", head, rows)


COSTS = ["cell", "steps", "supervised tokens", "seconds a step", "hours x ranks"]


def _costs(runs: Sequence[ReportedRun]) -> list[str]:
    """`COSTS` of a cell's runs. A step that was lost and repeated counts once. The first step, which allocates and
    compiles, is included."""
    steps, seconds = [run.num_steps for run in runs], [run.total("seconds") for run in runs]
    ranks = [run.environment.get("world_size") for run in runs]
    hours = [each * rank / 3600 for each, rank in zip(seconds, ranks, strict=True) if isinstance(rank, int)]
    return [
        f"{np.mean(steps):,.0f}",
        f"{np.mean([run.total('supervised_tokens') for run in runs]):,.0f}",
        f"{np.sum(seconds) / max(1, np.sum(steps)):.3g}",
        format_number(float(np.mean(hours)) if hours else None, ".3g"),
    ]
