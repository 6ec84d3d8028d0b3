"""What commands print and draw alike: tables as text and in Markdown, and the formats and colours of pictures."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vcore_ds.common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".pdf", ".svg")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which stay apart for colour-blind readers."""


def align_columns(rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> list[str]:
    """The lines of a table with columns two spaces apart: the first one and those with a heading in `left` begin at the
    left, all others end at the right.

    Args:
        rows: cells of the same number of columns, the headings first.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_left = [number == 0 or heading in left for number, heading in enumerate(rows[0])]
    return [
        "  ".join(
            cell.ljust(width) if begins else cell.rjust(width)
            for cell, width, begins in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in rows
    ]


def markdown_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the second one, of `---` and `---:`, aligns its columns."""
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def check_picture(option: str, path: Path) -> None:
    """Raises UserError where the format of the picture that an option names is unknown, or matplotlib is missing."""
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise UserError(f"{option}: found {path.name}; expected a name that ends in {', '.join(PICTURE_FORMATS)}")
    check_matplotlib(option)


def check_matplotlib(option: str) -> None:
    """Raises UserError where matplotlib, which an option needs, is missing."""
    try:
        import matplotlib.figure  # noqa: F401  (takes a second, and only pictures need it)
    except ImportError as error:
        raise UserError(f"{option}: {error}; expected matplotlib. Install it with `pip install matplotlib`") from None


def new_figure(width: float, height: float) -> "Figure":
    """An empty picture of so many inches, without pyplot, which keeps pictures and may open windows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


# Bytes for people.


GIB = 2**30


def gib(num_bytes: float, digits: int = 2) -> str:
    """The number of GiB, such as `1,024.50`."""
    return f"{num_bytes / GIB:,.{digits}f}"
