"""`vcore-ds eval`: accuracy of a model, an adapter or a run's result on benchmarks."""

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from vcore_ds.commands.arguments import positive, share, temperature
from vcore_ds.commands.named_model import find_named_model
from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import refuse_existing
from vcore_ds.data.answers import Kind
from vcore_ds.data.prepare.sources import find_local_files
from vcore_ds.training.evaluation_folder import EVALUATION, RUN_EVALUATION

HELP = "accuracy on benchmarks, or on two small tasks that need no download"
DESCRIPTION = (
    "Let a model answer problems, and grade its final answers: accuracy, shares of truncated and of missing answers, "
    "mean length. Without --tasks: arithmetic and the quickstart's held-out problems, a few minutes with a small model "
    "and no GPU. Prompts are rendered as in training. The same command resumes an interrupted evaluation. For large "
    "models use an OpenAI-compatible server (--url). docs/evaluation.md has examples."
)
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that launchers set for a rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="RUN|MODEL", help="a model's folder or hub id, an adapter's folder, or the folder of a run")
    add("--output", type=Path, required=True, metavar="DIR", help="a new folder, or an unfinished evaluation's")
    tasks = "tasks of docs/evaluation.md, each from FILE if given, or your own problems (default: arithmetic champ)"
    add("--tasks", nargs="+", default=["arithmetic", "champ"], metavar="NAME[=FILE]", help=tasks)
    kinds = "your own problems' answers (default: choice where rows have `options`, else math; docs/evaluation.md)"
    add("--answer", choices=get_args(Kind), help=kinds)
    template = "your own problems' prompt: a text with {problem}, and {options} if rows have them, or a file with one"
    add("--prompt", metavar="TEMPLATE", help=template)
    add("--base", metavar="MODEL", help="base model of an adapter (default: the one it names)")
    add("--preset", choices=["paper"], help="greedy, 8,192 new tokens (default: as generation_config.json recommends)")
    add("--samples", type=positive, metavar="N", help="answers per problem (default: 16 for AIME, else 1)")
    add("--limit", type=positive, metavar="N", help="evaluate the first N problems of each task")
    most = "maximum for an answer (default 32,768; arithmetic 96, champ 256)"
    add("--max-new-tokens", type=positive, metavar="N", help=most)
    add("--temperature", type=temperature, metavar="T", help="0 for greedy decoding")
    add("--top-p", type=share, metavar="P", help="sample from the most likely tokens with this total probability")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens; -1 for all")
    add("--seed", type=int, metavar="N", help="seed of the evaluation (default 42)")
    add("--precision", choices=["bf16", "fp32"], default="bf16", help="precision without --url (default bf16)")
    batch = "answers generated together, or requests sent together (default 16)"
    add("--batch-size", type=positive, default=16, metavar="N", help=batch)
    add("--url", metavar="URL", help="OpenAI-compatible server of the model, such as http://localhost:8000/v1")
    add("--served-name", metavar="NAME", help="the model's name on the server (default: RUN|MODEL)")


def main(arguments: argparse.Namespace) -> None:
    check_packages()
    refuse_existing(arguments.output / EVALUATION, "a new folder, or an unfinished evaluation")
    for files in filter(None, (word.partition("=")[2] for word in arguments.tasks)):
        find_local_files(files, "test")
    model = find_named_model(arguments.model, arguments.base, remedy="Name another one with --base MODEL")
    if arguments.url is not None and model.adapter is not None and arguments.served_name is None:
        raise UserError(  # the server's only model may be the base
            f"--url: found the adapter {model.adapter} without a name; expected --served-name NAME, as in vllm serve "
            f"BASE --enable-lora --lora-modules NAME={model.adapter}"
        )
    with lasting_imports():
        from vcore_ds.commands.evaluate.session import evaluate
        from vcore_ds.commands.evaluate.tasks import choose_tasks

    changes = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k", "seed")}
    sampling = choose_sampling(model.weights, arguments.preset, changes)
    is_greedy = sampling.temperature == 0
    if is_greedy and (arguments.samples or 1) > 1:
        raise UserError(
            f"--samples: found {arguments.samples} with greedy decoding, which gives the same answer each time; "
            "expected 1, or sampling. Set --temperature, or leave --samples out"
        )
    tasks = choose_tasks(
        arguments.tasks,
        answer=arguments.answer,
        prompt=arguments.prompt,
        limit=arguments.limit,
        num_samples=1 if is_greedy else arguments.samples,
        max_new_tokens=arguments.max_new_tokens or (8_192 if arguments.preset == "paper" else None),
    )
    evaluate(arguments, model, sampling, tasks)


@dataclass(frozen=True)
class Sampling:
    """All sampling fields, so that none is left to a server's defaults. Defaults are the paper's (table "Inference
    hyperparameters")."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 for all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 42


def choose_sampling(model: str, preset: str | None, changes: dict[str, Any]) -> Sampling:
    """The paper's or the model's sampling, changed by the values of `changes` that are not None. The model's is that of
    generation_config.json, or greedy, without its repetition penalty, which is meant for short chats and lowers
    accuracy."""
    from vcore_ds.commands.generation import read_generation_config

    sampling = Sampling()
    if preset != "paper" and (recommended := read_generation_config(model)).do_sample:
        sampling = Sampling(
            temperature=recommended.temperature or 1.0,
            top_p=recommended.top_p or 1.0,
            top_k=recommended.top_k or -1,
            min_p=recommended.min_p or 0.0,
        )
    return replace(sampling, **{name: value for name, value in changes.items() if value is not None})


def check_packages() -> None:
    """Raise UserError where the extra `eval` is not installed."""
    packages = ("inspect_ai", "reasoning_gym", "math_verify")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"eval: {sys.executable} does not find {' and '.join(missing)}; expected the extra `eval`. Install it with "
            "pip install 'vcore_ds[eval]' (a checkout: make .venv)"
        )


def evaluate_run(run: Path) -> None:
    """Evaluate a run's result on the default tasks, in a process without the launcher's environment. A failed
    evaluation is a warning; the run is finished."""
    print("\nEvaluating the result on arithmetic and held-out problems (a few minutes):", flush=True)
    words = ["eval", str(run), "--output", str(run / RUN_EVALUATION)]
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # with what a script added
    # -P: the working folder may hold a queue.py.
    if subprocess.run([sys.executable, "-P", "-m", "vcore_ds.commands.cli", *words], env=environment).returncode != 0:
        print(f"warning: the evaluation failed; repeat it: {shlex.join(['vcore-ds', *words])}", flush=True)
