"""Generated programs in the formats that the official graders of LiveCodeBench and OJBench read.

LiveCodeBench's grader runs Python. The paper's prompt asks for C++17, in training and in evaluation: what such a model
writes cannot be graded by it as it is.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from vcore_ds.commands.evaluate.problems import Problem, Task
from vcore_ds.files.aside import written_aside
from vcore_ds.files.evaluation_folder import SampleResult

HOW_TO_GRADE = {
    "livecodebench": (
        "python -m lcb_runner.runner.custom_evaluator --scenario codegeneration --release_version release_v6 "
        "--custom_output_file FILE (runs Python; the paper's prompt asks for C++17, which it cannot grade)"
    ),
    "ojbench": "ojbench.init(problem_dirs=[...]); ojbench.judge_jsonl(FILE, JUDGED)",
}
"""How the official grader is started on a file of generations."""


def write_generations(folder: Path, task: Task, problems: Sequence[Problem], samples: Sequence[SampleResult]) -> str:
    """Writes the file of a code task, and returns its name. Raises OSError.

    LiveCodeBench: one JSON list of {question_id, code_list}. OJBench: a line for each answer, all columns of the prompt
    and `content`.
    """
    of_problem: dict[str, list[SampleResult]] = defaultdict(list)
    for sample in samples:
        of_problem[sample.problem_id].append(sample)
    if task.name == "livecodebench":
        name = f"{task.name}.generations.json"
        rows = [
            {**problem.extra, "code_list": [sample.answer or "" for sample in of_problem[problem.id]]}
            for problem in problems
        ]
        text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    else:
        name = f"{task.name}.generations.jsonl"
        lines = [
            {**problem.extra, "content": sample.output} for problem in problems for sample in of_problem[problem.id]
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with written_aside(folder / name) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return name
