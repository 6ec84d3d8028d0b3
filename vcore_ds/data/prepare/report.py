"""Outcomes of rows: the table of `vcore-ds prepare`, the lines of `check`, and rows with their learned text marked."""

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import count
from vcore_ds.config.data_section import MANIFEST
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.prepare.convert import KEPT, MALFORMED, NOTICED, PrepareRequest, RowOutcome, examine_row
from vcore_ds.data.prepare.sources import check_source, find_files, is_small, number_rows
from vcore_ds.data.store import TokenStore, describe_counts, read_manifest
from vcore_ds.data.templates import find_end
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer, tokenize_rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_SHOWN = 10  # fields that are named in a line
_NUM_ROWS = 500  # rows of data that `check` reads, and renders in a second
_BEGIN, _END = "⟦", "⟧"  # around learned text
_MAX_CHARACTERS = 2_000  # of a passage that is shown; of longer ones beginning and end
_MAX_KINDS = 10  # of malformed rows in a message
_PLACE = re.compile(r"(.*?:\d+): (.*)", re.DOTALL)  # of a fault, and its reason
_QUOTED = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")  # in a reason, of this row alone


@dataclass
class PrepareReport:
    """Outcomes of all rows: `num_rows` is the sum of `num_malformed`, all `dropped` and `num_kept`."""

    request: PrepareRequest
    num_rows: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest: int = 0  # tokens of a conversation, without the cutoff
    _noticed: Counter[str] = field(default_factory=Counter)
    _ignored: Counter[str] = field(default_factory=Counter)
    _num_context_turns: int = 0
    _digests: array = field(default_factory=lambda: array("Q"))
    _lengths: array = field(default_factory=lambda: array("q"))

    def count(self, result: RowOutcome, source: str) -> None:
        """Add the result of a row of `source`."""
        self.outcomes[result.outcome] += 1
        self.longest = max(self.longest, result.num_tokens)
        if result.shape:
            self.shapes[result.shape] += 1
        if result.outcome == MALFORMED:
            self.faults.append(f"{source}:{result.number + 1}: {result.reason}")
        if result.outcome == KEPT:
            self._noticed.update(result.noticed)
            self._ignored.update(result.ignored)
            self._num_context_turns += result.context_turns
            self._digests.append(result.digest)
            self._lengths.append(min(result.num_tokens, self.request.cutoff_length))

    @property
    def num_kept(self) -> int:
        return self.outcomes[KEPT]

    @property
    def num_malformed(self) -> int:
        return self.outcomes[MALFORMED]

    @property
    def num_drawn(self) -> int:
        """Number of rows that were converted: all, or as many as it took to complete the sample."""
        return self.outcomes.total()

    @property
    def dropped(self) -> dict[str, int]:
        """Rows by the rule that left them out, the most frequent first."""
        dropped = {rule: number for rule, number in self.outcomes.most_common() if rule not in (KEPT, MALFORMED)}
        num_not_drawn = self.num_rows - self.num_drawn
        return dropped | ({"not drawn for the sample": num_not_drawn} if num_not_drawn else {})

    def describe_notices(self) -> dict[str, int]:
        """Text of an observation on kept sequences -> its number."""
        return {text: self._noticed[name] for name, text in NOTICED.items() if self._noticed[name]}

    @property
    def noticed(self) -> dict[str, int]:
        """Text of an observation, malformed rows too -> its number."""
        noticed = self.describe_notices()
        if self.faults:
            noticed[f"malformed rows are left out; the first: {self.faults[0]:.300}"] = self.num_malformed
        return noticed

    @property
    def lengths(self) -> dict[str, float] | None:
        """Distribution of the sequences' lengths, in tokens; percentiles are lengths that occur."""
        if not self._lengths:
            return None
        lengths = np.array(self._lengths)
        p50, p95 = np.percentile(lengths, [50, 95], method="inverted_cdf").tolist()
        return {"mean": round(float(lengths.mean()), 2), "p50": p50, "p95": p95, "max": int(lengths.max())}

    def describe_reading(self) -> list[str]:
        """Describe turns that rows exclude, and fields without effect, in a line each."""
        lines = []
        if self._num_context_turns:
            lines.append(f"turns of the assistant with weight 0, or in a prompt: {self._num_context_turns:,}")
        if num_duplicates := len(self._digests) - len(np.unique(np.array(self._digests))):
            lines.append(f"exact duplicates: {num_duplicates:,}")
        if self._ignored:
            ordered = sorted(self._ignored.items(), key=lambda item: (-item[1], item[0]))
            shown = [f"{name} {number:,}" for name, number in ordered[:_MAX_SHOWN]]
            shown += [f"{len(ordered) - _MAX_SHOWN:,} others"] if len(ordered) > _MAX_SHOWN else []
            lines.append(f"ignored: {', '.join(shown)}")
        return lines

    def manifest(self) -> dict[str, Any]:
        """Make the manifest's entries."""
        counts = {
            "rows": self.num_rows,
            "malformed": self.num_malformed,
            "drawn": self.num_drawn,
            "dropped": self.dropped,
            "kept": self.num_kept,
            "noticed": self.noticed,
            "shapes": self.shapes,
            "reading": self.describe_reading(),
        }
        return {"counts": counts, "longest": self.longest, "lengths": self.lengths}

    def describe(self) -> str:
        rows = [("rows read", f"{self.num_rows:,}"), ("  malformed", f"{self.num_malformed:,}")]
        rows += [(f"  {rule}", f"{number:,}") for rule, number in self.dropped.items()]
        rows.append(("kept", f"{self.num_kept:,}"))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value:>12}" for name, value in rows]
        if self.longest > self.request.cutoff_length:
            lines.append(f"The longest has {self.longest:,} tokens; --cutoff-length {self.longest} keeps all whole")
        if self.shapes:
            shapes = ", ".join(f"{shape} {number:,}" for shape, number in sorted(self.shapes.items()))
            lines.append(f"formats: {shapes}")
        lines += self.describe_reading()
        if (values := self.lengths) is not None:
            lines += ["", f"{'tokens per sequence':<{width}}  {'mean':>12}{'p50':>8}{'p95':>8}{'max':>8}"]
            percentiles = "".join(f"{values[name]:>8,}" for name in ("p50", "p95", "max"))
            lines.append(f"{'  this store':<{width}}  {values['mean']:>12,.2f}{percentiles}")
            if self.noticed:
                lines += ["", *(f"{number:,} {text}" for text, number in self.noticed.items())]
            if self.num_kept < (self.request.sample or 0):
                lines += ["", f"Fewer than the {self.request.sample:,} that were asked for: no more rows passed."]
        return "\n".join(lines)


def describe_reading(
    path: str,
    columns: Mapping[str, str] | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    split: str = "train",
    store: str | None = None,
) -> list[str]:
    """Describe a token store, or the first rows of conversations, in a line for each format, rule and observation. With
    the tokenizer, also what its chat template makes of the rows. `columns`, `split`: those of data; `store`: the token
    store that was made of `path`, whose counts are those of all rows. Raises UserError if `path` cannot be read."""
    if (Path(store or path) / MANIFEST).is_file():
        counts = read_manifest(Path(store or path)).get("counts", {})
        lines = [f"{counts['rows']:,} rows"] if store not in (None, path) else []
    else:
        request = PrepareRequest((path,), "", split, columns=columns or {})
        report = PrepareReport(request)
        for file, number, row in islice(number_rows(find_files([path], split)), _NUM_ROWS):
            result = RowOutcome(number)
            examine_row(result, row, request, file, tokenizer)
            report.count(result, path)
            report.num_rows += 1
        counts = report.manifest()["counts"]
        lines = [f"{'the first ' * (report.num_rows == _NUM_ROWS)}{report.num_rows:,} rows"]
    lines += [f"format {shape} {number:,}" for shape, number in counts.get("shapes", {}).items()]
    return [f"{path}: {line}" for line in [*lines, *describe_counts(counts)]]


def group_faults(faults: Iterable[str]) -> list[str]:
    """Describe each kind of fault once, `PLACE: REASON` of its first row, with the number of its rows."""
    kinds: dict[str, list[str]] = {}
    for fault in faults:
        match = _PLACE.fullmatch(fault)
        kinds.setdefault(_QUOTED.sub("", match[2] if match else fault), []).append(fault)
    ordered = sorted(kinds.values(), key=len, reverse=True)
    lines = [f"  {count(len(rows), 'row')}, first {rows[0]}" for rows in ordered[:_MAX_KINDS]]
    return lines + [f"  and {len(ordered) - _MAX_KINDS:,} other kinds"] * (len(ordered) > _MAX_KINDS)


def refuse_malformed(
    source: str, faults: Sequence[str], num_rows: int, max_malformed: float, listing: str = ""
) -> None:
    """Raise UserError if the share of malformed rows is too large. `listing`: where all faults are, for the message."""
    if len(faults) > max_malformed * num_rows:
        share = math.ceil(100 * len(faults) / num_rows) / 100
        options = f"data.max_malformed={share:g} in a recipe, --max-malformed {share:g} of prepare"
        advice = f" or leave them out ({options})" if len(faults) < num_rows else ""
        lines = [
            f"{source}: {len(faults):,} of {num_rows:,} rows are malformed ({len(faults) / num_rows:.2%}), expected at "
            f"most {max_malformed:.2%}:",
            *group_faults(faults),
            f"Repair them{advice}{listing}",
        ]
        raise UserError("\n".join(lines))


def show_rows(request: PrepareRequest, number: int, max_malformed: float) -> Iterator[str]:
    """Yield the first rows that are learned, each with its learned text marked, and at the end why others are left out.
    A source may be a token store. Raises UserError at the end if more than `max_malformed` of the rows are malformed:
    of all of small data, else of those that were read to show the first."""
    for source in request.sources:
        check_source(source, request.split)  # before transformers is imported
    tokenizer = load_tokenizer(request.tokenizer, "--tokenizer")
    check_tokenizer(tokenizer)
    stores = [source for source in request.sources if (Path(source) / MANIFEST).is_file()]
    for source in stores:
        for sequence in islice(TokenStore(source, tokenizer), number):
            yield _show_sequence(f"{source}: sequence {sequence.sequence_id}", sequence, tokenizer)
    sources = [source for source in request.sources if source not in stores]
    report, num_shown = PrepareReport(request), 0
    reads_all = all(is_small(source, request.split) for source in sources)
    for file, i, row in number_rows(find_files(sources, request.split)):
        result = RowOutcome(i)
        item = examine_row(result, row, request, file, tokenizer)
        report.count(result, file.name)
        report.num_rows += 1
        place = f"{file.name}:{i + 1}"
        if item is None and not result.reason and report.outcomes[result.outcome] == 1:
            yield f"{place}: left out: {result.outcome}"
        if item is not None and num_shown < number:
            yield _show_sequence(place, tokenize_rendered([item], tokenizer)[0], tokenizer, result.ignored)
            num_shown += 1
        if num_shown == number and not reads_all:
            break
    refuse_malformed(", ".join(sources), report.faults, report.num_drawn, max_malformed)
    if report.faults:
        yield "\n".join(["Malformed rows, which are left out:", *group_faults(report.faults)])
    yield from (f"{number:,} {text}" for text, number in report.describe_notices().items())


def _show_sequence(
    place: str, sequence: TokenizedSequence, tokenizer: "PreTrainedTokenizerBase", ignored: Sequence[str] = ()
) -> str:
    """Write the text of a sequence with the learned passages marked, below a line with the tokens that end them, and
    the row's ignored fields."""
    rest = f"; ignored: {', '.join(ignored)}" if ignored else ""
    edges = [0, *(np.flatnonzero(np.diff(sequence.supervised)) + 1).tolist(), len(sequence)]
    ends: dict[str, None] = {}
    shown = ""
    for start, end in pairwise(edges):
        text = str(tokenizer.decode(sequence.input_ids[start:end]))
        is_learned = bool(sequence.supervised[start])
        shown += f"{_BEGIN}{_shorten(text)}{_END}" if is_learned else _shorten(text)
        if is_learned:
            ends[find_end(tokenizer, text) or "no special token"] = None
    if not ends:
        return f"{place}: nothing is learned{rest}"
    return f"{place}: learned between {_BEGIN} and {_END}, up to {' and '.join(ends)}{rest}\n{shown.rstrip()}\n"


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
