"""Problems with their answers as rows for reinforcement learning, in the prompt of training."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vcore_ds.data import render_prompt
from vcore_ds.data.prepare.sources import BLANK, Broken, find_shards
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
    for number, raw in _rows(source, split):
        pair = _question_and_answer(raw)
        if isinstance(raw, dict):
            keys |= raw.keys()
        if isinstance(pair, str):
            left_out[pair] += 1
        else:
            found.append((number, *pair))
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
            f"the keys {', '.join(sorted(keys)) or 'none'}; expected at least {wanted:,}, each with one of "
            f"{', '.join(QUESTIONS)} and one of {', '.join(ANSWERS)}"
        )
    random.Random(seed).shuffle(rows)
    end = len(rows) if sample is None else held_out + sample
    return HandedRows(rows[held_out:end], rows[:held_out], left_out)


def _rows(source: str, split: str) -> Iterator[tuple[int, Any]]:
    number = 0
    for shard in find_shards([source], split):
        for _, row in shard.rows():
            if row is not BLANK:
                yield number, row
                number += 1


def _question_and_answer(row: Any) -> tuple[str, str] | str:
    """The two texts, or why there are none."""
    if isinstance(row, Broken):
        return row.reason
    if not isinstance(row, dict):
        return "no object"
    question, answer = (_first(row, keys) for keys in (QUESTIONS, ANSWERS))
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(question, str) or not question.strip():
        return "no question"
    if not isinstance(answer, str) or not answer.strip():
        return "no answer"
    return question.strip(), answer.strip()


def _first(row: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


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
