"""Achieved speeds from a run's metrics.jsonl, to calibrate a plan."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.planning.hardware import Achieved, Cluster, find_gpu
from vcore_ds.planning.memory import Phase
from vcore_ds.planning.run_plan import find_model, plan_run
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.planning.spread import LengthModel
from vcore_ds.planning.step_cost import StepCost
from vcore_ds.train.run_folder import ENVIRONMENT, METRICS, read_environment, read_metrics_of, read_recipe_of

NUM_WARM_UP = 2
"""Number of first steps that are left out: they compile kernels and make connections."""

_PHASES: tuple[Phase, ...] = ("probe", "utility", "main", "step")

_SMALLEST_SHARE, _LARGEST_SHARE = 1e-4, 1.0


@dataclass(frozen=True)
class Calibration:
    """The speed that a run achieved on its GPUs."""

    run: str
    device: str
    num_steps: int
    """Measured steps, without the warm-up."""
    seconds_step: float
    """Median sum of all phases."""
    achieved: Achieved

    def describe(self) -> str:
        return (
            f"Calibrated on {self.run}: {self.num_steps} steps on {self.device}, median {self.seconds_step:.3g} s; "
            f"matrix multiplications reach {self.achieved.compute:.0%} of the peak, the update "
            f"{self.achieved.memory:.0%} of the memory bandwidth; everything else as assumed"
        )


def calibrate(run: str) -> Calibration:
    """The achieved shares of a GPU's peak with which the plan of a run's recipe and cluster reproduces its metrics.

    The phases with matrix multiplications give the share of compute, the update that of memory. Simulated lengths have
    the mean of the metrics, which exclude prompts.

    Raises UserError for a folder without a run, a run that is too short, or one on a device of unknown peak.
    """
    folder = Path(run)
    try:
        recipe, environment, steps = read_recipe_of(folder), read_environment(folder), read_metrics_of(folder)
    except UserError as error:
        raise UserError(f"--calibrate: {str(error).removeprefix('RUN: ')}") from None
    if recipe.retired:
        raise UserError(
            f"--calibrate: {folder}: found {', '.join(recipe.retired)}, keys of an earlier version; expected a run of "
            "this version, which knows the cost of its steps"
        )
    if len(steps) <= NUM_WARM_UP:
        raise UserError(f"--calibrate: {folder / METRICS}: found {NUM_WARM_UP} steps or fewer; expected more")
    needed = {"supervised_tokens", "sequences", *(f"seconds_{phase}" for phase in _PHASES)}
    lines = [
        {key: value for key, value in step.items() if key in needed and value is not None}
        for step in steps[NUM_WARM_UP:]
    ]
    if any(line.keys() != needed for line in lines):
        raise UserError(f"--calibrate: {folder / METRICS}: expected {', '.join(sorted(needed))} in every line")
    devices = environment.get("devices")
    if not isinstance(devices, list) or not devices or not isinstance(environment.get("world_size"), int):
        raise UserError(f"--calibrate: {folder / ENVIRONMENT}: expected devices and world_size, as a run writes them")
    device = str(devices[0])
    gpu = find_gpu(device)
    if gpu is None:
        raise UserError(
            f"--calibrate: {folder / ENVIRONMENT}: found devices {device}; expected GPUs whose peak is known, because "
            "the shares of other devices say nothing about a GPU"
        )
    shape, _ = find_model(recipe.model.path)
    cluster = Cluster(gpu, environment["world_size"], len(devices))
    mean_tokens = statistics.median(line["supervised_tokens"] / line["sequences"] for line in lines)

    def median(*phases: Phase) -> float:
        return statistics.median(sum(line[f"seconds_{phase}"] for phase in phases) for line in lines)

    def predict(achieved: Achieved) -> StepCost:
        plan = plan_run(
            derive_plan_settings(recipe), replace(cluster, achieved=achieved), shape, lengths=LengthModel(mean_tokens)
        )
        return plan.cost

    measured, update = median("probe", "utility", "main"), median("step")
    achieved = Achieved()
    if update > 0:
        share = achieved.memory * predict(achieved).seconds["step"] / update
        achieved = replace(achieved, memory=min(max(share, _SMALLEST_SHARE), _LARGEST_SHARE))

    def with_compute(share: float) -> float:
        cost = predict(with_share(achieved, share))
        return cost.seconds_step - cost.seconds["step"]

    achieved = with_share(achieved, _share_for(with_compute, measured))
    return Calibration(run, device, len(lines), measured + update, achieved)


def with_share(achieved: Achieved, share: float) -> Achieved:
    """Another share of compute, with attention faster or slower by the same factor."""
    return replace(achieved, compute=share, attention=share / Achieved().compute)


def _share_for(seconds: Callable[[float], float], measured: float) -> float:
    """The share at which the decreasing function equals the measured value, or the nearer end of the range."""
    low, high = _SMALLEST_SHARE, _LARGEST_SHARE
    for _ in range(24):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return high
