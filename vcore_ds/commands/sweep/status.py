"""What of a sweep is done, running, failed, as text."""

from collections import Counter

from vcore_ds.commands.sweep.slurm import queued_tasks
from vcore_ds.results.sweep_folder import State, SweepFolder


def describe(sweep: SweepFolder) -> str:
    """A line for each run, and their numbers by state."""
    queued = queued_tasks(sweep)
    words = {}
    for task, run in enumerate(sweep.runs):
        state = sweep.state(run)
        is_queued = state not in (State.DONE, State.RUNNING) and task in queued
        words[run] = "queued" if is_queued else str(state)
    width = max(map(len, sweep.runs))
    lines = [f"{run:{width}}  {word:7}  {details(sweep, run, word)}".rstrip() for run, word in words.items()]
    counts = Counter(words.values())
    numbers = ", ".join(f"{counts[word]} {word}" for word in [*State, "queued"] if counts[word])
    return "\n".join([*lines, f"{len(sweep.runs)} runs in {sweep.folder}: {numbers}"])


def details(sweep: SweepFolder, run: str, word: str) -> str:
    """What there is to say of a run beside its state."""
    if word == State.FAILED:
        return describe_failure(sweep, run)
    num_steps = sweep.num_steps(run)
    return f"{num_steps:,} steps" if num_steps else ""


def describe_failure(sweep: SweepFolder, run: str) -> str:
    """Exit code and last line."""
    return f"exit code {sweep.exit_code(run)}: {sweep.last_words(run)}"
