"""JSON that this package writes, read back as the types that were written, with one message where it is not."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside
from vcore_ds.files.user_paths import reading

Contents = TypeVar("Contents")

_MAX_SHOWN = 200
"""Characters of a problem in a message: it may quote a key of any length."""


def read_json(path: Path, contents: TypeAdapter[Contents], expected: str, remedy: str = "Remove the file") -> Contents:
    """What a file holds.

    Args:
        contents: what it should hold.
        expected: the same in words.
        remedy: what to do with a file that holds something else.

    Raises:
        UserError: the file cannot be read, or holds something else: it is cut off, damaged, or of another version.
    """
    with reading("", path, expected):
        text = path.read_bytes()
    return parse_json(text, contents, str(path), expected, remedy)


def parse_json(text: bytes, contents: TypeAdapter[Contents], where: str, expected: str, remedy: str) -> Contents:
    """The same of a text that was read already; `where` begins the message."""
    try:
        return contents.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{place}: {first['msg']}" if place else first["msg"]
        raise UserError(
            f"{where}: is damaged, or of another version ({problem[:_MAX_SHOWN]}); expected {expected}. {remedy}"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, written aside."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    with written_aside(path, several_writers=True) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
