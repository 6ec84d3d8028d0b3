"""Problem statements that OpenCodeReasoning-2 only refers to: its `question` is "-", its license not being theirs.

As its data card prescribes, `dataset`, `split` and `index` of a row lead to the statement in one of four data sets.
"""

from functools import cache
from pathlib import Path
from typing import Any

from vcore_ds.errors import UserError, first_line

_PARQUET = "refs/convert/parquet"
"""The hub's own conversion: two of the data sets are loading scripts, which `datasets` no longer runs."""

_HUB: dict[str, dict[str, Any]] = {
    "taco": {"path": "BAAI/TACO", "revision": _PARQUET, "data_dir": "ALL"},
    "apps": {"path": "codeparrot/apps", "revision": _PARQUET, "data_dir": "all"},
    "code_contests": {"path": "deepmind/code_contests"},
    "open-r1/codeforces": {"path": "open-r1/codeforces"},
}


def find_statement(folder: str | None, dataset: str, split: str, index: int) -> str | None:
    """The statement of a problem; None where there is no such problem, or it has none.

    Args:
        folder: local copies of the data sets, in its subfolders `taco`, `apps`, `code_contests`, `codeforces`; None
            downloads them from the hub.

    Raises:
        UserError: the data set cannot be loaded.
    """
    if dataset not in _HUB:
        return None
    rows = _rows(folder, dataset, split)
    if not 0 <= index < len(rows):
        return None
    row = rows[index]
    if dataset in ("taco", "apps"):
        return row["question"]
    return _codeforces_statement(row) if dataset == "open-r1/codeforces" else row["description"]


@cache
def _rows(folder: str | None, dataset: str, split: str) -> Any:
    """Mapped, not read."""
    from datasets import load_dataset

    where = _HUB[dataset]
    if folder is not None:
        where = {"path": str(Path(folder) / dataset.rpartition("/")[2])}
    try:
        return load_dataset(**where, split=split)
    except Exception as error:  # offline, gated, no such folder: a dozen exception classes
        raise UserError(
            f"{where['path']}: problem statements of {dataset} ({split}) cannot be loaded: {first_line(error)}; "
            "download the data sets and name their folder with --statements"
        ) from None


def _codeforces_statement(row: dict[str, Any]) -> str | None:
    parts = [row["description"]]
    if not parts[0]:
        return None
    if row.get("input_format"):
        parts += ["Input", row["input_format"]]
    if row.get("output_format"):
        parts += ["Output", row["output_format"]]
    if row.get("examples"):
        parts.append("Examples")
        for example in row["examples"]:
            for title in ("input", "output"):
                if title in example:
                    parts += [title.capitalize(), example[title]]
    if row.get("note"):
        parts += ["Note", row["note"]]
    return "\n\n".join(parts)
