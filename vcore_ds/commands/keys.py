"""`vcore-ds keys`: every key of a recipe, from the schema; and the JSON Schema with which editors complete them."""

import argparse
import json
import textwrap
from typing import Any

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import markdown_rows
from vcore_ds.config.problems import (
    Key,
    did_you_mean,
    find_instead,
    names_elsewhere,
    nearest_keys,
    recipe_keys,
    section_meaning,
)
from vcore_ds.config.schema import Recipe

_BASE = {
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
    "description": "Files that this one is merged over, in order: looked up in this file's folder, then among the "
    "shipped recipes; .yaml may be left out.",
}


def make_json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 7, which the YAML language server knows best) of a recipe file. No key is required: others
    may come from `base`, fragments and overrides. Rules over several keys are not in it."""
    schema = _simplify(Recipe.model_json_schema())
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Recipe of vcore_ds",
        "description": "A run, or a part of its description. Made by `vcore-ds keys --json-schema`.",
        "type": "object",
        "additionalProperties": False,
        "properties": {"base": _BASE, **schema["properties"]},
        "$defs": schema["$defs"],
    }


def _simplify(schema: Any) -> Any:
    """Remove `required` and pydantic's titles, refuse names that match no pattern, and replace `prefixItems`, which is
    not in draft 7."""
    if isinstance(schema, list):
        return [_simplify(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    simple = {key: _simplify(value) for key, value in schema.items() if key != "required"}
    if isinstance(simple.get("title"), str):  # a key of a recipe may be called title
        del simple["title"]
    if isinstance(simple.get("description"), str):
        simple["description"] = " ".join(simple["description"].split())
    if "patternProperties" in simple:
        simple["additionalProperties"] = False
    if "prefixItems" in simple:
        items = simple.pop("prefixItems")
        if any(item != items[0] for item in items):
            raise NotImplementedError("a list whose items have different types")
        simple["items"] = items[0]
    return simple


HELP = "list the keys of a recipe: values, default, meaning"
DESCRIPTION = (
    "List the keys of a recipe with their allowed values, defaults and meaning; or those in whose name, values or "
    "meaning a word occurs, names of other trainers included. Examples: vcore-ds keys utility; vcore-ds keys "
    "method.kl_budget; vcore-ds keys clip; vcore-ds keys lora_r"
)

WIDTH = 100
WIDTH_OF_PAGE = 120
PAGE = """# Keys of a recipe

Every key that a recipe can have, by section. This page is the output of `vcore-ds keys --markdown`, which reads the
schema, and a test keeps it current. `vcore-ds keys utility` or `vcore-ds keys utility.epsilon` prints one section or
key in the terminal. How recipes are put together, and the rules between keys: [recipes.md](recipes.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a section, section.key or word (default: all)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--markdown", action="store_true", help="print the page docs/keys.md")
    shown.add_argument(
        "--json-schema", action="store_true", help="print the JSON Schema of recipes, for editors (docs/recipes.md)"
    )
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    names = [*arguments.names, *arguments.overrides]
    if arguments.json_schema:
        if names:
            raise UserError(f"keys: found {names[0]} with --json-schema; expected no name: the schema has all keys")
        print(json.dumps(make_json_schema(), indent=1))
        return
    keys = find_keys(names)
    if arguments.markdown:
        print(PAGE, end="")
    for section in dict.fromkeys(dotted.partition(".")[0] for dotted in keys):
        section_keys = {dotted: key for dotted, key in keys.items() if dotted.startswith(f"{section}.")}
        print((format_markdown if arguments.markdown else format_plain)(section, section_keys), end="")


def find_keys(names: list[str]) -> dict[str, Key]:
    """The keys with these dotted names, in these sections, or with these words in their name, values or meaning, other
    trainers' names included; all for no name. Raises UserError for a name that no key has or mentions."""
    keys = recipe_keys()
    chosen: set[str] = set()
    for name in names:
        hits = {dotted for dotted in keys if f"{dotted}.".startswith(f"{name}.")}
        if not hits and "." not in name:
            texts = {dotted: f"{dotted} {key.values} {key.meaning}".lower() for dotted, key in keys.items()}
            hits = {dotted for dotted in keys if name.lower() in texts[dotted] or names_elsewhere().get(name) == dotted}
        if not hits:
            if instead := find_instead(name):
                raise UserError(f"keys: {name}: {instead}")
            hint = did_you_mean(nearest_keys(name)) or "; `vcore-ds keys` lists all"
            raise UserError(f"keys: found {name}; expected a section, section.key or a word of a key's meaning{hint}")
        chosen |= hits
    return {dotted: key for dotted, key in keys.items() if not names or dotted in chosen}


def format_plain(section: str, keys: dict[str, Key]) -> str:
    lines = [f"{section}: {section_meaning(section)}"]
    for dotted, key in keys.items():
        default = "required" if key.default is None else f"default {key.default}"
        for text, indent in ((f"{dotted}: {key.values} ({default})", 2), (key.meaning, 6)):
            lines += textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))
    return "\n".join(lines) + "\n\n"


def format_markdown(section: str, keys: dict[str, Key]) -> str:
    rows: list[tuple[str, ...]] = [("key", "values", "default", "meaning"), ("---",) * 4]
    for dotted, key in keys.items():
        default = "required" if key.default is None else f"`{key.default}`"
        rows.append((f"`{dotted.removeprefix(f'{section}.')}`", key.values, default, key.meaning))
    meaning = textwrap.fill(section_meaning(section), WIDTH_OF_PAGE, break_on_hyphens=False)
    return "\n".join(["", f"## {section}", "", meaning, "", *markdown_rows(rows), ""])
