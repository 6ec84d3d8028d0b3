"""The paper's training data: traces of two published data sets that pass its rules (appendix "Dataset Curation for
supervised tasks"), as conversations.

`python launch_scripts/paper_data.py math data/math.jsonl --number 8000` draws rows of nvidia/OpenMathReasoning (`code`:
of nvidia/OpenCodeReasoning-2) without replacement until so many have passed, and writes them, one {"messages": ..} a
line. `vcore-ds prepare data/math.jsonl --sample 3200 ..` makes a token store of those that fit the cutoff. The paper's
traces for Qwen3 have 3,155 (math) and 2,861 (code) tokens on average.

OpenCodeReasoning-2 lacks the problem statements, whose licenses differ: `dataset`, `split` and `index` of a row name
the statement in one of four data sets, as its data card says.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import refuse_existing, write_atomically, writing
from vcore_ds.data.answers import AnswerChecker, code_prompt, final_answer, math_prompt
from vcore_ds.data.messages import Dropped, Message, split_thinking

MATH_COLUMNS = "problem_type generation_model problem generated_solution expected_answer"
SOURCES = {
    "math": ("nvidia/OpenMathReasoning", "cot", MATH_COLUMNS),
    "code": ("nvidia/OpenCodeReasoning-2", "cpp", "judgement question r1_generation dataset split index"),
}
"""Data set on the hub, its split, and the columns that are read."""

MISSING = "a text is missing"
OTHER_PROBLEM_TYPE = 'problem_type is not "has_answer_extracted"'
OTHER_MODEL = 'generation_model is not "DeepSeek-R1"'
NOT_RIGHT = 'judgement is not "right"'
NOT_ONE_THINKING = "not exactly one <think> pair with an answer"
NOT_BOXED = "no \\boxed{} in the answer"
NOT_EQUIVALENT = "math-verify: not the expected answer"
UNFINISHED = "math-verify: past the time limit"
NO_STATEMENT = "the problem's statement cannot be found"

_PARQUET = "refs/convert/parquet"  # the hub's conversion of loading scripts, which `datasets` no longer runs
_STATEMENTS: dict[str, dict[str, Any]] = {
    "taco": {"path": "BAAI/TACO", "revision": _PARQUET, "data_dir": "ALL"},
    "apps": {"path": "codeparrot/apps", "revision": _PARQUET, "data_dir": "all"},
    "code_contests": {"path": "deepmind/code_contests"},
    "open-r1/codeforces": {"path": "open-r1/codeforces"},
}


def convert_math_row(row: dict[str, Any], check_answer: Callable[[str, str], str]) -> list[Message]:
    """Convert a row of OpenMathReasoning. `check_answer`: maps (expected, answer) to a verdict of
    `AnswerChecker.check`. Raises Dropped for a row that does not pass."""
    if row["problem_type"] != "has_answer_extracted":
        raise Dropped(OTHER_PROBLEM_TYPE)
    if row["generation_model"] != "DeepSeek-R1":
        raise Dropped(OTHER_MODEL)
    problem, solution, expected = (_read(row, name) for name in ("problem", "generated_solution", "expected_answer"))
    thinking, answer = _split_trace(solution)
    if (final := final_answer(answer, "math")) is None:
        raise Dropped(NOT_BOXED)
    verdict = check_answer(expected, final)
    if verdict != "equivalent":
        raise Dropped(UNFINISHED if verdict == "unfinished" else NOT_EQUIVALENT)
    return _make_turns(math_prompt(problem), thinking, answer)


def convert_code_row(row: dict[str, Any], statements: str | None) -> list[Message]:
    """Convert a row of OpenCodeReasoning-2; `statements`: the folder of `find_statement`. Raises Dropped for a row that
    does not pass."""
    if row["judgement"] != "right":
        raise Dropped(NOT_RIGHT)
    thinking, answer = _split_trace(_read(row, "r1_generation"))
    statement: str | None = _read(row, "question")
    if statement == "-":
        statement = find_statement(statements, *(_read(row, name) for name in ("dataset", "split", "index")))
    if not statement:
        raise Dropped(NO_STATEMENT)
    return _make_turns(code_prompt(statement), thinking, answer)


def _read(row: dict[str, Any], name: str) -> str:
    text = (row[name] or "").strip()
    if not text:
        raise Dropped(MISSING)
    return text


def _split_trace(text: str) -> tuple[str, str]:
    """Return (thinking, answer)."""
    if text.count("<think>") > 1 or text.count("</think>") != 1:
        raise Dropped(NOT_ONE_THINKING)
    thinking, answer = (part.strip() for part in split_thinking(text))
    if not (thinking and answer):
        raise Dropped(NOT_ONE_THINKING)
    return thinking, answer


def _make_turns(question: str, thinking: str, answer: str) -> list[Message]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "reasoning_content": thinking, "content": answer},
    ]


def find_statement(folder: str | None, dataset: str, split: str, index: str) -> str | None:
    """Look up the statement of a problem in the subfolders `taco`, `apps`, `code_contests`, `codeforces` of `folder`,
    or on the hub (None); None if there is none. Raises UserError if the data set cannot be loaded."""
    if dataset not in _STATEMENTS or not index.isdecimal():
        return None
    where = _STATEMENTS[dataset]
    if folder is not None:
        where = {"path": str(Path(folder) / dataset.rpartition("/")[2])}
    rows = _load(split=split, **where)
    if len(index) > len(str(len(rows))) or int(index) >= len(rows):
        return None
    row = rows[int(index)]
    if dataset in ("taco", "apps"):
        return row["question"]
    return _join_codeforces_statement(row) if dataset == "open-r1/codeforces" else row["description"]


def _join_codeforces_statement(row: dict[str, Any]) -> str | None:
    parts = [("", row["description"]), ("Input", row.get("input_format")), ("Output", row.get("output_format"))]
    examples = row.get("examples") or []
    titles = ("input", "output")
    parts += [("", "Examples")] if examples else []
    parts += [(title.capitalize(), example[title]) for example in examples for title in titles if title in example]
    parts.append(("Note", row.get("note")))
    texts = [text for title, body in parts if body for text in (title, body) if text]
    return "\n\n".join(texts) if row["description"] else None


@cache
def _load(path: str, split: str, **options: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(path, split=split, **options)
    except Exception as error:  # of a dozen classes: offline, gated, no such folder
        raise UserError(f"{path}: split {split} cannot be loaded: {first_line(error)}") from None


Convert = Callable[[dict[str, Any]], list[Message]]


def draw(rows: Any, seed: int, convert: Convert, outcomes: Counter[str]) -> Iterator[str]:
    """Yield the lines of rows that pass, in random order, and count the outcomes."""
    for row in rows.shuffle(seed=seed):
        try:
            messages = convert(row)
        except Dropped as rule:
            outcomes[str(rule)] += 1
            continue
        outcomes["kept"] += 1
        yield json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the file, and print how many rows passed and which rules left out the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("task", choices=SOURCES)
    add("output", type=Path, help="new file of conversations, .jsonl")
    add("--number", type=int, help="traces to write (default: all that pass, which reads all rows)")
    add("--source", help="copy of the data set, in the hub's layout (default: download it)")
    add("--split", help="split of the data set (default: math cot, code cpp)")
    add("--seed", type=int, default=42, help="of the order in which rows are drawn (default 42)")
    add("--answer-seconds", type=int, default=5, help="math: CPU seconds per answer to verify (default 5)")
    add("--statements", help="code: folder with copies of taco, apps, code_contests and codeforces (default: download)")
    words = parser.parse_args()
    hub_id, split, columns = SOURCES[words.task]
    if words.task == "math" and find_spec("math_verify") is None:
        raise UserError("found no math-verify; expected the extra `math`: pip install 'vcore_ds[math]'")
    outcomes: Counter[str] = Counter()
    with writing("output", words.output, "a new file"), closing(AnswerChecker(words.answer_seconds)) as checker:
        refuse_existing(words.output, "a new file")
        rows = _load(words.source or hub_id, words.split or split)
        if missing := set(columns.split()) - set(rows.column_names):
            raise UserError(
                f"{words.source or hub_id}: found no column {', '.join(sorted(missing))}; expected {hub_id}"
            )

        def convert(row: dict[str, Any]) -> list[Message]:
            is_math = words.task == "math"
            return convert_math_row(row, checker.check) if is_math else convert_code_row(row, words.statements)

        words.output.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(words.output) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            for line in draw(rows, words.seed, convert, outcomes):
                file.write(line)
                if outcomes["kept"] == words.number:
                    break
    for outcome, number in outcomes.most_common():
        print(f"{number:>12,}  {outcome}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(UserError.EXIT_CODE)
