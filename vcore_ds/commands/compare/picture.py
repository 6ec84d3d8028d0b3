"""The differences of a comparison with their intervals, as a picture."""

from pathlib import Path
from typing import Any

from vcore_ds.commands.compare.differences import Comparison
from vcore_ds.files.user_paths import writing
from vcore_ds.results.presentation import COLOURS, new_figure


def draw(found: Comparison, path: Path) -> None:
    """Draws a line for every task and side: the difference from the reference with its 95% interval, single seeds as
    strokes, and in pale the interval of two-way clustering where there is one.

    Raises UserError where the file cannot be written.
    """
    differences = found.differences
    sides = [side.name for side in found.sides[1:]]
    figure = new_figure(6.0, 1.2 + 0.3 * len(differences))
    axes = figure.add_subplot()
    axes.axvline(0.0, color="black", linewidth=0.8)
    for place, one in enumerate(differences):
        colour = COLOURS[sides.index(one.side) % len(COLOURS)]
        wide = None if one.two_way is None else one.two_way.interval
        for interval, width, alpha in ((wide, 6.0, 0.25), (one.interval, 1.8, 1.0)):
            if interval is not None:
                low, high = interval
                # Other caps would make the line longer than the interval.
                style: dict[str, Any] = {"linewidth": width, "alpha": alpha, "solid_capstyle": "butt"}
                axes.plot([100 * low, 100 * high], [place, place], color=colour, **style)
        if found.has_seeds:
            axes.plot([100 * value for value in one.by_seed], [place] * len(one.by_seed), "|", color=colour, alpha=0.6)
        axes.plot(100 * one.difference, place, "o", color=colour)
    labels = [f"{one.task}  {one.side}" if len(sides) > 1 else one.task for one in differences]
    # Names are the user's, and not formulas where they hold `$`.
    axes.set_yticks(range(len(differences)), labels, parse_math=False)
    axes.set_ylim(len(differences) - 0.5, -0.5)
    about = "methods on these problems" if found.has_seeds else "these checkpoints, not the methods"
    if any(one.two_way is not None for one in differences):
        about += " (pale: on problems like these)"
    what = f"{sides[0]} minus {found.sides[0].name}" if len(sides) == 1 else f"difference from {found.sides[0].name}"
    axes.set_xlabel(f"{what}, points\n95% intervals: {about}", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    with writing("--png", path, "a file that can be written"):
        figure.savefig(path, dpi=200)
