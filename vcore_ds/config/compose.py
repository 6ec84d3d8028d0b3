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

from vcore_ds.config.problems import did_you_mean, show
from vcore_ds.config.schema import SECTIONS
from vcore_ds.config.yaml_text import ParsedYaml, YamlError, parse_yaml

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
SHIPPED_RECIPES = REPOSITORY_ROOT / "launch_scripts" / "recipes"


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

    def source(self, *keys: str) -> str:
        """Where the keys were set: an override before a line of a file, a section's line for an absent key."""
        candidates = [self.sources[key] for key in keys if key in self.sources]
        candidates += [self.sources[key.split(".")[0]] for key in keys if key.split(".")[0] in self.sources]
        overrides = [source for source in candidates if source.startswith("override ")]
        return (overrides or candidates or [self.file])[0]

    def folder(self, key: str) -> Path:
        """The folder of the file that sets `key`; the recipe's own folder where an override sets it."""
        source = self.sources.get(key, "override ")
        return Path(self.file if source.startswith("override ") else source.rpartition(":")[0]).parent

    def add(self, keys: Sequence[str], text: str) -> None:
        self.problems.append(f"{self.source(*keys)}: {keys[0]}: {text}")

    def replace(self, section: str, value: Any) -> None:
        """Replaces a whole section; nothing of the old one is left."""
        self.values[section] = with_text_keys(value)
        self.sources = {key: line for key, line in self.sources.items() if key.partition(".")[0] != section}

    def merge(self, values: dict[str, Any], sources: dict[str, str]) -> None:
        """Merges the sections of a file over what was read before."""
        for section, value in values.items():
            before = self.values.get(section)
            if isinstance(before, dict) and isinstance(value, dict):
                before.update(with_text_keys(value))
            else:
                self.replace(section, value)
        self.sources.update(sources)

    def cannot_go_on(self, problem: str) -> None:
        self.problems.append(problem)
        self.is_whole = False


def compose(recipe: str | Path, fragments: Sequence[str] = ()) -> Draft:
    """Reads a recipe with its bases, then fragments in order; nothing is validated yet.

    A base is looked up in the folder of the file that names it, a fragment in the working directory, and both then in
    the shipped recipes. Problems (a missing file, a cycle, text that is not YAML) are gathered in the draft.
    """
    draft = Draft(str(recipe))
    _read(draft, Path(recipe), [])
    for name in fragments:
        path, tried = _find(name, Path.cwd())
        if path is None:
            near = did_you_mean(_nearest(name, Path.cwd()))
            draft.cannot_go_on(f"{name}: found no such file; expected a recipe file (YAML); tried {tried}{near}")
        else:
            _read(draft, path, [])
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


def with_text_keys(value: Any) -> Any:
    """A mapping with its keys as text (a key `1` is then unknown like any other); anything else unchanged."""
    return {str(key): child for key, child in value.items()} if isinstance(value, dict) else value


def _read(draft: Draft, path: Path, chain: list[Path]) -> None:
    """Merges the file's bases, then the file. `chain`: the files that led here, the outermost first."""
    parsed = _parse(draft, path)
    if parsed is None:
        return
    for key, line, first_line in parsed.duplicates:
        draft.problems.append(f"{path}:{line}: {key}: found a second time (first in line {first_line}); expected once")
    values = with_text_keys(parsed.value)
    bases = values.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    where = f"{path}:{parsed.lines.get('base')}: base: found"
    chain = [*chain, path]
    if not isinstance(bases, list) or not all(isinstance(name, str) and name for name in bases):
        draft.cannot_go_on(f"{where} {show(bases)}; expected a file name, or a list of file names")
        bases = []
    for name in bases:
        base, tried = _find(name, path.parent)
        if base is None:
            near = did_you_mean(_nearest(name, path.parent))
            draft.cannot_go_on(
                f"{where} {show(name)}, which is no file ({_arrows([*chain, name])}); expected a recipe file (YAML); "
                f"tried {tried}{near}"
            )
        elif base.resolve() in {file.resolve() for file in chain}:
            draft.cannot_go_on(
                f"{where} {show(name)}, which is read already ({_arrows([*chain, base])}); "
                "expected files that are not based on each other"
            )
        else:
            _read(draft, base, chain)
    draft.merge(values, {key: f"{path}:{line}" for key, line in parsed.lines.items() if key != "base"})


def _parse(draft: Draft, path: Path) -> ParsedYaml | None:
    """The file as a mapping; None, with the problem in the draft, where it is not one."""
    try:
        parsed = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = did_you_mean(str(path.with_name(name)) for name in _nearest(path.name, path.parent, shipped=False))
        problem = f"{path}: found no such file; expected a recipe (YAML){near}"
    except IsADirectoryError:
        problem = f"{path}: found a folder; expected a recipe (a YAML file)"
    except UnicodeDecodeError as error:
        problem = f"{path}: found bytes that are not UTF-8 ({error.reason}); expected YAML text"
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}; expected a recipe (YAML)"
    except YamlError as error:
        where = "" if error.line is None else f":{error.line}:{error.column}"
        problem = f"{path}{where}: found text that is not YAML: {error}; expected a recipe"
    else:
        if isinstance(parsed.value, dict):
            return parsed
        found = "nothing" if parsed.value is None else show(parsed.value)
        problem = f"{path}: found {found}; expected sections ({', '.join(SECTIONS)}) with keys in them"
    draft.cannot_go_on(problem)
    return None


def _find(name: str, folder: Path) -> tuple[Path | None, str]:
    """The file of that name from `folder`, else from the shipped recipes; and where it was looked for, as text."""
    tried = [(start / os.path.expanduser(name)).resolve() for start in (folder, SHIPPED_RECIPES)]
    found = next((path for path in tried if os.path.isfile(path)), None)
    if found is not None and found.is_relative_to(Path.cwd()):
        found = found.relative_to(Path.cwd())  # as short as the user would write it
    return found, ", ".join(map(str, dict.fromkeys(tried)))


def _nearest(name: str, folder: Path, *, shipped: bool = True) -> list[str]:
    """Names of files like a name that was not found: the same in another folder, or spelt alike."""
    known = sorted(path.name for path in folder.glob("*.yaml"))
    if shipped:
        known += sorted(path.relative_to(SHIPPED_RECIPES).as_posix() for path in SHIPPED_RECIPES.rglob("*.yaml"))
    same = [other for other in known if Path(other).name == Path(name).name]
    return list(dict.fromkeys(same or difflib.get_close_matches(name, known, n=2)))


def _arrows(files: Iterable[str | Path]) -> str:
    return " -> ".join(map(str, files))
