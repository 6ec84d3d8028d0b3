"""Reads YAML files and overrides into a Recipe, or raises one error that lists all problems.

The top-level key `base` names other files: they are read first, in order, each after its own bases. Later values win,
key by key within a section. A section that is null replaces what was there, and a mapping after null starts empty. So
files grouped under a base mean the same as files named one by one.
"""

import difflib
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
    SHIPPED_RECIPES,
    UnreadableFile,
    dump_yaml,
    parse_yaml,
    read_text,
)
from vcore_ds.config.problems import RecipeError, did_you_mean, field_problems, nearest_keys, show
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS, Recipe, broken_rules, section_class

_COMMENT = re.compile(r"(^|\s)#")
_OVERRIDE_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,2}")


@dataclass
class Draft:
    """A recipe while it is read: plain values, where each was set, and the problems so far."""

    file: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """`FILE:LINE` or `override section.key=value`, by dotted name."""
    problems: list[str] = field(default_factory=list)
    is_complete: bool = True
    """False if a file could not be read, so that missing keys are not the recipe's mistake."""

    def source(self, *keys: str) -> str:
        """Where the keys were set: an override before a line of a file, a section's line for an absent key."""
        parents = [".".join(key.split(".")[:n]) for key in keys for n in range(key.count("."), 0, -1)]
        sources = [self.sources[key] for key in (*keys, *parents) if key in self.sources]
        return min(sources, key=lambda source: not source.startswith("override "), default=self.file)

    def add(self, keys: Sequence[str], text: str) -> None:
        self.problems.append(f"{self.source(*keys)}: {keys[0]}: {text}")

    def fail(self, problem: str) -> None:
        """Add a problem because of which a file is missing from the draft."""
        self.problems.append(problem)
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
    """Read a recipe with its bases (see `compose`) and apply overrides `section.key=value`, whose values are YAML.
    A word `FILE.yaml` among the overrides, or the name of a YAML file without its suffix, is a fragment, merged over
    the recipe. Fragments come first, in order, then the overrides. engine.deepspeed_config becomes
    `ds_configs/NAME.json` for a shipped file, which every installation finds, else an absolute path; in other paths `~`
    is expanded. Raises RecipeError with all problems."""
    fragments = [word for word in overrides if _is_fragment(word)]
    draft = compose(path, fragments)
    for word in overrides:
        if word not in fragments:
            _apply_override(draft, word)
    if not draft.is_complete:
        raise RecipeError(draft.problems)
    for section in SECTIONS.keys() - {"lora"}:
        draft.values.setdefault(section, {})  # a missing section is reported by its missing keys
    _resolve_deepspeed_config(draft)
    recipe = _validate(draft)
    if draft.problems or recipe is None:
        raise RecipeError(draft.problems)
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
    refused = {"adamw": ("momentum",), "sgd": ("betas", "eps", "momentum"), "muon": ()}
    for key in refused[recipe.optimizer.name]:
        del values["optimizer"][key]
    return dump_yaml(values)


def compose(recipe: str | Path, fragments: Sequence[str] = ()) -> Draft:
    """Read a recipe with its bases, then fragments in order, without validation. A base is looked up in the folder of
    the file that names it, the recipe and fragments in the working directory, and then each among the shipped recipes;
    `.yaml` may be left out. Unreadable files are problems of the draft."""
    draft = Draft()
    for name in (str(recipe), *fragments):
        _read(draft, name, Path(), [])
    draft.problems = list(dict.fromkeys(draft.problems))  # a file may be the base of several
    return draft


def _read(draft: Draft, name: str, folder: Path, chain: list[Path], prefix: str = "") -> None:
    """Merge a file's bases, then the file, which is looked up in `folder` first. `chain`: the files that led to this
    one as their base, the outermost first. `prefix`: the line that names the file, as the beginning of a message."""
    path = _find_file(name, folder)
    if path is None:
        tried = ", ".join(dict.fromkeys(os.path.abspath(path) for path in _candidates(name, folder)))
        nearest = [
            file if name.endswith(".yaml") else file.removesuffix(".yaml") for file in _nearest_files(name, folder)
        ]
        hint = did_you_mean(nearest)
        draft.fail(f"{prefix}{name}: found no such file; expected a recipe file (YAML); tried {tried}{hint}")
        return
    draft.file = draft.file or str(path)
    if any(path.samefile(file) for file in chain):
        cycle = " -> ".join(map(str, [*chain, path]))
        draft.fail(f"{prefix}found {show(name)}, which is based on itself ({cycle}); expected no cycle of bases")
        return
    try:
        parsed = parse_yaml(read_text(path))
    except UnreadableFile as error:
        draft.fail(f"{path}{error.position}: {error}; expected a recipe (a YAML file)")
        return
    if not isinstance(parsed.value, dict):
        found = "nothing" if parsed.value is None else show(parsed.value)
        draft.fail(f"{path}: found {found}; expected sections ({', '.join(SECTIONS)}) with keys in them")
        return
    for key, line, first_line in parsed.duplicates:
        draft.problems.append(f"{path}:{line}: {key}: found a second time (first in line {first_line}); expected once")
    bases = parsed.value.pop("base", [])
    prefix = f"{path}:{parsed.lines.pop('base', 0)}: base: "
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(base, str) and base for base in names):
        draft.fail(f"{prefix}found {show(bases)}; expected a file name, or a list of file names")
        names = []
    for base in names:
        _read(draft, base, path.parent, [*chain, path], prefix)
    draft.merge(parsed.value, {key: f"{path}:{line}" for key, line in parsed.lines.items()})


def _candidates(name: str, folder: Path) -> list[Path]:
    """The paths that a name may mean, in order of preference."""
    suffixes = ("",) if name.endswith(".yaml") else ("", ".yaml")
    return [start / f"{os.path.expanduser(name)}{suffix}" for start in (folder, SHIPPED_RECIPES) for suffix in suffixes]


def _find_file(name: str, folder: Path) -> Path | None:
    """The file of this name; a folder, for a better message than that there is none, only if there is no file."""
    # Not Path.exists, which raises for a name that is too long.
    paths = [path for path in _candidates(name, folder) if os.path.exists(path)]
    return next((path for path in paths if not path.is_dir()), paths[0] if paths else None)


def _is_fragment(word: str) -> bool:
    """Whether a word among the overrides names a file."""
    if "=" in word or not word:
        return False
    if word.endswith(".yaml"):
        return True
    path = _find_file(word, Path())
    return path is not None and path.suffix == ".yaml"


def _nearest_files(name: str, folder: Path) -> list[str]:
    """Files for a missing one: of the same name or else of a similar one, in its folder and among the shipped."""
    stem = Path(name).name.removesuffix(".yaml")
    shipped = sorted(SHIPPED_RECIPES.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    nearest = []
    for files in (
        [Path(name).with_name(path.name) for path in sorted((folder / os.path.expanduser(name)).parent.glob("*.yaml"))],
        [path.relative_to(SHIPPED_RECIPES) for path in shipped],
    ):
        stems = list(dict.fromkeys(path.stem for path in files))
        for match in [stem] if stem in stems else difflib.get_close_matches(stem, stems, n=2):
            nearest += [str(path) for path in files if path.stem == match]
    return list(dict.fromkeys(nearest))


def _apply_override(draft: Draft, override: str) -> None:
    source = f"override {override}"
    key, equals, text = override.partition("=")
    is_nested = key.count(".") == 2
    if not equals or not _OVERRIDE_KEY.fullmatch(key) or (is_nested and tuple(key.split(".")[:2]) not in SUBSECTIONS):
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
        quoted = make_override(key, text)
        draft.problems.append(f"{source}: {key}: found a comment in {show(text)}; expected quotes around #: {quoted}")
        return
    for duplicate, _, _ in parsed.duplicates:
        draft.problems.append(f"{source}: {key}.{duplicate}: found a second time; expected once")
    if "." not in key or isinstance(draft.values.get(key.partition(".")[0]), dict | None):
        draft.replace(key, parsed.value, source)  # a section that is no mapping is reported by the validation


def _override_hint(key: str, text: str) -> str:
    """The hint for a word that is not an override: a file, or the key that it resembles."""
    bare = key.lstrip("-")
    nearest = [] if text or not Path(key).name else [name.removesuffix(".yaml") for name in _nearest_files(key, Path())]
    files = [name for name in nearest if "/" in key or Path(name).name == key]
    if files or not _OVERRIDE_KEY.fullmatch(bare):
        return did_you_mean(files)
    names = [f"{bare}.KEY"] if bare in SECTIONS else [bare] if "." in bare else nearest_keys(bare)
    return did_you_mean(f"{name}={text or 'VALUE'}" for name in names)


def _resolve_deepspeed_config(draft: Draft) -> None:
    engine = draft.values["engine"]
    written = engine.get("deepspeed_config") if isinstance(engine, dict) else None
    if not written or not isinstance(written, str):
        return  # reported by the validation
    key = "engine.deepspeed_config"
    source = draft.sources.get(key, "override ")
    naming_file = draft.file if source.startswith("override ") else source.rpartition(":")[0]
    folders = (Path(naming_file).parent, Path.cwd(), SHIPPED_DEEPSPEED_CONFIGS.parent)
    candidates = list(dict.fromkeys((folder / os.path.expanduser(written)).resolve() for folder in folders))
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        shipped = did_you_mean(f"ds_configs/{path.name}" for path in sorted(SHIPPED_DEEPSPEED_CONFIGS.glob("*.json")))
        tried = ", ".join(map(str, candidates))
        draft.add([key], f"found {show(written)}, which is no file; expected a DeepSpeed JSON; tried {tried}{shipped}")
        return
    is_shipped = path.parent == SHIPPED_DEEPSPEED_CONFIGS
    draft.values["engine"] = engine | {"deepspeed_config": f"ds_configs/{path.name}" if is_shipped else str(path)}


def _validate(draft: Draft) -> Recipe | None:
    """Validate the draft; add the problems of single keys, and of the rules whose keys are all valid."""
    try:
        return Recipe.model_validate(draft.values)
    except ValidationError as error:
        wrong = field_problems(error, draft.values)
    for location, text in wrong.items():
        draft.add([".".join(location)], text)
    recipe = _build_valid_part(draft.values, wrong)
    for rule in broken_rules(recipe):
        if not any((key.split(".")[0],) in wrong or tuple(key.split(".")) in wrong for key in rule.keys):
            draft.add(rule.keys, rule.describe(recipe))
    return None


def _build_valid_part(values: dict[str, Any], wrong: Iterable[tuple[str, ...]]) -> Recipe:
    """An unvalidated recipe for the rules, with the valid keys set and the others at their defaults."""
    wrong_keys = {location[:2] for location in wrong}
    sections: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        keys = values.get(name)
        if name == "lora" and keys is None:
            sections[name] = None
            continue
        keys = keys if isinstance(keys, dict) else {}
        valid = {key: value for key, value in keys.items() if (name, key) not in wrong_keys}
        for key, value in valid.items():
            if (name, key) in SUBSECTIONS and value is not None:
                valid[key] = section_class(name, key).model_construct(set(value), **value)
        sections[name] = section.model_construct(set(valid), **valid)
    return Recipe.model_construct(set(sections), **sections)
