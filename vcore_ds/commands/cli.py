"""The command line: parses, dispatches, and turns a foreseen failure into one message and its exit code."""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

from vcore_ds import __version__
from vcore_ds.commands import (
    chat,
    check,
    compare,
    evaluate,
    export,
    fidelity,
    keep,
    keys,
    plan,
    preflight,
    prepare,
    recipes,
    reference,
    report,
    score,
    sweep,
    train,
)
from vcore_ds.commands.arguments import add_overrides
from vcore_ds.common.errors import RunFailed, RunStopped, UserError
from vcore_ds.distributed.signals import stop_signals

COMMANDS = {
    "train": train,
    "check": check,
    "plan": plan,
    "recipes": recipes,
    "keys": keys,
    "preflight": preflight,
    "reference": reference,
    "fidelity": fidelity,
    "score": score,
    "keep": keep,
    "prepare": prepare,
    "export": export,
    "report": report,
    "sweep": sweep,
    "eval": evaluate,
    "compare": compare,
    "chat": chat,
}

RETIRED = {
    "handoff": "launch_scripts/rl has examples for TRL and verl (docs/reinforcement-learning.md)",
    "tokens": "its tables are in `vcore-ds report RUN --text`",
}
"""Commands of earlier versions -> where their work is done now."""
START_RANKS = frozenset({"train", "preflight", "reference", "fidelity", "score"})
"""Commands that may be one rank of several, which the end of a launcher, or a signal to one of them, has to end."""

EXIT_UNREAD = 128 + signal.SIGPIPE
"""Exit code where the reader of the output has left, as shells report it of other tools."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    0: done. 1: the run failed. 2: something the user gave cannot work. 85: the run was asked to stop and has saved.
    141: nobody reads the output any more.
    """
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        if arguments.command in START_RANKS:
            stop_signals.listen()  # before the command imports torch, which can take a minute
        COMMANDS[arguments.command].main(arguments)
        sys.stdout.flush()
    except (UserError, RunFailed, RunStopped) as error:
        return _report(error)
    except BrokenPipeError:
        if not _output_is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more on its way out
        return EXIT_UNREAD
    return 0


def launch(
    recipe: str,
    arguments: Sequence[str],
    *,
    before: Callable[[Sequence[str]], Sequence[str]] | None = None,
    after: Callable[[], None] | None = None,
    with_report: bool = False,
    can_evaluate: bool = False,
    advice_if_long: str = "",
) -> int:
    """What a script in launch_scripts/ runs as one rank: `train` with a recipe of its own.

    Args:
        arguments: overrides and fragments, `--recipe FILE`, and what the launcher adds (`--local_rank`).
        before: runs first; gets the overrides and fragments, returns overrides to add.
        after: runs when the training is done.
        with_report: write the run's report before that, and say where it is.
        can_evaluate: take the option --eval, which evaluates the result.
        advice_if_long: said after the first step where the others take long.
    """
    parser = argparse.ArgumentParser(description=f"Train {recipe}; arguments are overrides and fragments.")
    parser.add_argument("--recipe", default=recipe, help="another recipe (YAML)")
    if can_evaluate:
        parser.add_argument("--eval", action="store_true", help="evaluate the result on two small tasks at the end")
    add_overrides(parser)
    parsed = parser.parse_intermixed_args(arguments)
    stop_signals.listen()
    try:
        if can_evaluate and parsed.eval:
            evaluate.check_packages()  # before the training, not after it
        if before is not None:
            parsed.overrides = [*parsed.overrides, *before(parsed.overrides)]
        train.main(parsed, advice_if_long=advice_if_long, says_next=after is None)
        if can_evaluate and parsed.eval:
            evaluate.after_training(parsed.recipe, parsed.overrides)
        if with_report:  # of the evaluation, too
            report.after_training(parsed.recipe, parsed.overrides)
        if after is not None:
            after()
    except (UserError, RunFailed, RunStopped) as error:
        return _report(error)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of a command, whose name is `command` among them. Exits with 2 and a message where they are none.

    Raises UserError for overrides to a command that takes none.
    """
    parser = argparse.ArgumentParser(
        prog="vcore-ds",
        description="Fine-tune language models on reasoning traces, tokens weighted by what learning them is worth.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"vcore-ds {__version__}")
    # The deepspeed launcher puts its own argument before everything else, also before the command.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=command.DESCRIPTION))
    word = next((word for word in argv if not word.startswith("-")), None)
    if word in RETIRED:
        parser.exit(2, f"vcore-ds: there is no command {word} any more: {RETIRED[word]}\n")
    # Overrides that follow an option are left over: argparse ends the list of overrides where an option begins.
    arguments, later = parser.parse_known_args(argv)
    unknown = [word for word in later if word.startswith("-")]
    if unknown:
        keys = [word.lstrip("-") for word in unknown if "." in word and "=" in word]
        hint = f"; a recipe's values are replaced without dashes: {' '.join(keys)}" if keys else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if later and "overrides" not in arguments:
        raise UserError(
            f"{arguments.command}: found {' '.join(later)}; expected no more than its --help lists (it reads no recipe)"
        )
    arguments.overrides = [*getattr(arguments, "overrides", []), *later]
    return arguments


def _output_is_unread() -> bool:
    """Whether standard output is a pipe whose reader has left, as `head` does."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _report(error: UserError | RunFailed | RunStopped) -> int:
    """Once per node: the ranks of a node share files, so they fail alike."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        stop_signals.leave()
        print(f"vcore-ds: {error}", file=sys.stderr, flush=True)
    else:
        # A launcher ends all ranks as soon as one fails; the one that speaks must get to.
        stop_signals.leave(last_words_seconds=0.0)
        time.sleep(5)
    return error.EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
