"""Log-probabilities of the training sequences under the frozen reference model, computed once before training (iw-SFT).

The importance ratio needs one number per sequence, so no second model is resident during training. The numbers are in
a file of their own, not in the store: models that share a tokenizer share a store.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from vcore_ds.data.dataset import ChangedDataset, Dataset
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside


def write_reference(path: Path, dataset: Dataset, log_probabilities: Sequence[float], model: str) -> None:
    """Writes a `.npz`: `log_probability` fp64 [n] in nats, in the order of the data, with the data's digest and the
    model's name."""
    # Into an open file: np.savez would add .npz to a name that lacks it.
    with written_aside(path) as unfinished, unfinished.open("wb") as file:
        np.savez(
            file,
            log_probability=np.array(log_probabilities, dtype=np.float64),
            digest=np.array(dataset.digest),
            model=np.array(model),
        )


def with_reference(dataset: Dataset, path: str) -> ChangedDataset:
    """The dataset with `reference_log_probability` of every sequence.

    Raises:
        UserError: the file cannot be read, or belongs to other tokens than the dataset's.
    """
    remedy = "make it with `vcore-ds reference RECIPE --output FILE`"
    try:
        with np.load(path, allow_pickle=False) as stored:
            digest, log_probabilities = str(stored["digest"]), stored["log_probability"]
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise UserError(
            f"data.reference_log_probabilities: {path}: found no such reference log-probabilities "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from None
    if digest != dataset.digest:
        raise UserError(
            f"data.reference_log_probabilities: {path}: found log-probabilities of {len(log_probabilities):,} other "
            f"sequences; expected those of the {len(dataset):,} training sequences as they are tokenized now "
            f"(data, template, tokenizer, cutoff_length and overlong decide); {remedy} again"
        )

    def with_value(i: int, sequence: TokenizedSequence) -> TokenizedSequence:
        return replace(sequence, reference_log_probability=float(log_probabilities[i]))

    return ChangedDataset(dataset, with_value)
