"""An evaluation: inspect asks, grades, logs and resumes; the result is read from its logs."""

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from inspect_ai import Task, eval_set
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import ChatMessageUser, GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from openai import OpenAIError
from tenacity import RetryError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from vcore_ds.commands.evaluate.model_apis import (
    MAX_RETRIES,
    TOKENS,
    InProcessAPI,
    Request,
    Sampling,
    Server,
    find_server,
)
from vcore_ds.commands.evaluate.tasks import ChosenTask
from vcore_ds.commands.named_model import NamedModel
from vcore_ds.common.digests import compute_file_digest
from vcore_ds.common.errors import RunStopped, UserError, first_line
from vcore_ds.common.locks import LOCK, lock_folder
from vcore_ds.common.paths import write_text, writing
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.common.text import align_columns
from vcore_ds.common.version import __version__
from vcore_ds.data.answers import AnswerChecker, Kind, final_answer, find_last_code_block, is_right
from vcore_ds.data.conversations import check_tokenizer, render_prompt
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.model_identity import compute_model_digest
from vcore_ds.training import evaluation_folder
from vcore_ds.training.evaluation_folder import EVALUATION, Evaluation, SampleResult, TaskResult

LOGS = "inspect_logs"  # subfolder of inspect's logs, from which it resumes
ANSWER_SECONDS = 5  # CPU time limit of comparing one answer
PACKAGES = ("inspect_ai", "math-verify", "transformers", "peft", "torch", "reasoning-gym")


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation, as on the command line."""

    output: Path
    tasks: Sequence[ChosenTask]
    preset: str | None
    sampling: Sampling
    precision: str
    batch_size: int
    url: str | None
    served_name: str | None


def evaluate(model: NamedModel, settings: Settings) -> Evaluation:
    """Answer and grade every task, or resume it, write the folder, and print the table. Raises UserError where the
    model, the server or the folder cannot be used, RunStopped on Ctrl-C."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(model.tokenizer, "RUN|MODEL")
    check_tokenizer(tokenizer)
    folder = settings.output
    with writing("--output", folder), lock_folder(folder):
        others = {file.name for file in folder.iterdir()} - {LOCK}
        if EVALUATION in others or (others and LOGS not in others):
            raise UserError(
                f"--output: {folder}: holds {'a finished evaluation' if EVALUATION in others else min(others)}; "
                "expected a new or empty folder, or an unfinished evaluation. Name another one"
            )
        described: dict[str, Any] = {"path": model.path, "base": model.weights, "adapter": model.adapter}
        versions = {"vcore_ds": __version__} | {name: version(name) for name in PACKAGES}
        server = None
        if settings.url is not None:
            server = find_server(settings.url, settings.served_name, model, tokenizer)
        asks_text = server is not None and server.is_transformers
        questions = {task.name: _render_questions(task, tokenizer, asks_text) for task in settings.tasks}
        api: InProcessAPI | Server
        if server is None:
            batches = _make_batches(settings, questions)
            api = InProcessAPI(model, tokenizer, settings.sampling, settings.precision, batches)
            described |= {"precision": settings.precision, "batch_size": settings.batch_size, "device": api.device.type}
        else:
            api = server
            described |= {"url": server.url, "served_name": server.name}
        logs = _run(api, model, settings, questions)
        evaluation = _write_result(settings, described, versions, logs)
    print(f"Result: {folder}", flush=True)
    return evaluation


def _render_questions(task: ChosenTask, tokenizer: PreTrainedTokenizerBase, as_text: bool) -> list[Sample]:
    """The problems as inspect asks them: rendered with the chat template, as in training, and tokenized here; `as_text`
    for a server that takes no tokens."""
    questions = []
    for problem in task.problems:
        text = render_prompt([{"role": "user", "content": str(problem.input)}], tokenizer)
        tokens = {TOKENS: tokenizer(text, add_special_tokens=False)["input_ids"]}
        prompt = ChatMessageUser(content=text, metadata=None if as_text else tokens)
        questions.append(Sample(id=problem.id, input=[prompt], target=problem.target, metadata=tokens))
    return questions


def _make_batches(settings: Settings, questions: dict[str, list[Sample]]) -> list[list[Request]]:
    """Split the answers to generate into batches, in inspect's order of asking."""
    batches = []
    for task in settings.tasks:
        requests = [
            Request(
                tuple((one.metadata or {})[TOKENS]),
                derive_seed(settings.sampling.seed, task.name, one.id, epoch),
                task.max_new_tokens,
            )
            for epoch in range(1, task.num_samples + 1)
            for one in questions[task.name]
        ]
        batches += [requests[i : i + settings.batch_size] for i in range(0, len(requests), settings.batch_size)]
    return batches


def _run(
    api: InProcessAPI | Server, model: NamedModel, settings: Settings, questions: dict[str, list[Sample]]
) -> dict[str, EvalLog]:
    """Run inspect, which reuses the answers of earlier logs; return each task's log, without samples."""
    sampling, checker, tasks = settings.sampling, AnswerChecker(ANSWER_SECONDS), []
    for task in settings.tasks:
        config = GenerateConfig(max_tokens=task.max_new_tokens)
        if isinstance(api, Server):
            config.extra_body = api.extra_body(sampling, task.max_new_tokens)
        tasks.append(
            Task(
                name=task.name,
                dataset=MemoryDataset(questions[task.name], name=task.name),
                epochs=task.num_samples,
                solver=answer_with_seed(task.name, sampling.seed),
                scorer=final_answer_scorer(task.kind, checker) if task.kind is not None else None,
                config=config,
            )
        )
    try:
        _, logs = eval_set(
            tasks,
            log_dir=str(_find_logs(model, settings)),
            model=api.as_model(GenerateConfig(temperature=sampling.temperature, top_p=sampling.top_p)),
            max_tasks=1,
            max_samples=settings.batch_size,
            max_connections=settings.batch_size,
            max_retries=MAX_RETRIES,
            debug_errors=True,  # raise the first error unchanged
            retry_attempts=1,
            retry_immediate=False,
            display="plain",
            log_level="error",
            ctl_server=False,
        )
    except (OpenAIError, RetryError) as error:
        raise UserError(
            f"--url: {settings.url}: a request failed {MAX_RETRIES + 1} times or was refused: "
            f"{first_line(error.__cause__ or error):.300}; expected an answer. Read the server's log; the same "
            "command resumes"
        ) from None
    finally:
        checker.close()
    if len(logs) < len(tasks):
        raise RunStopped("eval: interrupted; finished answers are kept, and the same command resumes")
    return {log.eval.task: log for log in logs}


def _find_logs(model: NamedModel, settings: Settings) -> Path:
    """Return the folder of inspect's logs, named by all that must be equal for answers to be reused; a server's URL may
    differ. Raises UserError where `settings.output` has logs of another evaluation."""
    identity: list[Any] = [model.weights, model.adapter, asdict(settings.sampling)]
    identity += [[task.name, task.num_samples, task.max_new_tokens, _describe(task)] for task in settings.tasks]
    if settings.url is None:  # a model trained again has the same path but other weights
        identity += [settings.precision, settings.batch_size, _weight_digests(model)]
    logs = settings.output / LOGS / _digest(identity)
    if logs.parent.is_dir() and {*logs.parent.iterdir()} - {logs}:
        raise UserError(
            f"--output: {settings.output}: holds an evaluation of another model, other problems or with other "
            "sampling; expected the same ones, to resume it. Name another folder"
        )
    return logs


@solver
def answer_with_seed(task: str, seed: int) -> Solver:
    """Ask the model, with a seed per answer. Raises UserError where a server counts other prompt tokens, or reports no
    finish reason or usage."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state, seed=derive_seed(seed, task, state.sample_id, state.epoch))
        usage, reason = state.output.usage, state.output.stop_reason
        if usage is None or reason not in ("stop", "max_tokens", "model_length"):
            raise UserError(
                f"--url: found an answer with finish reason {reason} and usage {usage}; expected `stop` or `length`, "
                "and the number of tokens. Use another server"
            )
        if usage.input_tokens != (expected := len(state.metadata[TOKENS])):
            raise UserError(
                f"--url: found a prompt of {usage.input_tokens} tokens there, {expected} here; expected the same "
                "prompt as in training. Serve the very model that RUN|MODEL names, with its tokenizer"
            )
        return state

    return solve


@scorer(name="final_answer", metrics=[accuracy(), stderr()])
def final_answer_scorer(kind: Kind, checker: AnswerChecker) -> Scorer:
    lock = anyio.Lock()

    async def score(state: TaskState, target: Target) -> Score:
        answer = final_answer(state.output.completion, kind)
        async with lock:  # the checker has one child process
            right = await to_thread.run_sync(is_right, answer, target.text, kind, checker)
        return Score(value=CORRECT if right else INCORRECT, answer=answer)

    return score


def derive_seed(seed: int, task: str, problem_id: int | str | None, epoch: int) -> int:
    """Derive a seed from the problem's id and the answer's number, in 31 bits: some servers take no more."""
    return torch_seed(Stream.EVALUATION, seed, zlib.crc32(f"{task}/{problem_id}".encode()), epoch - 1) % 2**31


def _write_result(
    settings: Settings, model: dict[str, Any], versions: dict[str, str], logs: dict[str, EvalLog]
) -> Evaluation:
    results: dict[str, TaskResult] = {}
    generations: dict[str, dict[str, Any]] = {}
    rows = [("task", "problems", "samples", "accuracy", "std. error", "truncated", "no answer", "mean tokens")]
    for task in settings.tasks:
        samples = _read_samples(logs[task.name])
        result = evaluation_folder.summarize(samples)
        share, error = "graded elsewhere", ""
        if task.kind is None:
            numbers = {name: value for name, value in asdict(result).items() if name != "accuracy"}
            generations[task.name] = {"file": _write_generations(settings.output, task, samples), **numbers}
        else:
            evaluation_folder.write_samples(settings.output, task.name, samples)
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
        "prompts": {task.name: _digest(_describe(task)) for task in settings.tasks},  # for `vcore-ds compare`
    }
    evaluation = Evaluation(model, settings.preset, sampling, versions, results, generations)
    evaluation_folder.write_evaluation(settings.output, evaluation)
    print("\n".join(["", *align_columns(rows)]), flush=True)
    return evaluation


def _read_samples(log: EvalLog) -> list[SampleResult]:
    """Read all samples of a task's log, sorted by problem, then number."""
    results = []
    for sample in read_eval_log(log.location, exclude_fields={"messages", "events"}).samples or ():
        output, score = sample.output, (sample.scores or {}).get("final_answer")
        answer = score.answer if score is not None else find_last_code_block(output.completion)
        assert output.usage is not None  # both APIs set it
        result = SampleResult(
            problem_id=str(sample.id),
            sample=sample.epoch - 1,
            correct=score is not None and score.value == CORRECT,
            answered=answer is not None,
            truncated=output.stop_reason in ("max_tokens", "model_length"),
            num_tokens=output.usage.output_tokens,
            answer=answer,
            output=output.completion,
        )
        results.append(result)
    return sorted(results, key=lambda result: (result.problem_id, result.sample))


def _write_generations(folder: Path, task: ChosenTask, samples: Sequence[SampleResult]) -> str:
    """Write the input of a code task's official grader, and return the file's name. LiveCodeBench: a JSON list of
    {question_id, code_list}. OJBench: a JSON line per answer, with the row's columns and `content`."""
    by_problem: dict[str, list[SampleResult]] = defaultdict(list)
    for sample in samples:
        by_problem[sample.problem_id].append(sample)
    answers = [(problem.metadata or {}, by_problem[str(problem.id)]) for problem in task.problems]
    name = f"{task.name}.generations.{'json' if task.name == 'livecodebench' else 'jsonl'}"
    if task.name == "livecodebench":
        rows = [{**row, "code_list": [sample.answer or "" for sample in given]} for row, given in answers]
        text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    else:
        rows = [{**row, "content": sample.output} for row, given in answers for sample in given]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(folder / name, text)
    return name


def _weight_digests(model: NamedModel) -> list[str]:
    """Digests of the base model's files, where they are local, and of the adapter's."""
    digests = [compute_model_digest(model.weights)] if Path(model.weights).is_dir() else []
    if model.adapter is not None:
        files = sorted(Path(model.adapter).glob("adapter_*"))
        digests += [f"{file.name} {compute_file_digest(file)}" for file in files]
    return digests


def _describe(task: ChosenTask) -> list[dict[str, Any]]:
    return [
        {"id": problem.id, "prompt": problem.input, "expected": problem.target, "extra": problem.metadata}
        for problem in task.problems
    ]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
