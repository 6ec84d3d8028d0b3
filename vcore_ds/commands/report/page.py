"""What a command shows, once for the screen and for a page: paragraphs, tables and places for drawings.

A page is one HTML file that fetches nothing. Its content, above all traces, is untrusted. The template escapes it, its
JSON contains no `<`, the scripts insert it as text nodes, and its content security policy allows only their own code.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from vcore_ds.common.text import align_columns, markdown_rows, shorten

SOURCES = Path(__file__).parent / "page"
SCRIPTS = ("base.js", "plots.js", "viewer.js", "main.js")  # in the order of the page
STYLE, TEMPLATE = "style.css", "page.html"
NOTHING = "–"


def format_number(value: float | None) -> str:
    """Four digits, and all digits before the point."""
    return NOTHING if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Table:
    """A table of formatted cells; one in `**` is bold."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Format for a terminal, with names truncated to 48 characters."""
        rows = [[shorten(name, 48), *cells] for name, *cells in self.rows]
        return "\n  ".join([self.caption, *(align_columns([self.head, *rows]) if rows else ["none"])])

    def markdown(self) -> str:
        head, *rows = markdown_rows([self.head, *self.rows])
        return "\n".join([head, "|" + "---|" * len(self.head), *rows])


@dataclass(frozen=True)
class Grid:
    """Tables side by side, where the window is wide enough."""

    tables: Sequence[Table]


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on demand."""

    summary: str
    blocks: "Sequence[Block]"
    is_open: bool = False
    in_text: bool = True  # whether the text has the blocks, or the summary alone


@dataclass(frozen=True)
class Notes:
    """Warnings."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text as it stands in a file; not in the text."""

    title: str
    text: str


@dataclass(frozen=True)
class Drawing:
    """A place that the scripts fill, with what stands there before."""

    id: str
    blocks: "Sequence[Block]" = ()


@dataclass(frozen=True)
class Bars:
    """Horizontal bars of several parts; not in the text, which has their numbers in a table."""

    names: Sequence[str]  # of the parts
    bars: Sequence[tuple[str, Sequence[str], str]]  # name, widths of the parts in percent, description


Block = str | Table | Grid | Fold | Notes | Code | Drawing | Bars


@dataclass(frozen=True)
class Section:
    """A section of a page; `link` is its name in the list at the top."""

    id: str
    title: str
    link: str
    blocks: Sequence[Block]
    in_text: bool = True


@dataclass(frozen=True)
class Page:
    """`data`: JSON for the scripts, by key of `NO_DATA`; `blobs`: element id -> base64 data for them."""

    title: str
    summary: str
    sections: Sequence[Section]
    data: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        blocks = (block for section in self.sections if section.in_text for block in section.blocks)
        return "\n\n".join([self.summary, *_texts(blocks)])

    def html(self) -> str:
        script = "\n" + "\n".join((SOURCES / name).read_text(encoding="utf-8") for name in SCRIPTS)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        loader = jinja2.FileSystemLoader(SOURCES)
        environment = jinja2.Environment(
            autoescape=True, loader=loader, trim_blocks=True, undefined=jinja2.StrictUndefined
        )
        return environment.get_template(TEMPLATE).render(
            policy="default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'",
            style=Markup((SOURCES / STYLE).read_text(encoding="utf-8")),
            script=Markup(script),
            report=Markup(as_json(NO_DATA | dict(self.data))),
            page=self,
        )


NO_DATA: dict[str, Any] = {
    "groups": [],  # labels of the curves' groups
    "curves": [],
    "histograms": [],
    "points": [],
    "tokens": [],  # descriptions of recorded tokens, as `traces.py` encodes them
    "followed": [],
    "scores": [],
    "weightRange": 1.0,
}


def _texts(blocks: "Iterator[Block] | Sequence[Block]") -> Iterator[str]:
    for block in blocks:
        if isinstance(block, str):
            yield block
        elif isinstance(block, Table):
            yield block.text()
        elif isinstance(block, Grid):
            yield from (table.text() for table in block.tables)
        elif isinstance(block, Fold):
            texts = list(_texts(block.blocks)) if block.in_text else []
            if texts or not block.in_text:
                yield from (block.summary, *texts)
        elif isinstance(block, Notes):
            yield "\n".join([block.title, *(f"  warning: {line}" for line in block.lines)])
        elif isinstance(block, Drawing):
            yield from _texts(block.blocks)


def as_json(value: Any) -> str:
    """JSON that is safe in a script element: without `<`, and ASCII only."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
