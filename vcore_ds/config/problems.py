"""Every key of a recipe in words (`vcore-ds keys`), and the problems of a recipe in the same words.

A problem says where, what was found, what was expected, and the nearest valid name.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vcore_ds.common.errors import UserError
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS, section_class
from vcore_ds.config.sections import LARGEST_COUNT, LARGEST_FLOAT, LARGEST_MINUTES, LARGEST_SEED

_MAX_SHOWN = 80
"""Characters of a value in a message."""

_UNBOUNDED = {LARGEST_COUNT, LARGEST_FLOAT, LARGEST_MINUTES, LARGEST_SEED, 60 * LARGEST_MINUTES}
"""Bounds that only keep a number within what tensors and timers hold: named where a value exceeds them."""

REMOVED = {
    ("probe", "decay"): "the running mean over directions was removed after 0.6",
    ("probe", "source"): "the direction is always the gradient of a probe batch; the previous step's was removed "
    "after 0.6",
}
"""Keys of earlier versions, and what became of them."""


class RecipeError(UserError):
    """A recipe or its DeepSpeed JSON cannot work. The message has one line per problem, all of them at once."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def show(value: Any) -> str:
    """A value as it would be written in YAML or JSON, shortened."""
    return shorten(json.dumps(value, ensure_ascii=False, default=str))


def shorten(text: str, limit: int = _MAX_SHOWN) -> str:
    """The text, with the end of a long one replaced by `...`."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def did_you_mean(names: Iterable[str]) -> str:
    """`; did you mean "a" or "b"?`, or nothing without names."""
    quoted = " or ".join(f'"{name}"' for name in names)
    return f"; did you mean {quoted}?" if quoted else ""


@dataclass(frozen=True)
class Key:
    """A key of a recipe."""

    section: str
    name: str
    values: str
    """The values that it may have, in words: `auto or a whole number of at least 1`."""
    default: str | None
    """As YAML has it; None where the key has to be given."""
    meaning: str

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"


def recipe_keys() -> list[Key]:
    """All keys in the order of the schema."""
    return [key for section in SECTIONS for key in _section_keys(section)]


def section_meaning(section: str) -> str:
    """The sentence that describes a section."""
    return " ".join((SECTIONS[section].__doc__ or "").split())


def _section_keys(*names: str) -> Iterator[Key]:
    """The keys of a section; those of a section within it after its key."""
    for name, schema in _key_schemas(*names).items():
        yield Key(
            section=names[0],
            name=".".join([*names[1:], name]),
            values=_values(schema),
            default=_yaml(schema["default"]) if "default" in schema else None,
            meaning=" ".join(schema["description"].split()),
        )
        if (names[0], name) in SUBSECTIONS:
            yield from _section_keys(*names, name)


def _key_schemas(*section: str) -> dict[str, Any]:
    """Key -> its JSON schema."""
    properties: dict[str, Any] = section_class(*section).model_json_schema()["properties"]
    return properties


def _values(schema: dict[str, Any], found: Any = None) -> str:
    """The values that a JSON schema allows, in words; a bound that nobody chooses by only where `found` exceeds it."""
    if "anyOf" in schema:
        return _either(_values(one, found) for one in schema["anyOf"])
    if "$ref" in schema:
        return "a section"
    if "const" in schema or "enum" in schema:
        return _either(_choices(schema))
    match schema["type"]:
        case "integer" | "number" as kind:
            number = "a whole number" if kind == "integer" else "a number"
            return " ".join([number, " and ".join(_bounds(schema, found))]).rstrip()
        case "array" if "prefixItems" in schema:
            return f"[{', '.join(_values(item) for item in schema['prefixItems'])}]"
        case "array":
            return f"a list of {_values(schema['items'])}"
        case "object":
            (value,) = schema["patternProperties"].values()
            return f"{{NAME: {_values(value)}, ...}}"
        case "string" if schema.get("pattern", "").startswith("^\\w"):
            return "a name of letters, digits and underscores"
        case kind:
            return {"boolean": "true or false", "string": "text", "null": "null"}[kind]


def _bounds(schema: dict[str, Any], found: Any) -> Iterator[str]:
    for name, words in (
        ("minimum", "of at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    ):
        bound = schema.get(name)
        is_exceeded = isinstance(found, int | float) and bound is not None and abs(found) > abs(bound)
        if bound is not None and (abs(bound) not in _UNBOUNDED or is_exceeded):
            yield f"{words} {f'{bound:g}' if isinstance(bound, float) else bound}"


def _choices(schema: dict[str, Any]) -> list[str]:
    """The words among a key's values."""
    branches = [choice for one in schema.get("anyOf", []) for choice in _choices(one)]
    return [*branches, *map(str, schema.get("enum", [schema["const"]] if "const" in schema else []))]


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def nearest_keys(name: str) -> list[str]:
    """Valid dotted names for an unknown section or key, best first: like it in its section, the same or alike in
    another one."""
    parent, _, word = name.rpartition(".")
    by_word: dict[str, list[str]] = {}
    for dotted in (
        *SECTIONS,
        *(f"{section}.{key}" for section, cls in SECTIONS.items() for key in cls.model_fields),
        *(f"{section}.{key}.{inner}" for (section, key), cls in SUBSECTIONS.items() for inner in cls.model_fields),
    ):
        by_word.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    siblings = {other: dotted for other in by_word for dotted in by_word[other] if dotted.rpartition(".")[0] == parent}
    near = [siblings[other] for other in difflib.get_close_matches(word, siblings, n=1)]
    return list(dict.fromkeys([*near, *by_word.get(word, [])])) or [
        dotted for other in difflib.get_close_matches(word, by_word, n=1) for dotted in by_word[other]
    ]


def field_problems(error: ValidationError, values: Any, within: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """The problems of single keys of a recipe, by location (section,), (section, key) or (section, key, inner key).

    Pydantic says which; the words are the schema's. The branches of a union and the items of a list are one key, hence
    one problem. Rules over several keys have no location and are asked separately.

    Args:
        values: what was validated.
        within: location of a section that was validated by itself, such as ("data", "keep").
    """
    locations = [(*within, *map(str, details["loc"])) for details in error.errors(include_url=False)]
    locations = [names[: 3 if names[:2] in SUBSECTIONS else 2] for names in locations if names]
    for name in reversed(within):
        values = {name: values}
    return {location: _describe(location, values) for location in dict.fromkeys(locations)}


def _describe(location: tuple[str, ...], values: Any) -> str:
    """`found ...; expected ...`, with a hint."""
    *section, name = location
    value, is_missing = values, False
    for part in location:
        is_missing = not isinstance(value, dict) or part not in value
        value = None if is_missing else value[part]
    found = f"found {'nothing' if is_missing else show(value)}"
    if location in REMOVED:
        return (
            f"{found}; expected no such key: {REMOVED[location]}. Leave the key out, and set probe.every to save "
            "probes; a run that was begun with it ends with vcore_ds 0.6"
        )
    known = section_class(*section).model_fields if section else SECTIONS
    if name not in known:
        kind = "key" if section else "section"
        hint = did_you_mean(nearest_keys(".".join(location)))
        return f"{found} under an unknown name; expected a {kind} among {', '.join(known)}{hint}"
    if not section or location in SUBSECTIONS:
        keys = ", ".join(section_class(*location).model_fields)
        or_null = {"lora": ", or null for full-parameter training", "keep": ", or null"}.get(name, "")
        return f"{found}; expected a section with keys {keys}{or_null}"
    schema = _key_schemas(*section)[name]
    near = difflib.get_close_matches(value, _choices(schema), n=1) if isinstance(value, str) else []
    not_empty = ", not empty" if value in ("", [], {}) else ""
    meaning = " ".join(schema["description"].split()).rstrip(".")
    return f"{found}; expected {_values(schema, value)}{not_empty} ({meaning}){did_you_mean(near)}"
