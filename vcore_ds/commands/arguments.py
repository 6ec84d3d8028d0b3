"""Arguments that several commands have."""

import argparse
import math
from collections.abc import Callable

LARGEST_COUNT = 2**31 - 1

RECIPE_HELP = "YAML file, or the name of a shipped one (`vcore-ds recipes` lists them)"
OVERRIDE_METAVAR = "FRAGMENT.yaml | section.key=value"
OVERRIDE_HELP = (
    "FRAGMENT.yaml is merged over the recipe (a file, or a shipped one: methods/dft.yaml, presets/paper.yaml); "
    "section.key=value replaces a value (batch.global_size=16 lora=null)"
)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """A recipe, with what is merged over it."""
    parser.add_argument("recipe", help=RECIPE_HELP)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Fragments and overrides, and what the deepspeed launcher adds."""
    parser.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE_METAVAR, help=OVERRIDE_HELP)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def add_again(parser: argparse.ArgumentParser) -> None:
    """For a command that resumes unfinished work."""
    parser.add_argument(
        "--again",
        action="store_true",
        help="begin again: delete what an earlier attempt has left unfinished at --output",
    )


def positive(word: str) -> int:
    """A whole number from 1 to `LARGEST_COUNT`, for argparse."""
    try:
        number = int(word)
    except ValueError:  # also more digits than Python converts
        raise argparse.ArgumentTypeError(f"found {_shown(word)}, expected a whole number of at least 1") from None
    if not 1 <= number <= LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"found {_shown(word)}, expected 1 to {LARGEST_COUNT:,}")
    return number


def positive_number(word: str) -> float:
    """A finite number above 0, for argparse."""
    return _number(word, "a number above 0", lambda number: 0 < number < math.inf)


def temperature(word: str) -> float:
    """A finite number from 0, for argparse."""
    return _number(word, "a number of at least 0", lambda number: 0 <= number < math.inf)


def share(word: str) -> float:
    """A number above 0, at most 1, for argparse."""
    return _number(word, "a number above 0, at most 1", lambda number: 0 < number <= 1)


def share_or_none(word: str) -> float:
    """A number from 0 to 1, for argparse."""
    return _number(word, "a number from 0 to 1", lambda number: 0 <= number <= 1)


def _number(word: str, expected: str, is_right: Callable[[float], bool]) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not is_right(number):
        raise argparse.ArgumentTypeError(f"found {_shown(word)}, expected {expected}")
    return number


def _shown(word: str) -> str:
    return word if len(word) <= 20 else f"a word of {len(word):,} characters"


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
