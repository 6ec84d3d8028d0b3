"""The columns of a plan: the recipe next to plain fine-tuning, or next to other settings; and what local data and a
measured run tell a plan."""

import argparse
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vcore_ds.commands.plan import GPU_OPTIONS, prediction
from vcore_ds.commands.plan.lengths import LengthModel
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import is_readable
from vcore_ds.common.text import GIB
from vcore_ds.config.load import load_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.hardware import Achieved, Cluster, Gpu, find_gpu
from vcore_ds.planning.known_models import find_shape, is_on_disk
from vcore_ds.planning.memory import Phase
from vcore_ds.planning.settings import PlanSettings, derive_plan_settings
from vcore_ds.training.run_folder import ENVIRONMENT, METRICS, read_environment, read_run_metrics, read_run_recipe
from vcore_ds.training.schedule import derive_schedule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_WARM_UP = 2  # number of first steps that are left out: they compile kernels and make connections

_PHASES: tuple[Phase, ...] = ("probe", "utility", "main", "step")

_SMALLEST_SHARE, _LARGEST_SHARE = 1e-4, 1.0


@dataclass(frozen=True)
class Calibration:
    """The speed that a run achieved on its GPUs."""

    run: str
    device: str
    num_steps: int
    seconds_step: float
    achieved: Achieved

    def describe(self) -> str:
        return (
            f"Calibrated on {self.run}: {self.num_steps} steps on {self.device}, median {self.seconds_step:.3g} s; "
            f"matrix multiplications reach {self.achieved.compute:.0%} of the peak, the update "
            f"{self.achieved.memory:.0%} of the memory bandwidth; everything else as assumed"
        )


def calibrate(run: str) -> Calibration:
    """The shares of a GPU's peak with which the plan of a run's recipe and cluster reproduces its metrics: the phases
    with matrix multiplications give that of compute, the update that of memory. Raises UserError for a folder without a
    run, a run that is too short, or a device of unknown peak."""
    folder = Path(run)
    try:
        recipe, environment, steps = read_run_recipe(folder), read_environment(folder), read_run_metrics(folder)
    except UserError as error:
        raise UserError(f"--calibrate: {str(error).removeprefix('RUN: ')}") from None
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
    shape, _ = prediction.find_model(recipe.model.path)
    cluster = Cluster(gpu, environment["world_size"], len(devices))
    mean_tokens = statistics.median(line["supervised_tokens"] / line["sequences"] for line in lines)

    plan = prediction.plan_run(derive_plan_settings(recipe), cluster, shape, lengths=LengthModel(mean_tokens))

    def median(*phases: Phase) -> float:
        return statistics.median(sum(line[f"seconds_{phase}"] for phase in phases) for line in lines)

    measured, update = median("probe", "utility", "main"), median("step")
    achieved = Achieved()
    if update > 0:
        share = achieved.memory * plan.cost.seconds["step"] / update
        achieved = replace(achieved, memory=min(max(share, _SMALLEST_SHARE), _LARGEST_SHARE))
    # Seconds fall as the share of compute rises.
    low, high = _SMALLEST_SHARE, _LARGEST_SHARE
    for _ in range(24):
        middle = (low * high) ** 0.5
        cost = plan.estimate_cost(with_share(achieved, middle))
        low, high = (middle, high) if cost.seconds_step - cost.seconds["step"] > measured else (low, middle)
    return Calibration(run, device, len(lines), measured + update, with_share(achieved, high))


def with_share(achieved: Achieved, share: float) -> Achieved:
    """Another share of compute, with attention faster or slower by the same factor."""
    return replace(achieved, compute=share, attention=share / Achieved().compute)


def find_lengths(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None" = None) -> LengthModel:
    """The lengths of a recipe's data, as far as they are on this machine, else those of typical reasoning traces.
    `tokenizer`: the model's, where it is loaded already."""
    if not all(is_readable(file.path) for file in recipe.data.train_files()):
        return LengthModel()
    from vcore_ds.commands.plan.local_lengths import (
        sample_lengths,  # imports numpy, and transformers to tokenize: seconds
    )

    return sample_lengths(recipe.data, recipe.model.path, tokenizer) or LengthModel()


def with_num_steps(recipe: Recipe, lengths: LengthModel) -> PlanSettings:
    """The plan's settings, with the steps of `schedule.num_epochs` where the number of training sequences is known."""
    settings, num_sequences = derive_plan_settings(recipe), lengths.num_sequences
    if settings.num_steps is not None:
        return settings
    if recipe.data.keep is not None:
        from vcore_ds.training.keep import read_kept_on_disk  # imports torch: seconds

        selection = read_kept_on_disk(recipe.data.keep)
        num_sequences = None if selection is None else len(selection.positions)
    if num_sequences is None:
        return settings
    per_step = settings.batch.global_size - settings.num_trusted
    schedule = derive_schedule(recipe.schedule, recipe.optimizer.learning_rate, num_sequences, per_step)
    return replace(settings, num_steps=schedule.num_steps)


_KL_BUDGET = 0.005  # nats, for the `vcore` column of a recipe with another method; no cost depends on it
RARER_PROBE = "probe.every=8"  # of the column beside a recipe with a probe in every step


@dataclass(frozen=True)
class Column:
    """The plan of one setting, and the fewest GPUs for it."""

    title: str
    plan: prediction.RunPlan
    smallest: prediction.RunPlan | None  # the plan on the fewest GPUs on which the run fits; None if there are too many


@dataclass(frozen=True)
class PlanTable:
    """The content of a plan's table."""

    recipe_name: str
    model: str
    columns: list[Column]
    calibration: Calibration | None
    recipe_title: str
    must_fit: bool  # `engine.memory_check`: whether a run that does not fit is refused

    @property
    def recipe_column(self) -> Column:
        return next(column for column in self.columns if column.title == self.recipe_title)

    @property
    def cluster(self) -> Cluster:
        return self.columns[0].plan.cluster


def build_table(arguments: argparse.Namespace) -> PlanTable:
    """Plan each column. Raises UserError for a recipe, GPU, model or run that cannot be used."""

    def reload(extra: Sequence[str]) -> Recipe:
        return load_recipe(arguments.recipe, [*arguments.overrides, *extra])

    recipe = reload(())
    if is_on_disk(recipe.model.path):
        from vcore_ds.models.architecture_check import check_configuration  # imports torch and transformers: seconds

        check_configuration(derive_plan_settings(recipe))
    gpu = choose_gpu(arguments)
    shape, model = prediction.find_model(recipe.model.path)
    calibration = None if arguments.calibrate is None else calibrate(arguments.calibrate)
    achieved = Achieved() if calibration is None else calibration.achieved
    host_bytes = int(arguments.host_memory * GIB)
    cluster = Cluster(gpu, arguments.gpus, arguments.gpus_per_node, achieved, host_bytes)

    def plan_column(title: str, recipe: Recipe) -> Column:
        column_shape, _ = find_shape(recipe.model.path) or (shape, model)
        lengths = find_lengths(recipe) if arguments.mean_tokens is None else LengthModel(arguments.mean_tokens)
        plan = prediction.plan_run(with_num_steps(recipe, lengths), cluster, column_shape, lengths=lengths)
        return Column(title, plan, prediction.find_smallest_cluster(plan))

    if arguments.compare:
        recipe_title = "recipe"
        recipes = {"recipe": recipe} | {setting: reload(split_setting(setting)) for setting in arguments.compare}
    else:
        recipe_title = recipe.method.name
        recipes = {name: change_method(recipe, name) for name in ("sft", recipe_title, "vcore")}
        if recipe.probe.every == 1:
            recipes[f"vcore {RARER_PROBE}"] = change_method(reload([RARER_PROBE]), "vcore")
    columns = [plan_column(title, changed) for title, changed in recipes.items()]
    return PlanTable(arguments.recipe, model, columns, calibration, recipe_title, recipe.engine.memory_check)


def change_method(recipe: Recipe, name: str) -> Recipe:
    """The recipe with another method, and no other change."""
    if recipe.method.name == name:
        return recipe
    strength = {"temperature": None, "kl_budget": _KL_BUDGET if name == "vcore" else None}
    return recipe.model_copy(update={"method": recipe.method.model_copy(update={"name": name, **strength})})


def split_setting(setting: str) -> list[str]:
    """Split a setting of --compare into overrides. Raises UserError for unbalanced quotes."""
    try:
        return shlex.split(setting)
    except ValueError as error:
        raise UserError(f"--compare: found {setting!r}: {error}; expected overrides in balanced quotes") from None


def choose_gpu(arguments: argparse.Namespace) -> Gpu:
    """The GPU of `--gpu`, with the values of the options that replace some. Raises UserError for an unknown name."""
    gpu = prediction.require_gpu(arguments.gpu)
    given = {option: value for option in GPU_OPTIONS if (value := getattr(arguments, option)) is not None}
    if not given:
        return gpu
    changed = {GPU_OPTIONS[option][0]: value * GPU_OPTIONS[option][1] for option, value in given.items()}
    if "flops" in changed:
        changed["attention_flops"] = gpu.attention_flops * changed["flops"] / gpu.flops
    if "memory_bytes" in changed:
        changed["memory_bytes"] = int(changed["memory_bytes"])
    return replace(gpu, name=f"{gpu.name} (changed)", **changed)
