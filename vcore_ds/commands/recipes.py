"""`vcore-ds recipes`: the files that ship with the package, one line each."""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from vcore_ds.commands.arguments import positive
from vcore_ds.commands.plan.prediction import RunPlan, find_model, find_smallest_cluster, plan_run, require_gpu
from vcore_ds.common.errors import UserError
from vcore_ds.common.text import Progress, align_columns, gib
from vcore_ds.config.load import SHIPPED_DEEPSPEED_CONFIGS, SHIPPED_RECIPES, load_recipe
from vcore_ds.config.problems import RecipeError
from vcore_ds.planning.hardware import GPUS, Cluster
from vcore_ds.planning.settings import derive_plan_settings

HELP = "list the shipped recipes, presets, methods and parts"
DESCRIPTION = (
    "List the recipes, presets, methods, parts and DeepSpeed JSON files that ship with the package; with --gpus, which "
    "recipes fit on that many GPUs. Every command, and `base:` in a recipe, accepts these names from any folder, with "
    "or without .yaml. Examples: vcore-ds check qwen3_8b_math_lora presets/paper; vcore-ds recipes --gpus 8 --gpu A100"
)

_RECIPES = {".": "Recipes: vcore-ds train NAME", "paper": "Recipes with the paper's numbers"}
_FRAGMENTS = {
    "presets": "Presets, merged over a recipe: vcore-ds train RECIPE NAME",
    "methods": "Baseline methods, merged over a recipe",
    "parts": "Parts that recipes are made of, for base: in your recipe",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=positive, metavar="N", help="instead, say which recipes fit on N GPUs (docs/planning.md)")
    kinds = f"with --gpus: kind of GPU: {', '.join(GPUS)} (default H100), in nodes of 8"
    add("--gpu", "--device", metavar="NAME", help=kinds)


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for a GPU that is not known."""
    if arguments.gpus is not None:
        print_fits(Cluster(require_gpu(arguments.gpu or "H100"), arguments.gpus))
        return
    if arguments.gpu is not None:
        raise UserError(f"recipes: found --gpu {arguments.gpu} alone; expected the number of GPUs with it: --gpus N")
    for folder, heading in (_RECIPES | _FRAGMENTS).items():
        print(f"{heading}\n")
        rows = [(name, read_summary(SHIPPED_RECIPES / name)) for name in shipped_names(folder)]
        for line in align_columns(rows, all_left=True):
            print(f"  {line}")
        print()
    print("DeepSpeed JSON: engine.deepspeed_config=NAME\n")
    for path in sorted(SHIPPED_DEEPSPEED_CONFIGS.glob("*.json")):
        print(f"  ds_configs/{path.name}")
    print(f"\nThe files are in {SHIPPED_RECIPES} and {SHIPPED_DEEPSPEED_CONFIGS}.")


def print_fits(cluster: Cluster) -> None:
    names = [name for folder in _RECIPES for name in shipped_names(folder)]
    # Seconds on an idle machine. Not on standard output, which may be read by a program.
    with Progress("Planning", len(names), say=partial(print, file=sys.stderr)) as progress:
        rows = [fit_row(name, cluster) for name in progress.over(names)]
    heading = ("recipe", f"on {cluster.describe()}", "GiB per GPU", "s per step", "GPU hours of 100 steps")
    print("\n".join(align_columns([heading, *rows], left=heading[1:2])))
    print(
        f"\nOf {gib(cluster.gpu.memory_bytes, 0)} GiB per GPU; speeds are assumed. vcore-ds plan RECIPE --gpus "
        f"{cluster.num_gpus} --gpu {cluster.gpu.name} says more, and what would make a recipe fit."
    )


def fit_row(name: str, cluster: Cluster) -> tuple[str, str, str, str, str]:
    recipe = load_recipe(SHIPPED_RECIPES / name)
    settings = derive_plan_settings(recipe)
    shape, _ = find_model(recipe.model.path)
    stem = name.removesuffix(".yaml")
    try:
        plan = plan_run(settings, cluster, shape)
    except RecipeError:  # such as an expert-parallel size that does not divide this number of GPUs
        group = recipe.parallel.tensor * recipe.parallel.expert
        smallest = find_smallest_cluster(plan_run(settings, replace(cluster, num_gpus=group), shape))
        return (stem, f"not on {cluster.num_gpus:,} GPUs{_fewest(smallest)}", "-", "-", "-")
    verdict = plan.verdict + ("" if plan.fits else _fewest(find_smallest_cluster(plan)))
    memory, hours = gib(plan.memory.estimate.peak_bytes, 1), f"{plan.gpu_hours(100):,.1f}"
    return (stem, verdict, memory, f"{plan.cost.seconds_step:,.3g}" if plan.fits else "-", hours if plan.fits else "-")


def _fewest(smallest: RunPlan | None) -> str:
    return "" if smallest is None else f"; from {smallest.cluster.num_gpus:,} GPUs"


def shipped_names(folder: str) -> list[str]:
    """Names of the YAML files in a folder of the shipped recipes; those of `parts` in subfolders too."""
    pattern = "**/*.yaml" if folder == "parts" else "*.yaml"
    return sorted(path.relative_to(SHIPPED_RECIPES).as_posix() for path in (SHIPPED_RECIPES / folder).glob(pattern))


def read_summary(path: Path) -> str:
    """The first sentence of the leading comment of a shipped file, after the line for editors."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words:
            break
        comment.append(words)
    sentence, _, _ = " ".join(comment).partition(". ")
    return sentence.removesuffix(".")
