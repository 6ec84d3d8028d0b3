"""The columns of a plan: the recipe next to plain fine-tuning, or next to other settings; and their picture."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vcore_ds.commands.local_data import find_lengths, with_num_steps
from vcore_ds.commands.plan.calibrate import Calibration, calibrate
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import writing
from vcore_ds.common.text import GIB, new_figure
from vcore_ds.config.load import load_recipe
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.hardware import Achieved, Cluster, Gpu
from vcore_ds.planning.model_shape import is_on_disk
from vcore_ds.planning.run_plan import (
    RunPlan,
    Way,
    cheapest_ways,
    expert_ways,
    find_model,
    find_shape,
    named_gpu,
    plan_run,
    smallest_cluster,
)
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.planning.spread import LengthModel

_KL_BUDGET = 0.005
"""Nats, for the `vcore` column of a recipe with another method; the cost of a step does not depend on it."""


RARER_PROBE = 8
"""Steps per probe batch of the plan that is shown beside one with a probe in every step."""


@dataclass(frozen=True)
class Column:
    """A plan, and changes that make the run fit."""

    title: str
    plan: RunPlan
    smallest: RunPlan | None
    """The plan on the fewest GPUs on which the run fits; None if there are too many."""
    ways: list[Way]
    """The cheapest changes that make it fit; empty if it fits."""
    expert_sizes: list[Way]
    """Other possible expert-parallel sizes; empty for a dense model."""
    rarer_probe: RunPlan | None = None
    """The plan with a probe batch in every eighth step only, where every step takes one; None beside --compare."""


@dataclass(frozen=True)
class Columns:
    """The content of a plan's table."""

    recipe_name: str
    model: str
    """Description of the model and the source of its shape."""
    columns: list[Column]
    calibration: Calibration | None
    recipe_title: str
    """The title of the recipe's column."""
    must_fit: bool
    """`engine.memory_check`: whether a run that does not fit is refused."""

    @property
    def recipe_column(self) -> Column:
        return next(column for column in self.columns if column.title == self.recipe_title)

    @property
    def cluster(self) -> Cluster:
        return self.columns[0].plan.cluster


def build_columns(arguments: argparse.Namespace) -> Columns:
    """Plan each column. Raises UserError for a recipe, GPU, model or run that cannot be used."""

    def reload(extra: Sequence[str]) -> Recipe:
        return load_recipe(arguments.recipe, [*arguments.overrides, *extra])

    recipe = reload(())
    if is_on_disk(recipe.model.path):
        from vcore_ds.train.model_check import check_configuration  # imports torch and transformers: seconds

        check_configuration(derive_plan_settings(recipe))
    gpu = choose_gpu(arguments)
    shape, model = find_model(recipe.model.path)
    calibration = None if arguments.calibrate is None else calibrate(arguments.calibrate)
    cluster = Cluster(
        gpu,
        arguments.gpus,
        arguments.gpus_per_node,
        Achieved() if calibration is None else calibration.achieved,
        int(arguments.host_memory * GIB),
        arguments.storage * 1e9,
    )

    def column(title: str, recipe: Recipe, reload: Callable[[Sequence[str]], Recipe]) -> Column:
        column_shape, _ = find_shape(recipe.model.path) or (shape, model)
        lengths = find_lengths(recipe) if arguments.mean_tokens is None else LengthModel(arguments.mean_tokens)
        plan = plan_run(with_num_steps(recipe, lengths), cluster, column_shape, lengths=lengths)
        ways = [] if plan.fits else cheapest_ways(plan, lambda extra: with_num_steps(reload(extra), lengths))
        rarer_probe = None
        if plan.settings.estimator is not None and plan.settings.probe.every == 1 and not arguments.compare:
            probe = plan.settings.probe.model_copy(update={"every": RARER_PROBE})
            settings = replace(plan.settings, probe=probe)
            rarer_probe = plan_run(settings, cluster, column_shape, lengths=lengths)
        return Column(title, plan, smallest_cluster(plan), ways, expert_ways(plan), rarer_probe)

    columns = []
    if arguments.compare:
        columns.append(column("recipe", recipe, reload))
        for setting in arguments.compare:
            overrides = split_setting(setting)

            def with_setting(extra: Sequence[str], overrides: Sequence[str] = overrides) -> Recipe:
                return reload([*overrides, *extra])

            columns.append(column(setting, with_setting(()), with_setting))
    else:
        for name in dict.fromkeys(["sft", recipe.method.name, "vcore"]):

            def with_method(extra: Sequence[str], name: str = name) -> Recipe:
                return change_method(reload(extra), name)

            columns.append(column(name, with_method(()), with_method))
    recipe_title = "recipe" if arguments.compare else recipe.method.name
    return Columns(arguments.recipe, model, columns, calibration, recipe_title, recipe.engine.memory_check)


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
    """The GPU of `--gpu`, with the values of the options that replace some.

    Raises UserError for an unknown name.
    """
    gpu = named_gpu(arguments.gpu)
    options = {
        "memory_bytes": ("gpu_memory", GIB),
        "flops": ("tflops", 1e12),
        "memory_bandwidth": ("bandwidth", 1e12),
        "node_bandwidth": ("nvlink", 1e9),
        "network_bandwidth": ("nic", 1e9 / 8),
    }
    changed = {
        field: getattr(arguments, option) * unit
        for field, (option, unit) in options.items()
        if getattr(arguments, option) is not None
    }
    if not changed:
        return gpu
    if "flops" in changed:
        changed["attention_flops"] = gpu.attention_flops * changed["flops"] / gpu.flops
    if "memory_bytes" in changed:
        changed["memory_bytes"] = int(changed["memory_bytes"])
    return replace(gpu, name=f"{gpu.name} (changed)", **changed)


def draw(columns: Columns, path: Path) -> None:
    """Plot memory and seconds of a step over the number of GPUs, from 1 to 4 * --gpus, at least 64.

    Raises UserError if the file cannot be written.
    """
    from matplotlib import ticker  # takes a second to import

    figure = new_figure(10.0, 4.0)
    memory, seconds = figure.subplots(1, 2)
    most = max(64, 4 * columns.cluster.num_gpus)
    for column in columns.columns:
        plans = list(plans_by_size(column.plan, most))
        sizes = [plan.cluster.num_gpus for plan in plans]
        memory.plot(sizes, [plan.memory.estimate.peak_bytes / GIB for plan in plans], marker="o", label=column.title)
        fitting = [plan for plan in plans if plan.fits]
        times = [plan.cost.seconds_step for plan in fitting]
        seconds.plot([plan.cluster.num_gpus for plan in fitting], times, marker="o", label=column.title)
    gpu = columns.cluster.gpu
    memory.axhline(gpu.memory_bytes / GIB, color="black", linestyle="--", label=gpu.name)
    memory.set(title="Peak memory of a GPU", ylabel="GiB")
    seconds.set(title="Time of a step, where it fits (assumed speeds)", ylabel="seconds")
    for axes in (memory, seconds):
        axes.set(xlabel=f"{gpu.name} GPUs")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    with writing("--picture", path):
        figure.savefig(path, dpi=150)


def plans_by_size(plan: RunPlan, most: int) -> Iterator[RunPlan]:
    """The plan on 1, 2, 4, ... GPUs, without numbers on which the recipe's packs are impossible."""
    size = 1
    while size <= most:
        with suppress(RecipeError):
            yield plan.on(size)
        size *= 2
