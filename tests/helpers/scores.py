"""Scores folders of a store, with given utilities."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands.score.output import count_rows
from vcore_ds.data.scores_folder import (
    NUM_SHOWN,
    ScoredData,
    Scores,
    TrustedSet,
    utility_columns,
    write_scores,
    write_tokens,
    write_traces,
)
from vcore_ds.data.store import TokenStore
from vcore_ds.models.model_identity import compute_model_digest


def write_scores_folder(
    folder: Path,
    store: TokenStore,
    model: Path,
    means: Mapping[str, Sequence[float]],
    sources: Sequence[str] | None = None,
    rows: Sequence[int] | None = None,
) -> Path:
    """Write a folder as `vcore-ds score` would, with the given mean utilities. `means`: by name of the trusted set, a
    mean utility for each sequence of the store. A sequence's sum is its mean times its number of supervised tokens, and
    its tokens' utilities are spread around the mean. `sources`: file of each sequence; None for a single file. `rows`:
    row of each sequence in its file; None for its index in the store."""
    folder.mkdir(parents=True)
    numbers = np.asarray(store.num_supervised_tokens, dtype=np.int64)
    columns: dict[str, Any] = {
        "sequence": np.arange(len(store)),
        "source": list(sources or ["train.jsonl"] * len(store)),
        "row": np.arange(len(store)) if rows is None else np.array(rows, np.int64),
        "num_supervised_tokens": numbers,
        "loss": np.linspace(0.5, 2.5, len(store)).astype(np.float32),
    }
    shown: list[dict[str, Any]] = []
    for name, values in means.items():
        mean = np.array(values, dtype=np.float32)
        rank = np.empty(len(mean), np.int64)
        rank[np.argsort(-mean, kind="stable")] = np.arange(1, len(mean) + 1)
        percentile = (100 * (1 - (rank - 1) / max(1, len(mean) - 1))).astype(np.float32)
        columns |= dict(zip(utility_columns(name), (mean * numbers, mean, rank, percentile), strict=True))
        for i in np.flatnonzero((rank <= NUM_SHOWN) | (rank > len(mean) - NUM_SHOWN)).tolist():
            sequence, num_tokens = store[i], int(numbers[i])
            spread = np.linspace(-1, 1, num_tokens) if num_tokens > 1 else np.zeros(1)
            row = {"set": name, "sequence": i, "tokens": sequence.input_ids, "supervised": sequence.supervised}
            row |= {"utilities": (mean[i] + spread).astype(np.float32)}
            shown.append(row | {"losses": np.linspace(0, 3, num_tokens).astype(np.float32)})
    tokenizer = store.manifest["tokenizer"]
    data = ScoredData(
        str(store.folder),
        store.digest,
        len(store),
        tokenizer["hash"],
        tokenizer["chat_template_hash"],
        int(numbers.sum()),
        {source["file"]: source["fingerprint"] for source in store.manifest.get("source", []) if "file" in source},
        **count_rows(store),
    )
    sets = {name: TrustedSet(f"{name}.jsonl", "0" * 64, 8, 1.5, 0.25, 0.5, -0.1) for name in means}
    write_traces(folder, columns)
    write_tokens(folder, shown)
    made_with = (str(model), compute_model_digest(str(model)), [], "sgd", "sequence")
    write_scores(folder, Scores(data, *made_with, sets, "0", "2026-11-23T00:00:00Z"))
    return folder
