"""From a run's folder to its tables."""

from dataclasses import dataclass
from pathlib import Path

from vcore_ds.errors import UserError
from vcore_ds.files.run_folder import TOKENS
from vcore_ds.results.run_reader import read_recipe_of, tokenizer_of
from vcore_ds.results.token_tables import TokenTables, are_uniform, make_tables
from vcore_ds.track.token_records import TokenRecord, read_records


@dataclass(frozen=True)
class FoundRun:
    """A run, with tables or a sentence on why it has none."""

    folder: Path
    method: str
    tables: TokenTables | None
    why_none: str | None


def read_run(
    folder: Path, *, step: int | None, top: int, min_count: int | None, tokenizer_path: str | None
) -> FoundRun:
    """Reads the records of a run, of one step or all.

    Raises:
        UserError: the folder holds no run, a record is damaged or not there, or no tokenizer can be found.
    """
    recipe = read_recipe_of(folder)
    records = _of_step(read_records(folder), step, folder)
    method = recipe.method.name
    if not records:
        asked = "run.num_token_records is 0" if recipe.run.num_token_records == 0 else f"{TOKENS}/ is empty or missing"
        return FoundRun(folder, method, None, f"{folder} has no records of tokens: {asked}.")
    if are_uniform(records):
        why = f"{folder} ({method}) weights all tokens alike: no token gained or lost in its {len(records)} record(s)."
        return FoundRun(folder, method, None, why)
    tokenizer = tokenizer_of(folder, recipe, tokenizer_path)
    try:
        return FoundRun(folder, method, make_tables(records, tokenizer, top=top, min_count=min_count), None)
    except UserError as error:
        raise UserError(f"{folder}: {error}. Name it with --tokenizer") from None


def _of_step(records: list[TokenRecord], step: int | None, folder: Path) -> list[TokenRecord]:
    if step is None or not records:
        return records
    chosen = [record for record in records if record.step == step]
    if not chosen:
        steps = ", ".join(str(record.step) for record in records)
        raise UserError(f"--step: found {step}; expected a step that {folder} has a record of: {steps}")
    return chosen
