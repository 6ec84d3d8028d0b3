"""From YAML files and overrides to a Recipe, or to one error that lists every problem at once."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vcore_ds.config.compose import Draft, compose, fragment_hint, is_fragment
from vcore_ds.config.files import SHIPPED_DEEPSPEED_CONFIGS, expand_home, resolve
from vcore_ds.config.problems import RecipeError, did_you_mean, field_problems, nearest_keys, shorten, show
from vcore_ds.config.resume import take_retired_keys
from vcore_ds.config.rules import broken_rules
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS, Recipe, section_class
from vcore_ds.config.yaml_text import YamlError, dump_yaml, parse_yaml

_COMMENT = re.compile(r"(^|\s)#")
_OVERRIDE_KEY = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,2}$")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, accept_retired: bool = False) -> Recipe:
    """Reads a recipe with its bases (see `compose`) and applies overrides `section.key=value` (values are YAML).

    A word `FILE.yaml` among the overrides is a fragment, merged like a base but after the recipe: fragments first, in
    order, then the overrides, the later ones last. `~` is expanded in every path. engine.deepspeed_config becomes the
    name of a shipped file, `ds_configs/NAME.json`, which every installation finds, or else an absolute path; the other
    paths stay as written. `accept_retired`: see `read_resolved_recipe`. Raises RecipeError, whose message lists all
    problems of files and overrides together.
    """
    draft = compose(path, [word for word in overrides if is_fragment(word)])
    retired = take_retired_keys(draft.values) if accept_retired else {}
    for override in overrides:
        if not is_fragment(override):
            _apply_override(draft, override)
    if not draft.is_whole:
        raise RecipeError(draft.problems)
    for section in SECTIONS.keys() - {"lora"}:
        draft.values.setdefault(section, {})  # so that a missing section is reported by its missing keys
    _resolve_deepspeed_config(draft)
    recipe = _validate(draft)
    if draft.problems or recipe is None:
        raise RecipeError(draft.problems)
    return recipe.with_retired(retired)


def make_override(key: str, value: object) -> str:
    """The word `key=value` that `load_recipe` reads back to this value, with quotes only where YAML needs them."""
    text = str(value) if isinstance(value, Path) else value
    with suppress(YamlError):
        if isinstance(text, str) and parse_yaml(text).value == text:
            return f"{key}={text}"
    quoted = json.dumps(text, ensure_ascii=False)  # YAML, once line breaks and the like beyond ASCII are escaped too
    escaped = (char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)
    return f"{key}={''.join(escaped)}"


def dump_recipe(recipe: Recipe) -> str:
    """One YAML with every key written out and no base; loads to an equal recipe."""
    values = recipe.model_dump(mode="json")
    if recipe.optimizer.name == "sgd":
        for key in ("betas", "eps"):  # refused with sgd
            del values["optimizer"][key]
    return dump_yaml(values)


def _apply_override(draft: Draft, override: str) -> None:
    source = f"override {shorten(override)}"
    key, equals, text = override.partition("=")
    if not equals or not _can_be_key(key):
        bare = key.lstrip("-")
        names: list[str] = []
        if _can_be_key(bare):
            names = [bare] if equals or "." in bare else nearest_keys(bare, None)
        hint = did_you_mean(shorten(f"{name}={text or 'VALUE'}") for name in names)
        expected = "section.key=value"
        if not equals:
            expected, hint = f"{expected} or FILE.yaml", fragment_hint(override) or hint
        draft.problems.append(f"{source}: found {show(override)}; expected {expected}{hint}")
        return
    if key == "base":
        draft.problems.append(f"{source}: base: found {show(text)}; expected the name of the file alone, FILE.yaml")
        return
    where = f"{source}: {shorten(key)}"
    try:
        parsed = parse_yaml(text)
    except YamlError as error:
        draft.problems.append(f"{where}: {error}; expected section.key=value")
        return
    if _COMMENT.search(text) and not text.startswith(("'", '"')) and isinstance(parsed.value, str | None):
        draft.problems.append(
            f"{where}: found a comment in {show(text)}; expected quotes around a text with #: "
            f"{shorten(make_override(key, text))}"
        )
        return
    for duplicate, _, _ in parsed.duplicates:
        draft.problems.append(f"{where}.{shorten(duplicate)}: found a second time; expected once")
    section, _, name = key.partition(".")
    if not name:
        draft.replace(section, parsed.value)
    elif section not in SECTIONS:
        nearest = did_you_mean(shorten(f"{other}={text}") for other in nearest_keys(section, name))
        draft.problems.append(f"{where}: found an unknown section; expected {', '.join(SECTIONS)}{nearest}")
        return
    else:
        *parents, last = key.split(".")
        values = draft.values
        for parent in parents:
            inside = values.get(parent)
            if not isinstance(inside, dict | None):
                return  # the section itself is reported
            values[parent] = dict(inside or {})  # such as lora.rank=16 on lora: null
            values = values[parent]
        values[last] = parsed.value
        draft.forget_sources_below(key)
    draft.sources[key] = source


def _can_be_key(text: str) -> bool:
    """Whether a text is written as `section`, `section.key`, or a key of a key that has keys of its own."""
    names = text.split(".")
    return bool(_OVERRIDE_KEY.match(text)) and (len(names) < 3 or (names[0], names[1]) in SUBSECTIONS)


def _resolve_deepspeed_config(draft: Draft) -> None:
    engine = draft.values["engine"]
    if not isinstance(engine, dict) or not isinstance(engine.get("deepspeed_config"), str):
        return
    written = engine["deepspeed_config"]
    if not written:
        return  # the schema says so
    folders = (draft.folder("engine.deepspeed_config"), Path.cwd(), SHIPPED_DEEPSPEED_CONFIGS.parent)
    tried = list(dict.fromkeys(resolve(folder / expand_home(written)) for folder in folders))
    for path in tried:
        if os.path.isfile(path):
            is_shipped = path.parent == SHIPPED_DEEPSPEED_CONFIGS
            engine["deepspeed_config"] = f"ds_configs/{path.name}" if is_shipped else str(path)
            return
    shipped = did_you_mean(f"ds_configs/{path.name}" for path in sorted(SHIPPED_DEEPSPEED_CONFIGS.glob("*.json")))
    places = ", ".join(shorten(str(path), 200) for path in tried)
    draft.add(
        ["engine.deepspeed_config"],
        f"found {show(written)}, which is no file; expected a DeepSpeed JSON; tried {places}{shipped}",
    )


def _validate(draft: Draft) -> Recipe | None:
    """Adds the problems of single keys, and of rules over several keys where all of these are valid."""
    try:
        return Recipe.model_validate(draft.values)
    except ValidationError as error:
        wrong = field_problems(error)
    for location, text in wrong.items():
        draft.add([".".join(location)], text)
    for rule in broken_rules(_sound_part(draft.values, set(wrong))):
        if not any((key.split(".")[0],) in wrong or tuple(key.split(".")) in wrong for key in rule.keys):
            draft.add(rule.keys, f"found {rule.found}; expected {rule.expected}")
    return None


def _sound_part(values: dict[str, Any], wrong: set[tuple[str, ...]]) -> Recipe:
    """A recipe of the valid keys, the others at their defaults; not validated, which suffices for the rules."""
    sections: dict[str, Any] = {}
    wrong_keys = {location[:2] for location in wrong}
    for name, kind in SECTIONS.items():
        given = values.get(name) if (name,) not in wrong else {}
        sound = {key: value for key, value in (given or {}).items() if (name, key) not in wrong_keys}
        for key in sound:
            if (name, key) in SUBSECTIONS and sound[key] is not None:
                sound[key] = section_class(name, key).model_construct(set(sound[key]), **sound[key])
        sections[name] = kind.model_construct(set(sound), **sound)
    if values.get("lora") is None:
        sections["lora"] = None
    return Recipe.model_construct(set(sections), **sections)
