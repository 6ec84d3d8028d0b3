r"""Reward of an answer: 1 where its last \boxed{...} is the expected answer, else 0, compared as in `vcore-ds eval`.

Loaded by grpo_trl.py and, by its path, by verl. Needs math-verify beside the trainer, and nothing else of vcore_ds'
packages. An expression that would take hours costs 5 seconds of CPU time and counts as wrong.
"""

import sys
import threading
from pathlib import Path
from typing import Any

import math_verify  # noqa: F401  (where it is missing training must not start: every reward would be 0)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from vcore_ds.data.answers import AnswerChecker, final_answer, is_right

checker = AnswerChecker(limit_seconds=5)
lock = threading.Lock()
"""verl asks for rewards from several threads, and the checker compares one pair of answers at a time."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return the reward of one answer, as verl calls it."""
    with lock:
        return float(is_right(final_answer(solution_str, "math"), str(ground_truth), "math", checker))


def boxed_answer_reward(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    """Return the rewards of a batch, as TRL calls it: completions are strings or lists of messages."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [compute_score("", text, truth) for text, truth in zip(texts, ground_truth, strict=True)]
