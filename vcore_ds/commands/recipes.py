"""`vcore-ds recipes`: the files that ship with the package, one line each."""

import argparse
from pathlib import Path

from vcore_ds.common.text import align_columns
from vcore_ds.config.files import SHIPPED_DEEPSPEED_CONFIGS, SHIPPED_RECIPES

HELP = "list the shipped recipes, presets, methods and parts"
DESCRIPTION = (
    "List the recipes, presets, methods, parts and DeepSpeed JSON files that ship with the package. Every command, and "
    "`base:` in a recipe, accepts these names from any folder. Example: vcore-ds check "
    "qwen3_8b_math_lora.yaml presets/paper.yaml"
)

_GROUPS = {
    ".": "Recipes: vcore-ds train NAME",
    "paper": "Recipes with the paper's numbers",
    "presets": "Presets, merged over a recipe: vcore-ds train RECIPE NAME",
    "methods": "Baseline methods, merged over a recipe",
    "parts": "Parts that recipes are made of, for base: in your recipe",
}
"""Folder -> heading."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def main(arguments: argparse.Namespace) -> None:
    for folder, heading in _GROUPS.items():
        print(f"{heading}\n")
        rows = [(name, read_summary(SHIPPED_RECIPES / name)) for name in shipped_names(folder)]
        for line in align_columns(rows, all_left=True):
            print(f"  {line}")
        print()
    print("DeepSpeed JSON: engine.deepspeed_config=NAME\n")
    for path in sorted(SHIPPED_DEEPSPEED_CONFIGS.glob("*.json")):
        print(f"  ds_configs/{path.name}")
    print(f"\nThe files are in {SHIPPED_RECIPES} and {SHIPPED_DEEPSPEED_CONFIGS}.")


def shipped_names(folder: str) -> list[str]:
    """Names of the YAML files in a folder of the shipped recipes; those of `parts` are in subfolders."""
    pattern = "*/*.yaml" if folder == "parts" else "*.yaml"
    return sorted(path.relative_to(SHIPPED_RECIPES).as_posix() for path in (SHIPPED_RECIPES / folder).glob(pattern))


def read_summary(path: Path) -> str:
    """The first sentence of the leading comment of a shipped file."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words:
            break
        comment.append(words)
    sentence, _, _ = " ".join(comment).partition(". ")
    return sentence.removesuffix(".")
