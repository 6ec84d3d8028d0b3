"""YAML in and out.

These are the differences from plain PyYAML:

- Every key has its line, and a key that comes a second time is seen.
- Numbers such as `1e-4` are numbers (YAML 1.2; PyYAML reads text), and dates stay text (a folder may be called
  2026-01-31).
- Values are what JSON has as well: keys are text, as written, and there are no sets, bytes or timestamps.
- Size and depth are bounded, with aliases counted as often as they are used: nine lines of nested aliases stand for a
  billion values.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from vcore_ds.config.files import UnreadableFile
from vcore_ds.config.problems import shorten

MAX_NODES = 20_000
"""Keys and values of a text; a recipe has about 150."""

MAX_DEPTH = 20
"""Levels of nesting; a recipe has three."""

MAX_NUMBER_CHARACTERS = 100
"""Characters of a number; any that has a use is written in 25."""

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class YamlError(UnreadableFile):
    """A text that is not YAML, or that exceeds a bound."""

    def __init__(self, problem: str, mark: yaml.Mark | None = None) -> None:
        super().__init__(f"cannot be read as YAML: {shorten(problem, 200)}")
        self.place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        is_key = isinstance(parent, yaml.MappingNode) and index is None
        if is_key and isinstance(node, yaml.ScalarNode) and node.tag != f"{_TAG}merge":
            return yaml.ScalarNode(f"{_TAG}str", node.value, node.start_mark, node.end_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in (f"{_TAG}int", f"{_TAG}float") and len(node.value) > MAX_NUMBER_CHARACTERS:
            problem = f"a number of {len(node.value):,} characters; expected at most {MAX_NUMBER_CHARACTERS}"
            raise YamlError(problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, OverflowError):  # `!!int x`, `!!bool maybe`
            problem = f"a value that does not fit its tag !!{node.tag.removeprefix(_TAG)}"
            raise YamlError(problem, node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    pass


_known = yaml.SafeLoader.yaml_constructors
_Loader.yaml_constructors = {
    **{f"{_TAG}{name}": _known[f"{_TAG}{name}"] for name in ("null", "bool", "int", "float", "str", "seq", "map")},
    **{f"{_TAG}{name}": _known[f"{_TAG}str"] for name in ("timestamp", "value")},  # unquoted dates, and a lone `=`
    None: _known[None],  # refuses every other tag
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
    """Parses one YAML document. Raises YamlError."""
    parsed = ParsedYaml()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _survey(node, "", (), parsed)
            parsed.value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise YamlError(error.problem or str(error), error.problem_mark) from None
    except yaml.YAMLError as error:  # NUL and the like, before anything is parsed
        raise YamlError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise YamlError(f"values nested more than {MAX_DEPTH} levels deep", loader.get_mark()) from None
    except (ValueError, OverflowError) as error:  # `%YAML` with 5,000 digits, "\UFFFFFFFF"
        raise YamlError(f"a number out of range ({error})", loader.get_mark()) from None
    return parsed


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to the same value."""
    # ASCII: with allow_unicode PyYAML writes U+0085 and U+2028 so that it reads them back as spaces.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, default_flow_style=False)


def _survey(node: yaml.Node, name: str | None, parents: tuple[yaml.Node, ...], parsed: ParsedYaml) -> int:
    """The number of keys and values of a node, an alias being the node that it names; adds its keys to `parsed`.

    A node is refused as soon as it exceeds a bound, so that refusing a billion values takes no longer than counting
    `MAX_NODES` on each of `MAX_DEPTH` levels.

    Args:
        name: the dotted name of a value; "" for the document, None for a key and for what is in a list.
        parents: the nodes that this one is a part of.
    """
    if node in parents:
        raise YamlError("an alias within the value that it stands for", node.start_mark)
    if len(parents) == MAX_DEPTH:
        raise YamlError(f"values nested more than {MAX_DEPTH} levels deep", node.start_mark)
    num_nodes = 1
    for child, child_name in _children(node, name, parsed):
        num_nodes += _survey(child, child_name, (*parents, node), parsed)
        if num_nodes > MAX_NODES:
            problem = f"more than {MAX_NODES:,} keys and values, aliases counted as often as they are used"
            raise YamlError(problem, node.start_mark)
    return num_nodes


def _children(node: yaml.Node, name: str | None, parsed: ParsedYaml) -> Iterator[tuple[yaml.Node, str | None]]:
    if isinstance(node, yaml.SequenceNode):
        yield from ((child, None) for child in node.value)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key, None
            yield value, _add_key(key, name, parsed)


def _add_key(key: yaml.Node, parent: str | None, parsed: ParsedYaml) -> str | None:
    """The dotted name of a key; None where the mapping has no name, or the key comes a second time."""
    if parent is None or not isinstance(key, yaml.ScalarNode):
        return None
    name, line = f"{parent}.{key.value}" if parent else key.value, key.start_mark.line + 1
    if name in parsed.lines:
        parsed.duplicates.append((name, line, parsed.lines[name]))
        return None
    parsed.lines[name] = line
    return name
