"""Arguments and argument types that several commands share."""

import argparse
import math
from collections.abc import Callable

LARGEST_COUNT = 2**31 - 1

RECIPE_HELP = "YAML file, or the name of a shipped one such as qwen3_4b_math_lora (`vcore-ds recipes` lists them)"
OVERRIDE_METAVAR = "FRAGMENT | section.key=value"
OVERRIDE_HELP = (
    "FRAGMENT is merged over the recipe (a YAML file, or a shipped one such as methods/dft); section.key=value "
    "replaces one value (batch.global_size=16 lora=null)"
)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help=RECIPE_HELP)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE_METAVAR, help=OVERRIDE_HELP)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def add_again(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--again", action="store_true", help="start over: delete the unfinished work of an earlier attempt at --output"
    )


def positive(word: str) -> int:
    try:
        number = int(word)
    except ValueError:  # raised for too many digits, too
        raise argparse.ArgumentTypeError(f"found {_shown(word)}, expected a whole number of at least 1") from None
    if not 1 <= number <= LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"found {_shown(word)}, expected 1 to {LARGEST_COUNT:,}")
    return number


def positive_number(word: str) -> float:
    return _parse_number(word, "a number above 0", lambda number: 0 < number < math.inf)


def temperature(word: str) -> float:
    return _parse_number(word, "a number of at least 0", lambda number: 0 <= number < math.inf)


def share(word: str) -> float:
    return _parse_number(word, "a number above 0, at most 1", lambda number: 0 < number <= 1)


def share_or_none(word: str) -> float:
    return _parse_number(word, "a number from 0 to 1", lambda number: 0 <= number <= 1)


def _parse_number(word: str, expected: str, is_valid: Callable[[float], bool]) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not is_valid(number):
        raise argparse.ArgumentTypeError(f"found {_shown(word)}, expected {expected}")
    return number


def _shown(word: str) -> str:
    return word if len(word) <= 20 else f"a word of {len(word):,} characters"


def take_numbers(arguments: argparse.Namespace, name: str, kind: type) -> tuple:
    """Return the numbers of a list option, without zeros. argparse also appends the overrides that follow it: move them
    to `arguments.overrides`."""
    numbers = []
    for word in getattr(arguments, name):
        try:
            numbers.append(kind(word))
        except ValueError:
            arguments.overrides.append(word)
    return tuple(number for number in numbers if number != 0)
