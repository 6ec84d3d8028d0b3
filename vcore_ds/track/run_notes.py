"""What a reader of a run has to know before believing its numbers, from what the run left in its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vcore_ds.files.run_folder import LOST_METRICS

RELIABLE_SIGNAL_TO_NOISE = 3.0
"""Below this, a finite difference orders tokens by rounding as much as by utility (Spearman under about 0.9)."""


def notes_on(
    folder: Path, has_result: bool, environment: Mapping[str, Any], metrics: Sequence[Mapping[str, float | None]]
) -> list[str]:
    """One sentence each; none of a run that ended as it should, at once and with numbers that can be believed."""
    notes = []
    if not has_result:
        last = int(metrics[-1]["step"] or 0)
        notes.append(f"No result is in its folder: it has not finished, or its result was moved. Last step: {last:,}.")
    resumed = environment.get("resumed")
    if isinstance(resumed, list) and resumed:
        steps = ", ".join(str(one.get("step")) for one in resumed if isinstance(one, dict))
        notes.append(f"Resumed {_times(len(resumed))}, from step {steps}.")
    if (folder / LOST_METRICS).is_file():
        notes.append(f"Steps after a checkpoint were taken again; what they measured first is in {LOST_METRICS}.")
    not_finite = [int(line["step"] or 0) for line in metrics if line.get("loss") is None]
    if not_finite:
        notes.append(f"The loss was not finite in {_steps(not_finite)}.")
    noisy = [
        int(line["step"] or 0)
        for line in metrics
        if (ratio := line.get("signal_to_noise")) is not None and ratio < RELIABLE_SIGNAL_TO_NOISE
    ]
    if noisy:
        notes.append(
            f"Utilities are mostly rounding noise in {_steps(noisy)}: the loss change of the finite difference is less "
            f"than {RELIABLE_SIGNAL_TO_NOISE:g} times its error."
        )
    saturated = sum(int(line.get("num_saturated") or 0) for line in metrics)
    if saturated:
        notes.append(
            f"The KL budget was out of reach in {saturated:,} sequences, whose weight is on as few tokens as it can be."
        )
    commit = environment.get("git_commit")
    if isinstance(commit, str) and commit.endswith("-dirty"):
        notes.append("The code differed from its git commit when the run started.")
    return notes


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return f"{len(steps):,} steps ({shown})" if len(steps) > 1 else f"step {shown}"
