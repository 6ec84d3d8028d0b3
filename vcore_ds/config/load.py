"""From YAML files and overrides to a Recipe, or to one error that lists every problem at once.

A file may name others under the top-level key `base`: they are read first, in order, each after its bases. Later values
win, key by key within a section; a section that is null replaces what was there, and a mapping after null starts from
nothing. So files grouped into a base mean the same as files named one by one.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vcore_ds.config.files import (
    SHIPPED_DEEPSPEED_CONFIGS,
    SHIPPED_RECIPES,
    UnreadableFile,
    dump_yaml,
    parse_yaml,
    read_text,
)
from vcore_ds.config.problems import RecipeError, did_you_mean, field_problems, nearest_keys, show
from vcore_ds.config.resume import take_retired_keys
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS, Recipe, broken_rules, section_class

_COMMENT = re.compile(r"(^|\s)#")
_OVERRIDE_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,2}")


@dataclass
class Draft:
    """A recipe that is being read: plain values, where each came from, and the problems so far."""

    file: str = ""
    """The recipe itself."""
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """`FILE:LINE` or `override section.key=value`, by dotted name."""
    problems: list[str] = field(default_factory=list)
    is_complete: bool = True
    """False where a file could not be read: what is missing then is not the recipe's fault."""

    def source(self, *keys: str) -> str:
        """Where the keys were set: an override before a line of a file, a section's line for an absent key."""
        parents = [".".join(key.split(".")[:n]) for key in keys for n in range(key.count("."), 0, -1)]
        sources = [self.sources[key] for key in (*keys, *parents) if key in self.sources]
        return min(sources, key=lambda source: not source.startswith("override "), default=self.file)

    def add(self, keys: Sequence[str], text: str) -> None:
        self.problems.append(f"{self.source(*keys)}: {keys[0]}: {text}")

    def replace(self, name: str, value: Any, source: str) -> None:
        """Sets a section, `section.key` or `section.key.key`; nothing of the value before is left."""
        *parents, last = name.split(".")
        values = self.values
        for i, parent in enumerate(parents):
            inside = values.get(parent)
            if not isinstance(inside, dict):  # such as lora.rank=16 on lora: null
                self.sources[".".join(parents[: i + 1])] = source
            values[parent] = dict(inside) if isinstance(inside, dict) else {}  # a copy: two sections may be one alias
            values = values[parent]
        values[last] = value
        self.forget_sources(name)
        self.sources[name] = source

    def forget_sources(self, name: str) -> None:
        """For a section or key whose whole value is replaced."""
        self.sources = {key: source for key, source in self.sources.items() if not f"{key}.".startswith(f"{name}.")}

    def merge(self, values: dict[str, Any], sources: dict[str, str]) -> None:
        """Merges the sections of a file over what was read before."""
        for section, new in values.items():
            old = self.values.get(section)
            if isinstance(old, dict) and isinstance(new, dict):
                merged = old | new
                for name, key in SUBSECTIONS:
                    if name == section and isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
                        merged[key] = old[key] | new[key]
                self.values[section] = merged
            else:
                self.values[section] = new
                self.forget_sources(section)
        self.sources.update(sources)

    def cannot_continue(self, problem: str) -> None:
        self.problems.append(problem)
        self.is_complete = False


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, accept_retired: bool = False) -> Recipe:
    """Reads a recipe with its bases (see `compose`) and applies overrides `section.key=value` (values are YAML).

    A word `FILE.yaml` among the overrides is a fragment, merged like a base but after the recipe: fragments first, in
    order, then the overrides, the later ones last. `~` is expanded in every path. engine.deepspeed_config becomes the
    name of a shipped file, `ds_configs/NAME.json`, which every installation finds, or else an absolute path; the other
    paths stay as written. `accept_retired`: see `read_resolved_recipe`. Raises RecipeError, whose message lists all
    problems of files and overrides together.
    """
    fragments = [word for word in overrides if "=" not in word and word.endswith(".yaml")]
    draft = compose(path, fragments)
    retired = take_retired_keys(draft.values) if accept_retired else {}
    for word in overrides:
        if word not in fragments:
            _apply_override(draft, word)
    if not draft.is_complete:
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
    with suppress(UnreadableFile):
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


def compose(recipe: str | Path, fragments: Sequence[str] = ()) -> Draft:
    """Reads a recipe with its bases, then fragments in order; nothing is validated yet.

    A base is looked up in the folder of the file that names it, the recipe and the fragments in the working directory,
    and then each of them among the shipped recipes. Problems (a missing file, a cycle, text that is not YAML) are
    gathered in the draft.
    """
    draft = Draft()
    for name in (str(recipe), *fragments):
        _read(draft, name, Path(), [])
    draft.problems = list(dict.fromkeys(draft.problems))  # a file may be the base of several
    return draft


def _read(draft: Draft, name: str, folder: Path, chain: list[Path], where: str = "") -> None:
    """Merges a file's bases, then the file.

    Args:
        folder: where it is looked up first.
        chain: the files that led here, the outermost first.
        where: the line that names it, as the beginning of a message.
    """
    candidates = [start / os.path.expanduser(name) for start in (folder, SHIPPED_RECIPES)]
    path = next((path for path in candidates if os.path.exists(path)), None)
    if path is None:
        tried = ", ".join(dict.fromkeys(os.path.abspath(path) for path in candidates))
        near = did_you_mean(_nearest_files(name, folder))
        draft.cannot_continue(f"{where}{name}: found no such file; expected a recipe file (YAML); tried {tried}{near}")
        return
    draft.file = draft.file or str(path)
    if any(path.samefile(file) for file in chain):
        arrows = " -> ".join(map(str, [*chain, path]))
        expected = "expected files that are not based on each other"
        draft.cannot_continue(f"{where}found {show(name)}, which is read already ({arrows}); {expected}")
        return
    try:
        parsed = parse_yaml(read_text(path))
    except UnreadableFile as error:
        draft.cannot_continue(f"{path}{error.place}: {error}; expected a recipe (a YAML file)")
        return
    if not isinstance(parsed.value, dict):
        found = "nothing" if parsed.value is None else show(parsed.value)
        expected = f"expected sections ({', '.join(SECTIONS)}) with keys in them"
        draft.cannot_continue(f"{path}: found {found}; {expected}")
        return
    for key, line, first_line in parsed.duplicates:
        draft.problems.append(f"{path}:{line}: {key}: found a second time (first in line {first_line}); expected once")
    bases = parsed.value.pop("base", [])
    where = f"{path}:{parsed.lines.pop('base', 0)}: base: "
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(base, str) and base for base in names):
        draft.cannot_continue(f"{where}found {show(bases)}; expected a file name, or a list of file names")
        names = []
    for base in names:
        _read(draft, base, path.parent, [*chain, path], where)
    draft.merge(parsed.value, {key: f"{path}:{line}" for key, line in parsed.lines.items()})


def _nearest_files(name: str, folder: Path) -> list[str]:
    """Names like that of a missing file, beside it and among the shipped: the same, or else a similar spelling."""
    beside = (folder / os.path.expanduser(name)).parent
    shipped = sorted(SHIPPED_RECIPES.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    near = []
    for known in (
        [Path(name).with_name(path.name) for path in sorted(beside.glob("*.yaml"))],
        [path.relative_to(SHIPPED_RECIPES) for path in shipped],
    ):
        same = [path for path in known if path.stem == Path(name).stem]
        close = difflib.get_close_matches(Path(name).stem, [path.stem for path in known], n=2)
        near += same or [path for stem in dict.fromkeys(close) for path in known if path.stem == stem]
    return list(dict.fromkeys(map(str, near)))


def _apply_override(draft: Draft, override: str) -> None:
    source = f"override {override}"
    key, equals, text = override.partition("=")
    is_inner = key.count(".") == 2
    if not equals or not _OVERRIDE_KEY.fullmatch(key) or (is_inner and tuple(key.split(".")[:2]) not in SUBSECTIONS):
        expected = "section.key=value" if equals else "section.key=value or FILE.yaml"
        draft.problems.append(f"{source}: found {show(override)}; expected {expected}{_override_hint(key, text)}")
        return
    if key == "base":
        draft.problems.append(f"{source}: base: found {show(text)}; expected the name of the file alone, FILE.yaml")
        return
    try:
        parsed = parse_yaml(text)
    except UnreadableFile as error:
        draft.problems.append(f"{source}: {key}: {error}; expected section.key=value")
        return
    if _COMMENT.search(text) and not text.startswith(("'", '"')) and isinstance(parsed.value, str | None):
        draft.problems.append(
            f"{source}: {key}: found a comment in {show(text)}; expected quotes around a text with #: "
            f"{make_override(key, text)}"
        )
        return
    for duplicate, _, _ in parsed.duplicates:
        draft.problems.append(f"{source}: {key}.{duplicate}: found a second time; expected once")
    if isinstance(draft.values.get(key.partition(".")[0], {}), dict | None) or "." not in key:
        draft.replace(key, parsed.value, source)  # where the section is no mapping, that is the problem


def _override_hint(key: str, text: str) -> str:
    """The hint for a word that is no override: what it lacks, or has too much of."""
    bare, files = key.lstrip("-"), []
    if not text:
        files = [name for name in _nearest_files(f"{key}.yaml", Path()) if Path(name).stem == Path(key).name]
    if files or not _OVERRIDE_KEY.fullmatch(bare):
        return did_you_mean(files)
    names = [f"{bare}.KEY"] if bare in SECTIONS else [bare] if "." in bare else nearest_keys(bare)
    return did_you_mean(f"{name}={text or 'VALUE'}" for name in names)


def _resolve_deepspeed_config(draft: Draft) -> None:
    engine = draft.values["engine"]
    written = engine.get("deepspeed_config") if isinstance(engine, dict) else None
    if not written or not isinstance(written, str):
        return  # the schema says so
    key = "engine.deepspeed_config"
    source = draft.sources.get(key, "override ")
    beside = Path(draft.file if source.startswith("override ") else source.rpartition(":")[0]).parent
    folders = (beside, Path.cwd(), SHIPPED_DEEPSPEED_CONFIGS.parent)
    tried = list(dict.fromkeys(Path(os.path.realpath(folder / os.path.expanduser(written))) for folder in folders))
    path = next((path for path in tried if os.path.isfile(path)), None)
    if path is None:
        shipped = did_you_mean(f"ds_configs/{path.name}" for path in sorted(SHIPPED_DEEPSPEED_CONFIGS.glob("*.json")))
        places = ", ".join(map(str, tried))
        draft.add([key], f"found {show(written)}, which is no file; expected a DeepSpeed JSON; tried {places}{shipped}")
        return
    is_shipped = path.parent == SHIPPED_DEEPSPEED_CONFIGS
    draft.values["engine"] = engine | {"deepspeed_config": f"ds_configs/{path.name}" if is_shipped else str(path)}


def _validate(draft: Draft) -> Recipe | None:
    """Adds the problems of single keys, and of rules over several keys where all of these are valid."""
    try:
        return Recipe.model_validate(draft.values)
    except ValidationError as error:
        wrong = field_problems(error, draft.values)
    for location, text in wrong.items():
        draft.add([".".join(location)], text)
    sound = _sound_part(draft.values, wrong)
    for rule in broken_rules(sound):
        if not any((key.split(".")[0],) in wrong or tuple(key.split(".")) in wrong for key in rule.keys):
            draft.add(rule.keys, rule.describe(sound))
    return None


def _sound_part(values: dict[str, Any], wrong: Iterable[tuple[str, ...]]) -> Recipe:
    """A recipe of the valid keys, the others at their defaults; not validated, which suffices for the rules."""
    wrong_keys = {location[:2] for location in wrong}
    sections: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        given = values.get(name)
        if name == "lora" and given is None:
            sections[name] = None
            continue
        keys = given if isinstance(given, dict) else {}
        sound = {key: value for key, value in keys.items() if (name, key) not in wrong_keys}
        for key, value in sound.items():
            if (name, key) in SUBSECTIONS and value is not None:
                sound[key] = section_class(name, key).model_construct(set(value), **value)
        sections[name] = kind.model_construct(set(sound), **sound)
    return Recipe.model_construct(set(sections), **sections)
