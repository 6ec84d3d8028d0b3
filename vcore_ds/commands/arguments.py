"""Arguments that several commands have."""

import argparse

OVERRIDE_METAVAR = "FRAGMENT.yaml | section.key=value"
OVERRIDE_HELP = (
    "FRAGMENT.yaml is merged over the recipe (methods/dft.yaml and presets/paper.yaml are found in "
    "launch_scripts/recipes/); section.key=value replaces a value (batch.global_size=16 lora=null)"
)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """A recipe, with what is merged over it."""
    parser.add_argument("recipe", help="YAML file, see launch_scripts/recipes/")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Fragments and overrides, and what the deepspeed launcher adds."""
    parser.add_argument("overrides", nargs="*", metavar=OVERRIDE_METAVAR, help=OVERRIDE_HELP)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def positive(word: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected at least 1")
    return number


def take_numbers(arguments: argparse.Namespace, name: str, kind: type) -> tuple:
    """The numbers of an option that takes a list, without zeros; argparse also gives it the overrides that follow,
    which are put where they belong."""
    numbers = []
    for word in getattr(arguments, name):
        try:
            numbers.append(kind(word))
        except ValueError:
            arguments.overrides.append(word)
    return tuple(number for number in numbers if number != 0)
