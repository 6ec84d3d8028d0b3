"""Reads YAML files and overrides into a Recipe, or raises one error that lists their problems.

The top-level key `base` names other files: they are read first, in order, each after its own bases. Later values win,
key by key within a section. A section that is null replaces what was there, and a mapping after null starts empty. So
files grouped under a base mean the same as files named one by one.

YAML is read by PyYAML's safe loader with three changes: `1e-4` is a number, as in YAML 1.2 (PyYAML reads a string),
dates are strings (a folder may be called 2026-01-31), and keys are strings as written.
"""

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import reading
from vcore_ds.config.exports import resolve_exports
from vcore_ds.config.method_section import read_function
from vcore_ds.config.problems import (
    RecipeError,
    breaks_rules,
    closest,
    describe_problem,
    find_instead,
    list_problems,
    nearest_keys,
    show,
)
from vcore_ds.config.schema import (
    FOREIGN_KEYS,
    SECTIONS,
    Recipe,
    is_section,
    iter_values,
    list_violations,
    section_class,
)

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "shipped"
"""Folder of the recipes, SLURM scripts and DeepSpeed JSON files in a wheel (pyproject.toml); a checkout has none."""

SHIPPED_RECIPES = _INSTALLED / "recipes" if _INSTALLED.is_dir() else _PACKAGE.parent / "launch_scripts" / "recipes"
"""Folder of the shipped recipes: `methods/dft.yaml` is found here from any working directory."""

SHIPPED_SLURM = SHIPPED_RECIPES.with_name("slurm")  # scripts of `vcore-ds sweep --slurm`

SHIPPED_DEEPSPEED_CONFIGS = (_INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent) / "ds_configs"

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader): ...


class _Dumper(yaml.SafeDumper): ...


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# The dumper needs the pattern too, or it would write the string "1e-4" without quotes.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """The value of one YAML document, and the line of each key, from 1, by dotted name. Raises yaml.YAMLError, for a
    repeated key too."""
    return copy.deepcopy(_parse_yaml(text))


@lru_cache(maxsize=512)  # a plan loads the same recipe, and its bases, a dozen times: 5 ms for each file
def _parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    lines = dict[str, int]()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _note_keys(node, "", lines)
        return None if node is None else loader.construct_document(node), lines
    except ValueError as error:  # such as `!!int x`
        raise yaml.YAMLError(str(error)) from None
    except RecursionError:
        raise yaml.YAMLError("values are nested too deeply") from None


def _note_keys(node: yaml.Node | None, within: str, lines: dict[str, int]) -> None:
    """Make the keys below a node strings, and add their lines."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
            key.tag, name = f"{_TAG}str", f"{within}{key.value}"
            if name in lines:
                problem = f"the key {name} a second time, first in line {lines[name]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
            _note_keys(value, f"{name}.", lines)


def read_text(path: Path, expected: str) -> str:
    """Read a UTF-8 file. Raises RecipeError, with what was `expected`."""
    try:
        with reading("", path, expected):
            return path.read_text(encoding="utf-8")
    except UserError as error:
        raise RecipeError([str(error)]) from None
    except UnicodeDecodeError as error:
        problem = describe_problem(f"bytes that are not UTF-8 ({error.reason})", expected)
        raise RecipeError([f"{path}: {problem}"]) from None


def read_yaml(path: Path, expected: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a YAML file that is a mapping, as `parse_yaml`. Raises RecipeError, with what was `expected`."""
    try:
        value, lines = parse_yaml(read_text(path, expected))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise RecipeError([f"{path}{place}: {_describe_yaml_error(error, expected)}"]) from None
    if not isinstance(value, dict):
        raise RecipeError([f"{path}: {describe_problem(show(value), expected)}"])
    return value, lines


def _describe_yaml_error(error: yaml.YAMLError, expected: str) -> str:
    return describe_problem(f"no YAML: {getattr(error, 'problem', None) or error}", expected)


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to the same value."""
    # ASCII: with allow_unicode PyYAML writes U+0085 and U+2028 unescaped, and reads them back as spaces.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, default_flow_style=False)


@dataclass
class MergedFiles:
    """The plain values of a recipe's files and overrides, where each was set, and the problems so far."""

    file: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # by dotted name: `FILE:LINE` or `override section.key=value`
    problems: list[str] = field(default_factory=list)

    def find_source(self, *keys: str) -> str:
        """Where the keys were set: an override before a line of a file, a section's line for an absent key."""
        parents = [".".join(key.split(".")[:n]) for key in keys for n in range(key.count("."), 0, -1)]
        sources = [self.sources[key] for key in (*keys, *parents) if key in self.sources]
        return min(sources, key=lambda source: not source.startswith("override "), default=self.file)

    def list_folders(self, key: str) -> list[Path]:
        """The folder of the file that sets a key, or of the recipe for an override; and the working directory."""
        source = self.sources.get(key, "override ")
        file = self.file if source.startswith("override ") else source.rpartition(":")[0]
        return [Path(file).parent, Path.cwd()]

    def merge(self, new: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        """Merge values, which `sources` locates, over the current ones."""
        self._merge_section(self.values, new, "", next(iter(sources.values()), ""))
        self.sources |= sources

    def _merge_section(self, old: dict[str, Any], new: Mapping[str, Any], within: str, source: str) -> None:
        for key, value in new.items():
            name, is_old_section = f"{within}{key}", isinstance(old.get(key), dict)
            if isinstance(value, dict) and is_section(name):
                if not is_old_section:  # such as `lora.rank=16` over `lora: null`
                    old[key], self.sources[name] = {}, source
                self._merge_section(old[key], value, f"{name}.", source)
                continue
            old[key], self.sources[name] = value, source
            if is_old_section:
                self.sources = {other: at for other, at in self.sources.items() if not other.startswith(f"{name}.")}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe with its bases (see `merge_files`) and apply overrides `section.key=value`, whose values are YAML.
    A word `FILE.yaml` among the overrides, or the name of a YAML file without its suffix, is a fragment, merged over
    the recipe. Fragments come first, in order, then the overrides. engine.deepspeed_config becomes
    `ds_configs/NAME.json` for a shipped file, which every installation finds, else an absolute path, as the file of
    method.function does; a run in model.path or lora.adapter its exported folder; in other paths `~` is expanded.
    Raises RecipeError with all problems: of words, keys, and rules over valid keys; of files alone where one cannot be
    read."""
    fragments = [word for word in overrides if _is_fragment(word)]
    merged = merge_files(path, fragments)
    is_complete = not merged.problems  # else missing keys are not the recipe's mistake
    for word in overrides:
        if word not in fragments:
            _apply_override(merged, word)
    if not is_complete:
        raise RecipeError(merged.problems)
    for section in SECTIONS.keys() - {"lora"}:
        merged.values.setdefault(section, {})  # a missing section is reported by its missing keys
    _resolve_deepspeed_config(merged)
    _resolve_function(merged)
    if unusable := [f"{merged.find_source(key)}: {text}" for key, text in resolve_exports(merged.values)]:
        raise RecipeError([*merged.problems, *unusable])
    try:
        recipe = Recipe.model_validate(merged.values)
    except ValidationError as error:
        problems = list_problems(error, merged.values)
        if not breaks_rules(error):
            problems += _list_violations(merged.values, [keys[0] for keys, _ in problems])
        merged.problems += [f"{merged.find_source(*keys)}: {keys[0]}: {text}" for keys, text in problems]
    if merged.problems:
        raise RecipeError(merged.problems)
    return recipe


def _list_violations(values: dict[str, Any], wrong: Iterable[str]) -> list[tuple[tuple[str, ...], str]]:
    """Rules over several keys that the valid ones break, with the others at their defaults."""
    wrong = {".".join(key.split(".")[:2]) for key in wrong}
    parts: dict[str, Any] = {"lora": None}
    for name, kind in SECTIONS.items():
        keys = values.get(name)
        if name == "lora" and keys is None:
            continue
        given = keys if isinstance(keys, dict) else {}
        valid = {key: value for key, value in given.items() if f"{name}.{key}" not in wrong}
        for key, value in valid.items():
            if is_section(f"{name}.{key}") and value is not None:
                valid[key] = section_class(name, key).model_construct(**value)
        parts[name] = kind.model_construct(**valid)
    rules = list_violations(Recipe.model_construct(**parts))
    return [rule for rule in rules if not wrong & {name for key in rule[0] for name in (key, key.partition(".")[0])}]


def read_resolved_recipe(path: Path) -> Recipe:
    """Read the recipe.yaml of a run. Files that it names need not exist any more. Raises RecipeError where it is not a
    recipe of this version."""
    values, _ = read_yaml(path, "the recipe of a run")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{path}: {keys[0]}: {text}" for keys, text in list_problems(error, values)) from None


def list_overrides(values: Mapping[str, Any]) -> list[str]:
    """The words `section.key=value` that `load_recipe` reads back to these sections."""
    return [make_override(key, value) for key, value in iter_values(values)]


def make_override(key: str, value: object) -> str:
    """The word `key=value` that `load_recipe` reads back to this value, quoted only where YAML needs it. Paths may be
    anywhere in the value."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    with suppress(yaml.YAMLError):
        if isinstance(text, str) and parse_yaml(text)[0] == text:
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
    path = _find_file(name, folder)
    if path is None or any(path.samefile(file) for file in chain):
        problem = describe_problem("no such file", "a recipe file (YAML)", _nearest_files(name, folder))
        if path is not None:
            problem = describe_problem(f"a cycle of bases ({' -> '.join(map(str, [*chain, path]))})", "none")
        merged.problems.append(f"{named_at}{name}: {problem}")
        return
    merged.file = merged.file or str(path)
    try:
        values, lines = read_yaml(path, f"a recipe: YAML with the sections {', '.join(SECTIONS)}")
    except RecipeError as error:
        merged.problems += error.problems
        return
    where, bases = f"{path}:{lines.pop('base', 0)}: base: ", values.pop("base", [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(base, str) and base for base in names):
        merged.problems.append(where + describe_problem(show(bases), "a file name, or a list of file names"))
        return
    for base in names:
        _read(merged, base, path.parent, [*chain, path], where)
    merged.merge(values, {key: f"{path}:{line}" for key, line in lines.items()})


def _find_file(name: str, folder: Path) -> Path | None:
    """The file of this name; a folder, for a better message than that there is none, only if there is no file."""
    suffixes = ("",) if name.endswith(".yaml") else ("", ".yaml")
    paths = [
        start / f"{os.path.expanduser(name)}{suffix}" for start in (folder, SHIPPED_RECIPES) for suffix in suffixes
    ]
    paths = [path for path in paths if os.path.exists(path)]  # Path.exists raises for a name that is too long
    return next((path for path in paths if not path.is_dir()), paths[0] if paths else None)


def _nearest_files(name: str, folder: Path) -> list[str]:
    """Names for that of no file: those of the most similar stem in its folder, and among the shipped recipes."""
    beside = [str(Path(name).parent / path.name) for path in (folder / os.path.expanduser(name)).parent.glob("*.yaml")]
    shipped = [path.relative_to(SHIPPED_RECIPES).as_posix() for path in SHIPPED_RECIPES.rglob("*.yaml")]
    # A part alone is no recipe, and only a file that names bases means one.
    shipped = [path for path in shipped if name.startswith("parts/") or not path.startswith("parts/")]
    nearest: list[str] = []
    for names in (sorted(beside), sorted(shipped)):
        stems = [Path(each).name.removesuffix(".yaml") for each in names]
        stem = closest(Path(name).name.removesuffix(".yaml"), stems)
        nearest += [each for each, other in zip(names, stems, strict=True) if other == stem]
    return list(dict.fromkeys(nearest))


def _is_fragment(word: str) -> bool:
    """Whether a word among the overrides names a file."""
    if "=" in word or not word:
        return False
    path = _find_file(word, Path())
    return word.endswith(".yaml") or (path is not None and path.suffix == ".yaml")


def _apply_override(merged: MergedFiles, override: str) -> None:
    source, (key, equals, text) = f"override {override}", override.partition("=")
    parents = key.split(".")
    expected = "section.key=value or FILE.yaml"
    if not equals or not all(part.isidentifier() for part in parents):
        instead = find_instead(key)
        problem = f"{key}: {instead}" if instead else describe_problem(show(override), expected, _nearest_words(key))
        merged.problems.append(f"{source}: {problem}")
        return
    try:
        value, _ = parse_yaml(text)
    except yaml.YAMLError as error:
        merged.problems.append(f"{source}: {key}: {_describe_yaml_error(error, expected)}")
        return
    if " #" in f" {text}" and not text.startswith(("'", '"')) and isinstance(value, str | None):
        problem = describe_problem(f"a comment in {show(text)}", f"quotes around #: {make_override(key, text)}")
        merged.problems.append(f"{source}: {key}: {problem}")
        return
    for replacing in [None, value] if is_section(key) else [value]:  # a section is replaced as a whole
        for name in reversed(parents):
            replacing = {name: replacing}
        merged.merge(replacing, {key: source})


def _nearest_words(word: str) -> list[str]:
    """Words for one that is no override: a file, or the key that it resembles."""
    files = [name.removesuffix(".yaml") for name in _nearest_files(word, Path())]
    if "/" in word or any(Path(name).name == word for name in files):
        return files
    return [key if key.endswith(".yaml") else f"{key}=VALUE" for key in nearest_keys(word.lstrip("-"))]


def _resolve_deepspeed_config(merged: MergedFiles) -> None:
    engine, key = merged.values["engine"], "engine.deepspeed_config"
    written = engine.get("deepspeed_config") if isinstance(engine, dict) else None
    if not written or not isinstance(written, str):
        return  # reported by the validation
    folders = (*merged.list_folders(key), SHIPPED_DEEPSPEED_CONFIGS.parent)
    candidates = list(dict.fromkeys((folder / os.path.expanduser(written)).resolve() for folder in folders))
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        expected = f"a DeepSpeed JSON: none of {', '.join(map(str, candidates))}"
        shipped = [f"ds_configs/{path.name}" for path in sorted(SHIPPED_DEEPSPEED_CONFIGS.glob("*.json"))]
        problem = describe_problem(show(written), expected, shipped)
        merged.problems.append(f"{merged.find_source(key)}: {key}: {problem}")
        return
    is_shipped = path.parent == SHIPPED_DEEPSPEED_CONFIGS
    engine["deepspeed_config"] = f"ds_configs/{path.name}" if is_shipped else str(path)


def _resolve_function(merged: MergedFiles) -> None:
    method, key = merged.values["method"], "method.function"
    if not isinstance(method, dict) or method.get("name") != "custom" or not isinstance(method.get("function"), str):
        return
    options = given if isinstance(given := method.get("options"), dict) else {}
    try:
        method |= read_function(method["function"], options, merged.list_folders(key))
    except ValueError as error:
        wrong_key, found, expected, names = error.args
        nearest = closest(str(found).split()[-1], names)
        problem = describe_problem(found, expected, [nearest] if nearest else [])
        merged.problems.append(f"{merged.find_source(wrong_key, key)}: {wrong_key}: {problem}")
