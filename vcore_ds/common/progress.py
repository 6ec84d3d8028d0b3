"""Progress of long work: a progress bar on a terminal, occasional lines in a log file."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

Item = TypeVar("Item")

BAR_SECONDS = 2.0
"""Delay before the bar appears."""

FIRST_LINE_SECONDS = 10.0
"""Delay before the first line in a log."""

LINE_SECONDS = 30.0
"""Least time between two lines; a tenth of the elapsed time if that is more."""


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
        """Args:
        title: the work, such as `Loading weights`.
        total: total amount, in any unit.
        done: amount done before.
        unit: name of a unit worth counting, such as `step`: the bar then shows numbers and rate, and stays.
        enabled: False shows nothing.
        say: receives the lines for a log file.
        clock: returns seconds.
        """
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
        """Add an amount of finished work."""
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
        """Show a text after the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def write(self, text: str) -> None:
        """Prints a line above the bar."""
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
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """Format seconds as `2h05m`, `3m20s` or `12s`."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
