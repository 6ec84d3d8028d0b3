"""Memory and seconds of a step against the number of GPUs, as a picture."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vcore_ds.commands.plan.columns import Columns
from vcore_ds.config.problems import RecipeError
from vcore_ds.files.user_paths import writing
from vcore_ds.planning.run_plan import RunPlan
from vcore_ds.results.presentation import new_figure
from vcore_ds.units import GIB


def draw(found: Columns, path: Path) -> None:
    """Draws every column on 1 GPU up to four times as many as were asked for, at least 64.

    Raises UserError where the file cannot be written.
    """
    from matplotlib import ticker  # takes a second to import, and only this needs it

    figure = new_figure(10.0, 4.0)
    memory, seconds = figure.subplots(1, 2)
    most = max(64, 4 * found.cluster.num_gpus)
    for column in found.columns:
        plans = list(plans_by_size(column.plan, most))
        sizes = [plan.cluster.num_gpus for plan in plans]
        memory.plot(sizes, [plan.memory.estimate.peak_bytes / GIB for plan in plans], marker="o", label=column.title)
        fitting = [plan for plan in plans if plan.fits]
        times = [plan.cost.seconds_step for plan in fitting]
        seconds.plot([plan.cluster.num_gpus for plan in fitting], times, marker="o", label=column.title)
    gpu = found.cluster.gpu
    memory.axhline(gpu.memory_bytes / GIB, color="black", linestyle="--", label=gpu.name)
    memory.set(title="Memory of a GPU at the peak", ylabel="GiB")
    seconds.set(title="Step, where it fits (assumed speeds)", ylabel="seconds")
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
    """The plan on 1, 2, 4, ... GPUs, without sizes on which the recipe's rows are not possible."""
    size = 1
    while size <= most:
        with suppress(RecipeError):
            yield plan.on(size)
        size *= 2
