"""All tasks by name, and what --tasks says."""

import difflib
from collections.abc import Sequence

from vcore_ds.commands.evaluate.benchmarks import BENCHMARKS
from vcore_ds.commands.evaluate.embedded import EMBEDDED
from vcore_ds.commands.evaluate.problems import Problem, Task, read_problems
from vcore_ds.errors import UserError

TASKS = {task.name: task for task in (*EMBEDDED, *BENCHMARKS)}


def chosen_tasks(words: Sequence[str], limit: int | None) -> dict[str, tuple[Task, list[Problem]]]:
    """The tasks that words NAME or NAME=FILE name, with their problems, the first `limit` of each.

    Raises:
        UserError: a name is unknown or comes twice, or a task's data cannot be used.
    """
    chosen: dict[str, tuple[Task, list[Problem]]] = {}
    for word in words:
        name, _, files = word.partition("=")
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise UserError(f"--tasks: found {name!r:.60}{hint}; expected some of {', '.join(TASKS)}")
        if name in chosen:
            raise UserError(f"--tasks: found {name} twice; expected each task once")
        chosen[name] = TASKS[name], read_problems(TASKS[name], files or None)[:limit]
    return chosen
