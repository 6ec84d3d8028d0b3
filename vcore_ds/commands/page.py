"""What a command shows, once for the screen and for a page: paragraphs, tables, traces and places for drawings.

A page is one HTML file that fetches nothing. Its content, above all traces, is untrusted. The template escapes it, its
JSON contains no `<`, the scripts insert it as text nodes, and its content security policy allows only their own code.
"""

import base64
import gzip
import hashlib
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from vcore_ds.commands.tokens import KINDS, UNIFORM_TOLERANCE, TokenSequence, TokenTexts
from vcore_ds.common.text import align_columns, markdown_rows

FILES = Path(__file__).parent / "page"
SCRIPTS = ("base.js", "plots.js", "viewer.js", "main.js")  # in the order of the page
STYLE, TEMPLATE = "style.css", "page.html"
NOTHING = "–"


def format_number(value: float | None, form: str = "") -> str:
    """The number in this form, such as `.2f`; by default with four digits, and all digits before the point."""
    return NOTHING if value is None else format(value, form or (",.4g" if abs(value) < 1000 else ",.0f"))


@dataclass(frozen=True)
class Table:
    """A table of formatted cells; one in `**` is bold."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        lines = align_columns([self.head, *self.rows]) if self.rows else ["none"]
        return "\n  ".join([self.caption, *lines])

    def markdown(self) -> str:
        head, *rows = markdown_rows([self.head, *self.rows])
        title = [f"**{self.caption}**", ""] if self.caption else []
        return "\n".join([*title, head, "|" + "---|" * len(self.head), *rows])


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on demand."""

    summary: str
    blocks: "Sequence[Block]"
    is_open: bool = False


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


Block = str | Table | list[Table] | Fold | Notes | Code | Drawing | Bars
"""Tables of a list are side by side, where the window is wide enough."""


@dataclass(frozen=True)
class PageSection:
    """A section of a page; `link` is its name in the list at the top."""

    id: str
    title: str
    link: str
    blocks: Sequence[Block]
    in_text: bool = True
    data: Mapping[str, Any] = field(default_factory=dict)  # for the page's `data`

    def text(self) -> str:
        return "\n\n".join(_texts(self.blocks))


@dataclass(frozen=True)
class Page:
    """`data`: JSON for the scripts, by key of `NOTHING` in base.js; `blobs`: element id -> base64 data for them."""

    title: str
    summary: str
    sections: Sequence[PageSection]
    data: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        texts = [section.text() for section in self.sections if section.in_text]
        return "\n\n".join([self.summary, *filter(None, texts)])

    def html(self) -> str:
        script = "\n" + "\n".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        loader = jinja2.FileSystemLoader(FILES)
        strict = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, undefined=jinja2.StrictUndefined)
        return strict.get_template(TEMPLATE).render(
            policy="default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'",
            style=Markup((FILES / STYLE).read_text(encoding="utf-8")),
            script=Markup(script),
            report=Markup(as_json(self.data)),
            page=self,
        )


def _texts(blocks: "Iterator[Block] | Sequence[Block]") -> Iterator[str]:
    for block in blocks:
        match block:
            case str():
                yield block
            case Table():
                yield block.text()
            case list():
                yield from _texts(block)
            case Fold(summary, inner):
                if texts := list(_texts(inner)):
                    yield from (summary, *texts)
            case Notes(title, lines):
                yield "\n".join([title, *(f"  warning: {line}" for line in lines)])
            case Drawing(_, inner):
                yield from _texts(inner)


def as_json(value: Any) -> str:
    """JSON that is safe in a script element: without `<`, and ASCII only."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# ---- traces ----------------------------------------------------------------------------------------------------------

KIND_BITS = 0b0000_0111
IN_ANSWER, AFTER_GAP, PROMPT = 8, 16, 32
"""Flags of a token, beside its kind: inside `\\boxed{}`; preceded by unsupervised tokens; unsupervised itself."""


@dataclass(frozen=True, eq=False)
class PageTrace:
    """A trace as a page shows it."""

    group: int | str  # optimizer step, or end of a ranking: traces are selected by it
    source: str
    id: int
    title: str
    facts: Sequence[str]  # beside the title
    tokens: TokenSequence
    measures: dict[str, np.ndarray]
    """Keys of `LEVELS`: those that are known. Tokens are ranked by the first, which is also shown first."""
    supervised: np.ndarray  # bool [n]; the others belong to the prompt, and their measures say nothing
    num_tokens: int  # of the full trace
    prompt: str = ""
    note: str = ""


def weight_levels(weights: np.ndarray) -> np.ndarray:
    """256 relative weights, ascending: 0, then logarithmically spaced on either side of 1, the 129th."""
    positive = weights[weights > 0]
    low = max(2.0**-14, min(1 / 1.001, positive.min(initial=1.0)))
    high = max(1.001, weights.max(initial=1.0))
    return np.concatenate([[0.0], np.geomspace(low, 1.0, 128)[:-1], np.geomspace(1.0, high, 128)])


def loss_levels(losses: np.ndarray) -> np.ndarray:
    """256 losses, ascending from 0, more densely spaced near 0."""
    return max(1e-3, float(losses.max(initial=0.0))) * np.linspace(0.0, 1.0, 256) ** 2


def utility_levels(utilities: np.ndarray) -> np.ndarray:
    """256 utilities, ascending, more densely spaced near 0, the 129th. `utilities`: utilities of supervised tokens
    only; zeros of other tokens would make the scale too fine near 0."""
    sizes = np.abs(utilities[utilities != 0])
    # Levels are evenly spaced in asinh(utility / unit). A unit far below the largest utility would leave few levels
    # for large ones: with at least 1e-4 of it, neighbours differ by 8% at most.
    unit = max(float(np.median(sizes)), 1e-4 * float(sizes.max()), 1e-30) if len(sizes) else 1e-30

    def side(most: float, number: int) -> np.ndarray:
        return unit * np.sinh(np.linspace(0.0, np.arcsinh(max(most / unit, 1e-3)), number))

    negative = -side(float(-utilities.min(initial=0.0)), 129)[:0:-1]
    return np.concatenate([negative, side(float(utilities.max(initial=0.0)), 128)])


def nearest(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index of the level nearest to each value, uint8."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.uint8)


LEVELS = {"weight": weight_levels, "loss": loss_levels, "utility": utility_levels, "entropy": loss_levels}


def encode_traces(
    name: str, texts: TokenTexts, traces: Sequence[PageTrace], *, has_one_scale: bool = False
) -> tuple[dict[str, Any], str]:
    """Encode traces, at least one, all with the same measures: a description for JSON, and the tokens as gzip in
    base64. The bytes are arrays over all tokens, one after the other: index in `texts` and rank in the trace (4 bytes
    each, little-endian), then one byte each: index in the levels of each of `measures`, and flags. `has_one_scale`:
    whether utilities have the same levels in all groups; those of one step can be a hundred times another's."""
    number_of: dict[str, int] = {}
    pieces = [texts.read_pieces(trace.tokens) for trace in traces]
    places = np.array([number_of.setdefault(piece, len(number_of)) for trace in pieces for piece in trace])
    prompts = list(dict.fromkeys(trace.prompt for trace in traces))
    beginnings = [trace.prompt or "".join(parts[:NAME_CHARACTERS]) for trace, parts in zip(traces, pieces, strict=True)]
    by_group: dict[int | str, list[PageTrace]] = {}
    for trace in traces:
        by_group.setdefault(trace.group, []).append(trace)
    first, *_ = measures = [name for name in traces[0].measures if all(name in trace.measures for trace in traces)]
    values = {measure: _join(measure, traces) for measure in measures}
    levels: dict[str, Any] = {}
    codes = []
    for measure in measures:
        if measure == "utility" and not has_one_scale:
            scales = {group: LEVELS[measure](_join(measure, members)) for group, members in by_group.items()}
        else:
            scales = dict.fromkeys(by_group, LEVELS[measure](values[measure]))
        codes += [nearest(scales[trace.group], trace.measures[measure]) for trace in traces]
        rounded = {group: _rounded(scale) for group, scale in scales.items()}
        levels[measure] = rounded if measure == "utility" else rounded[traces[0].group]
    description = {
        "run": name,
        "measures": measures,
        "groups": [[group, str(group)] for group in by_group],
        "isUniform": first == "weight" and bool(np.all(np.abs(values[first] - 1.0) <= UNIFORM_TOLERANCE)),
        "kinds": KINDS,
        "texts": list(number_of),
        "prompts": prompts,
        "levels": levels,
        "utilityAxis": _rounded(utility_levels(values["utility"])) if "utility" in measures else [],
        "sequences": [
            {name: getattr(trace, name) for name in ("group", "source", "id", "title", "facts", "note", "num_tokens")}
            | {
                "name": words,
                "prompt": prompts.index(trace.prompt),
                "tokens": len(trace.tokens.token_ids),
                "supervised": int(trace.supervised.sum()),
            }
            for trace, words in zip(traces, name_by_first_words(beginnings), strict=True)
        ],
    }
    # From 0 for the largest; ties in their order.
    keys = [np.where(one.supervised, -one.measures[first], np.inf) for one in traces]
    order = [np.argsort(np.argsort(key, kind="stable")) for key in keys]  # scipy.stats takes a second to import
    flags = [_find_flags(trace, texts) for trace in traces]
    arrays = [places.astype("<u4"), np.concatenate(order).astype("<u4"), *codes, *flags]
    packed = gzip.compress(b"".join(array.tobytes() for array in arrays), compresslevel=6, mtime=0)
    return description, base64.b64encode(packed).decode()


def _join(measure: str, traces: Sequence[PageTrace]) -> np.ndarray:
    """A measure of the supervised tokens of all traces, fp64."""
    return np.concatenate([trace.measures[measure][trace.supervised] for trace in traces]).astype(np.float64)


def _rounded(levels: np.ndarray) -> list[float]:
    """Levels for JSON, with four digits, finer than their spacing."""
    return [float(f"{value:.4g}") for value in levels]


def _find_flags(trace: PageTrace, texts: TokenTexts) -> np.ndarray:
    read, positions = texts.read(trace.tokens), trace.tokens.positions
    flags = read.kinds.astype(np.uint8) & KIND_BITS
    flags |= IN_ANSWER * read.in_answer.astype(np.uint8)
    flags |= AFTER_GAP * (np.diff(positions, prepend=positions[0] - 1) != 1).astype(np.uint8)
    return flags | PROMPT * (~trace.supervised).astype(np.uint8)


NAME_CHARACTERS = 48  # maximum characters of a trace's name


def name_by_first_words(texts: Sequence[str]) -> list[str]:
    """Name each text by its first words, without the beginning that all share, such as a system prompt, and without the
    role of the user, a line of one word."""
    shared = os.path.commonprefix(list(texts)) if len(set(texts)) > 1 else ""  # noqa: RUF071  (of strings, not paths)
    start = shared.rfind("\n") + 1
    if len(shared) - start > NAME_CHARACTERS // 2:
        start = shared.rfind(" ") + 1
    rests = [text[start:] if start else re.sub(r"\A\S+\n", "", text) for text in texts]
    return [textwrap.shorten(rest, NAME_CHARACTERS, placeholder=" …") for rest in rests]
