"""YAML in and out.

These are the differences from plain PyYAML:

- Duplicate keys are seen.
- Numbers such as `1e-4` are numbers (YAML 1.2; PyYAML reads text), and dates stay text (a folder may be called
  2026-01-31).
- Values are what JSON has as well: no sets, bytes or timestamps.
- Size and depth are bounded, with aliases counted as often as they are used: nine lines of nested aliases stand for a
  billion values.
"""

import re
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.constructor import ConstructorError

MAX_NODES = 20_000
"""Keys and values of a text; a recipe has about 150."""

MAX_DEPTH = 20
"""Levels of nesting; a recipe has three."""

MAX_NUMBER_CHARACTERS = 100
"""Characters of a number; any that has a use is written in 25."""

_TAG = "tag:yaml.org,2002:"
_CORE_TAGS = [f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")]
_FLOAT_TAG = f"{_TAG}float"
_TEXT_ALL_THE_SAME = (f"{_TAG}timestamp", f"{_TAG}value")
"""What PyYAML takes unquoted dates, and a lone `=`, for."""

_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in (f"{_TAG}int", _FLOAT_TAG) and len(node.value) > MAX_NUMBER_CHARACTERS:
            problem = f"a number of {len(node.value):,} characters; expected at most {MAX_NUMBER_CHARACTERS}"
            raise ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, OverflowError):  # `!!int x`, `!!bool maybe`
            problem = f"a value that does not fit its tag !!{node.tag.removeprefix(_TAG)}"
            raise ConstructorError(None, None, problem, node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    pass


_Loader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in [*_CORE_TAGS, None]}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _TEXT_ALL_THE_SAME]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# The dumper has to know the pattern too, or it would write the text "1e-4" without quotes.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))


@dataclass(frozen=True)
class ParsedYaml:
    """A parsed text with what a message about it needs."""

    value: Any
    lines: dict[str, int]
    """1-based line of each key, by dotted name."""
    duplicates: list[tuple[str, int, int]]
    """(dotted name, line, line of the first occurrence) of each repeated key; the value holds the last."""


class YamlError(Exception):
    """A text that is not YAML, or that exceeds a bound. `line` and `column` are 1-based, None where the parser gives
    none."""

    def __init__(self, problem: str, line: int | None, column: int | None) -> None:
        super().__init__(problem)
        self.line, self.column = line, column


def parse_yaml(text: str) -> ParsedYaml:
    """Parses one YAML document. Raises YamlError."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return ParsedYaml(None, {}, [])
        _Bounds().check(node)
        lines: dict[str, int] = {}
        duplicates: list[tuple[str, int, int]] = []
        _collect_keys(node, "", lines, duplicates)
        return ParsedYaml(loader.construct_document(node), lines, duplicates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
        raise YamlError(error.problem or str(error), *where) from None
    except RecursionError:
        raise YamlError(f"values nested more than {MAX_DEPTH} levels deep", None, None) from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(str(error).splitlines()[0], None, None) from None


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to the same value."""
    # ASCII: with allow_unicode PyYAML writes U+0085 and U+2028 so that it reads them back as spaces.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, default_flow_style=False)


class _Bounds:
    """Size and depth of a tree of nodes in which an alias is the node that it names, a second time.

    Each node is visited once, so refusing a billion values takes no longer than reading their few lines.
    """

    def __init__(self) -> None:
        self._measured: dict[int, tuple[int, int]] = {}
        """(number of nodes, levels) below and with each visited node, by its id."""
        self._open: set[int] = set()

    def check(self, node: yaml.Node) -> None:
        """Raises ConstructorError at the first node that exceeds a bound, or that is a part of itself."""
        self._measure(node, 1)

    def _measure(self, node: yaml.Node, depth: int) -> tuple[int, int]:
        if id(node) in self._open:
            raise ConstructorError(None, None, "an alias within the value that it stands for", node.start_mark)
        known = self._measured.get(id(node))
        if depth + (known[1] if known else 1) - 1 > MAX_DEPTH:
            raise ConstructorError(None, None, f"values nested more than {MAX_DEPTH} levels deep", node.start_mark)
        if known:
            return known
        self._open.add(id(node))
        num_nodes, levels = 1, 1
        for child in _children(node):
            num_below, levels_below = self._measure(child, depth + 1)
            num_nodes, levels = num_nodes + num_below, max(levels, 1 + levels_below)
            if num_nodes > MAX_NODES:
                problem = f"more than {MAX_NODES:,} keys and values, aliases counted as often as they are used"
                raise ConstructorError(None, None, problem, node.start_mark)
        self._open.remove(id(node))
        self._measured[id(node)] = num_nodes, levels
        return num_nodes, levels


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _collect_keys(node: yaml.Node, parent: str, lines: dict[str, int], duplicates: list[tuple[str, int, int]]) -> None:
    """Adds the keys of a mapping, and of the mappings in it, with their 1-based lines."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue  # refused when it is constructed
        key = f"{parent}.{key_node.value}" if parent else str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in lines:
            duplicates.append((key, line, lines[key]))
            continue
        lines[key] = line
        _collect_keys(value_node, key, lines, duplicates)
