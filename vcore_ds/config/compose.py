"""One recipe from several files: `base:` in a file and fragments on the command line, one merge for both.

A file may name others under the top-level key `base`: they are read first, in order, each after its own bases. What is
read later wins, key by key within a section; a section that is null replaces what was there, and a mapping after null
starts from nothing. So files that are grouped into a base mean the same as when they are named one by one.
"""

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vcore_ds.config.files import SHIPPED_RECIPES, UnreadableFile, expand_home, read_text, resolve
from vcore_ds.config.problems import did_you_mean, shorten, show
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS
from vcore_ds.config.yaml_text import ParsedYaml, parse_yaml

MAX_BASES = 100
"""Names under `base` in all files, each as often as it is read: a few files whose bases fork would be read forever."""


@dataclass
class Draft:
    """A recipe that is being read: plain values, where each came from, and the problems so far."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """`FILE:LINE` or `override section.key=value`, by dotted name."""
    problems: list[str] = field(default_factory=list)
    is_whole: bool = True
    """False where a file could not be read: what is missing then is not the recipe's fault."""
    num_bases: int = 0
    """Names under `base` that were looked up so far."""

    def source(self, *keys: str) -> str:
        """Where the keys were set: an override before a line of a file, a section's line for an absent key."""
        candidates = [self.sources[key] for key in keys if key in self.sources]
        for key in keys:
            while "." in key:
                key = key.rpartition(".")[0]
                candidates += [self.sources[key]] if key in self.sources else []
        overrides = [source for source in candidates if source.startswith("override ")]
        return (overrides or candidates or [self.file])[0]

    def folder(self, key: str) -> Path:
        """The folder of the file that sets `key`; the recipe's own folder where an override sets it."""
        source = self.sources.get(key, "override ")
        return Path(self.file if source.startswith("override ") else source.rpartition(":")[0]).parent

    def add(self, keys: Sequence[str], text: str) -> None:
        self.problems.append(f"{self.source(*keys)}: {shorten(keys[0])}: {text}")

    def replace(self, section: str, value: Any) -> None:
        """Replaces a whole section; nothing of the old one is left."""
        self.values[section] = dict(value) if isinstance(value, dict) else value  # two sections may be one alias
        self.forget_sources_below(section)

    def forget_sources_below(self, name: str) -> None:
        """For a section or key whose whole value is replaced."""
        self.sources = {key: line for key, line in self.sources.items() if not f"{key}.".startswith(f"{name}.")}

    def merge(self, values: dict[str, Any], sources: dict[str, str]) -> None:
        """Merges the sections of a file over what was read before."""
        for section, value in values.items():
            before = self.values.get(section)
            if isinstance(before, dict) and isinstance(value, dict):
                for key, inner in value.items():
                    there = before.get(key) if (section, key) in SUBSECTIONS else None
                    before[key] = there | inner if isinstance(there, dict) and isinstance(inner, dict) else inner
            else:
                self.replace(section, value)
        self.sources.update(sources)

    def cannot_continue(self, problem: str) -> None:
        self.problems.append(problem)
        self.is_whole = False


def compose(recipe: str | Path, fragments: Sequence[str] = ()) -> Draft:
    """Reads a recipe with its bases, then fragments in order; nothing is validated yet.

    A base is looked up in the folder of the file that names it, the recipe and the fragments in the working directory,
    and then each of them among the shipped recipes. Problems (a missing file, a cycle, text that is not YAML) are
    gathered in the draft.
    """
    path = Path(recipe)
    if not os.path.lexists(path):
        path = _find(str(path), Path.cwd())[0] or path
    draft = Draft(str(path))
    _read(draft, path, [])
    for name in fragments:
        found, tried = _find(name, Path.cwd())
        if found is None:
            draft.cannot_continue(f"{shorten(name)}: found no such file; expected a recipe file (YAML); {tried}")
        else:
            _read(draft, found, [])
    draft.problems = list(dict.fromkeys(draft.problems))  # a file may be the base of several
    return draft


def is_fragment(word: str) -> bool:
    """Whether a word among the overrides is a file to merge, such as `methods/dft.yaml`."""
    return "=" not in word and word.endswith(".yaml")


def fragment_hint(word: str) -> str:
    """The hint for a word without `=` that names a file except for its ending or folder; empty for any other word."""
    if not word:
        return ""
    if _find(f"{word}.yaml", Path.cwd())[0] is not None:
        return did_you_mean([f"{word}.yaml"])
    return did_you_mean(name for name in _nearest(f"{word}.yaml", Path.cwd()) if Path(name).stem == Path(word).name)


def _read(draft: Draft, path: Path, chain: list[Path]) -> None:
    """Merges the file's bases, then the file. `chain`: the files that led here, the outermost first."""
    parsed = _parse(draft, path)
    if parsed is None:
        return
    for key, line, first_line in parsed.duplicates:
        draft.problems.append(
            f"{path}:{line}: {shorten(key)}: found a second time (first in line {first_line}); expected once"
        )
    bases = parsed.value.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    where = f"{path}:{parsed.lines.get('base')}: base: found"
    chain = [*chain, path]
    if not isinstance(bases, list) or not all(isinstance(name, str) and name for name in bases):
        draft.cannot_continue(f"{where} {show(bases)}; expected a file name, or a list of file names")
        bases = []
    for name in bases:
        draft.num_bases += 1
        if draft.num_bases > MAX_BASES:
            if draft.num_bases == MAX_BASES + 1:
                draft.cannot_continue(f"{chain[0]}: found more than {MAX_BASES} files under base")
            return
        base, tried = _find(name, path.parent)
        if base is None:
            draft.cannot_continue(
                f"{where} {show(name)}, which is no file ({_arrows([*chain, shorten(name)])}); expected a recipe file "
                f"(YAML); {tried}"
            )
        elif resolve(base) in {resolve(file) for file in chain}:
            draft.cannot_continue(
                f"{where} {show(name)}, which is read already ({_arrows([*chain, base])}); "
                "expected files that are not based on each other"
            )
        else:
            _read(draft, base, chain)
    draft.merge(parsed.value, {key: f"{path}:{line}" for key, line in parsed.lines.items() if key != "base"})


def _parse(draft: Draft, path: Path) -> ParsedYaml | None:
    """The file as a mapping; None, with the problem in the draft, where it is not one."""
    try:
        parsed = parse_yaml(read_text(path))
    except FileNotFoundError:
        siblings = [str(path.with_name(name)) for name in _nearest(path.name, path.parent, shipped=False)]
        near = did_you_mean(siblings or _nearest(str(path), SHIPPED_RECIPES))
        tried = "" if path.is_absolute() else f"; tried {resolve(path)}, {SHIPPED_RECIPES / path}"
        problem = f"{path}: found no such file; expected a recipe (YAML){tried}{near}"
    except UnreadableFile as error:
        problem = f"{shorten(str(path), 200)}{error.place}: {error}; expected a recipe (a YAML file)"
    else:
        if isinstance(parsed.value, dict):
            return parsed
        found = "nothing" if parsed.value is None else show(parsed.value)
        problem = f"{path}: found {found}; expected sections ({', '.join(SECTIONS)}) with keys in them"
    draft.cannot_continue(problem)
    return None


def _find(name: str, folder: Path) -> tuple[Path | None, str]:
    """What has that name in `folder`, else among the shipped recipes. Without one, where it was looked for and the
    nearest names, as text."""
    tried = [resolve(start / expand_home(name)) for start in (folder, SHIPPED_RECIPES)]
    found = next((path for path in tried if os.path.lexists(path)), None)
    if found is not None and found.is_relative_to(Path.cwd()):
        found = found.relative_to(Path.cwd())  # as short as the user would write it
    if found is not None:
        return found, ""
    places = ", ".join(shorten(str(path), 200) for path in dict.fromkeys(tried))
    return None, f"tried {places}{did_you_mean(_nearest(name, folder))}"


def _nearest(name: str, folder: Path, *, shipped: bool = True) -> list[str]:
    """Names of files like a name that was not found: the same in another folder, or a similar spelling."""
    known = sorted(path.name for path in folder.glob("*.yaml")) if os.path.isdir(folder) else []
    if shipped:
        known += [file.relative_to(SHIPPED_RECIPES).as_posix() for file in sorted(SHIPPED_RECIPES.rglob("*.yaml"))]
    same = [other for other in known if Path(other).name == Path(name).name]
    return list(dict.fromkeys(same)) or difflib.get_close_matches(name, dict.fromkeys(known), n=2)


def _arrows(files: Iterable[str | Path]) -> str:
    return " -> ".join(map(str, files))
