"""`vcore-ds recipes`: what ships with the package, a line each."""

import argparse
from pathlib import Path

from vcore_ds.config.files import SHIPPED_DEEPSPEED_CONFIGS, SHIPPED_RECIPES

HELP = "list the shipped recipes, presets, methods and parts"
DESCRIPTION = (
    "List the recipes, presets, methods, parts and DeepSpeed JSON that ship with the package, by the names that every "
    "command and `base:` find them by from any folder."
)

_GROUPS = {
    ".": "Recipes: vcore-ds train NAME",
    "paper": "Recipes with the paper's numbers",
    "presets": "Presets, merged over a recipe: vcore-ds train RECIPE NAME",
    "methods": "Methods to compare with, merged over a recipe",
    "parts": "Parts that recipes are made of, for base: in a recipe of your own",
}
"""Folder -> heading."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def main(arguments: argparse.Namespace) -> None:
    for folder, heading in _GROUPS.items():
        names = shipped_names(folder)
        width = max(map(len, names))
        print(f"{heading}\n")
        for name in names:
            print(f"  {name:{width}}  {summary(SHIPPED_RECIPES / name)}")
        print()
    print("DeepSpeed JSON: engine.deepspeed_config=NAME\n")
    for path in sorted(SHIPPED_DEEPSPEED_CONFIGS.glob("*.json")):
        print(f"  ds_configs/{path.name}")
    print(f"\nThe files are in {SHIPPED_RECIPES} and {SHIPPED_DEEPSPEED_CONFIGS}.")


def shipped_names(folder: str) -> list[str]:
    """Names of the YAML files in a folder of the shipped recipes, those of `parts` in its own folders included."""
    pattern = "*/*.yaml" if folder == "parts" else "*.yaml"
    return sorted(path.relative_to(SHIPPED_RECIPES).as_posix() for path in (SHIPPED_RECIPES / folder).glob(pattern))


def summary(path: Path) -> str:
    """The first sentence of the comment that a shipped file begins with."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words:
            break
        comment.append(words)
    sentence, _, _ = " ".join(comment).partition(". ")
    return sentence.removesuffix(".")
