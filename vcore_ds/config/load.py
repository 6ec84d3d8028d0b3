"""Reads YAML files and overrides into a Recipe, or raises one error that lists all problems.

The top-level key `base` names other files: they are read first, in order, each after its own bases. Later values win,
key by key within a section. A section that is null replaces what was there, and a mapping after null starts empty. So
files grouped under a base mean the same as files named one by one.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vcore_ds.config.files import (
    SHIPPED_DEEPSPEED_CONFIGS,
    UnreadableFile,
    dump_yaml,
    find_file,
    list_candidates,
    nearest_files,
    parse_yaml,
    read_text,
)
from vcore_ds.config.problems import RecipeError, describe_problem, field_problems, nearest_keys, show
from vcore_ds.config.schema import FOREIGN_KEYS, SECTIONS, SUBSECTIONS, Recipe, broken_rules, section_class

_COMMENT = re.compile(r"(^|\s)#")
_OVERRIDE_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,2}")


@dataclass
class MergedFiles:
    """The plain values of a recipe's files and overrides, where each was set, and the problems so far."""

    file: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # by dotted name: `FILE:LINE` or `override section.key=value`
    problems: list[str] = field(default_factory=list)
    is_complete: bool = True  # else a file could not be read, so that missing keys are not the recipe's mistake

    def source(self, *keys: str) -> str:
        """Where the keys were set: an override before a line of a file, a section's line for an absent key."""
        parents = [".".join(key.split(".")[:n]) for key in keys for n in range(key.count("."), 0, -1)]
        sources = [self.sources[key] for key in (*keys, *parents) if key in self.sources]
        return min(sources, key=lambda source: not source.startswith("override "), default=self.file)

    def add(self, where: str, found: object, expected: str, nearest: Iterable[str] = ()) -> None:
        self.problems.append(f"{where}: {describe_problem(found, expected, nearest)}")

    def fail(self, where: str, found: object, expected: str, nearest: Iterable[str] = ()) -> None:
        """Add a problem because of which the values of a file are missing."""
        self.add(where, found, expected, nearest)
        self.is_complete = False

    def replace(self, name: str, value: Any, source: str) -> None:
        """Replace a section, `section.key` or `section.key.key`."""
        *parents, last = name.split(".")
        values = self.values
        for i, parent in enumerate(parents):
            inner = values.get(parent)
            if not isinstance(inner, dict):  # such as lora.rank=16 on lora: null
                self.sources[".".join(parents[: i + 1])] = source
            values[parent] = dict(inner) if isinstance(inner, dict) else {}  # two sections may be aliases in YAML
            values = values[parent]
        values[last] = value
        self.forget_sources(name)
        self.sources[name] = source

    def forget_sources(self, name: str) -> None:
        """Remove the sources of a section or key, whose value is replaced, and of all keys in it."""
        self.sources = {key: source for key, source in self.sources.items() if not f"{key}.".startswith(f"{name}.")}

    def merge(self, values: dict[str, Any], sources: dict[str, str]) -> None:
        """Merge the sections of a file over the current values."""
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


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe with its bases (see `merge_files`) and apply overrides `section.key=value`, whose values are YAML.
    A word `FILE.yaml` among the overrides, or the name of a YAML file without its suffix, is a fragment, merged over
    the recipe. Fragments come first, in order, then the overrides. engine.deepspeed_config becomes
    `ds_configs/NAME.json` for a shipped file, which every installation finds, else an absolute path; in other paths `~`
    is expanded. Raises RecipeError with all problems."""
    fragments = [word for word in overrides if _is_fragment(word)]
    merged = merge_files(path, fragments)
    for word in overrides:
        if word not in fragments:
            _apply_override(merged, word)
    if not merged.is_complete:
        raise RecipeError(merged.problems)
    for section in SECTIONS.keys() - {"lora"}:
        merged.values.setdefault(section, {})  # a missing section is reported by its missing keys
    _resolve_deepspeed_config(merged)
    recipe = _validate(merged)
    if merged.problems or recipe is None:
        raise RecipeError(merged.problems)
    return recipe


def list_overrides(values: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """List the words `section.key=value` that `load_recipe` reads back to these sections. A mapping below a section is
    a value, such as data.validation_path, unless it is a nested section."""
    for name, value in values.items():
        key = f"{within}{name}"
        if isinstance(value, Mapping) and (not within or tuple(key.split(".")) in SUBSECTIONS):
            yield from list_overrides(value, f"{key}.")
        else:
            yield make_override(key, value)


def make_override(key: str, value: object) -> str:
    """The word `key=value` that `load_recipe` reads back to this value, quoted only where YAML needs it. Paths may be
    anywhere in the value."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    with suppress(UnreadableFile):
        if isinstance(text, str) and parse_yaml(text).value == text:
            return f"{key}={text}"
    # JSON is YAML except for unescaped U+0085 and the like
    quoted = json.dumps(text, ensure_ascii=False, default=os.fspath)
    return f"{key}=" + "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def dump_recipe(recipe: Recipe) -> str:
    """YAML text with every key and without bases; loads to an equal recipe."""
    values = recipe.model_dump(mode="json")
    for key in FOREIGN_KEYS[recipe.optimizer.name]:
        del values["optimizer"][key]
    return dump_yaml(values)


def merge_files(recipe: str | Path, fragments: Sequence[str] = ()) -> MergedFiles:
    """Merge a recipe with its bases, then fragments in order, without validation. A base is looked up in the folder of
    the file that names it, the recipe and fragments in the working directory, and then each among the shipped recipes;
    `.yaml` may be left out. Files that cannot be read are problems of the result."""
    merged = MergedFiles()
    for name in (str(recipe), *fragments):
        _read(merged, name, Path(), [])
    merged.problems = list(dict.fromkeys(merged.problems))  # a file may be the base of several
    return merged


def _read(merged: MergedFiles, name: str, folder: Path, chain: list[Path], named_at: str = "") -> None:
    """Merge a file's bases, then the file, which is looked up in `folder` first. `chain`: the files that led to this
    one as their base, the outermost first. `named_at`: `FILE:LINE: base: `, where the file is named; empty for a word
    of the command."""
    path = find_file(name, folder)
    if path is None:
        tried = ", ".join(dict.fromkeys(os.path.abspath(path) for path in list_candidates(name, folder)))
        nearest = nearest_files(name, folder)
        if not name.endswith(".yaml"):
            nearest = [file.removesuffix(".yaml") for file in nearest]
        merged.fail(f"{named_at}{name}", "no such file", f"a recipe file (YAML); tried {tried}", nearest)
        return
    merged.file = merged.file or str(path)
    if any(path.samefile(file) for file in chain):
        cycle = " -> ".join(map(str, [*chain, path]))
        found = f"{show(name)}, which is based on itself ({cycle})"
        merged.fail(named_at.removesuffix(": "), found, "no cycle of bases")
        return
    try:
        parsed = parse_yaml(read_text(path))
    except UnreadableFile as error:
        merged.problems.append(f"{path}{error.position}: {error}; expected a recipe (a YAML file)")
        merged.is_complete = False
        return
    if not isinstance(parsed.value, dict):
        found = "nothing" if parsed.value is None else show(parsed.value)
        merged.fail(str(path), found, f"sections ({', '.join(SECTIONS)}) with keys in them")
        return
    for key, line, first_line in parsed.duplicates:
        merged.add(f"{path}:{line}: {key}", f"a second time (first in line {first_line})", "once")
    bases = parsed.value.pop("base", [])
    where = f"{path}:{parsed.lines.pop('base', 0)}: base"
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(base, str) and base for base in names):
        merged.fail(where, show(bases), "a file name, or a list of file names")
        names = []
    for base in names:
        _read(merged, base, path.parent, [*chain, path], f"{where}: ")
    merged.merge(parsed.value, {key: f"{path}:{line}" for key, line in parsed.lines.items()})


def _is_fragment(word: str) -> bool:
    """Whether a word among the overrides names a file."""
    if "=" in word or not word:
        return False
    path = find_file(word, Path())
    return word.endswith(".yaml") or (path is not None and path.suffix == ".yaml")


def _apply_override(merged: MergedFiles, override: str) -> None:
    source = f"override {override}"
    key, equals, text = override.partition("=")
    is_nested = key.count(".") == 2
    if not equals or not _OVERRIDE_KEY.fullmatch(key) or (is_nested and tuple(key.split(".")[:2]) not in SUBSECTIONS):
        expected = "section.key=value" if equals else "section.key=value or FILE.yaml"
        merged.add(source, show(override), expected, _nearest_words(key, text))
        return
    where = f"{source}: {key}"
    if key == "base":
        merged.add(where, show(text), "the name of the file alone, FILE.yaml")
        return
    try:
        parsed = parse_yaml(text)
    except UnreadableFile as error:
        merged.problems.append(f"{where}: {error}; expected section.key=value")
        return
    if _COMMENT.search(text) and not text.startswith(("'", '"')) and isinstance(parsed.value, str | None):
        merged.add(where, f"a comment in {show(text)}", f"quotes around #: {make_override(key, text)}")
        return
    for duplicate, _, _ in parsed.duplicates:
        merged.add(f"{where}.{duplicate}", "a second time", "once")
    if "." not in key or isinstance(merged.values.get(key.partition(".")[0]), dict | None):
        merged.replace(key, parsed.value, source)  # a section that is no mapping is reported by the validation


def _nearest_words(key: str, text: str) -> list[str]:
    """Words for one that is no override: a file, or the key that it resembles."""
    bare = key.lstrip("-")
    nearest = [] if text or not Path(key).name else [name.removesuffix(".yaml") for name in nearest_files(key, Path())]
    files = [name for name in nearest if "/" in key or Path(name).name == key]
    if files or not _OVERRIDE_KEY.fullmatch(bare):
        return files
    names = [f"{bare}.KEY"] if bare in SECTIONS else [bare] if "." in bare else nearest_keys(bare)
    return [f"{name}={text or 'VALUE'}" for name in names]


def _resolve_deepspeed_config(merged: MergedFiles) -> None:
    engine, key = merged.values["engine"], "engine.deepspeed_config"
    written = engine.get("deepspeed_config") if isinstance(engine, dict) else None
    if not written or not isinstance(written, str):
        return  # reported by the validation
    source = merged.sources.get(key, "override ")
    naming_file = merged.file if source.startswith("override ") else source.rpartition(":")[0]
    folders = (Path(naming_file).parent, Path.cwd(), SHIPPED_DEEPSPEED_CONFIGS.parent)
    candidates = list(dict.fromkeys((folder / os.path.expanduser(written)).resolve() for folder in folders))
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        shipped = [f"ds_configs/{path.name}" for path in sorted(SHIPPED_DEEPSPEED_CONFIGS.glob("*.json"))]
        expected = f"a DeepSpeed JSON; tried {', '.join(map(str, candidates))}"
        merged.add(f"{merged.source(key)}: {key}", f"{show(written)}, which is no file", expected, shipped)
        return
    is_shipped = path.parent == SHIPPED_DEEPSPEED_CONFIGS
    merged.values["engine"] = engine | {"deepspeed_config": f"ds_configs/{path.name}" if is_shipped else str(path)}


def _validate(merged: MergedFiles) -> Recipe | None:
    """Validate the values; add the problems of single keys, and of the rules whose keys are all valid."""
    try:
        return Recipe.model_validate(merged.values)
    except ValidationError as error:
        wrong = field_problems(error, merged.values)
    problems: list[tuple[tuple[str, ...], str]] = [((".".join(location),), text) for location, text in wrong.items()]
    recipe, wrong_keys = _build_valid_part(merged.values, wrong), {".".join(location) for location in wrong}
    problems.extend(
        (rule.keys, rule.describe(recipe))
        for rule in broken_rules(recipe)
        if not wrong_keys & {name for key in rule.keys for name in (key, key.partition(".")[0])}
    )
    merged.problems += [f"{merged.source(*keys)}: {keys[0]}: {text}" for keys, text in problems]
    return None


def _build_valid_part(values: dict[str, Any], wrong: Iterable[tuple[str, ...]]) -> Recipe:
    """An unvalidated recipe for the rules, with the valid keys set and the others at their defaults."""
    wrong_keys = {location[:2] for location in wrong}
    parts: dict[str, Any] = {"lora": None}
    for name, kind in SECTIONS.items():
        keys = values.get(name)
        if name == "lora" and keys is None:
            continue
        given = keys if isinstance(keys, dict) else {}
        valid = {key: value for key, value in given.items() if (name, key) not in wrong_keys}
        for key, value in valid.items():
            if (name, key) in SUBSECTIONS and value is not None:
                valid[key] = section_class(name, key).model_construct(set(value), **value)
        parts[name] = kind.model_construct(set(valid), **valid)
    return Recipe.model_construct(set(parts), **parts)
