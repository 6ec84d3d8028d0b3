"""An evaluation as text: what was measured for each task, and the accuracies in the layout of the paper's tables."""

from typing import Any

from vcore_ds.commands.evaluate.official import HOW_TO_GRADE
from vcore_ds.files.evaluation_folder import Evaluation
from vcore_ds.results.presentation import aligned, markdown_rows

PAPER_COLUMNS = {
    "AIME": "aime",
    "Olympiad": "olympiad",
    "LCB": "livecodebench",
    "OJBench": "ojbench",
    "RBench": "rbench",
    "SGPQA-1k": "supergpqa",
    "GSM8K": "gsm8k",
    "MATH500": "math500",
}
"""Columns of the paper's tables, and the task of each; the last two are from its table on problem difficulty."""
_HEADER = ("task", "problems", "samples", "accuracy", "truncated", "no answer", "mean tokens")
ABSENT, ELSEWHERE = "-", "(graded elsewhere)"


def describe(evaluation: Evaluation) -> str:
    """All tasks with their shares, the row of the paper's layout where one of its benchmarks is among them, and how
    generations are graded."""
    rows = [_HEADER, *(_row(name, vars(task)) for name, task in evaluation.tasks.items())]
    rows += [_row(name, values) for name, values in evaluation.generations.items()]
    parts = ["\n".join(aligned(rows))]
    if {*evaluation.tasks, *evaluation.generations} & set(PAPER_COLUMNS.values()):
        parts.append(paper_table(evaluation))
    for name, values in evaluation.generations.items():
        parts.append(f"{name}: {values['file']}; grade it with {HOW_TO_GRADE[name]}")
    return "\n\n".join(parts)


def paper_table(evaluation: Evaluation) -> str:
    """A Markdown table with the model's row, accuracies in percent as the paper gives them."""

    def cell(task: str) -> str:
        if task in evaluation.tasks:
            return f"{100 * evaluation.tasks[task].accuracy:.2f}"
        return ELSEWHERE if task in evaluation.generations else ABSENT

    columns = ["Model", *PAPER_COLUMNS]
    row = [str(evaluation.model["path"]), *map(cell, PAPER_COLUMNS.values())]
    return "\n".join(markdown_rows([columns, ["---", *["---:"] * len(PAPER_COLUMNS)], row]))


def _row(name: str, values: dict[str, Any]) -> tuple[str, ...]:
    accuracy = f"{values['accuracy']:.1%}" if "accuracy" in values else ELSEWHERE
    return (
        name,
        f"{values['num_problems']:,}",
        f"{values['num_samples_per_problem']:,}",
        accuracy,
        f"{values['truncated_share']:.1%}",
        f"{values['unanswered_share']:.1%}",
        f"{values['mean_tokens']:,.1f}",
    )
