"""`OUTPUT.unfinished`: the parts of a long computation that are done, which the same command continues.

The folder names the request that its parts belong to. It is gone when the computation is done, and after a failure
before its first part.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from vcore_ds.errors import UserError
from vcore_ds.files.aside import unfinished_path
from vcore_ds.files.json_files import write_json
from vcore_ds.files.locks import LOCK, alone_in, remove_locked

REQUEST = "request.json"
MAX_DIFFERENCES = 12
"""Lines of a message on two requests."""
MAX_VALUE_LENGTH = 160
"""Characters of a value in such a line."""


@contextmanager
def unfinished_work(output: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields `OUTPUT.unfinished`, which this process alone writes into. A block that raises leaves the folder where
    something was computed; any other block removes it.

    Raises:
        UserError: another process is in it.
        OSError: the folder cannot be made.
    """
    folder = unfinished_path(output)
    with alone_in(folder, say) as lock:
        try:
            yield folder
        except BaseException:
            if not _holds_parts(folder):
                remove_locked(folder, lock)
            raise
        remove_locked(folder, lock)


def resume_or_begin(folder: Path, request: Mapping[str, Any], say: Callable[[str], None], *, again: bool) -> None:
    """Keeps the parts in the folder of `unfinished_work` where they belong to the same request; else empties it.

    Args:
        request: everything that the parts depend on, as JSON can hold it.
        again: begin again, whatever was computed.

    Raises:
        UserError: parts of another request are there, and `again` is false.
    """
    if _holds_parts(folder) and not again:
        differences = describe_differences(read_request(folder), request)
        if not differences:
            say(f"{folder}: resuming where an earlier run ended")
            return
        raise UserError(
            f"--output: {folder}: found unfinished work of another request:\n{differences}\nexpected the same values, "
            "to resume it. Name another --output, or delete the unfinished work with --again"
        )
    if _holds_parts(folder):
        say(f"{folder}: beginning again")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    write_json(folder / REQUEST, request)


def read_request(folder: Path) -> dict[str, Any]:
    """The request whose parts are in a folder; empty where the file is missing or damaged."""
    try:
        found = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """A line for each value in which two requests differ, by its dotted key; empty where they are equal."""
    left, right = _flatten(there), _flatten(json.loads(json.dumps(here)))
    keys = [key for key in dict.fromkeys([*left, *right]) if left.get(key, _NOTHING) != right.get(key, _NOTHING)]
    lines = [f"  {key}: {_show(left, key)} there, {_show(right, key)} here" for key in islice(keys, MAX_DIFFERENCES)]
    if len(keys) > MAX_DIFFERENCES:
        lines.append(f"  and {len(keys) - MAX_DIFFERENCES:,} more")
    return "\n".join(lines)


_NOTHING = object()


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Dotted key -> value, of objects and lists within each other; an empty one is a value."""
    children = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(children, Mapping) or (key and not children):
        return {key: value}
    return {k: v for name, child in children.items() for k, v in _flatten(child, f"{key}.{name}".lstrip(".")).items()}


def _show(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "nothing"
    text = json.dumps(values[key], ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + "..."


def _holds_parts(folder: Path) -> bool:
    """Whether anything was computed: the lock, the request and empty folders are written before that."""
    return any(path.is_file() and path.name != LOCK and not path.name.startswith(REQUEST) for path in folder.rglob("*"))
