"""`vcore-ds eval`: how well a model, an adapter or a run's result answers problems."""

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vcore_ds.commands.arguments import positive, share, temperature
from vcore_ds.errors import UserError
from vcore_ds.files.evaluation_folder import OF_A_RUN

HELP = "accuracy on benchmarks, or on two small tasks that need no download"
DESCRIPTION = (
    "Let a model answer problems, and grade its final answers. Without --tasks: procedural arithmetic and the problems "
    "that the quickstart holds out, a few minutes with a small model and no GPU. Prompts are rendered by the code "
    "that training uses. Always reported: accuracy, the share of answers that were cut off, the share without an "
    "answer, the mean length. Run again after an interruption, it resumes where it was. Large models are asked through "
    "an OpenAI-compatible server (--url; --server-commands prints how to start one). docs/evaluation.md has examples."
)
EPILOG = (
    "Tasks: arithmetic and champ need no download; aime (aime24, aime25), olympiad, math500, gsm8k, rbench and "
    "supergpqa are read from the hub or from a file; livecodebench and ojbench give generations for their official "
    "graders."
)

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What launchers tell a rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "model", metavar="RUN|MODEL", help="a model's folder or hub id, an adapter's folder, or the folder of a run"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new folder for the result")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["arithmetic", "champ"],
        metavar="NAME[=FILE]",
        help="tasks, each with a file (.jsonl, .parquet), folder or hub id where its own data set is not reachable "
        "(default: arithmetic champ)",
    )
    parser.add_argument("--base", metavar="MODEL", help="base model of an adapter (default: the one that it names)")
    parser.add_argument(
        "--preset",
        choices=["paper"],
        help="paper: greedy, one answer, 8,192 new tokens (default: what generation_config.json recommends)",
    )
    parser.add_argument(
        "--samples", type=positive, metavar="N", help="answers to each problem (default: 16 for AIME, else 1)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N problems of each task")
    parser.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="(default: 32,768; arithmetic 96, champ 256)"
    )
    parser.add_argument("--temperature", type=temperature, metavar="T", help="0 is greedy")
    parser.add_argument("--top-p", type=share, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K", help="-1 for all tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="of all answers together (default 42)")
    parser.add_argument(
        "--precision", choices=["bf16", "fp32"], default="bf16", help="of the model in this process (default bf16)"
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=16,
        metavar="N",
        help="answers at a time in this process, requests at a time to a server (default 16)",
    )
    parser.add_argument(
        "--url", metavar="URL", help="an OpenAI-compatible server with the model, as http://localhost:8000/v1"
    )
    parser.add_argument("--served-name", metavar="NAME", help="the model's name there (default: the only one)")
    parser.add_argument(
        "--server-commands", action="store_true", help="print lines that serve this model with vLLM or SGLang, and end"
    )


def main(arguments: argparse.Namespace) -> None:
    if arguments.output is None and not arguments.server_commands:
        raise UserError("eval: found no --output; expected a new folder for the result: --output DIR")
    from vcore_ds.commands.evaluate.sampling import PAPER_MAX_NEW_TOKENS, choose_sampling
    from vcore_ds.models.named_model import find_named_model

    model = find_named_model(arguments.model, arguments.base, remedy="Name another one with --base MODEL")
    limit = arguments.max_new_tokens or (PAPER_MAX_NEW_TOKENS if arguments.preset == "paper" else None)
    changes = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k", "seed")}
    sampling = choose_sampling(model.weights, arguments.preset, changes)
    if sampling.is_greedy and (arguments.samples or 1) > 1:
        raise UserError(
            f"--samples: found {arguments.samples} with greedy decoding, which gives the same answer each time; "
            "expected 1, or sampling. Set --temperature, or leave --samples out"
        )
    if arguments.server_commands:
        from vcore_ds.commands.evaluate.server_commands import server_commands

        print(server_commands(model, max_new_tokens=limit, seed=sampling.seed, words=_repeated(arguments)))
        return
    check_packages()
    from vcore_ds.commands.evaluate.session import Settings, evaluate
    from vcore_ds.commands.evaluate.tasks import chosen_tasks

    evaluate(
        model,
        Settings(
            output=arguments.output,
            tasks=chosen_tasks(arguments.tasks, arguments.limit),
            preset=arguments.preset,
            sampling=sampling,
            num_samples=arguments.samples,
            max_new_tokens=limit,
            precision=arguments.precision,
            batch_size=arguments.batch_size,
            url=arguments.url,
            served_name=arguments.served_name,
        ),
    )


def after_training(recipe: str, overrides: Sequence[str]) -> None:
    """Evaluates what this process has just trained on the tasks that need no download, on rank 0, in a process without
    ranks. An evaluation that fails costs a warning and not the run."""
    from vcore_ds.config.load import load_recipe
    from vcore_ds.distributed import layout

    if not layout.is_first():
        return
    run = Path(load_recipe(recipe, overrides).run.output_dir)
    print("\nEvaluation of the result on arithmetic and held-out problems (a few minutes):", flush=True)
    words = ["eval", str(run), "--output", str(run / OF_A_RUN)]
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # a script may have added to it
    if subprocess.run([sys.executable, "-m", "vcore_ds.cli", *words], env=environment).returncode != 0:
        print(f"warning: no evaluation; repeat it: {shlex.join(['vcore-ds', *words])}", flush=True)


def check_packages() -> None:
    """Raises UserError where the extra `eval` is not installed."""
    missing = [name for name in ("inspect_ai", "reasoning_gym") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"eval: {sys.executable} does not find {' and '.join(missing)}; expected the extra `eval`. Install it with "
            "pip install 'vcore_ds[eval]' (a checkout: make .venv)"
        )


def _repeated(arguments: argparse.Namespace) -> str:
    """The options of this evaluation that the printed one repeats."""
    words = ["--tasks", *arguments.tasks]
    words += ["--preset", arguments.preset] if arguments.preset else []
    for name in ("samples", "limit", "max_new_tokens", "temperature", "top_p", "top_k", "seed"):
        value = getattr(arguments, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return " ".join([*words, "--batch-size 256", f"--output {arguments.output or 'DIR'}"])
