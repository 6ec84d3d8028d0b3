"""`vcore-ds keep --weights`: Gibbs weights of all tokens of the kept traces, from their utilities."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import Progress
from vcore_ds.data import scores_folder
from vcore_ds.data.score_selection import Selection
from vcore_ds.method.weights import gibbs_weights, gibbs_weights_for_budget

_SHARPNESS = re.compile(r"(kl_budget|temperature)=([0-9.]+(?:[eE][-+]?[0-9]+)?)")
_EXPECTED = "what vcore-ds score --tokens all writes there. Score again"


def parse_sharpness(text: str) -> tuple[str, float]:
    """`kl_budget` or `temperature`, and its number. Raises UserError."""
    match = _SHARPNESS.fullmatch(text)
    if match is None or float(match[2]) == 0:
        raise UserError(
            f"--weights: found {text}; expected kl_budget=NUMBER or temperature=NUMBER, positive, as in the section "
            "`method` of a recipe, such as kl_budget=0.005"
        )
    return match[1], float(match[2])


def write_weights(selection: Selection, sharpness: tuple[str, float], output: Path) -> None:
    """Write the file of weights of the selected traces. Raises UserError where the scores have no utilities of all
    tokens, or the file is damaged or of other scores; OSError where the file cannot be written."""
    keep, data = selection.keep, selection.scores.data
    path = Path(keep.scores) / scores_folder.UTILITIES
    if not path.is_file():
        raise UserError(
            f"SCORES: {keep.scores}: found no {scores_folder.UTILITIES}; expected {_EXPECTED} with --tokens all"
        )
    metadata = scores_folder.read_metadata(path, _EXPECTED)
    if metadata.get("digest") != data.digest:
        raise UserError(f"SCORES: {path}: found utilities of other tokens than scores.json names; expected {_EXPECTED}")
    made_with = {"model": selection.scores.model_digest, "scored_weights": selection.scores.weights}
    described = {**metadata, "set": keep.set, sharpness[0]: sharpness[1], **made_with}
    with Progress("Weights", len(selection.positions)) as progress:
        scores_folder.write_token_table(output, _weighted_rows(selection, path, sharpness, progress), described)


def _weighted_rows(
    selection: Selection, path: Path, sharpness: tuple[str, float], progress: Progress
) -> Iterator[scores_folder.TokenRows]:
    utility = f"utilities.{selection.keep.set}"
    for rows in scores_folder.read_token_rows(path, ["input_ids", "supervised", utility], _EXPECTED):
        kept = np.isin(rows.sequence, selection.positions)
        is_kept_token = np.repeat(kept, np.diff(rows.offsets["input_ids"]))
        num_tokens = np.diff(rows.offsets["input_ids"])[kept]
        num_supervised = np.diff(rows.offsets[utility])[kept]
        input_ids, supervised = (rows.values[name][is_kept_token] for name in ("input_ids", "supervised"))
        utilities = rows.values[utility][np.repeat(kept, np.diff(rows.offsets[utility]))]
        if supervised.sum() != len(utilities) or not np.isfinite(utilities).all():
            raise UserError(f"SCORES: {path}: found missing or infinite utilities; expected {_EXPECTED}")
        if not len(num_tokens):
            continue
        weights = np.zeros(len(input_ids), np.float16)
        weights[supervised] = _relative_weights(utilities, num_supervised, sharpness)
        offsets = dict.fromkeys(
            ("input_ids", "labels", scores_folder.LOSS_WEIGHTS), np.concatenate([[0], num_tokens.cumsum()])
        )
        labels = np.where(supervised, input_ids, scores_folder.LABEL_OF_PROMPT).astype(np.int32)
        values = {"input_ids": input_ids, "labels": labels, scores_folder.LOSS_WEIGHTS: weights}
        progress.advance(len(num_tokens))
        yield scores_folder.TokenRows(rows.sequence[kept], offsets, values)


def _relative_weights(utilities: np.ndarray, num_tokens: np.ndarray, sharpness: tuple[str, float]) -> np.ndarray:
    """`n q` of each token: 1 on average over each sequence."""
    name, value = sharpness
    numbers = torch.from_numpy(num_tokens)
    index = torch.repeat_interleave(torch.arange(len(numbers)), numbers)
    compute = gibbs_weights_for_budget if name == "kl_budget" else gibbs_weights
    result = compute(torch.from_numpy(utilities).double(), index, len(numbers), value)
    return (result.weights * numbers[index]).numpy().astype(np.float16)
