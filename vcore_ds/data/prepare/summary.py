"""What `check` and `prepare` say of rows: their shapes, and their fields that have no effect."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path

from vcore_ds.data.prepare.rows import Malformed, chat_rows
from vcore_ds.data.prepare.sources import find_shards
from vcore_ds.data.store_checks import MANIFEST, read_manifest

_MAX_SHOWN = 10
"""Fields that are named in a line."""

_NUM_ROWS = 1000
"""Rows that `check` reads of each source."""

_MOST_BYTES = 64 * 2**20
"""Larger files that are one list are not read by `check`, since that would take seconds."""


def list_fields(fields: Mapping[str, int]) -> str:
    """Fields with the number of rows that have them, the most frequent ones first."""
    ordered = sorted(fields.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"`{name:.40}` {number:,}" for name, number in ordered[:_MAX_SHOWN]]
    others = [f"{len(ordered) - _MAX_SHOWN:,} others"] if len(ordered) > _MAX_SHOWN else []
    return ", ".join([*shown, *others])


def describe_reading(path: str) -> list[str]:
    """Lines on a token store, or on the first rows of conversations: shapes, ignored fields, faults.

    Raises UserError where `path` cannot be read.
    """
    if (Path(path) / MANIFEST).is_file():
        return [f"{path}: {line}" for line in read_manifest(Path(path)).get("counts", {}).get("reading", [])]
    return [f"{path}: {_describe_rows(path)}"]


def _describe_rows(source: str) -> str:
    shapes: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    for_template: Counter[str] = Counter()
    faults: list[str] = []
    shards = find_shards([source], "train")
    if any(shard.kind == "array" and Path(shard.source).stat().st_size > _MOST_BYTES for shard in shards[:1]):
        return "a long list, which is not read here"
    for chat in islice(chain.from_iterable(map(chat_rows, shards)), _NUM_ROWS):
        if isinstance(chat, Malformed):
            faults.append(str(chat))
            continue
        shapes[chat.shape] += 1
        ignored.update(chat.unknown)
        for_template.update(chat.unknown_fields)
    num_rows = shapes.total() + len(faults)
    parts = [f"the first {num_rows:,} rows" if num_rows == _NUM_ROWS else f"{num_rows:,} rows"]
    parts += [f"format {shape} {number:,}" for shape, number in sorted(shapes.items())]
    parts += [f"ignored: {list_fields(ignored)}"] if ignored else []
    parts += [f"ignored unless the chat template reads it: {list_fields(for_template)}"] if for_template else []
    parts += [f"malformed: {len(faults):,}, the first: {faults[0]:.300}"] if faults else []
    return "; ".join(parts)
