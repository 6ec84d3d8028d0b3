"""Output of rank 0: a progress bar on a terminal, plain lines in a log file. Other ranks print nothing."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vcore_ds.common.text import Progress, duration, gib
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import ProbeConfig
from vcore_ds.distributed import layout

_notes = logging.getLogger("vcore_ds.start")  # details of a run's start, which `collecting_notes` takes
_notes.setLevel(logging.INFO)
_notes.propagate = False
_notes.addHandler(logging.NullHandler())

_steps: Progress | None = None  # the bar of the training steps: a process has one terminal


def say(text: str) -> None:
    """Print a line, above the bar if there is one."""
    if _steps is not None:
        _steps.write(text)
    elif layout.is_first():
        try:
            print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # a log on a full disk; the run's folder may have room, and has everything
            return


def warn(text: str) -> None:
    """Print a warning."""
    say(f"warning: {text}")


class _Collector(logging.Handler):
    def __init__(self, texts: list[str]):
        super().__init__()
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


@contextmanager
def collecting_notes() -> Iterator[list[str]]:
    """A context with the texts of `note` in it, in order: for start.txt of the run that starts."""
    texts: list[str] = []
    collector = _Collector(texts)
    _notes.addHandler(collector)
    try:
        yield texts
    finally:
        _notes.removeHandler(collector)


def note(text: str) -> None:
    """Note a detail for start.txt in the run's folder; commands without such a folder drop it."""
    _notes.info("%s", text)


def progress(title: str, total: float) -> Progress:
    """Show the progress of `total` units of work."""
    return Progress(title, total, enabled=layout.is_first(), say=say)


def start_steps(num_steps: int, num_done: int) -> None:
    """Open the bar of the training steps, on a terminal."""
    global _steps
    if layout.is_first() and sys.stdout.isatty():
        _steps = Progress("", num_steps, done=num_done, unit="step")


def show_step(number: int, num_steps: int, values: dict[str, Any], seconds_left: float, log: bool) -> None:
    """Show step `number`, from 1; `log`: whether it gets a line in a log file."""
    if _steps is not None:
        _steps.show(_format_step(values))
        _steps.advance(1)
    elif log:
        say(f"step {number}/{num_steps}  {_format_step(values)}  {duration(seconds_left)} left")


def end_steps() -> None:
    """Close the bar of the training steps."""
    global _steps
    if _steps is not None:
        _steps.__exit__()
        _steps = None


def explain_steps(method: MethodConfig, probe: ProbeConfig) -> str:
    """Make the legend of the lines of steps."""
    if method.name != "vcore":
        return "In each step: loss and weighted loss in nats, |g| gradient norm, lr learning rate"
    text = (
        "In each step: loss in nats, alpha factor of the weighted loss, tau sharpness of the weights, kl their "
        "distance from uniform in nats, s utilities of the tokens (mean±std), |g| gradient norm, lr learning rate"
    )
    if probe.direction != "sgd":
        optimizer = probe.direction.capitalize()
        text += f". s and tau of step 1, where {optimizer} has no state yet, have another scale"
    return text


def _format_step(values: dict[str, Any]) -> str:
    parts = [f"loss {values['loss']:.4f}"]
    if values["tau"] is None:
        parts.append(f"weighted {values['weighted_loss']:.4f}")
    else:
        parts += [
            f"alpha {values['alpha']:.3f}",
            f"tau {values['tau']:.3g}",
            f"kl {values['kl']:.3f}",
            f"s {values['utility_mean']:.2g}±{values['utility_std']:.2g}",
        ]
    parts += [
        f"|g| {values['grad_norm']:.3g}",
        f"lr {values['learning_rate']:.2e}",
        f"{values['supervised_tokens_per_second']:.0f} tok/s",
        f"{gib(values['peak_memory_bytes'], 1)} GiB",
    ]
    if values["utilization"] is not None:
        parts.append(f"MFU {values['utilization']:.1%}")
    if "expert_load_mean" in values:
        parts.append(f"fullest expert {values['expert_load_mean']:.1f}x")
    return "  ".join(parts)
