"""Rows with the columns of each benchmark's data set, for local files that stand in for them."""

import json
from pathlib import Path
from typing import Any

ROWS: dict[str, list[dict[str, Any]]] = {
    "aime": [{"id": 60, "problem": "What is 20 + 4?", "solution": "..", "answer": "024", "year": "2024"}],
    "olympiad": [
        {"id": 1606, "question": "Halve $x$.", "solution": [".."], "final_answer": ["$\\frac{x}{2}$"], "unit": None},
        {"id": 1610, "question": "Roots of $t^2=4$?", "solution": [".."], "final_answer": ["$2$,$-2$"], "unit": None},
    ],
    "math500": [
        {"problem": "One half?", "solution": "..", "answer": "\\frac{1}{2}", "unique_id": "test/algebra/1.json"}
    ],
    "gsm8k": [{"question": "A thousand eggs and two more?", "answer": "1000 + 2 = <<1000+2=1002>>1,002\n#### 1,002"}],
    "rbench": [
        {"index": "r1", "question": "Which?", "answer": "F", **{letter: f"option {letter}" for letter in "ABCDEF"}}
    ],
    "supergpqa": [
        {
            "uuid": f"u{number}",
            "question": "Which one?",
            "options": ["one", "two", "three"],
            "answer": "two",
            "discipline": "Science" if number % 4 else "Law",
            "answer_letter": "B",
        }
        for number in range(4)
    ],
    "livecodebench": [{"question_id": "abc301_a", "question_content": "Read two numbers.", "starter_code": ""}],
    "ojbench": [
        {"id": 1000, "prompt": f"In {language}:", "dataset": "NOI", "language": language, "difficulty": "hard"}
        for language in ("cpp", "python")
    ],
}
"""Task -> rows."""


def write_rows(folder: Path, task: str, rows: list[dict[str, Any]] | None = None) -> str:
    """Write a JSON Lines file; returns the argument of `--tasks` that names it."""
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[task] if rows is None else rows)))
    return f"{task}={path}"
