"""A run's folder, read back: recipe, metrics, held-out losses, tokenizer. Neither the model nor the data are needed."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import read_json, reading
from vcore_ds.config.resume import read_resolved_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.train.run_folder import HELD_OUT, METRICS, RECIPE, export_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOutLosses:
    """What held_out.json holds: mean nats per token, by name of the set."""

    before: dict[str, float]
    after: dict[str, float]


_HELD_OUT = TypeAdapter(HeldOutLosses)
_A_STEP = "the JSON object of an optimizer step, with `step` from 1 on and ascending"


def read_recipe_of(folder: Path) -> Recipe:
    """The resolved recipe of a run.

    Raises:
        UserError: the folder holds no run, or one that this version does not know.
    """
    with reading("RUN", folder, "a run's folder (run.output_dir)"):
        is_run = (folder / RECIPE).is_file()
    if not is_run:
        raise UserError(f"RUN: {folder}: found no {RECIPE} there; expected a run's folder (run.output_dir)")
    return read_resolved_recipe(folder / RECIPE, accept_retired=True)


def read_metrics_of(folder: Path) -> list[dict[str, float | None]]:
    """The numbers in the lines of metrics.jsonl, at least one line; None for what a step does not have, or what was
    not finite.

    Raises:
        UserError: the file is missing, empty or damaged.
    """
    path = folder / METRICS
    with reading("RUN", folder, "a run's folder (run.output_dir)"):
        if not path.is_file():
            raise UserError(f"RUN: {folder}: found no {METRICS} there; expected a run that has taken a step")
        written = path.read_bytes().splitlines()
    lines: list[dict[str, float | None]] = []
    last_step = 0
    for number, text in enumerate(written, start=1):
        step_and_values = _line(text)
        if step_and_values is None or step_and_values[0] <= last_step:
            found = text[:80].decode(errors="replace")
            raise UserError(
                f"{path}: line {number}: found {found!r}; expected {_A_STEP}. Remove the line: the others can be read"
            )
        last_step, values = step_and_values
        lines.append(values)
    if not lines:
        raise UserError(f"{path}: is empty; expected a run that has taken a step")
    return lines


def _line(text: bytes) -> tuple[int, dict[str, float | None]] | None:
    """The step and all values of a line; None where the line is damaged."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step = values.get("step") if isinstance(values, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        return None
    numbers = {key: value for key, value in values.items() if value is None or type(value) in (int, float)}
    return step, {key: None if value is None or not math.isfinite(value) else value for key, value in numbers.items()}


def read_held_out_losses(folder: Path) -> HeldOutLosses:
    """Before and after training; empty where the run measured none.

    Raises:
        UserError: held_out.json cannot be read.
    """
    path = folder / HELD_OUT
    if not path.is_file():
        return HeldOutLosses({}, {})
    return read_json(path, _HELD_OUT, "the held-out losses that a run writes there")


def tokenizer_of(folder: Path, recipe: Recipe, path: str | None) -> "PreTrainedTokenizerBase":
    """The tokenizer that `path` names; where it is None that of the run's result, else that of its model.

    Raises:
        UserError: there is none.
    """
    if path is not None:
        return load_tokenizer(path, "--tokenizer")
    exported = export_folder(folder, is_adapter=recipe.lora is not None)
    try:
        # The result's first: it needs no network, and a relative model.path depends on the working directory.
        return load_tokenizer(str(exported) if exported.is_dir() else recipe.model.path)
    except UserError as error:
        raise UserError(f"{folder}: {error}; expected the tokenizer of the run. Name it with --tokenizer") from None
