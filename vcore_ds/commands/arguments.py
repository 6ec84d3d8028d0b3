"""Arguments and argument types that several commands share."""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from vcore_ds.common.errors import UserError
from vcore_ds.config.problems import closest, find_instead, nearest_keys

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
    parser.add_argument("--again", action="store_true", help="start over: delete unfinished work of an earlier attempt")


Number = TypeVar("Number", int, float)


def _parser(kind: type[Number], expected: str, is_valid: Callable[[Number], bool]) -> Callable[[str], Number]:
    """An argument type for the numbers that are valid."""

    def parse(word: str) -> Number:
        with suppress(ValueError):  # raised for too many digits, too
            if is_valid(number := kind(word)):
                return number
        shown = word if len(word) <= 20 else f"a word of {len(word):,} characters"
        raise argparse.ArgumentTypeError(f"found {shown}, expected {expected}")

    return parse


positive = _parser(int, f"a whole number from 1 to {LARGEST_COUNT:,}", lambda number: 1 <= number <= LARGEST_COUNT)
not_negative = _parser(int, f"a whole number from 0 to {LARGEST_COUNT:,}", lambda number: 0 <= number <= LARGEST_COUNT)
positive_number = _parser(float, "a number above 0", lambda number: 0 < number < math.inf)
temperature = _parser(float, "a number of at least 0", lambda number: 0 <= number < math.inf)
share = _parser(float, "a number above 0, at most 1", lambda number: 0 < number <= 1)
fraction = _parser(float, "a number from 0 to 1", lambda number: 0 <= number <= 1)


def check_options(command: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise UserError for long options that the command does not have, before argparse prints its usage, or misses an
    argument that was taken for their value."""
    options, takes_recipe = list(parser._option_string_actions), any(a.dest == "overrides" for a in parser._actions)
    named = {word: word.partition("=")[0] for word in words if word.startswith("--")}
    unknown = [word for word, name in named.items() if not any(option.startswith(name) for option in options)]
    if hints := [f"{command}: {_explain_option(word, words, options, takes_recipe)}" for word in unknown]:
        raise UserError("\n".join(hints))


def _explain_option(word: str, words: Sequence[str], options: Iterable[str], takes_recipe: bool) -> str:
    """Name the nearest option, or, where the command takes a recipe, what to write for another trainer's flag."""
    option, equals, value = word.partition("=")
    name = option.lstrip("-").replace("-", "_")
    names = {known.lstrip("-").replace("-", "_"): known for known in options}
    near = closest(name, names, cutoff=0.75) or (last if (last := name.rpartition("_")[2]) in names else None)
    if near is not None:
        return f"found {option}; did you mean {names[near]}?"
    if not takes_recipe:
        return f"found {option}; expected one of the options that its --help lists"
    if instead := find_instead(name):
        return f"found {option}; {instead}"
    if not equals:
        value = next(iter(words[words.index(word) + 1 :]), "")
        is_value = value and "=" not in value and not value.endswith(".yaml") and not value.startswith("--")
        value = value if is_value else "VALUE"
    keys = [key if key.endswith(".yaml") else f"{key}={value}" for key in nearest_keys(name)]
    written = f"write {' or '.join(keys)} without dashes" if keys else "a recipe's keys are written section.key=value"
    return f"found {option}; {written} (`vcore-ds keys` lists the keys)"


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
