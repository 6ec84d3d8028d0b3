"""Problems with their answers as rows for reinforcement learning, in the prompt of training."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vcore_ds.data.prepare.sources import Broken
from vcore_ds.data.problem_rows import find_text, problem_rows
from vcore_ds.data.rendering import render_prompt
from vcore_ds.errors import UserError
from vcore_ds.grading.prompts import math_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS = ("problem", "question", "prompt")
ANSWERS = ("answer", "expected_answer", "ground_truth", "final_answer")

Row = dict[str, Any]
"""A row as verl reads it: data_source, prompt, ability, reward_model and extra_info."""


class HandedRows(NamedTuple):
    """The rows to learn from, those held out, and why others were left out."""

    train: list[Row]
    held_out: list[Row]
    left_out: Counter[str]


def read_rows(
    source: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prompt: Literal["math", "plain"],
    max_prompt_tokens: int,
    sample: int | None,
    held_out: int,
    seed: int,
    split: str,
) -> HandedRows:
    """Reads problems, puts them into the prompt of training, and draws a sample.

    Args:
        source: a file or folder (.jsonl, .json, .parquet) or a hub id.
        max_prompt_tokens: problems with longer prompts are left out, as rendered by the chat template.
        sample: problems to learn from; None for all that are not held out.
        held_out: problems set apart from them, at least one, as verl wants some.

    Raises:
        UserError: the source cannot be read, or has too few problems with an answer.
    """
    left_out: Counter[str] = Counter()
    found: list[tuple[int, str, str]] = []
    keys: set[str] = set()
    for number, (_, row) in enumerate(problem_rows(source, split)):
        if isinstance(row, Broken):
            left_out[row.reason] += 1
            continue
        keys |= row.keys()
        question, answer = find_text(row, *QUESTIONS), find_text(row, *ANSWERS)
        if question is None or answer is None:
            left_out["no question" if question is None else "no answer"] += 1
        else:
            found.append((number, question, answer))
    rows = []
    for number, question, answer in found:
        text = math_prompt(question) if prompt == "math" else question
        messages = [{"role": "user", "content": text}]
        rendered = render_prompt(messages, tokenizer)
        if len(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]) > max_prompt_tokens:
            left_out[f"prompt longer than {max_prompt_tokens:,} tokens"] += 1
            continue
        rows.append(_row(Path(source).stem, messages, answer, number))
    wanted = held_out + (sample or 1)
    if len(rows) < wanted:
        reasons = "; ".join(f"{number:,} left out: {reason}" for reason, number in left_out.items())
        raise UserError(
            f"--data: {source}: found {len(rows):,} usable problems{f' ({reasons})' if reasons else ''}, in rows with "
            f"the keys {', '.join(sorted(keys)) or 'none'}; expected at least {wanted:,}, of which {held_out:,} are "
            f"held out (--held-out), each with one of {', '.join(QUESTIONS)} and one of {', '.join(ANSWERS)}"
        )
    random.Random(seed).shuffle(rows)
    end = len(rows) if sample is None else held_out + sample
    return HandedRows(rows[held_out:end], rows[:held_out], left_out)


def _row(data_source: str, messages: list[dict[str, str]], answer: str, number: int) -> Row:
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": number},
    }


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """The rows with verl's columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(message)),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
        ]
    )
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
