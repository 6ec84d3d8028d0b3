"""Every key of a recipe with its values, default and meaning, read from the schema: `vcore-ds keys`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vcore_ds.config.fields import LARGEST_COUNT, LARGEST_FLOAT, LARGEST_MINUTES, LARGEST_SEED
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS, section_class

UNBOUNDED = {LARGEST_COUNT, LARGEST_FLOAT, LARGEST_MINUTES, LARGEST_SEED, 60 * LARGEST_MINUTES}
"""Bounds that only keep a number within what tensors and timers hold: no one chooses by them."""


@dataclass(frozen=True)
class Key:
    """A key of a recipe."""

    section: str
    name: str
    values: str
    """What it may be, in words: `auto or whole number at least 1`."""
    default: str | None
    """As YAML has it; None where the key has to be given."""
    meaning: str

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"


def recipe_keys() -> list[Key]:
    """All keys in the order of the schema."""
    return [key for section in SECTIONS for key in _keys_of(section)]


def _keys_of(*names: str) -> Iterator[Key]:
    """The keys of a section, or of a key with keys of its own; those of a key after it."""
    for name, key in section_class(*names).model_json_schema()["properties"].items():
        yield Key(
            section=names[0],
            name=".".join([*names[1:], name]),
            values=_values(key),
            default=_yaml(key["default"]) if "default" in key else None,
            meaning=" ".join(key["description"].split()),
        )
        if (names[0], name) in SUBSECTIONS:
            yield from _keys_of(*names, name)


def section_meaning(section: str) -> str:
    """The sentence that describes a section."""
    return " ".join((SECTIONS[section].__doc__ or "").split())


def _values(key: dict[str, Any]) -> str:
    """The values that a key's JSON schema allows, in words."""
    if "anyOf" in key:
        return " or ".join(_values(one) for one in key["anyOf"])
    if "$ref" in key:
        return "keys of its own"
    if "const" in key or "enum" in key:
        return ", ".join(str(value) for value in key.get("enum", [key.get("const")]))
    kind = key["type"]
    if kind in {"integer", "number"}:
        return " ".join(["whole number" if kind == "integer" else "number", " and ".join(_bounds(key))]).rstrip()
    if kind == "array":
        parts = [_values(part) for part in key.get("prefixItems", [])]
        return f"[{', '.join(parts)}]" if parts else f"list of {_values(key['items'])}"
    if kind == "object":
        (value,) = key["patternProperties"].values()
        return f"{{NAME: {_values(value)}, ...}}"
    return {"boolean": "true, false", "string": "text", "null": "null"}[kind]


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _bounds(key: dict[str, Any]) -> Iterator[str]:
    for name, words in (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    ):
        if name in key and abs(key[name]) not in UNBOUNDED:
            yield f"{words} {key[name]:g}"
