"""The commands. Each is thin: it parses, calls, and turns a user's mistake into one message and exit code 2."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from . import __version__
from .config import load_recipe
from .errors import UserError

OVERRIDE_HELP = "section.key=value, replaces a value of the recipe (for example batch.global_size=16 lora=null)"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the run failed (with a traceback), 2 something the user gave cannot work."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        return arguments.command(arguments)
    except UserError as error:
        return _report(error)


def launch(
    recipe: str,
    arguments: Sequence[str],
    *,
    before: Callable[[], Sequence[str]] | None = None,
    after: Callable[[], None] | None = None,
) -> int:
    """What a script in launch_scripts/ runs as one rank: `train` with a recipe of its own.

    Args:
        arguments: overrides, `--recipe FILE`, and what the launcher adds (`--local_rank`).
        before: runs first; returns overrides to add.
        after: runs when the training is done.
    """
    parser = argparse.ArgumentParser(description=f"Train {recipe}; arguments are overrides.")
    parser.add_argument("--recipe", default=recipe, help="another recipe (YAML)")
    _add_train_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    try:
        if before is not None:
            parsed.overrides = [*parsed.overrides, *before()]
        code = _train(parsed)
        if after is not None:
            after()
        return code
    except UserError as error:
        return _report(error)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vcore-ds",
        description="Fine-tune language models on reasoning traces, tokens weighted by what learning them is worth.",
    )
    parser.add_argument("--version", action="version", version=f"vcore-ds {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="run a recipe",
        description="Run a recipe: alone it is one process; under deepspeed, torchrun or srun, one per rank.",
        epilog="Several ranks: deepspeed --module vcore_ds.cli train RECIPE, or a script of launch_scripts/.",
    )
    train.add_argument("recipe", help="YAML file, see launch_scripts/recipes/")
    _add_train_arguments(train)
    train.set_defaults(command=_train)

    check = commands.add_parser(
        "check",
        help="validate a recipe without a GPU",
        description="Resolve and validate a recipe; print it with all defaults, and the batch arithmetic.",
    )
    check.add_argument("recipe", help="YAML file, see launch_scripts/recipes/")
    check.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDE_HELP)
    check.add_argument("--ranks", type=int, default=1, help="data-parallel size, GPUs in all (default 1)")
    check.set_defaults(command=_check)

    # The deepspeed launcher puts its own argument before everything else, also before the command.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    # Overrides that follow an option are left over: argparse ends the list of overrides where an option begins.
    arguments, later = parser.parse_known_args(argv)
    unknown = [word for word in later if word.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.overrides += later
    return arguments


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDE_HELP)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # from the deepspeed launcher


def _train(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from .run import train  # after the recipe: torch and deepspeed take seconds to import, a typo should not

    train(recipe)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from .run import describe_recipe

    print(describe_recipe(recipe, arguments.ranks))
    return 0


def _report(error: UserError) -> int:
    """Once per node: the ranks of a node share files, so they fail alike."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print(f"vcore-ds: {error}", file=sys.stderr, flush=True)
    else:
        # A launcher ends all ranks as soon as one fails; the one that speaks must get to.
        time.sleep(5)
    return UserError.EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
