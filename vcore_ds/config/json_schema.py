"""JSON Schema of recipe files, with which editors complete, explain and check keys."""

from typing import Any

from vcore_ds.config.schema import Recipe

_BASE = {
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
    "description": "Files that this one is merged over, in order: looked up in this file's folder, then among the "
    "shipped recipes; .yaml may be left out.",
}


def make_json_schema() -> dict[str, Any]:
    """The schema of a file: all keys with types, values, defaults and meanings, and none of them required, because the
    others may come from `base`, fragments and overrides. Rules over several keys are not in it.

    Draft 7, which the YAML language server knows best.
    """
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
