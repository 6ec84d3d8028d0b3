"""Weights of the tokens of a token store, read from the file of `vcore-ds keep --weights` (`method.name: stored`)."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import count
from vcore_ds.data.dataset import Store
from vcore_ds.data.token_tables import LOSS_WEIGHTS, read_metadata, read_token_rows
from vcore_ds.data.tokenization import TokenizedSequence

_EXPECTED = "the file that `vcore-ds keep SCORES --weights kl_budget=NUMBER --output FILE` writes"
_REMEDY = "Score data.train_path as it is now with --tokens all, and write the weights again"


class StoredWeights:
    """The weights in memory, 2 bytes for each token."""

    def __init__(self, path: Path, store: Store):
        """Raises UserError where the file cannot be read, is of other tokens, or has a weight that is none."""
        self._path, self._lengths = path, np.asarray(store.lengths, dtype=np.int64)
        if not path.is_file():
            raise UserError(f"data.token_weights: {path}: found no such file; expected {_EXPECTED}")
        self._check_belongs(read_metadata(path, _EXPECTED), store)
        self._starts = np.full(len(store), -1, dtype=np.int64)
        parts, num_tokens = [], 0
        for rows in read_token_rows(path, [LOSS_WEIGHTS], _EXPECTED):
            offsets, weights = rows.offsets[LOSS_WEIGHTS], rows.values[LOSS_WEIGHTS].astype(np.float16)
            if rows.sequence.min() < 0 or rows.sequence.max() >= len(store):
                raise UserError(f"data.token_weights: {path}: found traces that the data lacks. {_REMEDY}")
            self._refuse_first(
                np.diff(offsets) != self._lengths[rows.sequence], rows.sequence, "another number of tokens"
            )
            wrong = ~(np.isfinite(weights) & (weights >= 0))
            per_trace = np.add.reduceat(wrong, offsets[:-1]) > 0
            self._refuse_first(per_trace, rows.sequence, "a weight that is negative, inf or NaN")
            self._starts[rows.sequence] = offsets[:-1] + num_tokens
            parts.append(weights)
            num_tokens += len(weights)
        self._weights = np.concatenate([np.zeros(0, np.float16), *parts])
        self.digest = hashlib.sha256(self._weights.tobytes()).hexdigest()

    def add_to(self, i: int, sequence: TokenizedSequence) -> TokenizedSequence:
        """Set `loss_weights` of the sequence at position i."""
        start = self._starts[i]
        return replace(sequence, loss_weights=self._weights[start : start + len(sequence)].copy())

    def check_has(self, positions: np.ndarray) -> None:
        """Raise UserError unless there are weights for the sequences at `positions`."""
        missing = positions[self._starts[positions] < 0]
        if len(missing):
            raise UserError(
                f"data.token_weights: {self._path}: found no weights for {len(missing):,} of "
                f"{count(len(positions), 'training trace')}, first for the one at position {missing[0]}; expected all. "
                "Write weights of all traces, or select the same ones with data.keep"
            )

    def _check_belongs(self, made_with: dict[str, Any], store: Store) -> None:
        tokenizer = store.manifest["tokenizer"]
        for what, key, expected in (
            ("another tokenizer", "tokenizer", tokenizer["hash"]),
            ("another chat template", "chat_template", tokenizer["chat_template_hash"]),
            ("other tokens", "digest", store.digest),
        ):
            digest = str(made_with.get(key))
            if digest != expected:
                raise UserError(
                    f"data.token_weights: {self._path}: found weights for {what} ({digest[:12]}) than data.train_path "
                    f"has ({expected[:12]}); expected those of the same. {_REMEDY}"
                )

    def _refuse_first(self, is_wrong: np.ndarray, sequence: np.ndarray, what: str) -> None:
        if is_wrong.any():
            raise UserError(
                f"data.token_weights: {self._path}: found {what} for the trace at position "
                f"{sequence[np.argmax(is_wrong)]}; expected a finite number that is not negative for each of its "
                f"tokens. {_REMEDY}"
            )
