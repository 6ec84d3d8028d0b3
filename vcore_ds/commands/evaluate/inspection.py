"""One task as inspect runs it: prompts in, answers graded, and every sample back."""

from collections.abc import Sequence
from pathlib import Path

import anyio
from anyio import to_thread
from inspect_ai import Task as InspectTask
from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import ChatMessageUser, GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate

from vcore_ds.commands.evaluate.apis import KEY, TRUNCATED, InProcessAPI, ServerAPI, inspect_model
from vcore_ds.commands.evaluate.journal import Request
from vcore_ds.commands.evaluate.problems import Problem, Task
from vcore_ds.commands.evaluate.sampling import Sampling
from vcore_ds.errors import RunStopped, UserError, first_line
from vcore_ds.files.evaluation_folder import SampleResult
from vcore_ds.grading.answers import last_code_block
from vcore_ds.grading.final_answer import Kind, final_answer, is_right
from vcore_ds.grading.verification import AnswerChecker

MAX_RETRIES = 4
"""Attempts after the first for a request that a server fails."""
ANSWER_SECONDS = 5
"""CPU time to compare one answer."""


def run_task(
    task: Task,
    problems: Sequence[Problem],
    requests: Sequence[Request],
    api: InProcessAPI | ServerAPI,
    *,
    sampling: Sampling,
    logs: Path,
    max_connections: int,
) -> list[SampleResult]:
    """Every sample of the task, in the order of the requests.

    Args:
        logs: folder for inspect's own log, which `inspect view` shows.
        max_connections: requests at a time.

    Raises:
        UserError: the server failed more often than is tried, or a problem cannot be asked.
        RunStopped: the evaluation was interrupted.
    """
    by_id = {problem.id: problem for problem in problems}
    with_ids = not isinstance(api, ServerAPI) or api.takes_ids
    samples = [
        Sample(
            id=f"{request.problem_id}#{request.sample}",
            input=[ChatMessageUser(content=request.prompt, metadata=_metadata(number, request, with_ids))],
            target=by_id[request.problem_id].expected,
        )
        for number, request in enumerate(requests)
    ]
    checker = AnswerChecker(ANSWER_SECONDS)
    try:
        found = inspect_eval(
            InspectTask(
                dataset=MemoryDataset(samples, name=task.name),
                solver=generate(),
                scorer=_scorer(task.kind, checker) if task.kind is not None else None,
                name=task.name,
            ),
            model=inspect_model(api, GenerateConfig(temperature=sampling.temperature, top_p=sampling.top_p)),
            max_samples=max_connections,
            max_connections=max_connections,
            max_retries=MAX_RETRIES,
            fail_on_error=True,
            display="none",
            log_level="error",
            log_dir=str(logs),
            ctl_server=False,
        )
    finally:
        checker.close()
    if not found or found[0].status == "cancelled":
        raise RunStopped("eval: interrupted; the answers so far are kept, and the same command resumes")
    (log,) = found
    if log.status != "success":
        if api.problem is None:
            raise RuntimeError(log.error.message if log.error is not None else log.status)
        if isinstance(api, InProcessAPI) or isinstance(api.problem, UserError):
            raise api.problem
        raise UserError(
            f"--url: {api.base_url}: a request failed {MAX_RETRIES + 1} times or was refused: "
            f"{first_line(api.problem):.300}; expected answers. Look into the server's log; the answers so far are "
            "kept, and the same command resumes"
        )
    results = {str(sample.id): sample for sample in log.samples or ()}
    return [_result(task, request, results[f"{request.problem_id}#{request.sample}"]) for request in requests]


def _metadata(number: int, request: Request, with_ids: bool) -> dict:
    return {KEY: number, **({"prompt_token_ids": list(request.prompt_ids)} if with_ids else {})}


def _scorer(kind: Kind, checker: AnswerChecker) -> Scorer:
    lock = anyio.Lock()

    @scorer(metrics=[accuracy()], name="final_answer")
    def final_answer_scorer() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            answer = final_answer(state.output.completion, kind)
            async with lock:  # one process compares
                right = await to_thread.run_sync(is_right, answer, target.text, kind, checker)
            return Score(value=CORRECT if right else INCORRECT, answer=answer)

        return score

    return final_answer_scorer()


def _result(task: Task, request: Request, sample: EvalSample) -> SampleResult:
    output = sample.output
    assert output.usage is not None  # as every API gives it
    if task.kind is None:
        answer, correct = last_code_block(output.completion), False
    else:
        assert sample.scores is not None
        score = sample.scores["final_answer"]
        answer, correct = score.answer, score.value == CORRECT
    return SampleResult(
        problem_id=request.problem_id,
        sample=request.sample,
        correct=correct,
        answered=answer is not None,
        truncated=output.stop_reason in TRUNCATED,
        num_tokens=output.usage.output_tokens,
        answer=answer,
        output=output.completion,
    )
