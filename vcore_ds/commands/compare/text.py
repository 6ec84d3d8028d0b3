"""A comparison as a table, and as values for JSON."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from vcore_ds.commands.compare.differences import Accuracy, Comparison
from vcore_ds.commands.compare.statistics import Interval
from vcore_ds.results.presentation import aligned
from vcore_ds.results.seed_statistics import FEWEST_SEEDS

NOTHING = "–"
FORMAT = 1
"""Number of the JSON's format."""
WIDTH = 120
"""Characters of a line of prose."""

_ONE_RUN = (
    "Intervals are about these two checkpoints on problems like these, not about the methods that trained them: "
    f"another seed may differ by more. For methods train {FEWEST_SEEDS} seeds or more of each, and use --group."
)
_SEEDS = (
    "Intervals are about the methods, trained with other seeds, on these very problems (Student's t over pairs of "
    "seeds)."
)
_TWO_WAY = " Two-way intervals are about the methods on problems like these (clustered by seed and by problem)."


def describe(found: Comparison) -> str:
    """The tables, what they mean, and the warnings."""
    lines = [*_accuracy_table(found), "", *_difference_table(found), ""]
    lines += [part for note in _meaning(found) for part in textwrap.wrap(note, WIDTH)]
    if any(one.sample_sizes is not None for one in found.differences):
        lines += ["", *_power_table(found)]
    if found.has_seeds:
        lines += ["", *_pairs(found)]
    if found.warnings:
        lines += ["", *(f"warning: {warning}" for warning in found.warnings)]
    return "\n".join(lines)


def as_dict(found: Comparison) -> dict[str, Any]:
    """The comparison for programs: shares from 0 to 1, null where something is not known."""
    return {
        "format": FORMAT,
        "reference": found.sides[0].name,
        "intervals_are_about": "methods on these problems" if found.has_seeds else "these checkpoints",
        "sides": [{"name": side.name, "evaluations": [str(folder) for folder in side.folders]} for side in found.sides],
        "accuracies": [asdict(one) for one in found.accuracies],
        "differences": [asdict(one) for one in found.differences],
        "warnings": found.warnings,
    }


def _accuracy_table(found: Comparison) -> Iterator[str]:
    how = "Student's t over seeds" if found.has_seeds else "Wilson"
    yield f"Accuracy in percent, with 95% intervals ({how})"
    head = ["task", "problems", "samples", *(["seeds"] if found.has_seeds else []), "evaluation", "accuracy"]
    head += ["95% interval", "truncated", "no answer", "tokens"]
    rows = [head]
    for one in found.accuracies:
        seeds = [str(one.num_seeds)] if found.has_seeds else []
        rows.append(
            [
                *([one.task, f"{one.num_problems:,}"] if _is_first(one, found) else ["", ""]),
                *([str(one.num_samples_per_problem), *seeds] if _is_first(one, found) else ["", *[""] * len(seeds)]),
                one.side,
                f"{100 * one.accuracy:.1f}",
                _interval(one.interval, sign=""),
                f"{one.truncated_share:.1%}",
                f"{one.unanswered_share:.1%}",
                f"{one.mean_tokens:,.0f}",
            ]
        )
    yield from aligned(rows, left=("evaluation",))


def _is_first(one: Accuracy, found: Comparison) -> bool:
    return one.side == found.sides[0].name


def _difference_table(found: Comparison) -> Iterator[str]:
    yield f"Differences from {found.sides[0].name} in points"
    has_two_way = any(one.two_way is not None for one in found.differences)
    head = ["task", "evaluation", "difference", "95% interval", "p", "Holm"]
    if found.has_seeds:
        head += ["by seed", *(["two-way interval", "two-way p"] if has_two_way else [])]
    else:
        is_mcnemar = all(one.num_samples_per_problem == 1 for one in found.accuracies)
        head += ["bootstrap", "McNemar p" if is_mcnemar else "sign-flip p", "better/worse"]
    rows = [head]
    for one in found.differences:
        row = [one.task, one.side, f"{100 * one.difference:+.1f}", _interval(one.interval)]
        row += [_p_value(one.p_value), _p_value(one.holm_p_value)]
        if found.has_seeds:
            row.append(" ".join(f"{100 * value:+.1f}" for value in one.by_seed))
            if one.two_way is not None:
                row += [_interval(one.two_way.interval), _p_value(one.two_way.p_value)]
        else:
            row += [_interval(one.bootstrap_interval), _p_value(one.sign_flip_p_value)]
            row.append(f"{one.num_better}/{one.num_worse}")
        rows.append(row)
    yield from aligned(rows, left=("evaluation",))


def _meaning(found: Comparison) -> Iterator[str]:
    has_two_way = any(one.two_way is not None for one in found.differences)
    yield (_SEEDS + (_TWO_WAY if has_two_way else "")) if found.has_seeds else _ONE_RUN
    if len(found.differences) > 1:
        yield f"Holm: p adjusted for the {len(found.differences)} differences of the table."


def _power_table(found: Comparison) -> Iterator[str]:
    sizes = [(one, one.sample_sizes) for one in found.differences if one.sample_sizes is not None]
    _, first = sizes[0]
    numbers = sorted({k for _, size in sizes for k in size.needed})
    yield (
        f"Number of {first.unit}, by samples a problem (k), to detect {100 * first.difference:g} points: "
        f"p < 0.05 in {first.power:.0%} of all comparisons"
    )
    rows = [["task", "evaluation", *(f"k = {k}" for k in numbers), "detectable, points"]]
    for one, size in sizes:
        needed = [size.needed.get(k) for k in numbers]
        cells = [NOTHING if count is None else f"{count:,}" for count in needed]
        rows.append(
            [one.task, one.side, *cells, NOTHING if size.detectable is None else f"{100 * size.detectable:.1f}"]
        )
    yield from aligned(rows, left=("evaluation",))
    if any(count is None for _, size in sizes for count in size.needed.values()):
        yield (
            f"{NOTHING}: not known from these evaluations. One sample a problem does not tell how much of the spread "
            "more samples would remove."
        )


def _pairs(found: Comparison) -> Iterator[str]:
    """Which evaluations were paired, so that a wrong order is seen."""
    yield "Paired by seed:"
    for folders in zip(*(side.folders for side in found.sides), strict=True):
        yield "  " + "   ".join(map(str, folders))


def _interval(interval: Interval | None, sign: str = "+") -> str:
    return NOTHING if interval is None else f"[{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def _p_value(value: float | None) -> str:
    return NOTHING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"
