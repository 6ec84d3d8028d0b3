"""The training traces that scores select (`data.keep`): the rule, and a check that the scores fit the run."""

import difflib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import reading, unfinished_path
from vcore_ds.config.data_section import KeepConfig
from vcore_ds.config.problems import did_you_mean
from vcore_ds.data import scores_folder
from vcore_ds.data.dataset import Store
from vcore_ds.data.scores_folder import Scores


@dataclass(frozen=True, eq=False)
class Selection:
    """The selected traces of those that were scored."""

    keep: KeepConfig  # with the name of the target set filled in
    scores: Scores
    digest: str  # SHA-256 of scores.parquet
    positions: np.ndarray  # int64 [k], of the kept traces in the token store, ascending; at least one
    sources: np.ndarray  # str [n], where each scored trace came from

    @property
    def counts_by_source(self) -> dict[str, tuple[int, int]]:
        """(kept traces, all traces) of each source."""
        names, index = np.unique(self.sources, return_inverse=True)
        num_kept, num_scored = (np.bincount(part, minlength=len(names)) for part in (index[self.positions], index))
        return dict(zip(map(str, names), zip(num_kept.tolist(), num_scored.tolist(), strict=True), strict=True))

    def describe(self) -> str:
        """Describe them, such as `80 of 320 traces kept: the 25% with the highest mean utility for trusted
        (runs/scores/math)`."""
        keep = self.keep
        which = (
            f"{keep.by} utility for {keep.set} above {keep.above:g}"
            if keep.top is None
            else f"the {100 * keep.top:.4g}%{' of each source' * (keep.within == 'source')} with the highest {keep.by} "
            f"utility for {keep.set}"
        )
        return f"{len(self.positions):,} of {len(self.sources):,} traces kept: {which} ({keep.scores})"

    def origin(self) -> dict[str, Any]:
        """Entry of environment.json: folder, digest, criterion, and kept traces of each source."""
        return {
            **self.keep.model_dump(mode="json"),
            "digest": self.digest,
            "scored_weights": self.scores.weights,
            "kept": len(self.positions),
            "traces": len(self.sources),
            "kept_of_source": {name: list(numbers) for name, numbers in self.counts_by_source.items()},
        }


def select_positions(utilities: np.ndarray, sources: np.ndarray, keep: KeepConfig) -> np.ndarray:
    """Select the traces with the highest utility by `keep.top` (a share, rounded to whole traces, of all traces or of
    those of each source) or `keep.above`: positions in their token store, int64 [k], ascending. Ties go to the lower
    position. `utilities`: float [n]; those that are not finite are never selected. `sources`: [n], file or data set of
    each trace."""
    utilities = np.where(np.isfinite(utilities), utilities, -np.inf)
    if keep.above is not None:
        return np.flatnonzero(utilities > keep.above)
    assert keep.top is not None  # one of the two is given
    by_source = keep.within == "source"
    groups = np.unique(sources, return_inverse=True)[1] if by_source else np.zeros(len(utilities), np.int64)
    descending = np.argsort(-utilities, kind="stable")
    selected = [np.zeros(0, np.int64)]
    for group in range(groups.max(initial=-1) + 1):
        members = descending[groups[descending] == group]
        selected.append(members[: round(keep.top * len(members))])
    best = np.sort(np.concatenate(selected))
    return best[np.isfinite(utilities[best])]


def read_selection(keep: KeepConfig, where: Callable[[str], str] = "data.keep.{}".format) -> Selection:
    """Select traces by a folder of scores. `where` names a key of `keep` in messages, as the user set it. Raises
    UserError if the folder is missing, unfinished or damaged, has no such set, or nothing is kept."""
    folder = Path(keep.scores)
    _check_is_finished(folder, where("scores"))
    scores = scores_folder.read_scores(folder, where("scores"))
    keep = keep.model_copy(update={"set": _resolve_set_name(keep.set, scores, where("set"))})
    assert keep.set is not None
    total, mean, _, _ = scores_folder.utility_columns(keep.set)
    column = mean if keep.by == "mean" else total
    columns = scores_folder.read_traces(folder, ["source", column])
    utilities, sources = columns[column], columns["source"]
    if len(utilities) != scores.data.num_sequences:
        raise UserError(
            f"{where('scores')}: {folder}: found {len(utilities):,} traces in {scores_folder.TRACES} and "
            f"{scores.data.num_sequences:,} in {scores_folder.SCORES}; expected equal numbers. Copy the folder again"
        )
    positions = select_positions(utilities, sources, keep)
    if not len(positions):
        key, value = ("top", keep.top) if keep.above is None else ("above", keep.above)
        raise UserError(
            f"{where(key)}: found {value:g}, which keeps none of the {len(utilities):,} traces in {folder}, whose "
            f"{column} is {np.nanmin(utilities):.4g} to {np.nanmax(utilities):.4g}; expected at least one. "
            + ("Raise it" if keep.above is None else "Lower it, or give top instead")
        )
    path = folder / scores_folder.TRACES
    with reading(where("scores"), path, "a file that can be read"), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Selection(keep, scores, digest, positions, sources)


@dataclass(frozen=True)
class StartingWeights:
    """The weights with which a run begins."""

    model: str  # model.path
    model_digest: str
    adapter: str | None  # lora.adapter
    adapter_digest: str | None
    checkpoint: str | None  # digest of the checkpoint that they were exported from, if their card has one


def read_matching_selection(keep: KeepConfig, store: Store, start: StartingWeights) -> Selection:
    """Select traces for a run. Raises UserError, beside those of `read_selection`, unless the scores were made with the
    data, tokenizer and template of the run, and with the weights with which it begins; or else at checkpoints of a run
    that began with the same weights, or goes on in this one."""
    selection = read_selection(keep)
    folder, scores = selection.keep.scores, selection.scores
    hashes = scores.data.tokenizer_hash, scores.data.chat_template_hash, scores.data.digest
    if difference := scores_folder.find_difference(store, *hashes):
        raise UserError(
            f"data.keep.scores: {folder}: found scores of {scores.data.path} with {difference}; expected the same. "
            "Score data.train_path as it is now"
        )
    is_same_model = start.model_digest == scores.model_digest
    begins_alike = is_same_model and start.adapter_digest == scores.adapter_digest
    scored = {scores.result_digest, *(one.digest for one in scores.checkpoints)} if scores.checkpoints else set()
    goes_on = bool({start.adapter_digest or start.model_digest, start.checkpoint} & scored - {None, ""})
    if not (begins_alike or (goes_on and (start.adapter is None or is_same_model))):
        adapter = f" and lora.adapter {start.adapter}" if start.adapter is not None else ""
        raise UserError(
            f"data.keep.scores: {folder}: found scores with other weights ({scores.weights}; model "
            f"{scores.model_digest[:12]}); expected those of model.path {start.model} ({start.model_digest[:12]})"
            f"{adapter}. Score with these, or set model.path and lora.adapter"
        )
    return selection


def _check_is_finished(folder: Path, where: str) -> None:
    with reading(where, folder, "a folder that can be read"):
        if not (folder / scores_folder.SCORES).exists() and unfinished_path(folder).exists():
            raise UserError(
                f"{where}: {folder}: its scoring has not finished ({unfinished_path(folder).name}); expected a folder "
                "of scores. Run the same vcore-ds score again, which goes on where it ended"
            )


def _resolve_set_name(name: str | None, scores: Scores, where: str) -> str:
    if name is None and len(scores.sets) == 1:
        return next(iter(scores.sets))
    if name not in scores.sets:
        near = "" if name is None else did_you_mean(difflib.get_close_matches(name, scores.sets, n=1))
        found = "null" if name is None else f"{name}, for which there are no scores"
        raise UserError(f"{where}: found {found}; expected one of {', '.join(scores.sets)}{near}")
    return name
