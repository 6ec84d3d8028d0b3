"""What became of all rows: the table of `vcore-ds prepare`, and how `check` reads rows."""

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.data.conversations import NOTICES, Conversation, render_conversation
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare.convert import KEPT, MALFORMED, NOTICED
from vcore_ds.data.prepare.curation import RULES, Kind
from vcore_ds.data.prepare.rows import read_chat_rows
from vcore_ds.data.prepare.sources import find_files
from vcore_ds.data.store import MANIFEST, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_SHOWN = 10  # fields that are named in a line
_NUM_ROWS, _NUM_RENDERED = 1000, 200  # rows of each source that `check` reads, and that it renders
_MAX_LIST_BYTES = 64 * 2**20
"""Size up to which `check` reads a file that is one list; larger ones take seconds."""

PAPER_MEAN_LENGTHS = {"math": 3155.01, "code": 2861.25}
"""Average CoT length of the 3,200 examples for Qwen3 (paper, section "Experiments"), in tokens."""


def list_fields(fields: Mapping[str, int]) -> str:
    """List fields with the number of rows that have them, the most frequent ones first."""
    ordered = sorted(fields.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"`{name:.40}` {number:,}" for name, number in ordered[:_MAX_SHOWN]]
    others = [f"{len(ordered) - _MAX_SHOWN:,} others"] if len(ordered) > _MAX_SHOWN else []
    return ", ".join([*shown, *others])


def describe_reading(
    path: str,
    columns: Mapping[str, str] | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> list[str]:
    """Describe a token store, or the first rows of conversations: shapes, ignored fields, faults; of fewer rows, what
    the tokenizer's chat template makes of them. `columns`: data.columns. Raises UserError if `path` cannot be read."""
    if (Path(path) / MANIFEST).is_file():
        counts = read_manifest(Path(path)).get("counts", {})
        lines = [f"malformed: {counts['malformed']:,}"] if counts.get("malformed") else []
        lines += [f"{number:,} left out: {rule}" for rule, number in counts.get("dropped", {}).items()]
        lines += [f"{number:,} {what}" for what, number in counts.get("noticed", {}).items()]
        return [f"{path}: {line}" for line in [*lines, *counts.get("reading", [])]]
    return [f"{path}: {_describe_rows(path, columns, tokenizer)}"]


def _describe_rows(source: str, columns: Mapping[str, str] | None, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    shapes: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    for_template: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    faults: list[str] = []
    seen: Counter[str] = Counter()
    noticed: Counter[str] = Counter()
    files = find_files([source], "train")
    if not files[0].hub and files[0].path.endswith(".json") and Path(files[0].path).stat().st_size > _MAX_LIST_BYTES:
        return "large .json, which is not read here"
    for chat in islice(chain.from_iterable(read_chat_rows(file, columns) for file in files), _NUM_ROWS):
        if isinstance(chat, Malformed):
            faults.append(str(chat))
            continue
        if isinstance(chat, Dropped):
            left_out[str(chat)] += 1
            continue
        shapes[chat.shape] += 1
        ignored.update(chat.unknown)
        for_template.update(chat.unknown_fields)
        seen[json.dumps([chat.messages, chat.tools], sort_keys=True, default=repr)] += 1
        if tokenizer is not None and shapes.total() <= _NUM_RENDERED:
            try:
                conversation = Conversation(shapes.total(), chat.messages, source, **chat.options)
                noticed.update(render_conversation(conversation, tokenizer).notices)
            except UserError as error:
                faults.append(str(error).partition(": ")[2])
    num_rows = shapes.total() + left_out.total() + len(faults)
    parts = [f"the first {num_rows:,} rows" if num_rows == _NUM_ROWS else f"{num_rows:,} rows"]
    parts += [f"format {shape} {number:,}" for shape, number in sorted(shapes.items())]
    parts += [f"ignored: {list_fields(ignored)}"] if ignored else []
    parts += [f"ignored unless the chat template reads it: {list_fields(for_template)}"] if for_template else []
    parts += [f"{number:,} left out: {rule}" for rule, number in left_out.items()]
    parts += [f"exact duplicates: {number:,}"] if (number := seen.total() - len(seen)) else []
    parts += [f"malformed: {len(faults):,}, the first: {faults[0]:.300}"] if faults else []
    first = f" of the first {_NUM_RENDERED} rows" if shapes.total() > _NUM_RENDERED else ""
    return "; ".join([*parts, *(f"{noticed[name]:,}{first} {text}" for name, text in NOTICES.items() if noticed[name])])


@dataclass(frozen=True)
class LengthSummary:
    """Distribution of the sequences' lengths, in tokens."""

    mean: float
    p50: int
    p95: int
    max: int

    @classmethod
    def summarize(cls, sorted_lengths: Sequence[int]) -> Self:
        """Percentiles are lengths that occur: the smallest that at least 50% (95%) of all do not exceed."""
        n = len(sorted_lengths)
        p50, p95 = (sorted_lengths[-(-n * percent // 100) - 1] for percent in (50, 95))
        return cls(round(sum(sorted_lengths) / n, 2), p50, p95, sorted_lengths[-1])


@dataclass
class PrepareReport:
    """Outcomes of all rows: `num_rows` is the sum of `num_malformed`, all `dropped`, `num_not_drawn` and `num_kept`."""

    kind: Kind
    sample: int | None  # requested number of sequences; None for all
    cutoff_length: int
    num_rows: int
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # malformed rows: place and reason
    shapes: Counter[str] = field(default_factory=Counter)
    noticed_by_name: Counter[str] = field(default_factory=Counter)  # kept sequences by observation, see `NOTICED`
    digests: array = field(default_factory=lambda: array("Q"))  # of the kept sequences
    num_context_turns: int = 0  # turns of the assistant that the rows exclude from learning
    ignored: Counter[str] = field(default_factory=Counter)
    """kept rows by columns, and by keys of messages, that had no effect"""
    all_lengths: list[int] = field(default_factory=list)  # tokens of the kept sequences
    longest: int = 0  # tokens of the longest conversation that was tokenized, whether it was kept or not

    def count(self, result: Mapping[str, Any], source: str) -> None:
        """Count a row that was drawn: a `Result` without its tokens."""
        self.outcomes[result["outcome"]] += 1
        self.longest = max(self.longest, result["num_tokens"])
        if result["shape"]:
            self.shapes[result["shape"]] += 1
        if result["outcome"] == MALFORMED:
            self.faults.append(f"{source}:{result['number'] + 1}: {result['reason']}")
        if result["outcome"] == KEPT:
            self.noticed_by_name.update({name: number for name, number in result["noticed"].items() if number})
            self.ignored.update(result["ignored"])
            self.num_context_turns += result["context_turns"]
            self.digests.append(result["digest"])
            self.all_lengths.append(min(result["num_tokens"], self.cutoff_length))

    @property
    def num_kept(self) -> int:
        return self.outcomes[KEPT]

    @property
    def num_malformed(self) -> int:
        return self.outcomes[MALFORMED]

    @property
    def num_drawn(self) -> int:
        """Rows that were looked at: all, or those that a sample was drawn from until it was complete."""
        return self.outcomes.total()

    @property
    def dropped(self) -> dict[str, int]:
        """Rows by the rule that left them out, in the order of the rules."""
        rules = [*(rule for rule in RULES if rule in self.outcomes), *sorted(self.outcomes.keys() - {*RULES})]
        dropped = {rule: self.outcomes[rule] for rule in rules if rule not in (KEPT, MALFORMED)}
        num_not_drawn = self.num_rows - self.num_drawn
        return dropped | ({"not drawn for the sample": num_not_drawn} if num_not_drawn else {})

    @property
    def noticed(self) -> dict[str, int]:
        """Text of an observation -> its number."""
        noticed = {text: self.noticed_by_name[name] for name, text in NOTICED.items() if self.noticed_by_name[name]}
        if self.faults:
            noticed[f"malformed rows are left out; the first: {self.faults[0]:.300}"] = self.num_malformed
        return noticed

    @property
    def lengths(self) -> LengthSummary | None:
        return LengthSummary.summarize(sorted(self.all_lengths)) if self.all_lengths else None

    def describe_reading(self) -> list[str]:
        """Describe turns that rows exclude, and fields without effect, in a line each."""
        lines = []
        if self.num_context_turns:
            lines.append(f"turns of the assistant with weight 0, or in a prompt: {self.num_context_turns:,}")
        if num_duplicates := len(self.digests) - len(np.unique(self.digests)):
            lines.append(f"exact duplicates: {num_duplicates:,}")
        if self.ignored:
            lines.append(f"ignored: {list_fields(self.ignored)}")
        return lines

    def describe(self) -> str:
        rows = [("rows read", f"{self.num_rows:,}"), ("  malformed", f"{self.num_malformed:,}")]
        rows += [(f"  {rule}", f"{number:,}") for rule, number in self.dropped.items()]
        rows.append(("kept", f"{self.num_kept:,}"))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value:>12}" for name, value in rows]
        if self.longest > self.cutoff_length:
            lines.append(f"The longest has {self.longest:,} tokens; --cutoff-length {self.longest} keeps all whole")
        if self.shapes:
            lines.append(
                "formats: " + ", ".join(f"{shape} {number:,}" for shape, number in sorted(self.shapes.items()))
            )
        lines += self.describe_reading()
        if (values := self.lengths) is not None:
            lines += ["", f"{'tokens per sequence':<{width}}  {'mean':>12}{'p50':>8}{'p95':>8}{'max':>8}"]
            lines.append(
                f"{'  this store':<{width}}  {values.mean:>12,.2f}{values.p50:>8,}{values.p95:>8,}{values.max:>8,}"
            )
            if self.kind in PAPER_MEAN_LENGTHS:
                lines.append(f"{'  the paper (CoT, Qwen3)':<{width}}  {PAPER_MEAN_LENGTHS[self.kind]:>12,.2f}")
            if self.noticed:
                lines += ["", *(f"{number:,} {text}" for text, number in self.noticed.items())]
            if self.sample is not None and self.num_kept < self.sample:
                lines += ["", f"Fewer than the {self.sample:,} that were asked for: no more rows passed."]
        return "\n".join(lines)
