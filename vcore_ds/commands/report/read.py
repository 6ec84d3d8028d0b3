"""Read the runs of a report from their folders, and group those whose recipes differ only in the seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from vcore_ds.commands.report.tokens import TokenTables, TokenTexts, are_uniform, make_tables
from vcore_ds.common.errors import UserError
from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.training import run_folder
from vcore_ds.training.evaluation_folder import EVALUATION, RUN_EVALUATION, TaskResult, read_evaluation
from vcore_ds.training.metrics_log import list_notes
from vcore_ds.training.token_records import TokenRecord, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_A_SEED = ("run.seed", "run.output_dir", "track.trackers", "track.project", "track.group", "track.tags")
"""Keys in which the runs of a group may differ."""
MOST_KEYS_OF_LABEL = 3  # if groups differ in more keys, their label is the name of their first run


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """The content of a run's folder that a report shows."""

    name: str  # the folder's name, or its path if several have the same name; in a sweep `CELL/seed_N`
    folder: Path
    recipe: Recipe
    environment: dict[str, Any]
    metrics: list[dict[str, float | None]]  # lines of metrics.jsonl, at least one
    held_out: run_folder.HeldOutLosses
    evaluated: dict[str, TaskResult]
    """By task; empty if the run's folder holds no finished evaluation of its result."""
    records: list[TokenRecord]
    followed: list[TokenRecord]  # one trace a sequence
    texts: TokenTexts | None  # None without records, or without a tokenizer that has their tokens
    tables: TokenTables | None
    why_no_tables: str | None
    notes: list[str]
    cell: str | None = None

    def total(self, key: str) -> float:
        """Sum of a key over metrics.jsonl; missing values count as 0."""
        return sum(line.get(key) or 0.0 for line in self.metrics)


@dataclass(frozen=True, eq=False)
class Group:
    """One or more runs whose recipes differ only in the seed."""

    label: str
    runs: list[ReportedRun]


class TokenOptions(TypedDict, total=False):
    """Options of the tables of tokens."""

    top: int
    """Maximum length of the lists of tokens and phrases."""
    min_count: int | None
    """Minimum occurrences of a listed token or phrase; None for 1 in 5,000 tokens, at least 5."""
    step: int | None
    """Read only the record of this optimizer step; None for all records."""
    tokenizer_path: str | None
    """Folder or hub id; None for each run's tokenizer."""


def read_runs(
    folders: Sequence[Path], names: Sequence[str] | None = None, **options: Unpack[TokenOptions]
) -> list[ReportedRun]:
    """Read the runs, one per distinct folder. `names`: of a sweep's runs, `CELL/seed_N`, one per folder. Raises
    UserError where a folder holds no run, a file in it is missing or damaged, or `step` has no record."""
    if names is not None:
        runs = [_read_run(folder, name, **options) for folder, name in zip(folders, names, strict=True)]
        return [replace(run, cell=run.name.rpartition("/")[0]) for run in runs]
    distinct = list({folder.resolve(): folder for folder in folders}.values())
    names = [folder.resolve().name for folder in distinct]
    return [
        _read_run(folder, name if names.count(name) == 1 else str(folder), **options)
        for folder, name in zip(distinct, names, strict=True)
    ]


def _read_run(
    folder: Path,
    name: str,
    *,
    top: int = 15,
    min_count: int | None = None,
    step: int | None = None,
    tokenizer_path: str | None = None,
) -> ReportedRun:
    recipe = run_folder.read_run_recipe(folder)
    environment, metrics = run_folder.read_environment(folder), run_folder.read_run_metrics(folder)
    records, followed = _select_step(read_records(folder), step, folder), read_records(folder, "followed")
    held_out = run_folder.read_held_out_losses(folder)
    evaluation = folder / RUN_EVALUATION
    evaluated = read_evaluation(evaluation).tasks if (evaluation / EVALUATION).is_file() else {}
    has_result = run_folder.export_folder(folder, is_adapter=recipe.lora is not None).is_dir()
    notes = list_notes(folder, has_result, environment, metrics)
    texts, tables, why = None, None, None
    if not records:
        is_off = recipe.run.num_token_records == 0
        cause = "run.num_token_records is 0" if is_off else f"{run_folder.TOKENS}/ is empty or missing"
        why = f"No tokens were recorded: {cause}."
    else:
        try:
            tokenizer: PreTrainedTokenizerBase = run_folder.load_run_tokenizer(
                folder, recipe.model.path, tokenizer_path
            )
            recorded = [sequence for record in records for sequence in record.sequences]
            texts = TokenTexts(tokenizer, [*recorded, *(trace for record in followed for trace in record.sequences)])
            if are_uniform(records):
                why = "All recorded tokens have the uniform weight: none gained or lost."
            else:
                tables = make_tables(records, tokenizer, top=top, min_count=min_count)
        except UserError as error:
            if tokenizer_path is not None:
                raise
            # The model may be on another machine, and curves and costs need no tokenizer.
            why = f"The recorded tokens cannot be shown: {error}"
            notes.append(why)
    return ReportedRun(
        name, folder, recipe, environment, metrics, held_out, evaluated, records, followed, texts, tables, why, notes
    )


def _select_step(records: list[TokenRecord], step: int | None, folder: Path) -> list[TokenRecord]:
    if step is None or not records:
        return records
    chosen = [record for record in records if record.step == step]
    if not chosen:
        steps = ", ".join(str(record.step) for record in records)
        raise UserError(f"--step: found {step}; expected a step with recorded tokens in {folder}: {steps}")
    return chosen


def group_runs(runs: Sequence[ReportedRun]) -> list[Group]:
    """Groups in the order of their first runs, labelled by the values in which their recipes differ."""
    keys = list(differences(runs, ignored=OF_A_SEED))
    by_recipe: dict[str, list[ReportedRun]] = {}
    for run in runs:
        values = {key: value for key, value in flat_values(run.recipe).items() if key not in OF_A_SEED}
        by_recipe.setdefault(repr(sorted(values.items())), []).append(run)
    groups = []
    for members in by_recipe.values():
        values = flat_values(members[0].recipe)
        label = ", ".join(_format_setting(key, values[key]) for key in keys if values.get(key) is not None)
        if members[0].cell is not None:
            label = members[0].cell
        elif not label or len(keys) > MOST_KEYS_OF_LABEL:
            label = members[0].name
        groups.append(Group(label + (f" ({len(members)} runs)" if len(members) > 1 else ""), members))
    return groups


def _format_setting(key: str, value: Any) -> str:
    """A setting in a label: `vcore` for method.name, `kl_budget 0.1` for method.kl_budget."""
    *_, name = key.split(".")
    return format_value(value) if name == "name" else f"{name} {format_value(value)}"


def differences(runs: Sequence[ReportedRun], ignored: Sequence[str] = ("run.output_dir",)) -> dict[str, list[Any]]:
    """Dotted key -> its value in each run, for keys in which the recipes differ."""
    flat = [flat_values(run.recipe) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    values_of = {key: [values.get(key) for values in flat] for key in keys if key not in ignored}
    return {key: values for key, values in values_of.items() if any(value != values[0] for value in values)}


def format_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
