"""From a run's folder to its tables."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vcore_ds.config import Recipe, read_resolved_recipe
from vcore_ds.data import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.files.run_folder import RECIPE, TOKENS, export_folder
from vcore_ds.files.user_paths import reading
from vcore_ds.track.token_records import TokenRecord, read_records
from vcore_ds.track.token_tables import TokenTables, are_uniform, make_tables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    with reading("RUN", folder, "a run's folder (run.output_dir)"):
        is_run = (folder / RECIPE).is_file()
    if not is_run:
        raise UserError(f"RUN: {folder}: found no {RECIPE} there; expected a run's folder (run.output_dir)")
    recipe = read_resolved_recipe(folder / RECIPE)
    records = _of_step(read_records(folder), step, folder)
    method = recipe.method.name
    if not records:
        asked = "run.num_token_records is 0" if recipe.run.num_token_records == 0 else f"{TOKENS}/ is empty or missing"
        return FoundRun(folder, method, None, f"{folder} has no records of tokens: {asked}.")
    if are_uniform(records):
        why = f"{folder} ({method}) weights all tokens alike: no token gained or lost in its {len(records)} record(s)."
        return FoundRun(folder, method, None, why)
    tokenizer = _tokenizer_of(folder, recipe, tokenizer_path)
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


def _tokenizer_of(folder: Path, recipe: Recipe, path: str | None) -> "PreTrainedTokenizerBase":
    if path is not None:
        return load_tokenizer(path, "--tokenizer")
    exported = folder / export_folder(recipe).name  # the run may have been moved since
    try:
        # The result's first: it needs no network, and a relative model.path depends on the working directory.
        return load_tokenizer(str(exported) if exported.is_dir() else recipe.model.path)
    except UserError as error:
        raise UserError(f"{folder}: {error}; expected the tokenizer of the run. Name it with --tokenizer") from None
