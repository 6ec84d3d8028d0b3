"""From a YAML file and overrides to a Recipe, or to one error that lists every problem at once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vcore_ds.config.problems import RecipeError, did_you_mean, field_problems, nearest_keys, show
from vcore_ds.config.rules import broken_rules
from vcore_ds.config.schema import SECTIONS, Recipe
from vcore_ds.config.yaml_text import YamlError, dump_yaml, parse_yaml

_REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
_OVERRIDE_KEY = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$")
_PATH_KEYS = (("model", "path"), ("data", "train_path"), ("data", "validation_path"), ("run", "output_dir"))


@dataclass
class _Draft:
    """A recipe that is being read: plain values, where each came from, and the problems so far."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """`FILE:LINE` or `override section.key=value`, by dotted name."""
    problems: list[str] = field(default_factory=list)

    def source(self, *keys: str) -> str:
        """Where the keys were set: an override before a line of the file, a section's line for an absent key."""
        candidates = [self.sources[key] for key in keys if key in self.sources]
        candidates += [self.sources[key.split(".")[0]] for key in keys if key.split(".")[0] in self.sources]
        overrides = [source for source in candidates if source.startswith("override ")]
        return (overrides or candidates or [self.file])[0]

    def add(self, keys: Sequence[str], text: str) -> None:
        self.problems.append(f"{self.source(*keys)}: {keys[0]}: {text}")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies overrides `section.key=value` (values are YAML), the later ones last.

    `~` is expanded in every path; engine.deepspeed_config becomes absolute, the other paths stay as written.
    Raises RecipeError, whose message lists all problems of file and overrides together.
    """
    draft = _read(Path(path))
    for override in overrides:
        _apply_override(draft, override)
    for section in SECTIONS.keys() - {"lora"}:
        draft.values.setdefault(section, {})  # so that a missing section is reported by its missing keys
    _resolve_paths(draft, Path(path).parent)
    recipe = _validate(draft)
    if draft.problems or recipe is None:
        raise RecipeError(draft.problems)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every key written out; loads to an equal recipe."""
    values = recipe.model_dump(mode="json")
    if recipe.optimizer.name == "sgd":
        for key in ("betas", "eps"):  # refused with sgd
            del values["optimizer"][key]
    return dump_yaml(values)


def _read(path: Path) -> _Draft:
    """The file's values, unchecked. Raises RecipeError where there is nothing to go on with."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = did_you_mean(str(other) for other in sorted(path.parent.glob("*.yaml"))[:5])
        raise RecipeError([f"{path}: found no such file; expected a recipe (YAML){near}"]) from None
    except IsADirectoryError:
        raise RecipeError([f"{path}: found a folder; expected a recipe (a YAML file)"]) from None
    except UnicodeDecodeError as error:
        raise RecipeError([f"{path}: found bytes that are not UTF-8 ({error.reason}); expected YAML text"]) from None
    except OSError as error:
        raise RecipeError([f"{path}: cannot be read: {error.strerror}; expected a recipe (YAML)"]) from None
    try:
        parsed = parse_yaml(text)
    except YamlError as error:
        where = "" if error.line is None else f":{error.line}:{error.column}"
        raise RecipeError([f"{path}{where}: found text that is not YAML: {error}; expected a recipe"]) from None
    if not isinstance(parsed.value, dict):
        found = "nothing" if parsed.value is None else show(parsed.value)
        raise RecipeError([f"{path}: found {found}; expected sections ({', '.join(SECTIONS)}) with keys in them"])
    draft = _Draft(str(path), {key: _with_text_keys(value) for key, value in _with_text_keys(parsed.value).items()})
    draft.sources = {key: f"{path}:{line}" for key, line in parsed.lines.items()}
    for key, line, first_line in parsed.duplicates:
        draft.problems.append(f"{path}:{line}: {key}: found a second time (first in line {first_line}); expected once")
    return draft


def _with_text_keys(value: Any) -> Any:
    """A mapping with the keys as text (a key `1` is then unknown like any other); anything else as it is."""
    return {str(key): child for key, child in value.items()} if isinstance(value, dict) else value


def _apply_override(draft: _Draft, override: str) -> None:
    source = f"override {override}"
    key, equals, text = override.partition("=")
    if not equals or not _OVERRIDE_KEY.match(key):
        bare = key.lstrip("-")
        names = [bare] if equals and bare != key and _OVERRIDE_KEY.match(bare) else []
        if not names and _OVERRIDE_KEY.match(bare):
            names = [bare] if "." in bare else nearest_keys(bare, None)
        hint = did_you_mean(f"{name}={text or 'VALUE'}" for name in names)
        draft.problems.append(f"{source}: found {show(override)}; expected section.key=value{hint}")
        return
    try:
        parsed = parse_yaml(text)
    except YamlError as error:
        draft.problems.append(f"{source}: {key}: found a value that is not YAML: {error}; expected section.key=value")
        return
    for duplicate, _, _ in parsed.duplicates:
        draft.problems.append(f"{source}: {key}.{duplicate}: found a second time; expected once")
    section, _, name = key.partition(".")
    if not name:
        draft.values[section] = _with_text_keys(parsed.value)
        draft.sources = {other: line for other, line in draft.sources.items() if other.partition(".")[0] != section}
    elif section not in SECTIONS:
        nearest = did_you_mean(f"{other}={text}" for other in nearest_keys(section, name))
        draft.problems.append(f"{source}: {key}: found an unknown section; expected {', '.join(SECTIONS)}{nearest}")
        return
    else:
        if draft.values.get(section) is None:
            draft.values[section] = {}  # such as lora.rank=16 on lora: null
        if not isinstance(draft.values[section], dict):
            return  # the section itself is reported
        draft.values[section][name] = parsed.value
    draft.sources[key] = source


def _resolve_paths(draft: _Draft, recipe_folder: Path) -> None:
    for section, key in _PATH_KEYS:
        values = draft.values[section]
        if isinstance(values, dict) and isinstance(values.get(key), str):
            values[key] = _expand_user(values[key])
    engine = draft.values["engine"]
    if not isinstance(engine, dict) or not isinstance(engine.get("deepspeed_config"), str):
        return
    written = engine["deepspeed_config"]
    if not written:
        return  # the schema says so
    tried = [folder / _expand_user(written) for folder in (recipe_folder, Path.cwd(), _REPOSITORY_ROOT)]
    tried = list(dict.fromkeys(path.resolve() for path in tried))
    for path in tried:
        if path.is_file():
            engine["deepspeed_config"] = str(path)
            return
    shipped = did_you_mean(f"ds_configs/{path.name}" for path in sorted(_REPOSITORY_ROOT.glob("ds_configs/*.json")))
    places = ", ".join(map(str, tried))
    draft.add(
        ["engine.deepspeed_config"],
        f"found {show(written)}, which is no file; expected a DeepSpeed JSON; tried {places}{shipped}",
    )


def _expand_user(path: str) -> str:
    """`~` expanded; a user that does not exist stays as written, and the missing file is reported later."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        return path


def _validate(draft: _Draft) -> Recipe | None:
    """Adds the problems of single keys and of rules over several, the latter where all their keys are sound."""
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
    """A recipe of the keys that passed, the others at their defaults; unchecked, good enough for the rules."""
    sections: dict[str, Any] = {}
    for name, section_class in SECTIONS.items():
        given = values.get(name) if (name,) not in wrong else {}
        sound = {key: value for key, value in (given or {}).items() if (name, key) not in wrong}
        sections[name] = section_class.model_construct(set(sound), **sound)
    return Recipe.model_construct(set(sections), **sections)
