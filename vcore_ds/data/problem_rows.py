"""Rows of problems with their answers, from files or the hub, as evaluation and reinforcement learning read them."""

from collections.abc import Iterator
from itertools import chain, groupby
from typing import Any

from vcore_ds.data.prepare.sources import BLANK, Broken, find_shards


def problem_rows(source: str, split: str) -> Iterator[tuple[str, dict[str, Any] | Broken]]:
    """(place of a row, for messages; its columns, or what is wrong with it) for each row that is not blank.

    Args:
        source: a file, folder or pattern (.jsonl, .json, .parquet), or a hub id.
        split: of a data set on the hub, see `find_shards`.

    Raises:
        UserError: the source cannot be read, or is empty.
    """
    for path, shards in groupby(find_shards([source], split), key=lambda shard: shard.source):
        rows = chain.from_iterable(shard.rows() for shard in shards)
        for number, (_, row) in enumerate(rows, start=1):
            if row is BLANK:
                continue
            if not isinstance(row, dict | Broken):
                row = Broken(f"found {type(row).__name__}, expected an object")
            yield f"{path}: row {number}", row


def find_text(row: dict[str, Any], *names: str) -> str | None:
    """The first of the columns with a text or a number in it, as text without white space around it; None without."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    return None


def text_of(row: dict[str, Any], *names: str) -> str:
    """The same for columns of which a row must have one. Raises ValueError where it has none, or nothing in them."""
    text = find_text(row, *names)
    if text is None:
        found = ", ".join(map(str, row)) or "none"
        raise ValueError(f"found no {' or '.join(f'`{name}`' for name in names)} (its columns: {found:.200})")
    return text
