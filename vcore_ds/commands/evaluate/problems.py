"""Problems of an evaluation, and reading them from files or the hub."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vcore_ds.data.prepare.sources import Broken
from vcore_ds.data.problem_rows import problem_rows
from vcore_ds.errors import UserError, first_line
from vcore_ds.grading.final_answer import Kind

BENCHMARK_TOKENS = 32_768
"""What model cards of reasoning models recommend for most questions."""


@dataclass(frozen=True)
class Problem:
    """One problem of a task."""

    id: str
    prompt: str
    """The user's turn."""
    expected: str = ""
    """LaTeX or a letter; empty for code."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Columns that selecting problems, or the official format of generations, needs."""


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub."""

    path: str
    config: str | None
    split: str
    files: str | None = None
    """The JSON-lines files to read, where the data set is a loading script or holds more than its rows."""


@dataclass(frozen=True)
class Task:
    """What an evaluation can be asked for."""

    name: str
    help: str
    """Half a line for the list of tasks."""
    kind: Kind | None
    """None for code: generations are written for the official graders."""
    read: Callable[[dict[str, Any]], Problem] | None = None
    """A row's problem, with an empty id where the row has none; None for a task that needs no data. Raises ValueError
    with what the row lacks."""
    sources: tuple[HubSource, ...] = ()
    """Where its rows are on the hub."""
    select: Callable[[list[Problem]], list[Problem]] = list
    """Which of the problems are evaluated."""
    make: Callable[[], list[Problem]] | None = None
    """The problems of a task that needs no data."""
    num_samples: int = 1
    """Answers to a problem, unless decoding is greedy or --samples says otherwise."""
    max_new_tokens: int = BENCHMARK_TOKENS
    """Unless --max-new-tokens or a preset says otherwise."""


def read_problems(task: Task, files: str | None) -> list[Problem]:
    """The problems of a task.

    Args:
        files: a file, folder, pattern or hub id that replaces the task's own source.

    Raises:
        UserError: the data cannot be read, has no problems, lacks answers, or has an id twice.
    """
    if task.make is not None:
        if files is not None:
            raise UserError(f"--tasks: {task.name}={files}: found a file for a task that makes its own problems")
        return task.make()
    sources = task.sources if files is None else (files,)
    problems = [problem for source in sources for problem in _problems_of(task, source, len(sources))]
    if not problems:
        raise UserError(f"--tasks: {task.name}: {files or sources[0]}: found no problems; expected one a row")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise UserError(
                f"--tasks: {task.name}: {files or sources[0]}: found the problem {problem.id} twice; expected an id "
                "for each problem"
            )
        seen.add(problem.id)
    return task.select(problems)


def _problems_of(task: Task, source: HubSource | str, num_sources: int) -> Iterator[Problem]:
    assert task.read is not None
    name = source.path if isinstance(source, HubSource) else source
    # Sets that belong together (AIME 2024 and 2025) may count from 0 each.
    prefix = f"{name.rpartition('/')[2]}/" if num_sources > 1 else ""
    rows = _hub_rows(task, source) if isinstance(source, HubSource) else problem_rows(source, "test")
    for number, (where, row) in enumerate(rows, start=1):
        try:
            if isinstance(row, Broken):
                raise ValueError(row.reason)
            problem = task.read(row)
        except ValueError as error:
            raise UserError(f"--tasks: {task.name}: {where}: {error}; expected a row of {task.help}") from None
        yield Problem(f"{prefix}{problem.id or f'{number:05d}'}", problem.prompt, problem.expected, problem.extra)


def _hub_rows(task: Task, source: HubSource) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    try:
        if source.files is None:
            rows = list(load_dataset(source.path, source.config, split=source.split))
        else:
            files = f"hf://datasets/{source.path}/{source.files}"
            rows = list(load_dataset("json", data_files={source.split: files}, split=source.split))
    except Exception as error:  # offline, gated, misspelt: a dozen exception classes of three packages
        raise UserError(
            f"--tasks: {task.name}: {source.path}: cannot be loaded from the hub: {first_line(error)}; download it on "
            f"a machine with a connection and give the file: --tasks {task.name}=FILE.jsonl"
        ) from None
    yield from ((f"{source.path}: row {number}", row) for number, row in enumerate(rows, start=1))


# ---- columns -------------------------------------------------------------------------------------------------------


def id_of(row: dict[str, Any], *names: str) -> str:
    """The row's own id, empty where it has none."""
    return next((str(row[name]) for name in names if row.get(name) not in (None, "")), "")


def plain(latex: str) -> str:
    """An answer without the dollar signs around its LaTeX."""
    return latex.replace("$", "").strip()
