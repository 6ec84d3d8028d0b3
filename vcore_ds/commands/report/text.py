"""A report as text: what was learnt, what gained and lost weight, what a step cost, what differs."""

from collections.abc import Iterator, Sequence

from vcore_ds.commands.report.read import ReportedRun
from vcore_ds.commands.report.tables import (
    Table,
    compare_tables,
    difference_table,
    phases_of,
    results_table,
    summary,
    tables_of,
)


def describe(runs: Sequence[ReportedRun]) -> str:
    """Return the tables of the page; of several runs those that compare them."""
    return "\n\n".join(_paragraphs(runs))


def _paragraphs(runs: Sequence[ReportedRun]) -> Iterator[str]:
    yield summary(runs)
    yield results_table(runs).text()
    for run in runs:
        lines = [f"warning: {note}" for note in run.notes if note != run.why_no_tables]
        lines += [run.why_no_tables] if run.why_no_tables is not None else []
        if lines:
            yield "\n".join(f"{run.name}: {line}" for line in lines)
    for table in compare_tables(runs):
        yield table.text()
    if len(runs) > 1:
        yield "Report one run for its tokens and phrases."
    elif runs[0].tables is not None:
        gained = tables_of(runs[0], runs[0].tables)
        yield f"Recorded: {gained['heading']}. Weight 1 is the uniform weight."
        for table in gained["tables"] + gained["more"]:
            yield table.text()
    phases = phases_of(runs)
    yield Table("Seconds of a step", phases.head, phases.rows).text()
    if len(runs) > 1 and (differing := difference_table(runs)).rows:
        yield differing.text()
