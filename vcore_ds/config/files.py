"""Recipe files: where they are found, and reading and writing YAML.

YAML is read by PyYAML's safe loader with three changes: `1e-4` is a number, as in YAML 1.2 (PyYAML reads a string),
dates are strings (a folder may be called 2026-01-31), and keys are strings as written.
"""

import copy
import difflib
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "shipped"
"""Folder of the recipes and DeepSpeed JSON files in a wheel, see pyproject.toml; a checkout does not have it."""

SHIPPED_RECIPES = _INSTALLED / "recipes" if _INSTALLED.is_dir() else _PACKAGE.parent / "launch_scripts" / "recipes"
"""Folder of the shipped recipes: `methods/dft.yaml` is found here from any working directory."""

SHIPPED_DEEPSPEED_CONFIGS = (_INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent) / "ds_configs"

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class UnreadableFile(Exception):
    """A file that cannot be read, or is not YAML. `position`: `:LINE:COLUMN` of the error, or empty."""

    def __init__(self, problem: str, position: str = ""):
        super().__init__(problem)
        self.position = position


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises FileNotFoundError, or UnreadableFile with the reason."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"found bytes that are not UTF-8 ({error.reason})") from None


class _Loader(yaml.SafeLoader): ...


class _Dumper(yaml.SafeDumper): ...


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# The dumper needs the pattern too, or it would write the string "1e-4" without quotes.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))


@dataclass
class ParsedYaml:
    """The value of a YAML document, and the lines of its keys."""

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    """Line of each key, from 1, by dotted name."""
    duplicates: list[tuple[str, int, int]] = field(default_factory=list)
    """(dotted name, line, line of the first occurrence) of each repeated key; the last one is in the value."""


def parse_yaml(text: str) -> ParsedYaml:
    """Parse one YAML document. Raises UnreadableFile."""
    return copy.deepcopy(_parse_yaml(text))


@lru_cache(maxsize=512)  # a plan loads the same recipe, and its bases, a dozen times: 5 ms for each file
def _parse_yaml(text: str) -> ParsedYaml:
    parsed = ParsedYaml()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _note_keys(node, "", parsed)
            parsed.value = loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        position = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        problem = getattr(error, "problem", None) or error
        raise UnreadableFile(f"cannot be read as YAML: {problem}", position) from None
    return parsed


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to the same value."""
    # ASCII: with allow_unicode PyYAML writes U+0085 and U+2028 unescaped, and reads them back as spaces.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, default_flow_style=False)


def _note_keys(node: yaml.Node, parent: str, parsed: ParsedYaml) -> None:
    """Make the keys below a node strings, and add their names and lines to `parsed`."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
            continue
        key.tag = f"{_TAG}str"
        name, line = f"{parent}{key.value}", key.start_mark.line + 1
        if name in parsed.lines:
            parsed.duplicates.append((name, line, parsed.lines[name]))
        else:
            parsed.lines[name] = line
            _note_keys(value, f"{name}.", parsed)


def list_candidates(name: str, folder: Path) -> list[Path]:
    """The paths that a name may mean, in order of preference."""
    suffixes = ("",) if name.endswith(".yaml") else ("", ".yaml")
    return [start / f"{os.path.expanduser(name)}{suffix}" for start in (folder, SHIPPED_RECIPES) for suffix in suffixes]


def find_file(name: str, folder: Path) -> Path | None:
    """The file of this name; a folder, for a better message than that there is none, only if there is no file."""
    # Not Path.exists, which raises for a name that is too long.
    paths = [path for path in list_candidates(name, folder) if os.path.exists(path)]
    return next((path for path in paths if not path.is_dir()), paths[0] if paths else None)


def nearest_files(name: str, folder: Path) -> list[str]:
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
