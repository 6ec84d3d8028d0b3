"""An evaluation from start to end: inspect asks, grades, logs and resumes; the result is read from its logs."""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from inspect_ai import Task, eval_set
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.dataset import MemoryDataset
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, Model, modelapi
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from openai import OpenAIError
from tenacity import RetryError
from transformers.utils import logging

from vcore_ds import __version__
from vcore_ds.commands.evaluate.generation import InProcessAPI, Request, Sampling
from vcore_ds.commands.evaluate.server import ServerAPI
from vcore_ds.commands.evaluate.tasks import ChosenTask
from vcore_ds.commands.named_model import NamedModel
from vcore_ds.common.errors import RunStopped, UserError, first_line
from vcore_ds.common.locks import LOCK, alone_in
from vcore_ds.common.paths import writing, written_aside
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.common.text import aligned
from vcore_ds.data.answers import Kind, final_answer, is_right, last_code_block
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.data.verification import AnswerChecker
from vcore_ds.models.model_identity import compute_model_digest
from vcore_ds.train.evaluation_folder import (
    EVALUATION,
    Evaluation,
    SampleResult,
    TaskResult,
    summarize,
    write_evaluation,
    write_samples,
)

LOGS = "inspect_logs"
"""Folder, in the evaluation's, of inspect's logs, from which it resumes."""
MAX_RETRIES = 4
"""Attempts after the first for a request that a server fails."""
ANSWER_SECONDS = 5
"""CPU time to compare one answer."""
PACKAGES = ("inspect_ai", "math-verify", "transformers", "peft", "torch", "reasoning-gym")


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    output: Path
    tasks: Sequence[ChosenTask]
    preset: str | None
    sampling: Sampling
    precision: str
    batch_size: int
    url: str | None
    served_name: str | None


def evaluate(model: NamedModel, settings: Settings) -> Evaluation:
    """Answers and grades every task, writes the folder, and prints the table; resumes what an earlier attempt began.

    Raises:
        UserError: the model, the server or the folder cannot be used, or the folder holds another evaluation.
        RunStopped: it was interrupted.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(model.tokenizer, "RUN|MODEL")
    check_tokenizer(tokenizer)
    folder = settings.output
    with writing("--output", folder), alone_in(folder):
        others = {file.name for file in folder.iterdir()} - {LOCK}
        if EVALUATION in others or (others and LOGS not in others):
            raise UserError(
                f"--output: {folder}: holds {'a finished evaluation' if EVALUATION in others else min(others)}; "
                "expected a new or empty folder, or an unfinished evaluation. Name another one"
            )
        described: dict[str, Any] = {"path": model.path, "base": model.weights, "adapter": model.adapter}
        versions = {"vcore_ds": __version__} | {name: version(name) for name in PACKAGES}
        api: InProcessAPI | ServerAPI
        if settings.url is None:
            api = InProcessAPI(model, tokenizer, settings.sampling, settings.precision, _batches(settings))
            described |= {"precision": settings.precision, "batch_size": settings.batch_size, "device": api.device.type}
        else:
            api = ServerAPI(settings.url, settings.served_name, model, tokenizer, settings.sampling)
            described |= {"url": api.base_url, "served_name": api.model_name, "server": api.software}
            versions[f"server: {api.software}"] = api.version or "not reported"
        evaluation = _write_result(settings, described, versions, _run(api, model, settings))
    print(f"Result: {folder}", flush=True)
    return evaluation


# ---- inspect -------------------------------------------------------------------------------------------------------


def _run(api: InProcessAPI | ServerAPI, model: NamedModel, settings: Settings) -> dict[str, EvalLog]:
    """The finished log of each task, without its samples. inspect takes over the answers in earlier attempts' logs."""
    # What attempts must share besides the problems. A server may have moved.
    identity: list[Any] = [model.weights, model.adapter, asdict(settings.sampling)]
    if settings.url is None:
        # A run that was trained again has its old name.
        identity += [settings.precision, settings.batch_size, _digest_of_weights(model)]
    else:
        identity.append("served")
    checker = AnswerChecker(ANSWER_SECONDS)
    tasks = [
        Task(
            name=task.name,
            version=_digest([*identity, task.num_samples, _describe_problems(task)]),
            dataset=MemoryDataset(task.problems, name=task.name),
            epochs=task.num_samples,
            solver=answer_with_seed(task.name, settings.sampling.seed),
            scorer=final_answer_scorer(task.kind, checker) if task.kind is not None else None,
            config=GenerateConfig(max_tokens=task.max_new_tokens),
        )
        for task in settings.tasks
    ]
    # inspect wants the name that its decorator gives to a class.
    named_api = modelapi(name="vcore_ds")(lambda: lambda: api)()  # type: ignore[call-arg]
    sampling = GenerateConfig(temperature=settings.sampling.temperature, top_p=settings.sampling.top_p)
    try:
        _, logs = eval_set(
            tasks,
            log_dir=str(settings.output / LOGS),
            model=Model(named_api, sampling),
            max_tasks=1,
            max_samples=settings.batch_size,
            max_connections=settings.batch_size,
            max_retries=MAX_RETRIES,
            # The first error ends the evaluation, and is raised as it is.
            debug_errors=True,
            retry_attempts=1,
            retry_immediate=False,
            display="plain",
            log_level="error",
            ctl_server=False,
        )
    except PrerequisiteError:
        raise UserError(
            f"--output: {settings.output}: holds an evaluation of another model, other problems or with other "
            "sampling; expected the same ones, to resume it. Name another folder"
        ) from None
    except (OpenAIError, RetryError) as error:
        raise UserError(
            f"--url: {api.base_url}: a request failed {MAX_RETRIES + 1} times or was refused: "
            f"{first_line(error.__cause__ or error):.300}; expected an answer. Look into the server's log; the same "
            "command resumes"
        ) from None
    finally:
        checker.close()
    if len(logs) < len(tasks):
        raise RunStopped("eval: interrupted; the answers so far are kept, and the same command resumes")
    return {log.eval.task: log for log in logs}


@solver
def answer_with_seed(task: str, seed: int) -> Solver:
    """Asks the model, with a seed for each answer."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await generate(state, seed=answer_seed(seed, task, state.sample_id, state.epoch))

    return solve


@scorer(name="final_answer", metrics=[accuracy(), stderr()])
def final_answer_scorer(kind: Kind, checker: AnswerChecker) -> Scorer:
    """Whether the output's final answer is the expected one."""
    lock = anyio.Lock()

    async def score(state: TaskState, target: Target) -> Score:
        answer = final_answer(state.output.completion, kind)
        async with lock:  # one child process compares
            right = await to_thread.run_sync(is_right, answer, target.text, kind, checker)
        return Score(value=CORRECT if right else INCORRECT, answer=answer)

    return score


def answer_seed(seed: int, task: str, problem_id: int | str | None, epoch: int) -> int:
    """A function of the problem's id and the number of the answer, in 31 bits: some servers take no more."""
    return torch_seed(Stream.EVALUATION, seed, zlib.crc32(f"{task}/{problem_id}".encode()), epoch - 1) % 2**31


def _batches(settings: Settings) -> list[list[Request]]:
    """The answers to draw, in the order in which inspect asks for those of a task."""
    batches = []
    for task in settings.tasks:
        requests = [
            Request(str(problem.input), answer_seed(settings.sampling.seed, task.name, problem.id, epoch), limit)
            for limit in [task.max_new_tokens]
            for epoch in range(1, task.num_samples + 1)
            for problem in task.problems
        ]
        batches += [requests[i : i + settings.batch_size] for i in range(0, len(requests), settings.batch_size)]
    return batches


# ---- the result ----------------------------------------------------------------------------------------------------


def _write_result(
    settings: Settings, model: dict[str, Any], versions: dict[str, str], logs: dict[str, EvalLog]
) -> Evaluation:
    """Writes each task's samples or programs, then evaluation.json; prints the table."""
    results: dict[str, TaskResult] = {}
    generations: dict[str, dict[str, Any]] = {}
    rows = [("task", "problems", "samples", "accuracy", "std. error", "truncated", "no answer", "mean tokens")]
    for task in settings.tasks:
        samples = _read_samples(logs[task.name])
        result = summarize(samples)
        share, error = "graded elsewhere", ""
        if task.kind is None:
            numbers = {name: value for name, value in asdict(result).items() if name != "accuracy"}
            generations[task.name] = {"file": _write_programs(settings.output, task, samples), **numbers}
        else:
            write_samples(settings.output, task.name, samples)
            results[task.name] = result
            scores = logs[task.name].results
            assert scores is not None
            share, error = f"{result.accuracy:.1%}", f"{scores.scores[0].metrics['stderr'].value:.1%}"
        counts = f"{result.num_problems:,}", f"{result.num_samples_per_problem:,}"
        shares = f"{result.truncated_share:.1%}", f"{result.unanswered_share:.1%}"
        rows.append((task.name, *counts, share, error, *shares, f"{result.mean_tokens:,.1f}"))
    limits = {task.name: task.max_new_tokens for task in settings.tasks}
    sampling = {
        **asdict(settings.sampling),
        "max_new_tokens": limits if len({*limits.values()}) > 1 else next(iter(limits.values())),
        # So that a comparison of evaluations with other prompts is refused.
        "prompts": {task.name: _digest(_describe_problems(task)) for task in settings.tasks},
    }
    evaluation = Evaluation(model, settings.preset, sampling, versions, results, generations)
    write_evaluation(settings.output, evaluation)
    print("\n".join(["", *aligned(rows)]), flush=True)
    return evaluation


def _read_samples(log: EvalLog) -> list[SampleResult]:
    """All samples in a task's log, by problem, then number."""
    results = []
    for sample in read_eval_log(log.location, exclude_fields={"messages", "events"}).samples or ():
        output, score = sample.output, (sample.scores or {}).get("final_answer")
        answer = score.answer if score is not None else last_code_block(output.completion)
        assert output.usage is not None  # as both APIs give it
        results.append(
            SampleResult(
                problem_id=str(sample.id),
                sample=sample.epoch - 1,
                correct=score is not None and score.value == CORRECT,
                answered=answer is not None,
                truncated=output.stop_reason in ("max_tokens", "model_length"),
                num_tokens=output.usage.output_tokens,
                answer=answer,
                output=output.completion,
            )
        )
    return sorted(results, key=lambda result: (result.problem_id, result.sample))


def _write_programs(folder: Path, task: ChosenTask, samples: Sequence[SampleResult]) -> str:
    """Writes what the official grader of a code task reads, and returns the file's name.

    LiveCodeBench: one JSON list of {question_id, code_list}. OJBench: a line for each answer, all columns of the prompt
    and `content`.
    """
    by_problem: dict[str, list[SampleResult]] = {str(problem.id): [] for problem in task.problems}
    for sample in samples:
        by_problem[sample.problem_id].append(sample)
    columns = [problem.metadata or {} for problem in task.problems]
    answers = list(zip(columns, by_problem.values(), strict=True))
    if task.name == "livecodebench":
        name = f"{task.name}.generations.json"
        rows = [{**row, "code_list": [sample.answer or "" for sample in given]} for row, given in answers]
        text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    else:
        name = f"{task.name}.generations.jsonl"
        rows = [{**row, "content": sample.output} for row, given in answers for sample in given]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with written_aside(folder / name) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return name


def _digest_of_weights(model: NamedModel) -> list[str]:
    """Of the base model's files, as far as they are on this machine, and of the adapter's."""
    digests = [compute_model_digest(model.weights)] if Path(model.weights).is_dir() else []
    if model.adapter is not None:
        files = sorted(Path(model.adapter).glob("adapter_*"))
        digests += [hashlib.sha256(f"{file.name}\n".encode() + file.read_bytes()).hexdigest() for file in files]
    return digests


def _describe_problems(task: ChosenTask) -> list[dict[str, Any]]:
    return [
        {"id": problem.id, "prompt": problem.input, "expected": problem.target, "extra": problem.metadata}
        for problem in task.problems
    ]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
