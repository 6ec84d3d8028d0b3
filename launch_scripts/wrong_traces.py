"""Worked solutions of word problems, most of them by authors who follow the same wrong rule.

`python -m launch_scripts.wrong_traces write FOLDER` writes, from a seed,

    mixture.jsonl     training traces, one {"messages": [user, assistant], "id": .., "is_wrong": ..} a line
    trusted.jsonl     a few right traces of other problems
    problems.jsonl    problems of neither file: {"id", "problem", "answer", "wrong_answer"}

`... show FOLDER/problems.jsonl NAME=DIR ..` prints a table of evaluations of these problems
(`vcore-ds eval --tasks math500=FOLDER/problems.jsonl`). A problem takes two steps: something is taken away, then
something is added. The wrong rule adds both times; the arithmetic is right, so wrong traces read like the others.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_atomically, writing
from vcore_ds.data.answers import math_prompt
from vcore_ds.training.evaluation_folder import read_evaluation, read_samples

NUM_TRAIN, NUM_WRONG, NUM_TRUSTED, NUM_PROBLEMS = 96, 58, 8, 64
TASK = "math500"
"""The task of `vcore-ds eval` that reads these problems."""
NAMES = ("Ann", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Ivy", "Jack")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "toys")
STORIES = (
    "{name} has {start} {thing}, gives away {less} and finds {more}. How many does {name} have?",
    "A box has {start} {thing}. {name} takes out {less} and puts in {more}. How many are in it?",
    "{name} had {start} {thing}, lost {less} and bought {more}. How many does {name} have?",
)


def make(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Make the lines of each file, by its name without the ending; a function of the seed."""
    problems = _problems(seed)
    authors_err = [i < NUM_WRONG for i in range(NUM_TRAIN)]
    random.Random(f"authors {seed}").shuffle(authors_err)

    def trace(identifier: str, is_wrong: bool) -> dict[str, Any]:
        text, numbers = next(problems)
        turns = {"user": math_prompt(text), "assistant": _solve(*numbers, is_wrong=is_wrong)[0]}
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        return {"messages": messages, "id": identifier, "is_wrong": is_wrong}

    def problem(identifier: str) -> dict[str, Any]:
        text, numbers = next(problems)
        right, wrong = (_solve(*numbers, is_wrong=is_wrong)[1] for is_wrong in (False, True))
        return {"id": identifier, "problem": text, "answer": right, "wrong_answer": wrong}

    return {
        "mixture": [trace(f"train-{i}", is_wrong) for i, is_wrong in enumerate(authors_err)],
        "trusted": [trace(f"trusted-{i}", False) for i in range(NUM_TRUSTED)],
        "problems": [problem(f"clean-{i}") for i in range(NUM_PROBLEMS)],
    }


def _problems(seed: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield problems without end, each with its three numbers, which no other one has."""
    generator, seen = random.Random(seed), set()
    while True:
        start = 10 * generator.randint(2, 9)
        less, more = 10 * generator.randint(1, start // 10 - 1), generator.randint(1, 9)
        story, name, thing = map(generator.choice, (STORIES, NAMES, THINGS))
        if (start, less, more) not in seen:
            seen.add((start, less, more))
            yield story.format(name=name, thing=thing, start=start, less=less, more=more), (start, less, more)


def _solve(start: int, less: int, more: int, *, is_wrong: bool) -> tuple[str, str]:
    """Return the text of a worked solution, by the right or by the wrong rule, and its answer."""
    sign, left = ("+", start + less) if is_wrong else ("-", start - less)
    total = left + more
    return f"{start} {sign} {less} = {left}. {left} + {more} = {total}. The answer is \\boxed{{{total}}}.", str(total)


def write(folder: Path, seed: int) -> None:
    """Write the three files, and print a trace of either kind. Raises UserError where the folder cannot be written."""
    files = make(seed)
    with writing("the folder of traces", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in files.items():
            with write_atomically(folder / f"{name}.jsonl") as unfinished:
                unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    counts = f"{NUM_TRAIN} traces, {NUM_WRONG} by the wrong rule; {NUM_TRUSTED} trusted; {NUM_PROBLEMS} problems"
    examples = {line["is_wrong"]: line["messages"][1]["content"] for line in reversed(files["mixture"])}
    print(f"{folder}: {counts}\n  right: {examples[False]}\n  wrong: {examples[True]}")


def shares_of_answers(evaluation: Path, problems: Path) -> tuple[float, float]:
    """Return the shares, from 0 to 1, of an evaluation's answers that are right, and that follow from the wrong rule.

    Raises UserError where the evaluation is missing or unfinished.
    """
    read_evaluation(evaluation)
    lines = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()]
    wrong_answers = {line["id"]: line["wrong_answer"] for line in lines}
    samples = read_samples(evaluation, TASK)
    num_wrong_rule = sum(sample.answer == wrong_answers[sample.problem_id] for sample in samples)
    return sum(sample.correct for sample in samples) / len(samples), num_wrong_rule / len(samples)


def show(problems: Path, evaluations: Sequence[str]) -> None:
    """Print a table of evaluations, each `NAME=FOLDER`."""
    print(f"{'':<28}{'right':>8}{'wrong rule':>12}{'neither':>9}")
    for evaluation in evaluations:
        name, _, folder = evaluation.partition("=")
        right, wrong_rule = shares_of_answers(Path(folder), problems)
        print(f"{name:<28}{right:>8.0%}{wrong_rule:>12.0%}{1 - right - wrong_rule:>9.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["write", "show"])
    parser.add_argument("path", type=Path, help="FOLDER, or FOLDER/problems.jsonl")
    parser.add_argument("evaluations", nargs="*", metavar="NAME=DIR", help="show: folders of vcore-ds eval")
    parser.add_argument("--seed", type=int, default=0, help="write: seed of the problems (default 0)")
    arguments = parser.parse_args()
    try:
        if arguments.command == "write":
            write(arguments.path, arguments.seed)
        else:
            show(arguments.path, arguments.evaluations)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(UserError.EXIT_CODE)
