"""Output shared by commands: tables as text and in Markdown, formats and colours of pictures, byte sizes."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vcore_ds.common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".pdf", ".svg")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish."""


def align_columns(rows: Sequence[Sequence[str]], left: Collection[str] = (), *, all_left: bool = False) -> list[str]:
    """Lines of a table with columns two spaces apart. The first column is left-aligned, the others right-aligned.

    Args:
        rows: cells, the same number in each row, the headings first.
        left: headings of further left-aligned columns.
        all_left: left-align all columns, for a table without headings.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_left = [all_left or number == 0 or heading in left for number, heading in enumerate(rows[0])]
    return [
        "  ".join(
            cell.ljust(width) if left_aligned else cell.rjust(width)
            for cell, width, left_aligned in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in rows
    ]


def count(number: float, noun: str) -> str:
    """Such as `1 rank`, `2,000 ranks` or `0.2 epochs`."""
    return f"{number:,.12g} {noun}{'s' * (number != 1)}"


def markdown_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a Markdown table; the second row, of `---` and `---:`, aligns the columns."""
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def check_picture(option: str, path: Path) -> None:
    """Raise UserError if the option's picture has an unknown format, or matplotlib is missing."""
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise UserError(f"{option}: found {path.name}; expected a name that ends in {', '.join(PICTURE_FORMATS)}")
    check_matplotlib(option)


def check_matplotlib(option: str) -> None:
    """Raise UserError if matplotlib, which the option needs, is missing."""
    try:
        import matplotlib.figure  # noqa: F401  (takes a second, and only pictures need it)
    except ImportError as error:
        raise UserError(f"{option}: {error}; expected the extra `pictures`: pip install 'vcore_ds[pictures]'") from None


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches, made without pyplot, which keeps figures and may open windows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


GIB = 2**30


def gib(num_bytes: float, digits: int = 2) -> str:
    """Format bytes in GiB, such as `1,024.50`."""
    return f"{num_bytes / GIB:,.{digits}f}"
