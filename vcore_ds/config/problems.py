"""Problems of a recipe as text: where, what was found, what was expected, the nearest valid name."""

import difflib
import json
import typing
from collections.abc import Iterable
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vcore_ds.config.schema import SECTIONS, SUBSECTIONS, section_class
from vcore_ds.errors import UserError

_MAX_SHOWN = 80
"""Characters of a value in a message."""

_MAX_PROBLEMS = 50
"""Problems in one message, a line each; what follows is counted."""

REMOVED = {
    ("probe", "decay"): "the running mean over directions was removed after 0.6",
    ("probe", "source"): "the direction is always the gradient of a probe batch; the previous step's was removed "
    "after 0.6",
}
"""Keys of earlier versions, and what became of them."""


class RecipeError(UserError):
    """A recipe or its DeepSpeed JSON cannot work. The message has one line per problem, all of them at once."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(_on_one_line(problem) for problem in problems)
        lines = list(self.problems[:_MAX_PROBLEMS])
        if len(self.problems) > _MAX_PROBLEMS:
            lines.append(f"and {len(self.problems) - _MAX_PROBLEMS:,} more problems")
        super().__init__("\n".join(lines))


def show(value: Any) -> str:
    """A value as it would be written in YAML or JSON, shortened."""
    return shorten(json.dumps(value, ensure_ascii=False, default=str))


def shorten(text: str, limit: int = _MAX_SHOWN) -> str:
    """The text, with the end of a long one replaced by `...`."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _on_one_line(text: str) -> str:
    """Line breaks, control characters and the like as escapes: a name may hold any of them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def did_you_mean(names: Iterable[str]) -> str:
    """`; did you mean "a" or "b"?`, or nothing without names."""
    quoted = " or ".join(f'"{name}"' for name in names)
    return f"; did you mean {quoted}?" if quoted else ""


def nearest_keys(section: str, key: str | None) -> list[str]:
    """Valid dotted names for a word without a key (key None) or an unknown `section.key`, best first."""
    if section not in SECTIONS:
        near = difflib.get_close_matches(section, SECTIONS, n=1)
        if near and key is not None and key in SECTIONS[near[0]].model_fields:
            return [f"{near[0]}.{key}"]
        return near or _nearest_elsewhere(key or section)
    if key is None:
        return [f"{section}.KEY"]
    exact = [f"{other}.{key}" for other, cls in SECTIONS.items() if key in cls.model_fields]
    near = difflib.get_close_matches(key, SECTIONS[section].model_fields, n=1)
    return [*(f"{section}.{name}" for name in near), *exact] or _nearest_elsewhere(key)


def _nearest_inner_keys(section: str, key: str, inner: str) -> list[str]:
    near = difflib.get_close_matches(inner, section_class(section, key).model_fields, n=1)
    return [f"{section}.{key}.{name}" for name in near]


def _nearest_elsewhere(key: str) -> list[str]:
    """Dotted names whose last part is, or is most like, `key`, over all sections."""
    near = difflib.get_close_matches(key, {name for cls in SECTIONS.values() for name in cls.model_fields}, n=1)
    return [f"{section}.{near[0]}" for section, cls in SECTIONS.items() if near and near[0] in cls.model_fields]


def field_problems(error: ValidationError) -> dict[tuple[str, ...], str]:
    """What pydantic found, by location (section,), (section, key) or (section, key, key of the key): `found ...;
    expected ...; did you mean ...?`.

    The branches of a union and the items of a list are one key, hence one problem. Only as many as a message shows are
    described in full: the nearest name takes about a millisecond each.
    """
    grouped: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        if details["loc"]:  # the rules over several keys have no location and are asked separately
            names = tuple(map(str, details["loc"]))
            grouped.setdefault(names[: 3 if names[:2] in SUBSECTIONS else 2], []).append(details)
    described = {location: _describe(location, grouped[location]) for location in islice(grouped, _MAX_PROBLEMS)}
    return {location: described.get(location, f"found {show(grouped[location][0]['input'])}") for location in grouped}


def _describe(location: tuple[str, ...], details: list[ErrorDetails]) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        return _describe_unknown(location, first["input"])
    if len(location) == 1:
        section = location[0]
        alternative = ", or null for full-parameter training" if section == "lora" else ""
        return f"found {show(first['input'])}; expected a section with keys {_names(section)}{alternative}"
    field = section_class(*location[:-1]).model_fields[location[-1]]
    found = "nothing" if _is_missing_key(first) else show(_input_at_key(details))
    hints = [hint for item in details for hint in _nearest_values(item)]
    expected = " or ".join(dict.fromkeys(_expected(item) + _position(item) for item in details))
    if type(None) in typing.get_args(field.annotation):
        expected += " or null"
    return f"found {found}; expected {expected} ({_meaning(field)}){did_you_mean(hints)}"


def _describe_unknown(location: tuple[str, ...], found: Any) -> str:
    if location in REMOVED:
        return (
            f"found {show(found)}; expected no such key: {REMOVED[location]}. Leave the key out, and set probe.every "
            "to save probes; a run that was begun with it ends with vcore_ds 0.6"
        )
    if len(location) == 1:
        expected = f"a section among {', '.join(SECTIONS)}"
        nearest = nearest_keys(location[0], None)
    else:
        expected = f"a key among {_names(*location[:-1])}"
        nearest = nearest_keys(*location) if len(location) == 2 else _nearest_inner_keys(*location)
    return f"found {show(found)} under an unknown name; expected {expected}{did_you_mean(nearest)}"


def _input_at_key(details: list[ErrorDetails]) -> Any:
    """The value at the key. For a wrong list item pydantic knows the item alone, for a wrong union the whole value."""
    return min(details, key=lambda item: len(item["loc"]))["input"]


def _expected(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    match details["type"]:
        case "missing":
            return "a value" if _is_missing_key(details) else f"an entry at position {details['loc'][-1]}"
        case "literal_error":
            return str(context["expected"]).replace("'", '"')
        case "int_type" | "int_from_float":
            return "an integer"
        case "float_type":
            return "a number"
        case "finite_number":
            return "a finite number"
        case "bool_type":
            return "true or false"
        case "string_type":
            return "text"
        case "string_too_short":
            return "text that is not empty"
        case "string_too_long":
            return f"text of at most {context['max_length']:,} characters"
        case "string_unicode":
            return "text without unpaired surrogates"
        case "string_pattern_mismatch":
            is_name = context["pattern"].startswith(r"^\w")
            return "names of letters, digits and underscores" if is_name else "text without NUL characters"
        case "model_type":
            return f"keys {_names(*map(str, details['loc']))}"
        case "dict_type":
            return "a mapping of names to texts"
        case "tuple_type":
            return "a list"
        case "too_short" if context["field_type"] == "Dictionary":
            return "a mapping with at least one name"
        case "too_short" | "too_long":
            return f"a list of {'at least ' if details['type'] == 'too_short' else ''}{_length_bound(context)}"
        case _:  # "Input should be greater than 0" and the like
            return details["msg"].replace("Input should be ", "a number ")


def _position(details: ErrorDetails) -> str:
    """Which entry of a list is meant, from 0."""
    entry = details["loc"][-1]
    return f" at position {entry}" if isinstance(entry, int) and details["type"] != "missing" else ""


def _length_bound(context: dict[str, Any]) -> str:
    bound = context.get("min_length", context.get("max_length"))
    return f"{bound} value{'' if bound == 1 else 's'}"


def _nearest_values(details: ErrorDetails) -> list[str]:
    if details["type"] != "literal_error" or not isinstance(details["input"], str):
        return []
    choices = str(details["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
    return difflib.get_close_matches(details["input"], choices, n=1)


def _names(*section: str) -> str:
    return ", ".join(section_class(*section).model_fields)


def _meaning(field: FieldInfo) -> str:
    """The field's docstring in one line: what the value is, with its unit and scope."""
    return " ".join((field.description or "").split()).rstrip(".")


def _is_missing_key(details: ErrorDetails) -> bool:
    """A missing key, not a missing entry of a list of fixed length."""
    return details["type"] == "missing" and isinstance(details["loc"][-1], str)
