"""Tasks of `vcore-ds eval`: the paper's benchmarks, from the hub or a copy, two without a download, the user's own."""

import difflib
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from inspect_ai.dataset import Sample

from vcore_ds.commands.evaluate.champ import HELD_OUT, read_champ_problems
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import expand_home
from vcore_ds.common.text import check_unicode
from vcore_ds.config.load import read_text
from vcore_ds.data.answers import (
    CHAMP,
    Kind,
    choice_prompt,
    clean_answer,
    code_prompt,
    fill_template,
    math_prompt,
    read_letter,
)
from vcore_ds.data.prepare.sources import UnreadableRow, read_problem_rows, require_text
from vcore_ds.training.evaluation_folder import SampleResult

SUBSET_SIZE = 1_000
"""Problems of SuperGPQA-1k. The paper does not say which; these are chosen by `choose_supergpqa`."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A task that --tasks can name, or one of the user's."""

    help: str
    kind: Kind
    read: Callable[[Row], Sample] | None = None
    """Turns a row into a problem, with an empty id where it has none. Raises ValueError for unusable rows."""
    sources: tuple[tuple[str, str], ...] = ()  # data sets on the hub, each with its split
    select: Callable[[list[Sample]], list[Sample]] = list
    make: Callable[[], list[Sample]] | None = None  # makes the problems of a task without a data set
    num_samples: int = 1  # default of --samples; greedy decoding gives one answer
    max_new_tokens: int = 32_768
    """Default of --max-new-tokens, as model cards of reasoning models recommend; the preset has its own."""


class ChosenTask(NamedTuple):
    """A task with the settings of this evaluation."""

    name: str
    kind: Kind
    problems: list[Sample]
    """Input: the user's turn. Target: the answer, in LaTeX or as a letter; empty for code."""
    num_samples: int
    max_new_tokens: int

    def describe(self) -> list[list[Any]]:
        kind = [] if self.name in BENCHMARKS else [[self.kind]]  # a benchmark's is always the same
        return kind + [[problem.id, problem.input, problem.target] for problem in self.problems]


def choose_tasks(
    words: Sequence[str],
    *,
    answer: Kind | None = None,
    prompt: str | None = None,
    limit: int | None = None,
    num_samples: int | None = None,
    max_new_tokens: int | None = None,
) -> list[ChosenTask]:
    """Read the tasks NAME or NAME=FILE, with the first `limit` problems of each; None for each task's number of samples
    and tokens. Names of no benchmark are tasks of the user's, with `answer` and `prompt` as in `make_own_task`. Raises
    UserError where a name is unknown or repeated, a template or a task's data cannot be used, or no task takes them."""
    chosen: dict[str, ChosenTask] = {}
    for word in words:
        name, _, files = word.partition("=")
        if name not in BENCHMARKS and not (files and re.fullmatch(r"\w[\w.-]{0,63}", name)):
            near = difflib.get_close_matches(name, BENCHMARKS, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise UserError(
                f"--tasks: found {name!r:.60}{hint}; expected some of {', '.join(BENCHMARKS)}, or NAME=FILE with "
                "problems of your own and a NAME of letters, digits, dots and dashes"
            )
        if name in chosen:
            raise UserError(f"--tasks: found {name} twice; expected each task once")
        task = BENCHMARKS.get(name) or make_own_task(files, answer, prompt)
        if task.make is not None and files:
            raise UserError(f"--tasks: {word}: found a file for a task that makes its own problems")
        problems = task.make() if task.make is not None else task.select(_read_problems(name, task, files))
        limits = num_samples or task.num_samples, max_new_tokens or task.max_new_tokens
        chosen[name] = ChosenTask(name, task.kind, problems[:limit], *limits)
    if (answer, prompt) != (None, None) and chosen.keys() <= BENCHMARKS.keys():
        raise UserError("--answer, --prompt: found benchmarks alone, which have theirs; expected NAME=FILE in --tasks")
    return list(chosen.values())


def make_own_task(files: str, answer: Kind | None, prompt: str | None) -> Benchmark:
    """Make a task of the user's problems. `answer`: None for multiple choice where the first row has `options`, else
    math. `prompt`: a template with `{problem}`, and `{options}` for multiple choice, or a file with one; None for the
    prompt of training. Raises UserError where they cannot be read, or the template lacks a field."""
    if answer is None:
        _, first = next(read_problem_rows(files, "test"), ("", None))
        answer = "choice" if isinstance(first, dict) and "options" in first else "math"
    readers: dict[Kind, Callable[..., Sample]] = {"choice": _read_choice, "code": _read_code}
    read = readers.get(answer, read_math)
    if prompt is not None:
        if "{problem}" not in prompt:
            prompt = read_text(expand_home(prompt), "a --prompt with {problem}, or a file with one").strip()
        needed = ["{problem}", *(["{options}"] if answer == "choice" else [])]
        if missing := [field for field in needed if field not in prompt]:
            raise UserError(f"--prompt: found {prompt!r:.100} without {missing[0]}; expected {' and '.join(needed)}")
        read = partial(read, make_prompt=partial(fill_template, prompt))
    columns = {"choice": "`problem`, a list `options` and the `answer`'s letter", "code": "`problem`"}
    return Benchmark(columns.get(answer, "`problem` and `answer`"), answer, read)


def _read_problems(name: str, task: Benchmark, files: str) -> list[Sample]:
    """Read a task's problems from `files` (a file, folder, pattern or hub id), or from its sources if that is empty."""
    assert task.read is not None
    problems: dict[str, Sample] = {}
    sources = [(files, "test")] if files else task.sources
    if not sources:
        raise UserError(f"--tasks: {name}: found no file; expected {name}=FILE, a copy of {task.help}")
    for source, split in sources:
        # Ids of AIME 2024 and 2025 may coincide.
        prefix = f"{source.rpartition('/')[2]}/" if len(sources) > 1 else ""
        for number, (where, row) in enumerate(read_problem_rows(source, split), start=1):
            try:
                if isinstance(row, UnreadableRow):
                    raise ValueError(row.reason)
                problem = task.read(row)
                fields = f"{problem.id}{problem.input}{problem.target}{problem.metadata or ''}"
                check_unicode(fields, f"--tasks: {name}: {where}", "Repair the row")
            except ValueError as error:
                raise UserError(f"--tasks: {name}: {where}: {error}; expected a row of {task.help}") from None
            problem.id = f"{prefix}{problem.id or f'{number:05d}'}"
            if problem.id in problems:
                raise UserError(f"--tasks: {name}: {where}: found the problem {problem.id} twice; expected unique ids")
            problems[problem.id] = problem
    if not problems:
        raise UserError(f"--tasks: {name}={files}: found no problems; expected one a row")
    return list(problems.values())


def read_math(row: Row, make_prompt: Callable[[str], str] = math_prompt) -> Sample:
    """Read a problem of AIME, MATH-500, or OlympiadBench, which has a list of answers, or one of the user's."""
    answers = row.get("final_answer")
    if isinstance(answers, list) and all(isinstance(answer, str) for answer in answers):
        row = {**row, "final_answer": ", ".join(answers)}
    question = require_text(row, "problem", "question", "Problem")
    answer = require_text(row, "answer", "Answer", "final_answer")
    return _problem(row, ("unique_id", "id", "ID"), make_prompt(question), clean_answer(answer))


def _read_gsm8k(row: Row) -> Sample:
    """Read a problem of GSM8K: the answer is the number after `####` at the end of the solution."""
    _, mark, number = require_text(row, "answer").rpartition("####")
    if not mark or not number.strip():
        raise ValueError("found no number behind #### in `answer`")
    return _problem(row, ("id",), math_prompt(require_text(row, "question")), clean_answer(number))


def _read_choice(row: Row, make_prompt: Callable[[str, Sequence[str]], str] = choice_prompt) -> Sample:
    """Read a problem of SuperGPQA, with a list of options, or R-Bench-T, with a column per option, from A."""
    options = row.get("options", [require_text(row, letter) for letter in "ABCDEF" if letter in row])
    options = list(map(str, options)) if isinstance(options, list) else []
    letter = read_letter(require_text(row, "answer_letter", "answer"))
    if letter not in [chr(ord("A") + i) for i in range(len(options))]:
        raise ValueError(f"found {len(options)} options and the answer {letter!r:.40}")
    prompt = make_prompt(require_text(row, "problem", "question"), options)
    return _problem(row, ("uuid", "index", "id"), prompt, letter, discipline=str(row.get("discipline", "")))


def choose_supergpqa(problems: list[Sample]) -> list[Sample]:
    """Choose 1,000 problems, with each discipline's share of the data set (largest remainder method): those with the
    smallest hashes of their ids, whatever their order."""
    if len(problems) <= SUBSET_SIZE:
        return problems
    groups: dict[str, list[Sample]] = defaultdict(list)
    for problem in sorted(problems, key=lambda one: hashlib.sha256(f"42/{one.id}".encode()).digest()):
        groups[(problem.metadata or {})["discipline"]].append(problem)
    shares = {name: len(group) * SUBSET_SIZE / len(problems) for name, group in groups.items()}
    by_remainder = sorted(groups, key=lambda name: (int(shares[name]) - shares[name], name))
    num_more = SUBSET_SIZE - sum(map(int, shares.values()))
    counts = {name: int(shares[name]) + (place < num_more) for place, name in enumerate(by_remainder)}
    return [problem for name in sorted(groups) for problem in groups[name][: counts[name]]]


def _read_code(row: Row, make_prompt: Callable[[str], str] = code_prompt) -> Sample:
    """Read a problem of LiveCodeBench or the user's. The training prompt asks for C++."""
    return _problem(row, ("question_id", "id"), make_prompt(require_text(row, "problem", "question_content")), "")


def _read_ojbench(row: Row) -> Sample:
    """Read a prompt of OJBench, which has one in C++ and one in Python per problem."""
    columns = {name: row.get(name) for name in ("id", "prompt", "dataset", "language", "difficulty")}
    name = f"{row.get('id')}-{row.get('language')}"
    return Sample(id=name, input=require_text(row, "prompt"), metadata={"row": columns})


def _only_cpp(problems: list[Sample]) -> list[Sample]:
    """Select OJBench's 232 prompts for C++, the language of the training data."""
    return [problem for problem in problems if str(problem.id).endswith("-cpp")]


def format_generations(task: ChosenTask, samples: Sequence[SampleResult]) -> str:
    """The input of a code task's official grader. OJBench: a JSON line per answer, with the row's columns and
    `content`. LiveCodeBench, and the user's: a JSON list of {question_id, code_list}."""
    by_problem: dict[str, list[SampleResult]] = defaultdict(list)
    for sample in samples:
        by_problem[sample.problem_id].append(sample)
    answers = [(problem, by_problem[str(problem.id)]) for problem in task.problems]
    if task.name != "ojbench":
        rows = [{"question_id": one.id, "code_list": [each.answer or "" for each in given]} for one, given in answers]
        return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    rows = [{**(one.metadata or {})["row"], "content": each.output} for one, given in answers for each in given]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _problem(row: Row, ids: Sequence[str], prompt: str, expected: str, **metadata: str) -> Sample:
    """Make a problem; `ids`: columns that may hold the row's id."""
    identifier = next((str(row[name]) for name in ids if row.get(name) not in (None, "")), "")
    return Sample(id=identifier, input=prompt, target=expected, metadata=metadata)


def _make_arithmetic() -> list[Sample]:
    """Make 100 sums and differences and 100 products, with the library's prompt: the paper's asks for a box, which
    SmolLM2-135M leaves empty. Not the library's `basic_arithmetic`: its answers to unparenthesised divisions are
    wrong."""
    from reasoning_gym import create_dataset

    sums = create_dataset("chain_sum", seed=42, size=100, max_digits=2, max_terms=3)
    products = create_dataset("products", seed=42, size=100, max_digits=2, max_terms=2)
    return [
        Sample(id=f"{name}-{number:03d}", input=entry["question"], target=entry["answer"])
        for name, entries in (("sum", sums), ("product", products))
        for number, entry in enumerate(entries)
    ]


def _make_champ() -> list[Sample]:
    rows = read_champ_problems()
    prompts = {name: CHAMP.format(statement=rows[name]["_text"].strip()) for name in HELD_OUT}
    return [Sample(id=name, input=prompts[name], target=rows[name]["_answer"]) for name in HELD_OUT]


_AIME24, _AIME25 = ("HuggingFaceH4/aime_2024", "train"), ("yentinglin/aime_2025", "train")
_OLYMPIAD = ("Hothan/OlympiadBench::OE_TO_maths_en_COMP", "train")
_MATH500, _GSM8K = ("HuggingFaceH4/MATH-500", "test"), ("openai/gsm8k::main", "test")
_RBENCH, _SUPERGPQA = ("R-Bench/R-Bench::rbench-t_en", "test"), ("m-a-p/SuperGPQA", "train")

BENCHMARKS = {
    # Small models seldom box an answer, so these accept the last number.
    "arithmetic": Benchmark("procedural arithmetic", "number", make=_make_arithmetic, max_new_tokens=96),
    "champ": Benchmark("CHAMP, 30 held-out problems", "number", make=_make_champ, max_new_tokens=256),
    "aime": Benchmark("AIME 2024 and 2025, 60 problems", "math", read_math, (_AIME24, _AIME25), num_samples=16),
    "aime24": Benchmark("AIME 2024, 30 problems", "math", read_math, (_AIME24,), num_samples=16),
    "aime25": Benchmark("AIME 2025, 30 problems", "math", read_math, (_AIME25,), num_samples=16),
    "olympiad": Benchmark("OlympiadBench OE_TO_maths_en_COMP, 674 problems", "math", read_math, (_OLYMPIAD,)),
    "math500": Benchmark("MATH-500, 500 problems", "math", read_math, (_MATH500,)),
    "gsm8k": Benchmark("GSM8K, 1,319 problems", "math", _read_gsm8k, (_GSM8K,)),
    "rbench": Benchmark("R-Bench-T in English, 1,094 questions", "choice", _read_choice, (_RBENCH,)),
    "supergpqa": Benchmark("SuperGPQA", "choice", _read_choice, (_SUPERGPQA,), select=choose_supergpqa),
    # The data set of the former has a loading script, that of the latter files other than its rows.
    "livecodebench": Benchmark("LiveCodeBench's test*.jsonl", "code", _read_code),
    "ojbench": Benchmark("OJBench's prompts/full.jsonl", "code", _read_ojbench, select=_only_cpp),
}
