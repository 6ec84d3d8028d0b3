"""The keys of a recipe in words, for `vcore-ds keys` and for messages about wrong values.

A message says where the value was set, what was found, what is expected, and the nearest valid name.
"""

import difflib
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import shorten
from vcore_ds.config.data_section import WeightedPath
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS, RuleViolations, section_class

_BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


class RecipeError(UserError):
    """Problems of a recipe or of its DeepSpeed JSON; the message has one line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@cache
def _read_names() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("names_elsewhere.yaml").read_text(encoding="utf-8"))


@cache
def names_elsewhere() -> dict[str, str]:
    """Name in another trainer or an earlier version -> our key, or a fragment to merge: of names_elsewhere.yaml."""
    return {name: key for key, names in _read_names().items() if key != "instead" for name in names.split()}


def find_instead(name: str) -> str | None:
    """What to use instead of another trainer's key that has no counterpart; None for other names, dotted or not."""
    words = {word: text for names, text in _read_names()["instead"].items() for word in names.split()}
    return words.get(name.rpartition(".")[2])


def show(value: Any) -> str:
    """A value as JSON, shortened."""
    return shorten(json.dumps(value, ensure_ascii=False, default=str))


def describe_problem(found: object, expected: str, nearest: Iterable[str] = ()) -> str:
    """The form of every message about a value, after its place: `found ...; expected ...; did you mean ...?`."""
    return f"found {found}; expected {expected}{did_you_mean(nearest)}"


def closest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The same or the most similar of these words; None if none is similar, by difflib's ratio."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), None)


def did_you_mean(names: Iterable[str]) -> str:
    """`; did you mean "a" or "b"?`; empty without names."""
    quoted = " or ".join(f'"{name}"' for name in names)
    return f"; did you mean {quoted}?" if quoted else ""


class Key(NamedTuple):
    """A key of a recipe."""

    values: str
    """Its valid values in words: `auto or a whole number of at least 1`."""
    default: str | None
    """As in YAML; None for a required key."""
    meaning: str


@cache
def recipe_keys() -> dict[str, Key]:
    """All keys by dotted name, in the order of the schema; those of a nested section come after its key."""
    keys: dict[str, Key] = {}

    def add(*names: str) -> None:
        for name, schema in section_class(*names).model_json_schema()["properties"].items():
            default = schema.get("default")
            default = default if isinstance(default, str) else json.dumps(default) if "default" in schema else None
            meaning = " ".join(schema["description"].split())
            keys[".".join((*names, name))] = Key(_describe_values(schema), default, meaning)
            if (*names, name) in SUBSECTIONS:
                add(*names, name)

    for section in SECTIONS:
        add(section)
    return keys


def section_meaning(section: str) -> str:
    """The description of a section."""
    return " ".join((SECTIONS[section].__doc__ or "").split())


def _describe_values(schema: dict[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return _join_alternatives(map(_describe_values, schema["anyOf"]))
    if "$ref" in schema:
        return "a section"
    if "const" in schema or "enum" in schema:
        return _join_alternatives(map(str, schema.get("enum", [schema.get("const")])))
    match schema["type"]:
        case "integer" | "number" as kind:
            bounds = [f"{words} {schema[name]:.10g}" for name, words in _BOUNDS.items() if name in schema]
            return f"{'a whole number' if kind == 'integer' else 'a number'} {' and '.join(bounds)}".rstrip()
        case "array" if "prefixItems" in schema:
            return f"[{', '.join(map(_describe_values, schema['prefixItems']))}]"
        case "array" if "$ref" in schema["items"]:
            keys = WeightedPath.model_json_schema()["properties"]
            return f"a list of {{{', '.join(f'{key}: {_describe_values(value)}' for key, value in keys.items())}}}"
        case "array":
            return f"a list of {_describe_values(schema['items'])}"
        case "object":
            (value,) = schema["patternProperties"].values()
            return f"{{NAME: {_describe_values(value)}, ...}}"
        case "string" if schema.get("pattern", "").startswith("^\\w"):
            return "a name of letters, digits and underscores"
        case kind:
            return {"boolean": "true or false", "string": "text", "null": "null"}[kind]


def _join_alternatives(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def nearest_keys(name: str) -> list[str]:
    """Valid dotted names for an unknown section or key: those of the same or the most similar last word, the one in the
    same section first."""
    parent, _, word = name.rpartition(".")
    if known := names_elsewhere().get(name) or names_elsewhere().get(word):
        return [known]
    words = {key: key.rpartition(".")[2] for key in (*SECTIONS, *recipe_keys())}
    beside = [words[key] for key in words if key.rpartition(".")[0] == parent]
    nearest = closest(word, beside if parent else ()) or closest(word, words.values(), cutoff=0.75)  # not `template`
    return sorted((key for key in words if words[key] == nearest), key=lambda key: key.rpartition(".")[0] != parent)


def breaks_rules(error: ValidationError) -> bool:
    """Whether rules over several keys are broken; else single keys are wrong."""
    return isinstance(error.errors(include_url=False)[0].get("ctx", {}).get("error"), RuleViolations)


def list_problems(error: ValidationError, values: Any, *within: str) -> list[tuple[tuple[str, ...], str]]:
    """(dotted keys, `found ...; expected ...`) of each wrong key; if there is none, of each broken rule over several
    keys. The branches of a union and the items of a list belong to one key. `within`: the section that was validated
    alone, such as "data", "keep"."""
    details = error.errors(include_url=False)
    if breaks_rules(error):
        return details[0]["ctx"]["error"].problems
    for name in reversed(within):
        values = {name: values}
    locations = [(*within, *map(str, detail["loc"])) for detail in details]
    locations = [names[: 3 if names[:2] in SUBSECTIONS else 2] for names in locations]
    return [((".".join(names),), _describe_field(names, values)) for names in dict.fromkeys(locations)]


def _describe_field(location: tuple[str, ...], values: Any) -> str:
    """What was found and expected at a location."""
    *section, name = location
    value, is_missing = values, False
    for part in location:
        is_missing = not isinstance(value, dict) or part not in value
        value = None if is_missing else value[part]
    found = "nothing" if is_missing else show(value)
    known = section_class(*section).key_names() if section else list(SECTIONS)
    if name not in known:
        if instead := find_instead(".".join(location)):
            return f"found {found} under an unknown name; {instead}"
        expected = f"a {'key' if section else 'section'} among {', '.join(known)}"
        return describe_problem(f"{found} under an unknown name", expected, nearest_keys(".".join(location)))
    if not section or location in SUBSECTIONS:
        keys = ", ".join(section_class(*location).key_names())
        expected = f"a section with keys {keys}{', or null' * (bool(section) or name == 'lora')}"
        return describe_problem(found, expected, [key for known, key in names_elsewhere().items() if known == name])
    key = recipe_keys()[".".join(location)]
    nearest = closest(value, key.values.replace(" or ", ", ").split(", ")) if isinstance(value, str) else None
    not_empty = ", not empty" if value in ("", [], {}) else ""
    has_no_home = os.path.expanduser("~") == "~" and "~" in found
    not_home = ", not ~ where HOME is unset and the user id has no name" if has_no_home else ""
    expected = f"{key.values}{not_empty}{not_home} ({key.meaning.partition('. ')[0].rstrip('.')})"
    return describe_problem(found, expected, [nearest] if nearest else [])
