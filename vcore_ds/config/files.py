"""Recipe files: where the shipped ones are, and text and YAML in and out.

PyYAML's safe loader with three changes: numbers such as `1e-4` are numbers (YAML 1.2; PyYAML reads text), dates stay
text (a folder may be called 2026-01-31), and keys are text as written.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "shipped"
"""Where pyproject.toml puts the recipes and the DeepSpeed JSON in a wheel; a checkout has no such folder."""

SHIPPED_RECIPES = _INSTALLED / "recipes" if _INSTALLED.is_dir() else _PACKAGE.parent / "launch_scripts" / "recipes"
"""The folder below which `methods/dft.yaml` and the like are found from any working directory."""

SHIPPED_DEEPSPEED_CONFIGS = (_INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent) / "ds_configs"
"""The folder of the DeepSpeed JSON; `ds_configs/NAME.json` is found in its parent."""

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class UnreadableFile(Exception):
    """A file without text, or text that is not YAML; the message begins with `found` or `cannot be read`."""

    place = ""
    """`:LINE:COLUMN`, from 1, of what cannot be read in the text; empty where it is the whole file."""


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        FileNotFoundError: nothing has that name.
        UnreadableFile: with the reason.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"found bytes that are not UTF-8 ({error.reason})") from None


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# The dumper has to know the pattern too, or it would write the text "1e-4" without quotes.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))


@dataclass
class ParsedYaml:
    """A parsed text with what a message about it needs."""

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    """1-based line of each key, by dotted name."""
    duplicates: list[tuple[str, int, int]] = field(default_factory=list)
    """(dotted name, line, line of the first occurrence) of each repeated key; the value holds the last."""


def parse_yaml(text: str) -> ParsedYaml:
    """Parses one YAML document. Raises UnreadableFile."""
    parsed = ParsedYaml()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _note_keys(node, "", parsed)
            parsed.value = loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        unreadable = UnreadableFile(f"cannot be read as YAML: {getattr(error, 'problem', None) or error}")
        unreadable.place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise unreadable from None
    return parsed


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to the same value."""
    # ASCII: with allow_unicode PyYAML writes U+0085 and U+2028 so that it reads them back as spaces.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, default_flow_style=False)


def _note_keys(node: yaml.Node, parent: str, parsed: ParsedYaml) -> None:
    """Makes the keys below a node text, and adds their names and lines to `parsed`."""
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
