"""Caveats on a run, for reports and the console: how it ended, divergence, unreliable numbers. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vcore_ds.common.paths import read_json
from vcore_ds.common.text import count
from vcore_ds.training.run_folder import END, LOST_METRICS

RELIABLE_SIGNAL_TO_NOISE = 3.0
"""Below this, a finite difference orders tokens by rounding as much as by utility (Spearman under about 0.9)."""


@dataclass(frozen=True)
class End:
    """Contents of end.json."""

    step: int
    message: str


_END = TypeAdapter(End)


def describe_end(folder: Path, last_step: int) -> str:
    """Describe the end of a run without a result. Raises UserError if its record is damaged."""
    if not (folder / END).is_file():
        return (
            "No result is in its folder: it has not finished, was killed, or its result was moved. Last step: "
            f"{last_step:,}."
        )
    end = read_json(folder / END, _END, "the end of an attempt, as a run writes it there")
    return f"It did not finish: the last attempt ended in step {end.step}: {end.message}. Last step: {last_step:,}."


def describe_divergence(losses: Sequence[float]) -> str | None:
    """Describe that training has diverged: the mean of the last tenth of the losses so far, nats, is more than twice,
    and more than 1 nat above, that of their first tenth. None if it has not."""
    part = -(-len(losses) // 10)
    first, last = (sum(some) / max(1, part) for some in (losses[:part], losses[len(losses) - part :]))
    if not last > max(2 * first, first + 1):
        return None
    shown = [f"{loss:,.4g}" if loss < 1000 else f"{loss:,.0f}" for loss in (first, last)]
    return f"Training diverged: the loss rose from {shown[0]} to {shown[1]} nats. Lower optimizer.learning_rate."


def list_losses(metrics: Sequence[Mapping[str, float | None]]) -> list[float]:
    """List the losses of the lines of metrics.jsonl that are finite, nats."""
    return [loss for line in metrics if (loss := line.get("loss")) is not None]


def list_notes(
    folder: Path, has_result: bool, environment: Mapping[str, Any], metrics: Sequence[Mapping[str, float | None]]
) -> list[str]:
    """List the caveats, a sentence each, how the run ended first; none for one that finished at the first attempt with
    reliable numbers."""
    by_step = {int(line["step"] or 0): line for line in metrics}
    resumed = [str(start["step"]) for start in environment.get("resumed", [])]
    not_finite = [step for step, line in by_step.items() if line.get("loss") is None]
    ratios = {step: line.get("signal_to_noise") for step, line in by_step.items()}
    noisy = [step for step, ratio in ratios.items() if ratio is not None and ratio < RELIABLE_SIGNAL_TO_NOISE]
    rise = describe_divergence(list_losses(metrics))
    saturated = sum(int(line.get("num_saturated") or 0) for line in metrics)
    notes = {
        "" if has_result else describe_end(folder, max(by_step)): not has_result,
        rise or "": rise is not None,
        f"The loss was not finite in {_list_steps(not_finite)}.": not_finite,
        f"Resumed from step {', '.join(resumed)}.": resumed,
        f"Steps after a checkpoint were taken again; what they measured first is in {LOST_METRICS}.": (
            folder / LOST_METRICS
        ).is_file(),
        f"Utilities are mostly rounding noise in {_list_steps(noisy)}: the loss change of the finite difference is "
        f"less than {RELIABLE_SIGNAL_TO_NOISE:g} times its error.": noisy,
        f"The KL budget was out of reach in {count(saturated, 'sequence')}, whose weight is on as few tokens as it "
        "can be.": saturated,
        "The code differed from its git commit when the run started.": str(environment.get("git_commit")).endswith(
            "-dirty"
        ),
    }
    return [note for note, applies in notes.items() if applies]


def _list_steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return f"{len(steps):,} steps ({shown})" if len(steps) > 1 else f"step {shown}"
