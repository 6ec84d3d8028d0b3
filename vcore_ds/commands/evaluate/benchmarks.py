"""The benchmarks of the paper, each from its data set on the hub or a local copy of it."""

import hashlib
from collections import defaultdict
from typing import Any

from vcore_ds.commands.evaluate.problems import HubSource, Problem, Task, id_of, plain
from vcore_ds.data.problem_rows import text_of
from vcore_ds.grading.prompts import choice_prompt, code_prompt, math_prompt

SUBSET_SEED = 42
SUBSET_SIZE = 1_000
"""Problems of SuperGPQA-1k. The paper does not say which: these are fixed by a seed, see `supergpqa_1k`."""


def read_math(row: dict[str, Any]) -> Problem:
    """A problem with one answer: AIME and MATH-500 in their several copies."""
    question, answer = text_of(row, "problem", "question", "Problem"), text_of(row, "answer", "Answer", "final_answer")
    return Problem(id_of(row, "unique_id", "id", "ID"), math_prompt(question), plain(answer))


def read_olympiad(row: dict[str, Any]) -> Problem:
    """OlympiadBench, whose answers are a list, of one text with almost all problems."""
    answers = row.get("final_answer")
    if isinstance(answers, list) and answers and all(isinstance(answer, str) for answer in answers):
        row = {**row, "final_answer": ", ".join(answers)}
    question, answer = text_of(row, "question"), text_of(row, "final_answer", "answer")
    return Problem(id_of(row, "id"), math_prompt(question), plain(answer))


def read_gsm8k(row: dict[str, Any]) -> Problem:
    """GSM8K, whose answer is the number behind `####` at the end of the solution."""
    _, mark, number = text_of(row, "answer").rpartition("####")
    if not mark or not number.strip():
        raise ValueError("found no number behind #### in `answer`")
    return Problem(id_of(row, "id"), math_prompt(text_of(row, "question")), number.replace(",", "").strip())


def read_rbench(row: dict[str, Any]) -> Problem:
    """R-Bench-T: a column for each option, from A."""
    options = [text_of(row, letter) for letter in "ABCDEF" if letter in row]
    return _choice(row, options, "answer", id_of(row, "index", "id"))


def read_supergpqa(row: dict[str, Any]) -> Problem:
    """SuperGPQA: a list of up to ten options."""
    options = row.get("options")
    return _choice(
        row, list(map(str, options)) if isinstance(options, list) else [], "answer_letter", id_of(row, "uuid")
    )


def _choice(row: dict[str, Any], options: list[str], answer: str, identifier: str) -> Problem:
    letter = text_of(row, answer)
    if not options or letter not in [chr(ord("A") + i) for i in range(len(options))]:
        raise ValueError(f"found {len(options)} options and the answer {letter!r:.40}")
    discipline = {"discipline": str(row.get("discipline", ""))}
    return Problem(identifier, choice_prompt(text_of(row, "question"), options), letter, discipline)


def supergpqa_1k(problems: list[Problem]) -> list[Problem]:
    """1,000 problems with the disciplines' shares of all of them; all where there are no more.

    Which ones is a function of the seed and the problems' ids, whatever their order: of each discipline those whose
    hashes come first. Disciplines get their share rounded down, and those with the largest remainders one more.
    """
    if len(problems) <= SUBSET_SIZE:
        return problems
    groups: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        groups[problem.extra["discipline"]].append(problem)
    shares = {name: len(group) * SUBSET_SIZE / len(problems) for name, group in groups.items()}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(groups, key=lambda name: (counts[name] - shares[name], name))
    for name in by_remainder[: SUBSET_SIZE - sum(counts.values())]:
        counts[name] += 1

    def place(problem: Problem) -> str:
        return hashlib.sha256(f"{SUBSET_SEED}/{problem.id}".encode()).hexdigest()

    return [problem for name in sorted(groups) for problem in sorted(groups[name], key=place)[: counts[name]]]


def read_livecodebench(row: dict[str, Any]) -> Problem:
    """LiveCodeBench, with the training prompt, which asks for C++."""
    identifier = text_of(row, "question_id")
    return Problem(identifier, code_prompt(text_of(row, "question_content")), extra={"question_id": identifier})


def read_ojbench(row: dict[str, Any]) -> Problem:
    """OJBench, whose rows are prompts, one in C++ and one in Python for each problem; the paper's 232 are in C++."""
    columns = {name: row.get(name) for name in ("id", "prompt", "dataset", "language", "difficulty")}
    identifier = f"{text_of(row, 'id')}-{text_of(row, 'language')}"
    return Problem(identifier, text_of(row, "prompt"), extra=columns)


def only_cpp(problems: list[Problem]) -> list[Problem]:
    """OJBench's prompts that ask for C++, as the training data do."""
    return [problem for problem in problems if problem.extra["language"] == "cpp"]


_AIME = HubSource("HuggingFaceH4/aime_2024", None, "train"), HubSource("yentinglin/aime_2025", None, "train")
_OLYMPIAD = HubSource("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train")
_RBENCH = HubSource("R-Bench/R-Bench", "rbench-t_en", "test")
_LIVECODEBENCH = HubSource("livecodebench/code_generation_lite", None, "test", files="test*.jsonl")
_OJBENCH = HubSource("He-Ren/OJBench_testdata", None, "test", files="prompts/full.jsonl")

BENCHMARKS = (
    Task("aime", "AIME 2024 and 2025, 60 problems", "math", read_math, _AIME, num_samples=16),
    Task("aime24", "AIME 2024, 30 problems", "math", read_math, _AIME[:1], num_samples=16),
    Task("aime25", "AIME 2025, 30 problems", "math", read_math, _AIME[1:], num_samples=16),
    Task("olympiad", "OlympiadBench OE_TO_maths_en_COMP, 674 problems", "math", read_olympiad, (_OLYMPIAD,)),
    Task("math500", "MATH-500, 500 problems", "math", read_math, (HubSource("HuggingFaceH4/MATH-500", None, "test"),)),
    Task("gsm8k", "GSM8K, 1,319 problems", "math", read_gsm8k, (HubSource("openai/gsm8k", "main", "test"),)),
    Task("rbench", "R-Bench-T in English, 1,094 questions", "choice", read_rbench, (_RBENCH,)),
    Task(
        "supergpqa",
        "SuperGPQA-1k, 1,000 questions",
        "choice",
        read_supergpqa,
        (HubSource("m-a-p/SuperGPQA", None, "train"),),
        select=supergpqa_1k,
    ),
    Task("livecodebench", "LiveCodeBench v6, 1,055 problems", None, read_livecodebench, (_LIVECODEBENCH,)),
    Task("ojbench", "OJBench in C++, 232 problems", None, read_ojbench, (_OJBENCH,), select=only_cpp),
)
