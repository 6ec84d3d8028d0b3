"""The tables of runs, printed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from vcore_ds.commands.tokens.read import FoundRun
from vcore_ds.results.presentation import aligned
from vcore_ds.results.token_tables import Row, TokenTables

WIDEST_NAME = 48


def as_json(runs: Sequence[FoundRun]) -> str:
    """Everything, the lists cut as they are printed."""
    found = [
        {
            "run": str(run.folder),
            "method": run.method,
            "why_none": run.why_none,
            "tables": None if run.tables is None else asdict(run.tables),
        }
        for run in runs
    ]
    return json.dumps({"runs": found}, indent=2)


def describe(runs: Sequence[FoundRun]) -> str:
    """The tables of one run; those of several side by side."""
    paragraphs = [run.why_none for run in runs if run.why_none is not None]
    with_tables = [(run, run.tables) for run in runs if run.tables is not None]
    if len(with_tables) == 1:
        paragraphs += _describe_one(*with_tables[0])
    elif with_tables:
        paragraphs += _compare(with_tables)
    return "\n\n".join(paragraphs)


def _describe_one(run: FoundRun, tables: TokenTables) -> Iterator[str]:
    yield _heading(run, tables)
    thirds = _thirds(tables)
    often = f"at least {tables.min_count} times"
    yield _table(f"Tokens that gained most weight ({often})", tables.tokens.gained)
    yield _table(f"Tokens that lost most weight ({often})", tables.tokens.lost)
    yield _table(f"Phrases that gained most weight ({often})", tables.phrases.gained)
    yield _table(f"Phrases that lost most weight ({often})", tables.phrases.lost)
    yield _table("By kind of token", tables.kinds)
    yield _table("By position in the trace", tables.positions)
    if tables.sources:
        yield _table("By source of the sequence", tables.sources)
    if thirds:
        yield thirds
        for name, of in (("Tokens", tables.tokens), ("Phrases", tables.phrases)):
            yield _table(f"{name} whose weight rose most between them", of.rose)
            yield _table(f"{name} whose weight fell most between them", of.fell)


def _heading(run: FoundRun, tables: TokenTables) -> str:
    steps = ", ".join(map(str, tables.steps))
    lines = [
        f"{run.folder} ({run.method}): {tables.num_tokens:,} tokens of {tables.num_sequences:,} sequences, of "
        f"step{'s' if len(tables.steps) > 1 else ''} {steps}.",
        "weight: 1 is the uniform weight",
    ]
    if abs(tables.relative_weight - 1.0) >= 0.005:
        lines[1] += f"; the mean of all tokens is {tables.relative_weight:.2f}, and `gained` means above it"
    return "\n".join([lines[0], lines[1] + "."])


def _thirds(tables: TokenTables) -> str | None:
    if not tables.first_third:
        return None
    first, last = (", ".join(map(str, steps)) for steps in (tables.first_third, tables.last_third))
    return f"First third: the record{_plural(tables.first_third)} of step {first}; last third: of step {last}."


def _plural(of: Sequence[int]) -> str:
    return "s" if len(of) > 1 else ""


def _table(title: str, rows: Sequence[Row]) -> str:
    head = ["", "weight", "count", "of weight", "of tokens", "utility", "loss", "first third", "last third"]
    cells = [
        [
            _short(row.name),
            f"{row.relative_weight:.2f}",
            f"{row.count:,}",
            f"{row.share_of_weight:.2%}",
            f"{row.share_of_tokens:.2%}",
            "-" if row.utility is None else f"{row.utility:.3g}",
            f"{row.loss:.3f}",
            _weight(row.first_third),
            _weight(row.last_third),
        ]
        for row in rows
    ]
    return _titled(title, aligned([head, *cells]) if rows else ["none"])


def _compare(runs: Sequence[tuple[FoundRun, TokenTables]]) -> Iterator[str]:
    yield "\n".join(f"{number}: {_heading(run, tables)}" for number, (run, tables) in enumerate(runs, start=1))
    for title, rows_of in (
        ("By kind of token", [tables.kinds for _, tables in runs]),
        ("By position in the trace", [tables.positions for _, tables in runs]),
        ("By source of the sequence", [tables.sources for _, tables in runs]),
    ):
        names = list(dict.fromkeys(row.name for rows in rows_of for row in rows))
        if not names:
            continue
        head = ["relative weight in run", *(str(number) for number in range(1, len(runs) + 1))]
        by_name = [{row.name: row.relative_weight for row in rows} for rows in rows_of]
        rows = [[name, *(_weight(of.get(name)) for of in by_name)] for name in names]
        yield _titled(title, aligned([head, *rows]))
    yield "Give one run for its tokens and phrases."


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n  ".join([title, *lines])


def _weight(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _short(name: str) -> str:
    return name if len(name) <= WIDEST_NAME else name[: WIDEST_NAME - 3] + "..."
