"""Position of a rank's main thread in the run, by which the watchdog judges it."""

import time
from dataclasses import dataclass, replace

PHASES_OF_A_STEP = ("probe", "utility", "main", "step")

STALL_FACTOR, LEAST_STALL_SECONDS = 10, 600.0
"""A phase of a step that takes this many times as long as before, and at least these seconds, hangs. Otherwise
collectives in which all ranks wait for each other would end at `engine.timeout_minutes`, which covers the first step.
"""


@dataclass(frozen=True)
class Position:
    """Position of a rank's main thread. All ranks pass the same marks in the same order, so more marks are further."""

    num_marks: int = 0
    step: int = 0
    phase: str = "loading"
    is_loading: bool = True
    beat: int = 0
    left: bool = False  # whether the rank has ended normally

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase


_position = Position()
_marked_at = 0.0
_longest_seconds: dict[str, float] = {}
"""By phase of a step, the longest time in it, but for the first time, which reads weights and compiles: 0 after that.
"""


def get_position() -> Position:
    """Return this rank's position."""
    return _position


def reset_position() -> None:
    """Forget the position of an earlier command in this process."""
    global _position
    _position = Position()
    _longest_seconds.clear()


def mark(phase: str, step: int | None = None, *, is_loading: bool = False) -> None:
    """Record that the main thread enters a phase (a word or two), in optimizer step `step`, from 1 (None for no
    change). `is_loading`: a phase that reads large files, see `LOADING_PATIENCE_SECONDS` in `watchdog`. All ranks must
    call it; it does not communicate."""
    global _position, _marked_at
    now, last = time.monotonic(), _position.phase
    if last in PHASES_OF_A_STEP:
        _longest_seconds[last] = max(_longest_seconds[last], now - _marked_at) if last in _longest_seconds else 0.0
    step = _position.step if step is None else step
    num_marks = _position.num_marks + 1
    _position = replace(_position, num_marks=num_marks, phase=phase, step=step, is_loading=is_loading)
    _marked_at = now


def find_stall_seconds(resumed_at: float) -> float | None:
    """Return the seconds since the last mark, or since this process went on after it was suspended, if they are so many
    that the phase must hang, else None."""
    longest = _longest_seconds.get(_position.phase, 0.0)
    seconds = time.monotonic() - max(_marked_at, resumed_at)
    is_stalled = longest > 0.0 and seconds > max(STALL_FACTOR * longest, LEAST_STALL_SECONDS)
    return seconds if is_stalled else None
