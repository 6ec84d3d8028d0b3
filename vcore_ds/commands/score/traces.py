"""The best and worst traces as a page can hold them: a byte for each measure of a token, compressed; each text once."""

import base64
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vcore_ds.files.scores_folder import utility_columns
from vcore_ds.results.token_levels import loss_levels, nearest, rounded, utility_levels
from vcore_ds.results.token_texts import TokenTexts

MOST_TOKENS = 800_000
"""Tokens of a page, some 3 MB of it. Where there are more, each trace is cut to its part of them."""
SUPERVISED = 1
"""Flag of a token that is trained on; the others belong to the prompt."""


@dataclass(frozen=True, eq=False)
class ShownTrace:
    """The tokens of a trace, prompt included."""

    token_ids: np.ndarray
    positions: np.ndarray

    @staticmethod
    def of(row: Mapping[str, Any], most_tokens: int | None = None) -> "ShownTrace":
        """From a row of tokens.parquet, its first `most_tokens`."""
        ids = np.array(row["tokens"][:most_tokens], dtype=np.int32)
        return ShownTrace(ids, np.arange(len(ids)))


def encode_traces(
    name: str, columns: Mapping[str, np.ndarray], shown: Sequence[Mapping[str, Any]], texts: TokenTexts
) -> tuple[dict[str, Any], str]:
    """What the page knows of the shown traces of a set: a description for JSON, and the tokens as base64 of gzip.

    The bytes are, for all tokens, one array after the other: place in `texts` (`bytesText` each, little-endian), then a
    byte each: place in the levels of loss, of utility, and flags. The best trace comes first, the worst last.
    """
    total, mean, rank, _ = utility_columns(name)
    rows = sorted((row for row in shown if row["set"] == name), key=lambda row: columns[rank][row["sequence"]])
    most = max(1, MOST_TOKENS // max(1, len(shown)))
    names: dict[str, int] = {}
    sequences: list[dict[str, Any]] = []
    places: list[np.ndarray] = []
    flags: list[np.ndarray] = []
    losses: list[np.ndarray] = []
    utilities: list[np.ndarray] = []
    for row in rows:
        trace, place = ShownTrace.of(row, most), row["sequence"]
        supervised = np.array(row["supervised"][:most], dtype=np.bool_)
        places.append(np.array([names.setdefault(piece, len(names)) for piece in texts.pieces_of(trace)]))
        flags.append(supervised.astype(np.uint8) * SUPERVISED)
        for found, values in ((losses, row["losses"]), (utilities, row["utilities"])):
            of_tokens = np.zeros(len(supervised))
            of_tokens[supervised] = values[: int(supervised.sum())]
            found.append(of_tokens)
        sequences.append(
            {
                "step": "",
                "tokens": len(supervised),
                "wholeTokens": len(row["tokens"]),
                "title": f"{columns['source'][place]}, row {columns['row'][place]:,}",
                "rank": int(columns[rank][place]),
                "mean": float(f"{columns[mean][place]:.4g}"),
                "sum": float(f"{columns[total][place]:.4g}"),
                "loss": float(f"{columns['loss'][place]:.4g}"),
            }
        )
    all_losses, all_utilities, all_flags = (np.concatenate(parts) for parts in (losses, utilities, flags))
    levels = {"loss": loss_levels(all_losses), "utility": utility_levels(all_utilities[all_flags == SUPERVISED])}
    text_type = np.dtype("<u2" if len(names) <= 1 << 16 else "<u4")
    arrays = [
        np.concatenate(places).astype(text_type),
        nearest(levels["loss"], all_losses),
        nearest(levels["utility"], all_utilities),
        all_flags,
    ]
    description = {
        "name": name,
        "texts": list(names),
        "bytesText": text_type.itemsize,
        "bytesRank": 0,
        "levels": rounded(levels),
        "numScored": len(columns[rank]),
        "sequences": sequences,
    }
    packed = gzip.compress(b"".join(array.tobytes() for array in arrays), compresslevel=6, mtime=0)
    return description, base64.b64encode(packed).decode()
