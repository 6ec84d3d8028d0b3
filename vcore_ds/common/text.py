"""Output on the screen and in files: tables, counts, sizes, durations, pictures, and the progress of long work."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

from vcore_ds.common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish."""


def align_columns(rows: Sequence[Sequence[str]], left: Collection[str] = (), *, all_left: bool = False) -> list[str]:
    """Lines of a table with columns two spaces apart, the headings first. The first column is left-aligned, and those
    with the headings `left`, or all (for a table without headings); the others right-aligned."""
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


def check_unicode(text: str, place: str, remedy: str) -> None:
    """Raise UserError for text that UTF-8 cannot encode: Python keeps bytes that are no UTF-8, and half of an escaped
    pair in JSON, as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{place}: found a byte that is no UTF-8, or half of a surrogate pair; expected Unicode text. {remedy}"
        ) from None


def markdown_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a Markdown table; the second row, of `---` and `---:`, aligns the columns."""
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


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


def shorten(text: str, limit: int = 80) -> str:
    """The text, with the end of a long one replaced by `...`."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def gib(num_bytes: float, digits: int = 2) -> str:
    """Format bytes in GiB, such as `1,024.50`."""
    return f"{num_bytes / GIB:,.{digits}f}"


Item = TypeVar("Item")

BAR_SECONDS = 2.0  # delay before the bar appears

FIRST_LINE_SECONDS = 10.0  # delay before the first line in a log

LINE_SECONDS = 30.0  # least time between two lines; a tenth of the elapsed time if that is more


class Progress:
    """Progress bar with the share of work done and the remaining time. No collectives; rank 0's is shown."""

    def __init__(
        self,
        title: str,
        total: float,
        *,
        done: float = 0.0,
        unit: str = "",
        enabled: bool = True,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` and `done`: amounts in any unit. `unit`: name of one worth counting, such as `step`: the bar then
        shows numbers and rate, and stays. `say` receives the lines for a log file, `clock` returns seconds."""
        self._title, self._total, self._say, self._clock = title, total, say, clock
        self._enabled, self._done = enabled, done
        self._started = clock()
        self._next_line = self._started + FIRST_LINE_SECONDS
        self._bar = None
        if enabled and sys.stdout.isatty():
            from tqdm import tqdm  # here: most commands show none

            self._bar = tqdm(
                total=total,
                initial=done,
                desc=title or None,
                unit=unit or "it",
                delay=0 if unit else BAR_SECONDS,
                bar_format=None if unit else "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left",
                leave=bool(unit),
                file=sys.stdout,
                dynamic_ncols=True,
            )

    def advance(self, amount: float = 1.0) -> None:
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount)
        elif self._enabled and (now := self._clock()) >= self._next_line and 0 < self._done < self._total:
            seconds = now - self._started
            left = seconds * (self._total / self._done - 1.0)
            self._say(f"{self._title}: {self._done / self._total:.0%}, {duration(left)} left")
            sys.stdout.flush()
            self._next_line = now + max(LINE_SECONDS, 0.1 * seconds)

    def show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(text)

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over items, each of which counts as 1 once the next is requested."""
        for item in items:
            yield item
            self.advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """Format seconds as `2h05m`, `3m20s` or `12s`."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
