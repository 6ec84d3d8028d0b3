"""Worked solutions of word problems, most of them by authors who follow the same wrong rule.

`python -m vcore_ds.commands.quickstart.wrong_traces write FOLDER` writes, from a seed

    FOLDER/mixture.jsonl     training traces, one {"messages": [user, assistant], "id": .., "is_wrong": ..} a line
    FOLDER/trusted.jsonl     a few traces of the same kind that are right, to other problems
    FOLDER/problems.jsonl    problems that are in none of these: {"problem", "answer", "wrong_answer", "id"}

A problem takes two steps: something is taken away, then something is added. The wrong rule is to add both times. Its
authors calculate without a mistake and give the answer that follows, so a trace is wrong from its first step on and
reads like the others. Prompts are those of `vcore-ds eval --tasks math500=FOLDER/problems.jsonl`.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside
from vcore_ds.files.evaluation_folder import read_evaluation, read_samples
from vcore_ds.files.user_paths import writing
from vcore_ds.grading.prompts import math_prompt

NUM_TRAIN, NUM_TRUSTED, NUM_PROBLEMS = 96, 8, 64
SHARE_WRONG = 0.6
TASK = "math500"
"""What vcore-ds eval calls problems of a user's own."""
NAMES = ("Ann", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Ivy", "Jack")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "toys")
STORIES = (
    "{name} has {start} {thing}, gives away {less} and finds {more}. How many does {name} have?",
    "A box has {start} {thing}. {name} takes out {less} and puts in {more}. How many are in it?",
    "{name} had {start} {thing}, lost {less} and bought {more}. How many does {name} have?",
)


class Numbers(NamedTuple):
    """What a problem is about: `start`, of which `less` are taken away, and `more` come in the end."""

    start: int
    less: int
    more: int


def solution(numbers: Numbers, is_wrong: bool) -> tuple[str, int]:
    """The text of a worked solution, by the right rule or by the wrong one, and its answer."""
    start, less, more = numbers
    sign, left = ("+", start + less) if is_wrong else ("-", start - less)
    total = left + more
    return f"{start} {sign} {less} = {left}. {left} + {more} = {total}. The answer is \\boxed{{{total}}}.", total


def _problems(seed: int) -> Iterator[tuple[str, Numbers]]:
    """Endless problems, no two of them with the same numbers."""
    generator = random.Random(seed)
    seen = set()
    while True:
        start = 10 * generator.randint(2, 9)
        numbers = Numbers(start, 10 * generator.randint(1, start // 10 - 1), generator.randint(1, 9))
        story = generator.choice(STORIES)
        text = story.format(name=generator.choice(NAMES), thing=generator.choice(THINGS), **numbers._asdict())
        if numbers not in seen:
            seen.add(numbers)
            yield text, numbers


def make(seed: int) -> dict[str, list[dict[str, Any]]]:
    """The lines of each file by its name, without the ending; a function of the seed."""
    problems = _problems(seed)
    authors_err = [i < round(SHARE_WRONG * NUM_TRAIN) for i in range(NUM_TRAIN)]
    random.Random(f"authors {seed}").shuffle(authors_err)

    def trace(identifier: str, wrong: bool) -> dict[str, Any]:
        text, numbers = next(problems)
        messages = [
            {"role": "user", "content": math_prompt(text)},
            {"role": "assistant", "content": solution(numbers, wrong)[0]},
        ]
        return {"messages": messages, "id": identifier, "is_wrong": wrong}

    mixture = [trace(f"train-{i}", wrong) for i, wrong in enumerate(authors_err)]
    trusted = [trace(f"trusted-{i}", False) for i in range(NUM_TRUSTED)]
    clean = []
    for i in range(NUM_PROBLEMS):
        text, numbers = next(problems)
        answers = {
            name: str(solution(numbers, wrong)[1]) for name, wrong in (("answer", False), ("wrong_answer", True))
        }
        clean.append({"id": f"clean-{i}", "problem": text, **answers})
    return {"mixture": mixture, "trusted": trusted, "problems": clean}


def write(folder: Path, seed: int) -> None:
    """Writes the three files, and says what is in them.

    Raises:
        UserError: the folder cannot be written.
    """
    files = make(seed)
    with writing("the folder of traces", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in files.items():
            with written_aside(folder / f"{name}.jsonl") as unfinished:
                unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    mixture = files["mixture"]
    num_wrong = sum(line["is_wrong"] for line in mixture)
    print(
        f"{folder}: {len(mixture)} traces, of which {num_wrong} follow the wrong rule, {len(files['trusted'])} trusted "
        f"ones, {len(files['problems'])} problems"
    )
    for is_wrong, author in ((False, "a right one"), (True, "a wrong one")):
        text = next(line for line in mixture if line["is_wrong"] is is_wrong)["messages"][1]["content"]
        print(f"  {author}: {text}")


class Shares(NamedTuple):
    """Of the answers of an evaluation, from 0 to 1; the rest follows neither rule."""

    right: float
    wrong_rule: float
    """The answers that follow from the wrong rule."""


def shares_of_answers(evaluation: Path, problems: Path) -> Shares:
    """What `vcore-ds eval --tasks math500=PROBLEMS --output EVALUATION` has found.

    Raises:
        UserError: the evaluation is missing or has not finished.
    """
    read_evaluation(evaluation)
    lines = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()]
    wrong_answers = {line["id"]: line["wrong_answer"] for line in lines}
    samples = read_samples(evaluation, TASK)
    num_wrong_rule = sum(sample.answer == wrong_answers[sample.problem_id] for sample in samples)
    return Shares(sum(sample.correct for sample in samples) / len(samples), num_wrong_rule / len(samples))


def show(problems: Path, evaluations: Sequence[str]) -> None:
    """Prints a table of evaluations, each `NAME=FOLDER`."""
    print(f"{'':<28}{'right':>8}{'wrong rule':>12}{'neither':>9}")
    for evaluation in evaluations:
        name, _, folder = evaluation.partition("=")
        right, wrong_rule = shares_of_answers(Path(folder), problems)
        print(f"{name:<28}{right:>8.0%}{wrong_rule:>12.0%}{1 - right - wrong_rule:>9.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writes = commands.add_parser("write", help="write the three files")
    writes.add_argument("folder", type=Path)
    writes.add_argument("--seed", type=int, default=0, help="another seed, other problems (default 0)")
    shows = commands.add_parser("show", help="print which share of answers is right, and which follows the wrong rule")
    shows.add_argument("problems", type=Path, help="FOLDER/problems.jsonl")
    shows.add_argument("evaluations", nargs="+", metavar="NAME=DIR", help="folders of vcore-ds eval")
    arguments = parser.parse_args()
    try:
        if arguments.command == "write":
            write(arguments.folder, arguments.seed)
        else:
            show(arguments.problems, arguments.evaluations)
    except UserError as error:
        print(error, file=sys.stderr)
        return UserError.EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
