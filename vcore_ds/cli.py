"""The commands. Each is thin: it parses, calls, and turns a user's mistake into one message and exit code 2."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import __version__
from .config import load_recipe
from .errors import RunStopped, UserError
from .signals import stop_signals

OVERRIDE_METAVAR = "FRAGMENT.yaml | section.key=value"
OVERRIDE_HELP = (
    "FRAGMENT.yaml is merged over the recipe (methods/dft.yaml and presets/paper.yaml are found in "
    "launch_scripts/recipes/); section.key=value replaces a value (batch.global_size=16 lora=null)"
)

FIDELITY_LISTS = {"epsilons": float, "probe_sizes": int, "stale_steps": int}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the run failed (with a traceback), 2 something the user gave cannot work, 85 the run was
    asked to stop and has saved."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        return arguments.command(arguments)
    except (UserError, RunStopped) as error:
        return _report(error)


def launch(
    recipe: str,
    arguments: Sequence[str],
    *,
    before: Callable[[Sequence[str]], Sequence[str]] | None = None,
    after: Callable[[], None] | None = None,
) -> int:
    """What a script in launch_scripts/ runs as one rank: `train` with a recipe of its own.

    Args:
        arguments: overrides and fragments, `--recipe FILE`, and what the launcher adds (`--local_rank`).
        before: runs first; gets the overrides and fragments, returns overrides to add.
        after: runs when the training is done.
    """
    parser = argparse.ArgumentParser(description=f"Train {recipe}; arguments are overrides and fragments.")
    parser.add_argument("--recipe", default=recipe, help="another recipe (YAML)")
    _add_train_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    stop_signals.listen()
    try:
        if before is not None:
            parsed.overrides = [*parsed.overrides, *before(parsed.overrides)]
        code = _train(parsed)
        if after is not None:
            after()
        return code
    except (UserError, RunStopped) as error:
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
    _add_recipe_arguments(train)
    train.set_defaults(command=_train)

    check = commands.add_parser(
        "check",
        help="validate a recipe without a GPU",
        description="Resolve and validate a recipe; print it with all defaults, and the batch arithmetic.",
    )
    check.add_argument("recipe", help="YAML file, see launch_scripts/recipes/")
    check.add_argument("overrides", nargs="*", metavar=OVERRIDE_METAVAR, help=OVERRIDE_HELP)
    check.add_argument("--ranks", type=int, default=1, help="data-parallel size, GPUs in all (default 1)")
    check.set_defaults(command=_check)

    preflight = commands.add_parser(
        "preflight",
        help="compare the nodes of a run before it starts",
        description="Started like train, one process per rank: compares packages, commit, GPUs, files and free disk of "
        "all nodes, and times an all-reduce. Exit code 2 where a node is not fit, with what to do about it.",
    )
    _add_recipe_arguments(preflight)
    preflight.set_defaults(command=_preflight)

    reference = commands.add_parser(
        "reference",
        help="log-probabilities that iw_sft needs, with all parameters trained",
        description="Compute, before training, the log-probability of every training sequence under the model that "
        "training starts from: one forward over the data. Alone it is one process; under a launcher, one per rank.",
    )
    _add_recipe_arguments(reference)
    reference.add_argument("--output", required=True, type=Path, metavar="FILE", help="file to write (.npz)")
    reference.set_defaults(command=_reference)

    fidelity = commands.add_parser(
        "fidelity",
        help="measure how right the utilities are",
        description="Measure, on the recipe's own model, data, precision and parallelism, how right the utilities of "
        "jvp and of finite differences are against a reference in higher precision, and how well small probes and kept "
        "directions agree with a large probe. Lists are numbers separated by spaces; 0 leaves a part out.",
    )
    _add_recipe_arguments(fidelity)
    numbers = dict(nargs="+", metavar="N")
    fidelity.add_argument("--output", type=Path, metavar="DIR", help="write fidelity.json and fidelity.png there")
    fidelity.add_argument(
        "--sequences", type=int, default=4, metavar="N", help="training sequences to measure on (default 4)"
    )
    fidelity.add_argument(
        "--epsilons", **numbers, default="1 1e-1 1e-2 1e-3 1e-4 1e-5".split(), help="default 1 1e-1 ... 1e-5"
    )
    fidelity.add_argument("--probe-sizes", **numbers, default="1 4 8 32".split(), help="|B'|, default 1 4 8 32")
    fidelity.add_argument(
        "--large-probe",
        type=int,
        default=64,
        metavar="N",
        help="|B'| that these and kept directions are compared with (default 64; 0 measures neither)",
    )
    fidelity.add_argument(
        "--stale-steps",
        **numbers,
        default="1 2 4 8".split(),
        help="optimizer steps of the recipe's training to keep a direction for (default 1 2 4 8)",
    )
    fidelity.add_argument(
        "--after-steps", type=int, default=0, metavar="N", help="train N steps before measuring (default 0)"
    )
    fidelity.set_defaults(command=_fidelity)

    prepare = commands.add_parser(
        "prepare",
        help="raw data to a store of tokens",
        description="Filter, sample and tokenize raw data into a store of tokens. math: OpenMathReasoning, answers "
        "checked by math-verify; code: OpenCodeReasoning-2; chat: rows of messages, ShareGPT or Alpaca. Run again "
        "after an interruption it goes on where it was.",
    )
    prepare.add_argument("kind", choices=["math", "code", "chat"], help="which rules, prompt and columns")
    prepare.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="files (.jsonl, .json, .parquet), folders, patterns or hub ids; default of math "
        "nvidia/OpenMathReasoning, of code nvidia/OpenCodeReasoning-2",
    )
    prepare.add_argument(
        "--tokenizer", required=True, metavar="MODEL", help="folder or hub id of the model that will be trained"
    )
    prepare.add_argument("--output", required=True, type=Path, metavar="DIR", help="the store to make")
    prepare.add_argument(
        "--sample",
        type=_positive,
        metavar="N",
        help="sequences to keep, at random (the paper: 3200 or 32000; default all)",
    )
    prepare.add_argument("--seed", type=int, default=42, help="of the sample (default 42)")
    prepare.add_argument(
        "--cutoff-length", type=_positive, default=16384, metavar="N", help="longest sequence, tokens (default 16384)"
    )
    prepare.add_argument(
        "--overlong", choices=["drop", "truncate"], default="drop", help="what becomes of longer ones (default drop)"
    )
    prepare.add_argument("--split", help="split of hub data (default math: cot, code: cpp, chat: train)")
    prepare.add_argument("--processes", type=_positive, metavar="N", help="default: one per CPU core")
    prepare.add_argument(
        "--answer-seconds", type=_positive, default=5, metavar="N", help="CPU time to compare one answer (default 5)"
    )
    prepare.add_argument(
        "--statements",
        metavar="DIR",
        help="code: folder with copies of the data sets that hold the problems (taco, apps, code_contests, "
        "codeforces); default: the hub",
    )
    prepare.add_argument(
        "--max-malformed", type=float, default=0.01, metavar="SHARE", help="refuse more malformed rows (default 0.01)"
    )
    prepare.set_defaults(command=_prepare, overrides=[])

    export = commands.add_parser(
        "export",
        help="a Hugging Face folder out of a run's checkpoint",
        description="Write the full weights, the adapter, or the model with its adapter merged in, out of a run's "
        "checkpoint of any world size: in one process, without a GPU, one file's worth of weights in memory.",
    )
    export.add_argument("run", type=Path, metavar="RUN", help="a run's folder (run.output_dir)")
    export.add_argument(
        "--checkpoint", metavar="NAME", help="of RUN/checkpoints, such as step_00000100 (default: the newest)"
    )
    export.add_argument(
        "--output", type=Path, metavar="DIR", help="new folder (default RUN/export/CHECKPOINT/model, adapter or merged)"
    )
    export.add_argument("--merge", action="store_true", help="LoRA: merge the adapter into the model")
    export.add_argument(
        "--dtype", choices=["bf16", "fp32"], help="of the weights (default: the run's precision; an adapter: fp32)"
    )
    export.set_defaults(command=_export, overrides=[])

    # The deepspeed launcher puts its own argument before everything else, also before the command.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    # Overrides that follow an option are left over: argparse ends the list of overrides where an option begins.
    arguments, later = parser.parse_known_args(argv)
    unknown = [word for word in later if word.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.overrides += later
    return arguments


def _add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, see launch_scripts/recipes/")
    _add_train_arguments(parser)


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar=OVERRIDE_METAVAR, help=OVERRIDE_HELP)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # from the deepspeed launcher


def _train(arguments: argparse.Namespace) -> int:
    stop_signals.listen()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from .run import train  # after the recipe: torch and deepspeed take seconds to import, a typo should not

    train(recipe)
    return 0


def _preflight(arguments: argparse.Namespace) -> int:
    stop_signals.listen()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from .preflight import preflight

    preflight(recipe)
    return 0


def _reference(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from .reference import write_reference_log_probabilities

    write_reference_log_probabilities(recipe, arguments.output)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from .run import describe_recipe

    print(describe_recipe(recipe, arguments.ranks))
    return 0


def _fidelity(arguments: argparse.Namespace) -> int:
    lists = {name: _take_numbers(arguments, name, kind) for name, kind in FIDELITY_LISTS.items()}
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from .fidelity import FidelityOptions, measure_fidelity

    options = FidelityOptions(
        num_sequences=arguments.sequences,
        large_probe_size=arguments.large_probe,
        after_steps=arguments.after_steps,
        output=arguments.output,
        **lists,
    )
    measure_fidelity(recipe, options)
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    kind, sources = arguments.kind, arguments.sources + arguments.overrides  # those after an option
    if not sources and kind == "chat":
        raise UserError("prepare chat: found no SOURCE; expected files, folders or hub ids with conversations")
    from .data.prepare import HUB_IDS, SPLITS, PrepareRequest, prepare

    request = PrepareRequest(
        kind=kind,
        sources=tuple(sources or [HUB_IDS[kind]]),
        tokenizer=arguments.tokenizer,
        split=arguments.split or SPLITS[kind],
        sample=arguments.sample,
        seed=arguments.seed,
        cutoff_length=arguments.cutoff_length,
        overlong=arguments.overlong,
        answer_seconds=arguments.answer_seconds,
        statements=arguments.statements,
    )
    processes = arguments.processes or os.cpu_count() or 1
    prepare(request, arguments.output, processes=processes, max_malformed_share=arguments.max_malformed)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    if arguments.overrides:
        raise UserError(f"export: found {' '.join(arguments.overrides)} after RUN; expected one run and options")
    from .export import export_run

    export_run(
        arguments.run,
        checkpoint=arguments.checkpoint,
        output=arguments.output,
        merge=arguments.merge,
        dtype=arguments.dtype,
    )
    return 0


def _positive(word: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected at least 1")
    return number


def _take_numbers(arguments: argparse.Namespace, name: str, kind: type) -> tuple:
    """Of an option that takes a list, without zeros: argparse also gives it the overrides that follow it."""
    numbers = []
    for word in getattr(arguments, name):
        try:
            numbers.append(kind(word))
        except ValueError:
            arguments.overrides.append(word)
    return tuple(number for number in numbers if number != 0)


def _report(error: UserError | RunStopped) -> int:
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
