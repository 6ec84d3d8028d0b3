"""A comparison as tables and as JSON."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from vcore_ds.commands.compare.comparison import Difference, Result, Sides, find_warnings
from vcore_ds.commands.compare.statistics import POWER, Interval
from vcore_ds.common.statistics import FEWEST_SEEDS
from vcore_ds.common.text import align_columns

NOTHING = "–"
FORMAT = 2
"""Version of the JSON."""
WIDTH = 120
"""Characters of a line of prose."""


def as_dict(sides: Sides, results: Sequence[Result], power_difference: float | None) -> dict[str, Any]:
    """The comparison for programs: shares from 0 to 1, null for unknown values."""
    has_seeds = results[0].num_seeds > 1
    return {
        "format": FORMAT,
        "intervals_are_about": "methods on these problems" if has_seeds else "these checkpoints",
        "sides": [{"name": name, "evaluations": [str(one.folder) for one in seeds]} for name, seeds in sides.items()],
        "results": [asdict(result) for result in results],
        "power_difference": power_difference,
        "warnings": list(find_warnings(sides, results)),
    }


def describe(sides: Sides, results: Sequence[Result], power_difference: float | None) -> str:
    """The tables, what their intervals are about, and the warnings."""
    reference, has_seeds = next(iter(sides)), results[0].num_seeds > 1
    compared = [(result, result.difference) for result in results if result.difference is not None]
    parts = [_accuracy_table(results, reference), _difference_table(compared, reference), _meaning(compared)]
    if power_difference is not None:
        parts.append(_power_table(compared, 100 * power_difference))
    if has_seeds:
        folders = zip(*([str(one.folder) for one in seeds] for seeds in sides.values()), strict=True)
        parts.append(iter(["Paired by seed:", *("  " + "   ".join(pair) for pair in folders)]))
    parts.append(f"warning: {warning}" for warning in find_warnings(sides, results))
    return "\n\n".join(filter(None, map("\n".join, parts)))


def _accuracy_table(results: Sequence[Result], reference: str) -> Iterator[str]:
    kind = "Wilson" if results[0].num_seeds == 1 else "Student's t over seeds"
    yield f"Accuracy in percent, with 95% intervals ({kind})"
    rows = ["task,problems,samples,seeds,evaluation,accuracy,95% interval,truncated,no answer,tokens".split(",")]
    for one in results:
        counts = (f"{count:,}" for count in (one.num_problems, one.num_samples_per_problem, one.num_seeds))
        cells = [one.task, *counts] if one.side == reference else [""] * 4
        cells += [one.side, f"{100 * one.accuracy:.1f}", _interval(one.interval, sign="")]
        rows.append([*cells, f"{one.truncated_share:.1%}", f"{one.unanswered_share:.1%}", f"{one.mean_tokens:,.0f}"])
    yield from align_columns(rows, left=("evaluation",))


Compared = Sequence[tuple[Result, Difference]]


def _difference_table(compared: Compared, reference: str) -> Iterator[str]:
    yield f"Differences from {reference} in points"
    has_seeds, has_two_way = compared[0][0].num_seeds > 1, compared[0][1].two_way is not None
    exact = "McNemar p" if all(result.num_samples_per_problem == 1 for result, _ in compared) else "sign-flip p"
    rows = [["task", "evaluation", "difference", "95% interval", "p", "Holm"]]
    rows[0] += ["by seed"] if has_seeds else [exact, "better/worse"]
    rows[0] += ["two-way interval", "two-way p"] if has_two_way else []
    for result, difference in compared:
        cells = [result.task, result.side, f"{100 * difference.value:+.1f}", _interval(difference.interval)]
        cells += [_p_value(difference.p_value), _p_value(difference.holm_p_value)]
        by_seed = " ".join(f"{100 * value:+.1f}" for value in difference.by_seed)
        better_worse = f"{difference.num_better}/{difference.num_worse}"
        cells += [by_seed] if has_seeds else [_p_value(difference.sign_flip_p_value), better_worse]
        if difference.two_way is not None:
            cells += [_interval(difference.two_way.interval), _p_value(difference.two_way.p_value)]
        rows.append(cells)
    yield from align_columns(rows, left=("evaluation",))


def _meaning(compared: Compared) -> Iterator[str]:
    about = "Intervals are about the methods, trained with other seeds, on these very problems."
    if compared[0][0].num_seeds == 1:
        about = (
            "Intervals are about these checkpoints on problems like these, not about the methods that trained them: "
            f"another seed may differ by more. For methods train {FEWEST_SEEDS} seeds or more of each, and use --group."
        )
    if compared[0][1].two_way is not None:
        about += " Two-way intervals are about the methods on problems like these."
    yield from textwrap.wrap(about, WIDTH)
    if len(compared) > 1:
        yield f"Holm: p adjusted for the {len(compared)} differences of the table."


def _power_table(compared: Compared, points: float) -> Iterator[str]:
    yield (
        f"Number of {'problems' if compared[0][0].num_seeds == 1 else 'seeds'}, by samples per problem (k), to detect "
        f"{points:g} points: p < 0.05 in {POWER:.0%} of all comparisons"
    )
    counts = sorted({k for _, difference in compared for k in difference.needed or ()})
    rows = [["task", "evaluation", *(f"k = {k}" for k in counts), "detectable, points"]]
    for result, difference in compared:
        needed = [(difference.needed or {}).get(k) for k in counts]
        cells = [NOTHING if number is None else f"{number:,}" for number in needed]
        detectable = NOTHING if difference.detectable is None else f"{100 * difference.detectable:.1f}"
        rows.append([result.task, result.side, *cells, detectable])
    yield from align_columns(rows, left=("evaluation",))
    if any(NOTHING in row for row in rows):
        yield f"{NOTHING}: unknown. One sample per problem does not tell how much of the spread more would remove."


def _interval(interval: Interval | None, sign: str = "+") -> str:
    return NOTHING if interval is None else f"[{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def _p_value(value: float | None) -> str:
    return NOTHING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"
