"""An evaluation from start to end: model, problems, answers, result; begun, or resumed where it was killed."""

import hashlib
import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from vcore_ds import __version__
from vcore_ds.commands.evaluate import apis, table
from vcore_ds.commands.evaluate.generation import InProcessModel
from vcore_ds.commands.evaluate.inspection import run_task
from vcore_ds.commands.evaluate.journal import Journal, Request
from vcore_ds.commands.evaluate.official import write_generations
from vcore_ds.commands.evaluate.problems import Problem, Task
from vcore_ds.commands.evaluate.sampling import Sampling
from vcore_ds.commands.evaluate.server import Server, check_prompt, open_server
from vcore_ds.data.rendering import check_tokenizer, render_prompt
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.files.evaluation_folder import (
    EVALUATION,
    Evaluation,
    SampleResult,
    TaskResult,
    read_samples,
    samples_path,
    summarize,
    write_evaluation,
    write_samples,
)
from vcore_ds.files.json_files import write_json
from vcore_ds.files.locks import LOCK, alone_in
from vcore_ds.files.model_folder import digest_of_model
from vcore_ds.files.unfinished_work import REQUEST, describe_differences, read_request
from vcore_ds.files.user_paths import writing
from vcore_ds.models.named_model import NamedModel, end_token_ids
from vcore_ds.random_streams import Stream, torch_seed

UNFINISHED = "unfinished"
"""Folder with the request and the answers so far; gone when the evaluation is done."""
PACKAGES = ("inspect_ai", "math-verify", "transformers", "peft", "torch", "reasoning-gym")


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    output: Path
    tasks: dict[str, tuple[Task, list[Problem]]]
    preset: str | None
    sampling: Sampling
    num_samples: int | None
    """Answers to a problem; None for each task's own number."""
    max_new_tokens: int | None
    """None for each task's own limit."""
    precision: str
    batch_size: int
    url: str | None
    served_name: str | None

    def samples_of(self, task: Task) -> int:
        """One where decoding is greedy: more would be the same answer again."""
        return 1 if self.sampling.is_greedy else self.num_samples or task.num_samples

    def limit_of(self, task: Task) -> int:
        return self.max_new_tokens or task.max_new_tokens


def evaluate(model: NamedModel, settings: Settings) -> Evaluation:
    """Answers and grades every task, writes the folder, and prints the table.

    Raises:
        UserError: the model, the server or the folder cannot be used, or the folder holds another evaluation.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(model.tokenizer, "RUN|MODEL")
    check_tokenizer(tokenizer)
    with writing("--output", settings.output), alone_in(settings.output):
        _begin(settings.output, _request_of(model, settings))
        asked = {
            name: _requests(task, problems, settings, tokenizer) for name, (task, problems) in settings.tasks.items()
        }
        source: InProcessModel | Server
        if settings.url is None:
            source = InProcessModel(model, tokenizer, settings.sampling, settings.precision)
        else:
            ends = end_token_ids(_generation_config(model.weights), tokenizer)
            source = open_server(settings.url, settings.served_name, model, settings.sampling, ends)
            _check_server(source, asked)
        tasks: dict[str, TaskResult] = {}
        generations: dict[str, dict[str, Any]] = {}
        for name, (task, problems) in settings.tasks.items():
            if task.kind is not None and samples_path(settings.output, name).is_file():
                samples = read_samples(settings.output, name)
            else:
                samples = _answer(source, model, task, problems, asked[name], settings)
            result = summarize(samples)
            if task.kind is None:
                file = write_generations(settings.output, task, problems, samples)
                kept = {key: value for key, value in asdict(result).items() if key != "accuracy"}
                generations[name] = {"file": file, **kept}
            else:
                write_samples(settings.output, name, samples)
                tasks[name] = result
        evaluation = Evaluation(
            model=_describe(model, settings, source),
            preset=settings.preset,
            sampling=_describe_sampling(settings),
            versions=_versions(source),
            tasks=tasks,
            generations=generations,
        )
        write_evaluation(settings.output, evaluation)
        shutil.rmtree(settings.output / UNFINISHED)
    print(f"\n{table.describe(evaluation)}\nResult: {settings.output}", flush=True)
    return evaluation


def _begin(folder: Path, request: dict[str, Any]) -> None:
    """Raises UserError where the folder holds something else than a part of this very evaluation."""
    path = folder / UNFINISHED / REQUEST
    if (folder / EVALUATION).exists():
        raise UserError(f"--output: {folder}: holds a finished evaluation; expected a new folder. Name another one")
    if path.is_file():
        if differences := describe_differences(read_request(path.parent), request):
            raise UserError(
                f"--output: {folder}: holds an unfinished evaluation of something else:\n{differences}\nexpected the "
                "same values, to resume it, or a new folder. Name another folder"
            )
        return
    if any(found.name not in (LOCK, UNFINISHED) for found in folder.iterdir()):
        raise UserError(f"--output: {folder}: is not an empty folder; expected a new or empty one. Name another one")
    write_json(path, request)


def _request_of(model: NamedModel, settings: Settings) -> dict[str, Any]:
    """What an attempt that resumes has to share with the first, in flat keys; a server may have moved."""
    request: dict[str, Any] = {
        "version": __version__,
        "model": model.path,
        "base": model.weights,
        "adapter": model.adapter,
        "preset": settings.preset,
        "served": settings.url is not None,
        **asdict(settings.sampling),
    }
    if settings.url is None:  # these decide the last bits of a logit
        request |= {"precision": settings.precision, "batch_size": settings.batch_size}
        if Path(model.weights).is_dir():  # a run that was trained again has its old name
            request["weights"] = digest_of_model(model.weights)
        if model.adapter is not None:
            request["adapter_weights"] = _digest_of_adapter(Path(model.adapter))
    for name, (task, problems) in settings.tasks.items():
        request[f"tasks.{name}"] = {
            "problems": len(problems),
            "samples": settings.samples_of(task),
            "max_new_tokens": settings.limit_of(task),
            "digest": _digest(problems),
        }
    return request


def _digest_of_adapter(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("adapter_*")):
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(problems: Sequence[Problem]) -> str:
    """Equal where two evaluations put the same questions and expect the same answers."""
    return hashlib.sha256(json.dumps([asdict(problem) for problem in problems]).encode()).hexdigest()[:16]


def _requests(
    task: Task, problems: Sequence[Problem], settings: Settings, tokenizer: PreTrainedTokenizerBase
) -> list[Request]:
    """The answers to draw, problem by problem; seeds are functions of the problem and the answer's number."""
    requests = []
    for problem in problems:
        prompt = render_prompt([{"role": "user", "content": problem.prompt}], tokenizer)
        ids = tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        place = zlib.crc32(f"{task.name}/{problem.id}".encode())
        for sample in range(settings.samples_of(task)):
            # 31 bits: some servers take no more.
            seed = torch_seed(Stream.EVALUATION, settings.sampling.seed, place, sample) % 2**31
            requests.append(Request(problem.id, sample, prompt, ids, settings.limit_of(task), seed))
    return requests


def _check_server(server: Server, asked: dict[str, list[Request]]) -> None:
    """Raises UserError where the server has another prompt, or too little room for prompt and answer."""
    every = [request for requests in asked.values() for request in requests]
    check_prompt(server, every[0].prompt, every[0].prompt_ids)
    need = max(len(request.prompt_ids) + request.max_new_tokens for request in every)
    if server.longest is not None and server.longest < need:
        raise UserError(
            f"--url: {server.url}: serves sequences of {server.longest:,} tokens; expected {need:,} for the longest "
            "prompt with its answer. Serve longer ones, or set --max-new-tokens"
        )


def _answer(
    source: InProcessModel | Server,
    model: NamedModel,
    task: Task,
    problems: Sequence[Problem],
    requests: list[Request],
    settings: Settings,
) -> list[SampleResult]:
    # The first batch of long answers may take minutes, or hours without a GPU.
    limit, at_a_time = settings.limit_of(task), min(settings.batch_size, len(requests))
    print(f"{task.name}: {len(requests):,} answers of at most {limit:,} tokens, {at_a_time} at a time", flush=True)
    journal = Journal(settings.output / UNFINISHED / f"{task.name}.jsonl", task.name, len(requests))
    api: apis.InProcessAPI | apis.ServerAPI
    if isinstance(source, Server):
        api = apis.ServerAPI(source, requests, journal)
    else:
        api = apis.InProcessAPI(model.name, source, requests, settings.batch_size, journal)
        at_a_time *= 2  # the next batch waits while one runs
    return run_task(
        task,
        problems,
        requests,
        api,
        sampling=settings.sampling,
        logs=settings.output / "inspect_logs",
        max_connections=min(at_a_time, len(requests)),
    )


def _generation_config(base: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(base)
    except OSError:
        return GenerationConfig()


def _describe(model: NamedModel, settings: Settings, source: InProcessModel | Server) -> dict[str, Any]:
    found: dict[str, Any] = {"path": model.path, "base": model.weights, "adapter": model.adapter}
    if isinstance(source, Server):
        return found | {"url": source.url, "served_name": source.name, "server": source.software}
    return found | {
        "precision": settings.precision,
        "batch_size": settings.batch_size,
        "device": source.device.type,
    }


def _describe_sampling(settings: Settings) -> dict[str, Any]:
    limits = {name: settings.limit_of(task) for name, (task, _) in settings.tasks.items()}
    same = len(set(limits.values())) == 1
    return {
        **asdict(settings.sampling),
        "max_new_tokens": next(iter(limits.values())) if same else limits,
        # So that a comparison of evaluations with other prompts is refused.
        "prompts": {name: _digest(problems) for name, (_, problems) in settings.tasks.items()},
    }


def _versions(source: InProcessModel | Server) -> dict[str, str]:
    found = {"vcore_ds": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if isinstance(source, Server):
        found[f"server: {source.software}"] = source.version or "not reported"
    return found
