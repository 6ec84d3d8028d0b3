"""What was learnt, with which a report opens: losses and accuracies before and after training."""

from collections.abc import Sequence
from dataclasses import dataclass

from vcore_ds.commands.report.read import ReportedRun
from vcore_ds.commands.report.tables import NOTHING, Table


@dataclass(frozen=True)
class Result:
    """A measure before and after training; None for what was not measured, or was not finite."""

    before: float | None
    after: float | None
    is_share: bool = False

    def ends(self) -> list[str]:
        return [self._shown(self.before), self._shown(self.after)]

    def change(self) -> str:
        if self.before is None or self.after is None:
            return NOTHING
        return f"{self.after - self.before:+.4f}"

    def _shown(self, value: float | None) -> str:
        return NOTHING if value is None else f"{value:.1%}" if self.is_share else f"{value:.4f}"


def summary(runs: Sequence[ReportedRun]) -> str:
    """One sentence: the model, the method, and how much was trained."""
    models = ", ".join(dict.fromkeys(_model_name(run.recipe.model.path) for run in runs))
    methods = ", ".join(dict.fromkeys(run.recipe.method.name for run in runs))
    if len(runs) > 1:
        return f"{models} fine-tuned with {methods}."
    (run,) = runs
    kind = "all parameters" if run.recipe.lora is None else f"LoRA of rank {run.recipe.lora.rank}"
    counts = [_count(_num_steps(run), "optimizer step")]
    for key, name in (("sequences", "sequence"), ("supervised_tokens", "supervised token")):
        if total := run.total(key):
            counts.append(_count(total, name))
    ranks = run.environment.get("world_size")
    where = f" on {_count(ranks, 'rank')}" if isinstance(ranks, int) else ""
    return f"{models} fine-tuned with {methods}, {kind}: {', '.join(counts)} in {_duration(run)}{where}."


def results_table(runs: Sequence[ReportedRun]) -> Table:
    """Of one run a row for each measure; of several a row for each run."""
    measured = [_results_of(run) for run in runs]
    if len(runs) == 1:
        rows = [[name, *result.ends(), result.change()] for name, result in measured[0].items()]
        return Table("What was learnt", ["", "before", "after", "change"], rows)
    names = list(dict.fromkeys(name for found in measured for name in found))
    rows = []
    for run, found in zip(runs, measured, strict=True):
        of_run = [run.name, run.recipe.method.name, str(run.recipe.run.seed), f"{_num_steps(run):,}", _duration(run)]
        cells = [" → ".join(found[name].ends()).removeprefix(f"{NOTHING} → ") if name in found else NOTHING
                 for name in names]  # fmt: skip
        rows.append([*of_run, *cells])
    return Table("What was learnt", ["", "method", "seed", "steps", "training time", *names], rows)


def _results_of(run: ReportedRun) -> dict[str, Result]:
    """By name of the measure."""
    before, after = run.held_out.before, run.held_out.after
    found = {f"held-out loss{name and f', {name}'} (nats)": Result(before.get(name), after[name]) for name in after}
    losses = [line.get("loss") for line in run.metrics]
    found["training loss, first and last step (nats)"] = Result(losses[0], losses[-1])
    for name, task in run.evaluated.items():
        found[f"accuracy, {name} ({_count(task.num_problems, 'problem')})"] = Result(None, task.accuracy, is_share=True)
    return found


def _model_name(path: str) -> str:
    """A hub id as it is; of a folder the last name."""
    parts = path.rstrip("/").split("/")
    return path if len(parts) <= 2 else parts[-1]


def _num_steps(run: ReportedRun) -> int:
    return int(run.metrics[-1]["step"] or 0)


def _duration(run: ReportedRun) -> str:
    """Of all steps."""
    seconds = run.total("seconds")
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def _count(number: float, name: str) -> str:
    return f"{number:,.0f} {name}{'' if number == 1 else 's'}"
