"""The command line: parse, dispatch, and turn an expected failure into one message and its exit code."""

import argparse
import atexit
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

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
from vcore_ds.commands.arguments import add_overrides, check_options
from vcore_ds.common import __version__
from vcore_ds.common.errors import OutOfMemory, RunFailed, RunStopped, UserError, first_line, is_out_of_memory
from vcore_ds.common.paths import check_working_folder
from vcore_ds.common.standard_streams import find_output_error, repair_standard_streams
from vcore_ds.common.text import shorten
from vcore_ds.config.load import load_recipe
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

START_RANKS = frozenset({"train", "preflight", "reference", "fidelity", "score"})
"""Commands that may run as one rank of several, and so must stop with the launcher or on a signal to any rank."""

EXIT_UNREAD = 128 + signal.SIGPIPE
"""Exit code where the reader of the output has closed the pipe, as shells report it for other tools."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 the run failed, 2 the user's input is wrong, 85 stopped on
    request and saved, 141 the reader of the output has closed the pipe."""

    def run_command() -> None:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        if arguments.command in START_RANKS:
            stop_signals.listen()  # before the command imports torch, which can take a minute
        COMMANDS[arguments.command].main(arguments)
        if arguments.command != "train":  # whose result is its folder, also where its log could not be written
            sys.stdout.flush()

    return _find_exit_code(run_command)


def run() -> NoReturn:
    """Run the command of this process's arguments, and end the process."""
    end_process(main())


def end_process(code: int) -> NoReturn:
    """End the process with an exit code, after its atexit handlers, without finalizing the interpreter: a gloo thread
    that waits for the GIL then, to free the tensors of its last collective, aborts a process whose run has succeeded
    (https://github.com/pytorch/pytorch/pull/179291). DeepSpeed's modules keep such threads alive."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def launch(
    recipe: str,
    arguments: Sequence[str],
    *,
    before: Callable[[Sequence[str]], Sequence[str]] | None = None,
    after: Callable[[Path, bool], None] | None = None,
) -> int:
    """Train a script's default recipe as one rank, for the scripts in launch_scripts/. `arguments`: overrides and
    fragments, `--recipe FILE`, and the launcher's `--local_rank`. `before` is called first, with the overrides and
    fragments, and returns overrides to add; `after` at the end, with the run's folder and whether to evaluate it: only
    scripts with `after` have the option --eval."""
    parser = argparse.ArgumentParser(description=f"Train {recipe}; arguments are overrides and fragments.")
    parser.add_argument("--recipe", default=recipe, help="another recipe (YAML)")
    if after is not None:
        parser.add_argument("--eval", action="store_true", help="evaluate the result on two small tasks at the end")
    add_overrides(parser)

    def train_and_evaluate() -> None:
        check_options("train", parser, arguments)
        parsed = parser.parse_intermixed_args(arguments)
        stop_signals.listen()
        if after is not None and parsed.eval:
            evaluate.check_packages()  # a missing package must not show up after hours of training
        if before is not None:
            parsed.overrides = [*parsed.overrides, *before(parsed.overrides)]
        train.main(parsed, says_next=after is None)
        if after is not None:
            after(Path(load_recipe(parsed.recipe, parsed.overrides).run.output_dir), parsed.eval)

    return _find_exit_code(train_and_evaluate)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; the command's name is `command`. Exits with 2 and a message on an error. Raises UserError
    for overrides to a command that takes none."""
    parser = argparse.ArgumentParser(
        prog="vcore-ds",
        description="Fine-tune language models on reasoning traces with VCORE: each token is weighted by its utility, "
        "how much learning it lowers the loss on other traces. Start with `vcore-ds recipes` and `vcore-ds check "
        "RECIPE`. `vcore-ds COMMAND --help` has the options of a command.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"vcore-ds {__version__}")
    # The deepspeed launcher puts its argument first, even before the command.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=command.DESCRIPTION))
    if chosen := next((word for word in argv if word in COMMANDS), None):
        check_options(chosen, commands.choices[chosen], argv[argv.index(chosen) + 1 :])
    # argparse ends the list of overrides at the first option, so overrides after an option are left over.
    arguments, later = parser.parse_known_args(argv)
    if unknown := [word for word in later if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if later and "overrides" not in arguments:
        raise UserError(
            f"{arguments.command}: found {' '.join(later)}; expected no more than its --help lists (it reads no recipe)"
        )
    arguments.overrides = [*getattr(arguments, "overrides", []), *later]
    return arguments


def _find_exit_code(work: Callable[[], None]) -> int:
    """Do the work of a process, and return its exit code; expected failures are printed. Others are raised."""
    repair_standard_streams()
    try:
        check_working_folder()
        work()
    except (UserError, RunFailed, RunStopped, OutOfMemory) as error:
        return _report(error)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # of a name that a user gave: wherever a file is looked for
            return _report(UserError(f"{shorten(str(error.filename))}: {error.strerror}; expected the name of a file"))
        problem = find_output_error()
        if problem is None or problem.errno != error.errno:
            raise
        if problem.errno == errno.EPIPE:  # as where `head` has closed the pipe
            return EXIT_UNREAD
        return _report(UserError(f"standard output: cannot be written: {problem.strerror}; expected room for it"))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _report(
            OutOfMemory(f"out of memory: {first_line(error)}. Fewer or shorter sequences at a time need less")
        )
    return 0


def _report(error: UserError | RunFailed | RunStopped | OutOfMemory) -> int:
    """Print the error once per node, whose ranks fail alike, or on the rank that has it, and return its exit code."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0 or isinstance(error, OutOfMemory):
        stop_signals.leave()
        with suppress(OSError):  # nobody reads it
            print(f"vcore-ds: {error}", file=sys.stderr, flush=True)
    else:
        # The launcher kills all ranks once one exits; give local rank 0 time to print.
        stop_signals.leave(last_words_seconds=0.0)
        time.sleep(5)
    return error.EXIT_CODE


if __name__ == "__main__":
    run()
