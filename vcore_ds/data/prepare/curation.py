"""Curation of raw rows for `vcore-ds prepare`: requests, conversations, and the rules that drop rows (appendix "Dataset
Curation for supervised tasks")."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.locks import describe_differences
from vcore_ds.data.answers import code_prompt, find_answer_spans, math_prompt
from vcore_ds.data.conversations import Supervise
from vcore_ds.data.messages import Dropped, Malformed, Message, split_thinking
from vcore_ds.data.prepare.rows import check_object, find_texts, list_names
from vcore_ds.data.prepare.sources import RawFile, describe_source
from vcore_ds.data.store import MANIFEST, describe_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


OTHER_PROBLEM_TYPE = 'problem_type is not "has_answer_extracted"'
OTHER_MODEL = 'generation_model is not "DeepSeek-R1"'
NOT_RIGHT = 'judgement is not "right"'
NOT_ONE_THINKING = "not exactly one <think> pair with an answer"
NOT_BOXED = "no \\boxed{} in the answer"
NOT_EQUIVALENT = "math-verify: not the expected answer"
UNFINISHED = "math-verify: past the time limit"
NO_STATEMENT = "the problem's statement cannot be found"

_MAX_INDEX_DIGITS = 12  # digits of a problem's number; int() raises for thousands of them


def convert_math_row(row: Any, check_answer: Callable[[str, str], str]) -> list[Message]:
    """Convert a row of OpenMathReasoning to a conversation. `check_answer`: maps (expected, answer) to a verdict of
    `AnswerChecker.check`."""
    _keep_only(row, "problem_type", "has_answer_extracted", OTHER_PROBLEM_TYPE)
    _keep_only(row, "generation_model", "DeepSeek-R1", OTHER_MODEL)
    fields = find_texts(row, "problem", "generated_solution", "expected_answer")
    thinking, answer = _split_trace(fields["generated_solution"])
    spans = find_answer_spans(answer)
    if not spans:
        raise Dropped(NOT_BOXED)
    verdict = check_answer(fields["expected_answer"], answer[slice(*spans[-1])])
    if verdict != "equivalent":
        raise Dropped(UNFINISHED if verdict == "unfinished" else NOT_EQUIVALENT)
    return _make_messages(math_prompt(fields["problem"].strip()), thinking, answer)


def convert_code_row(row: Any, find_statement: Callable[[str, str, int], str | None]) -> list[Message]:
    """Convert a row of OpenCodeReasoning-2 to a conversation. `find_statement`: maps (data set, split, index) to the
    statement, if `question` is "-"."""
    _keep_only(row, "judgement", "right", NOT_RIGHT)
    fields = find_texts(row, "question", "r1_generation")
    thinking, answer = _split_trace(fields["r1_generation"])
    statement: str | None = fields["question"].strip()
    if statement == "-":
        where = find_texts(row, "dataset", "split", "index")
        if not where["index"].isdecimal() or len(where["index"]) > _MAX_INDEX_DIGITS:
            raise Malformed(f"`index` is {where['index']!r:.60}, expected the number of the problem")
        statement = find_statement(where["dataset"], where["split"], int(where["index"]))
    if not statement:
        raise Dropped(NO_STATEMENT)
    return _make_messages(code_prompt(statement), thinking, answer)


def _split_trace(text: str) -> tuple[str, str]:
    """Return (thinking, answer)."""
    if text.count("<think>") > 1 or text.count("</think>") != 1:
        raise Dropped(NOT_ONE_THINKING)
    parts = split_thinking(text)
    if not all(part.strip() for part in parts):
        raise Dropped(NOT_ONE_THINKING)
    return parts[0].strip(), parts[1].strip()


def _make_messages(prompt: str, thinking: str, answer: str) -> list[Message]:
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": answer, "reasoning_content": thinking},
    ]


def _keep_only(row: Any, name: str, value: str, rule: str) -> None:
    check_object(row)
    if name not in row:
        raise Malformed(f"no field `{name}`, found {list_names(row)}")
    if row[name] != value:
        raise Dropped(rule)


# OpenCodeReasoning-2 lacks the problem statements, whose licenses differ: `question` is "-", and `dataset`, `split` and
# `index` name the statement in one of four data sets, as its data card says.


_PARQUET = "refs/convert/parquet"
"""The hub's conversion; two of the data sets are loading scripts, which `datasets` no longer runs."""

_HUB: dict[str, dict[str, Any]] = {
    "taco": {"path": "BAAI/TACO", "revision": _PARQUET, "data_dir": "ALL"},
    "apps": {"path": "codeparrot/apps", "revision": _PARQUET, "data_dir": "all"},
    "code_contests": {"path": "deepmind/code_contests"},
    "open-r1/codeforces": {"path": "open-r1/codeforces"},
}


def find_statement(folder: str | None, dataset: str, split: str, index: int) -> str | None:
    """Look up the statement of a problem in the subfolders `taco`, `apps`, `code_contests`, `codeforces` of `folder`,
    or on the hub (None); None if there is none. Raises UserError if the data set cannot be loaded."""
    if dataset not in _HUB:
        return None
    rows = _load_rows(folder, dataset, split)
    if not 0 <= index < len(rows):
        return None
    row = rows[index]
    if dataset in ("taco", "apps"):
        return row["question"]
    return _join_codeforces_statement(row) if dataset == "open-r1/codeforces" else row["description"]


@cache
def _load_rows(folder: str | None, dataset: str, split: str) -> Any:
    from datasets import load_dataset

    where = _HUB[dataset]
    if folder is not None:
        where = {"path": str(Path(folder) / dataset.rpartition("/")[2])}
    try:
        return load_dataset(**where, split=split)
    except Exception as error:  # of a dozen classes: offline, gated, no such folder
        raise UserError(
            f"{where['path']}: problem statements of {dataset} ({split}) cannot be loaded: {first_line(error)}; "
            "download the data sets and name their folder with --statements"
        ) from None


def _join_codeforces_statement(row: dict[str, Any]) -> str | None:
    parts = [("", row["description"]), ("Input", row.get("input_format")), ("Output", row.get("output_format"))]
    examples = row.get("examples") or []
    titles = ("input", "output")
    parts += [("", "Examples")] if examples else []
    parts += [(title.capitalize(), example[title]) for example in examples for title in titles if title in example]
    parts.append(("Note", row.get("note")))
    texts = [text for title, body in parts if body for text in (title, body) if text]
    return "\n\n".join(texts) if row["description"] else None


Kind = Literal["math", "code", "chat"]

SPLITS = {"math": "cot", "code": "cpp", "chat": "train"}
HUB_IDS = {"math": "nvidia/OpenMathReasoning", "code": "nvidia/OpenCodeReasoning-2"}

_ROWS_VERSION = 3
"""How rows are read. 1 dropped `tools`, calls, and the weights of messages; 2 left thinking in the text, dropped
thinking columns and `chat_template_kwargs`, and did not learn every end of a turn; both drew other samples."""


@dataclass(frozen=True)
class PrepareRequest:
    """Everything that determines the bytes of the store."""

    kind: Kind
    sources: tuple[str, ...]  # files, folders, patterns, or ids on the hub
    tokenizer: str  # folder or hub id of the model to train
    split: str  # split of data sets on the hub
    sample: int | None = None  # sequences to keep, chosen at random; None for all
    seed: int = 42
    cutoff_length: int = 16384  # tokens; longer sequences are dropped or truncated
    overlong: Literal["drop", "truncate"] = "drop"
    supervise: Supervise = "all"  # turns of the assistant that are learned, of chat data
    columns: Mapping[str, str] = field(default_factory=dict)  # of chat data: our name of a column -> the rows' name
    answer_seconds: int = 5  # CPU seconds for comparing one answer
    statements: str | None = None
    """folder with the problem statements that OpenCodeReasoning-2 refers to; None for the hub"""


def describe_origin(
    request: PrepareRequest, files: Sequence[RawFile], tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, Any]:
    """Make the manifest's entries on a store's origin; equal origins give equal contents."""
    apart = ("kind", "sources", "tokenizer", "seed")
    filters = {key: value for key, value in asdict(request).items() if key not in apart}
    filters["rows_version"] = _ROWS_VERSION
    if request.kind == "math":
        filters |= {"prompt": math_prompt("{ORIGINAL QUESTION}"), "math_verify": version("math-verify")}
    if request.kind == "code":
        filters["prompt"] = code_prompt("{ORIGINAL QUESTION}")
    return {
        "kind": request.kind,
        "source": describe_source(files),
        "tokenizer": describe_tokenizer(tokenizer),
        "filters": filters,
        "seed": request.seed,
    }


def check_finished(output: Path, origin: dict[str, Any]) -> None:
    """Raise UserError unless `output` is a store of this origin."""
    remedy = "name another --output, or delete it"
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{output}: is there already and is no token store; {remedy}") from None
    if differences := describe_differences({key: manifest.get(key) for key in origin}, origin):
        raise UserError(f"{output}: found a store that was made otherwise; {remedy}:\n{differences}")
