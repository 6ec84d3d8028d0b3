"""YAML in and out, with three differences from plain PyYAML: duplicate keys are seen, numbers such as `1e-4` are
numbers (YAML 1.2; PyYAML reads text), and dates stay text (a folder may be called 2026-01-31)."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

_FLOAT_TAG = "tag:yaml.org,2002:float"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
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
    """Not YAML. `line` and `column` are 1-based, None where the parser does not say."""

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
        lines: dict[str, int] = {}
        duplicates: list[tuple[str, int, int]] = []
        _collect_keys(node, "", lines, duplicates)
        return ParsedYaml(loader.construct_document(node), lines, duplicates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
        raise YamlError(error.problem or str(error), *where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(str(error).splitlines()[0], None, None) from None


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to the same value."""
    # ASCII: with allow_unicode PyYAML writes U+0085 and U+2028 so that it reads them back as spaces.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, default_flow_style=False)


def _collect_keys(node: yaml.Node, parent: str, lines: dict[str, int], duplicates: list[tuple[str, int, int]]) -> None:
    """Adds the keys of a mapping, and of the mappings in it, with their 1-based lines."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{parent}.{key_node.value}" if parent else str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in lines:
            duplicates.append((key, line, lines[key]))
            continue
        lines[key] = line
        _collect_keys(value_node, key, lines, duplicates)
