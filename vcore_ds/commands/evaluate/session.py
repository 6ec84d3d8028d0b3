"""An evaluation: inspect asks a model in this process or on a server, grades, logs and resumes; the result is read from
its logs."""

import argparse
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import torch
from anyio import to_thread
from inspect_ai import Task, eval_set
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import (
    ChatMessage,
    ChatMessageUser,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    get_model,
    modelapi,
)
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import OpenAIError
from tenacity import RetryError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from vcore_ds.commands.evaluate import Sampling
from vcore_ds.commands.evaluate.tasks import ChosenTask, format_generations
from vcore_ds.commands.generation import (
    end_token_ids,
    generate_answers,
    load_to_answer,
    longest_sequence,
    read_generation_config,
)
from vcore_ds.commands.named_model import NamedModel
from vcore_ds.common import __version__
from vcore_ds.common.errors import RunStopped, UserError, first_line
from vcore_ds.common.locks import lock_folder
from vcore_ds.common.paths import check_folder, compute_file_digest, refuse_existing, write_text, writing
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.common.text import align_columns
from vcore_ds.data.answers import AnswerChecker, Kind, final_answer, is_right
from vcore_ds.data.conversations import check_tokenizer, render_prompt
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.description import DTYPES
from vcore_ds.models.model_identity import compute_model_digest
from vcore_ds.training import evaluation_folder
from vcore_ds.training.evaluation_folder import (
    EVALUATION,
    Evaluation,
    SampleResult,
    TaskResult,
    compute_weights_digest,
)

LOGS = "inspect_logs"  # subfolder of inspect's logs, from which it resumes
TOKENS = "prompt_token_ids"  # metadata of a message from which inspect's providers of completions take the prompt
ANSWER_SECONDS = 5  # CPU time limit of comparing one answer
MAX_RETRIES = 4
REQUEST_SECONDS = 3_600.0  # timeout of one answer: tens of thousands of tokens on a busy GPU take many minutes
PACKAGES = ("inspect_ai", "math-verify", "transformers", "peft", "torch", "reasoning-gym")


class Request(NamedTuple):
    """One answer to generate."""

    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int


class InProcessAPI(ModelAPI):
    """A model, with its adapter if any, in this process. Batches are fixed in advance, so that a resumed evaluation
    forms the same ones and gets bitwise equal answers."""

    def __init__(
        self,
        model: NamedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        precision: str,
        batches: Sequence[Sequence[Request]],
    ) -> None:
        """Load the model. Raises UserError where it or its adapter cannot be loaded."""
        super().__init__(model.name)
        self._model = load_to_answer(model, DTYPES[precision])
        self.device = self._model.device
        ends = end_token_ids(self._model.generation_config, tokenizer)
        self._model.generation_config = GenerationConfig()  # its fields would fill in for unset ones
        # transformers takes no temperature of 0.
        drawn = {"do_sample": True, **asdict(sampling), "top_k": max(sampling.top_k, 0)}
        if sampling.temperature == 0:
            drawn = {"do_sample": False, "repetition_penalty": sampling.repetition_penalty}
        drawn.pop("seed", None)
        self._settings = GenerationConfig(use_cache=True, eos_token_id=ends, pad_token_id=ends[0], **drawn)
        self._tokenizer = tokenizer
        self._batches = {request: batch for batch in batches for request in batch}
        self._outputs: dict[Request, ModelOutput] = {}
        self._lock = anyio.Lock()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        assert input[0].metadata is not None and config.seed is not None and config.max_tokens is not None
        request = Request(tuple(input[0].metadata[TOKENS]), config.seed, config.max_tokens)
        async with self._lock:
            if request not in self._outputs:
                batch = self._batches[request]
                self._outputs |= zip(batch, await to_thread.run_sync(self.answer, batch), strict=True)
        return self._outputs[request]

    def answer(self, requests: Sequence[Request]) -> list[ModelOutput]:
        """Answer a batch, with the first request's seed. Raises UserError where a prompt leaves no room to answer."""
        prompts = [request.prompt for request in requests]
        longest = longest_sequence(self._model)
        if max(map(len, prompts)) >= longest:
            raise UserError(
                f"--tasks: found a prompt of {max(map(len, prompts)):,} tokens; expected fewer than {longest:,}, the "
                "model's longest sequence. Evaluate problems that fit"
            )
        torch.manual_seed(requests[0].seed)
        limits = [request.max_new_tokens for request in requests]
        outputs = []
        for prompt, answer in zip(prompts, generate_answers(self._model, prompts, limits, self._settings), strict=True):
            text = self._tokenizer.decode(answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            output = ModelOutput.from_content(self.model_name, str(text), answer.stop_reason)
            lengths = {"input_tokens": len(prompt), "output_tokens": len(answer.ids)}
            output.usage = ModelUsage(**lengths, total_tokens=sum(lengths.values()))
            outputs.append(output)
        return outputs


def open_server(
    arguments: argparse.Namespace, model: NamedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> Model:
    """The model on an OpenAI-compatible server. Raises UserError where it cannot be reached."""
    url = arguments.url.rstrip("/")
    try:
        httpx.get(f"{url}/models", timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"--url: {url}: cannot be reached ({first_line(error)}); expected an OpenAI-compatible server. Start one "
            "(docs/evaluation.md shows how), and wait until it is ready"
        ) from None
    settings = GenerationConfig(eos_token_id=read_generation_config(model.weights).eos_token_id)
    # The sampling fields that OpenAI's API lacks.
    fields = {key: getattr(sampling, key) for key in ("top_k", "min_p", "repetition_penalty")}
    fields["stop_token_ids"] = end_token_ids(settings, tokenizer)
    return get_model(
        f"openai-api-completions/vcore/{arguments.served_name or model.path}",
        config=GenerateConfig(temperature=sampling.temperature, top_p=sampling.top_p, extra_body=fields),
        base_url=url,
        api_key=os.environ.get("OPENAI_API_KEY") or "none",  # any text, for servers that need none
        memoize=False,
        client_timeout=REQUEST_SECONDS,
        max_retries=0,  # of the client; inspect retries
    )


def evaluate(
    arguments: argparse.Namespace, model: NamedModel, sampling: Sampling, tasks: Sequence[ChosenTask]
) -> Evaluation:
    """Answer and grade every task, or resume it, write the folder, and print the table. `arguments`: of the command.
    Raises UserError where the model, the server or the folder cannot be used, RunStopped on Ctrl-C."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(model.tokenizer, "RUN|MODEL")
    check_tokenizer(tokenizer)
    folder: Path = arguments.output
    with writing("--output", folder), ExitStack() as held:
        check_folder(folder)
        held.enter_context(lock_folder(folder))  # not the same answers twice, by two commands
        refuse_existing(folder / EVALUATION, "a new folder, or an unfinished evaluation")
        prompts = {task.name: _digest(task.describe()) for task in tasks}  # for `vcore-ds compare`
        logs = _find_logs(arguments, model, sampling, tasks, prompts)
        tasks = [task._replace(problems=_render(task.problems, tokenizer)) for task in tasks]
        described: dict[str, Any] = {"path": model.path, "base": model.weights, "adapter": model.adapter}
        described["digest"] = compute_weights_digest(Path(model.adapter or model.weights))
        if arguments.url is None:
            batches = _make_batches(tasks, sampling.seed, arguments.batch_size)
            api = InProcessAPI(model, tokenizer, sampling, arguments.precision, batches)
            # inspect registers classes, but takes any callable that returns an instance.
            asked = Model(modelapi(name="vcore_ds")(lambda: lambda: api)(), GenerateConfig())  # type: ignore[call-arg]
            described |= {name: getattr(arguments, name) for name in ("precision", "batch_size")}
            described["device"] = api.device.type
        else:
            asked = open_server(arguments, model, tokenizer, sampling)
            described |= {"url": arguments.url, "served_name": arguments.served_name or model.path}
        written = _run(asked, logs, arguments, sampling.seed, tasks)
        settings = {**asdict(sampling), "prompts": prompts}
        evaluation = _write_result(arguments, described, settings, tasks, written)
    print(f"Result: {folder}", flush=True)
    return evaluation


def _render(problems: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The problems as inspect asks them: rendered with the chat template, as in training, and tokenized here."""
    questions = []
    for problem in problems:
        text = render_prompt([{"role": "user", "content": str(problem.input)}], tokenizer)
        tokens = {TOKENS: tokenizer(text, add_special_tokens=False)["input_ids"]}
        prompt, metadata = ChatMessageUser(content=text, metadata=tokens), (problem.metadata or {}) | tokens
        questions.append(Sample(id=problem.id, input=[prompt], target=problem.target, metadata=metadata))
    return questions


def _make_batches(tasks: Sequence[ChosenTask], seed: int, batch_size: int) -> list[list[Request]]:
    """Split the answers to generate into batches, in inspect's order of asking."""
    batches = []
    for task in tasks:
        requests = [
            Request(
                tuple((one.metadata or {})[TOKENS]), derive_seed(seed, task.name, one.id, epoch), task.max_new_tokens
            )
            for epoch in range(1, task.num_samples + 1)
            for one in task.problems
        ]
        batches += [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    return batches


def _run(
    model: Model, logs: Path, arguments: argparse.Namespace, seed: int, tasks: Sequence[ChosenTask]
) -> dict[str, EvalLog]:
    """Run inspect, which reuses the answers of earlier logs; return each task's log, without samples."""
    checker = AnswerChecker(ANSWER_SECONDS)
    try:
        _, written = eval_set(
            [
                Task(
                    name=task.name,
                    dataset=MemoryDataset(task.problems, name=task.name),
                    epochs=task.num_samples,
                    solver=answer_with_seed(task.name, seed),
                    scorer=final_answer_scorer(task.kind, checker),
                    config=GenerateConfig(max_tokens=task.max_new_tokens),
                )
                for task in tasks
            ],
            log_dir=str(logs),
            model=model,
            max_tasks=1,
            max_samples=arguments.batch_size,
            max_connections=arguments.batch_size,
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
            f"--url: {arguments.url}: a request failed {MAX_RETRIES + 1} times or was refused: "
            f"{first_line(error.__cause__ or error):.300}; expected an answer. Read the server's log; the same "
            "command resumes"
        ) from None
    finally:
        checker.close()
    if len(written) < len(tasks):
        raise RunStopped("eval: interrupted; finished answers are kept, and the same command resumes")
    return {log.eval.task: log for log in written}


def _find_logs(
    arguments: argparse.Namespace,
    model: NamedModel,
    sampling: Sampling,
    tasks: Sequence[ChosenTask],
    prompts: dict[str, str],
) -> Path:
    """Return the folder of inspect's logs, named by all that must be equal for answers to be reused; a server's URL may
    differ. Raises UserError where the output has logs of another evaluation."""
    identity: list[Any] = [model.weights, model.adapter, asdict(sampling)]
    identity += [[task.name, task.num_samples, task.max_new_tokens, prompts[task.name]] for task in tasks]
    if arguments.url is None:  # a model trained again has the same path but other weights
        identity += [arguments.precision, arguments.batch_size]
        identity += [compute_model_digest(model.weights)] if Path(model.weights).is_dir() else []
        adapter_files = sorted(Path(model.adapter).glob("adapter_*")) if model.adapter is not None else []
        identity += [compute_file_digest(file) for file in adapter_files]
    logs = arguments.output / LOGS / _digest(identity)
    if logs.parent.is_dir() and {*logs.parent.iterdir()} - {logs}:
        raise UserError(
            f"--output: {arguments.output}: holds an evaluation of another model, other problems or with other "
            "sampling; expected the same ones, to resume it. Name another folder"
        )
    return logs


@solver
def answer_with_seed(task: str, seed: int) -> Solver:
    """Ask the model, with a seed per answer. Raises UserError where a server counts other prompt tokens, or reports no
    finish reason or usage."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state, seed=derive_seed(seed, task, state.sample_id, state.epoch))
        usage, reason, expected = state.output.usage, state.output.stop_reason, len(state.metadata[TOKENS])
        if usage is None or reason not in ("stop", "max_tokens", "model_length") or usage.input_tokens != expected:
            raise UserError(
                f"--url: found an answer with finish reason {reason} and usage {usage}; expected `stop` or `length`, "
                f"and a prompt of {expected} tokens, as in training. Serve the very model that RUN|MODEL names"
            )
        return state

    return solve


@scorer(name="final_answer", metrics=[accuracy(), stderr()])
def final_answer_scorer(kind: Kind, checker: AnswerChecker) -> Scorer:
    lock = anyio.Lock()

    async def score(state: TaskState, target: Target) -> Score:
        # Thinking that the prompt opens may be cut off too. Decoding drops a `</think>` that is a special token.
        is_cut_off = state.output.stop_reason != "stop" and state.input_text.rstrip().endswith("<think>")
        answer = final_answer("<think>" * is_cut_off + state.output.completion, kind)
        async with lock:  # the checker has one child process
            right = await to_thread.run_sync(is_right, answer, target.text, kind, checker)
        return Score(value=CORRECT if right else INCORRECT, answer=answer)

    return score


def derive_seed(seed: int, task: str, problem_id: int | str | None, epoch: int) -> int:
    """Derive a seed from the problem's id and the answer's number, in 31 bits: some servers take no more."""
    return torch_seed(Stream.EVALUATION, seed, zlib.crc32(f"{task}/{problem_id}".encode()), epoch - 1) % 2**31


def _write_result(
    arguments: argparse.Namespace,
    model: dict[str, Any],
    sampling: dict[str, Any],
    tasks: Sequence[ChosenTask],
    logs: dict[str, EvalLog],
) -> Evaluation:
    folder = arguments.output
    results: dict[str, TaskResult] = {}
    rows = [("task", "problems", "samples", "accuracy", "truncated", "no answer", "mean tokens")]
    for task in tasks:
        samples = _read_samples(logs[task.name])
        result = evaluation_folder.summarize(samples)
        evaluation_folder.write_samples(folder, task.name, samples)
        counts = f"{result.num_problems:,}", f"{result.num_samples_per_problem:,}"
        shares = f"{result.truncated_share:.1%}", f"{result.unanswered_share:.1%}"
        accuracy_share = f"{result.accuracy:.1%}"
        if task.kind == "code":  # no result of this evaluation, which `vcore-ds compare` could compare
            accuracy_share = "graded elsewhere"
            write_text(folder / f"{task.name}.generations.json", format_generations(task, samples))
        else:
            results[task.name] = result
        rows.append((task.name, *counts, accuracy_share, *shares, f"{result.mean_tokens:,.1f}"))
    limits = {task.name: task.max_new_tokens for task in tasks}
    sampling["max_new_tokens"] = limits if len({*limits.values()}) > 1 else next(iter(limits.values()))
    versions = {"vcore_ds": __version__} | {name: version(name) for name in PACKAGES}
    evaluation = Evaluation(model, arguments.preset, sampling, versions, results)
    evaluation_folder.write_evaluation(folder, evaluation)
    print("\n".join(["", *align_columns(rows)]), flush=True)
    return evaluation


def _read_samples(log: EvalLog) -> list[SampleResult]:
    """Read all samples of a task's log, sorted by problem, then number."""
    results = []
    for sample in read_eval_log(log.location, exclude_fields={"messages", "events"}).samples or ():
        output, score = sample.output, (sample.scores or {})["final_answer"]
        assert output.usage is not None  # `answer_with_seed` has checked it
        results.append(
            SampleResult(
                problem_id=str(sample.id),
                sample=sample.epoch - 1,
                correct=score.value == CORRECT,
                answered=score.answer is not None,
                truncated=output.stop_reason in ("max_tokens", "model_length"),
                num_tokens=output.usage.output_tokens,
                answer=score.answer,
                output=output.completion,
            )
        )
    return sorted(results, key=lambda result: (result.problem_id, result.sample))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
