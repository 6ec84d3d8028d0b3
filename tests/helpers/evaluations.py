"""Evaluation folders as `vcore-ds eval` writes them, with chosen answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.training.evaluation_folder import Evaluation, SampleResult, summarize, write_evaluation, write_samples

SAMPLING = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 8192, "seed": 0}


def write_answers(
    folder: Path,
    tasks: Mapping[str, Sequence[Sequence[int]] | np.ndarray],
    *,
    truncated: int = 0,
    sampling: Mapping[str, Any] = SAMPLING,
    model: str | None = None,
) -> Path:
    """Write an evaluation. `tasks`: by name, whether each sample of each problem is right, `[problems, samples]`.
    `truncated`: number of samples, the first of each task, that are truncated and have no answer. `model`: path of the
    evaluated model; a path in `folder` by default."""
    folder.mkdir(parents=True)
    results = {}
    for name, correct in tasks.items():
        samples = [
            SampleResult(f"{name}-{i:04d}", k, bool(right), True, False, 100, "42", "\\boxed{42}")
            for i, row in enumerate(correct)
            for k, right in enumerate(row)
        ]
        for i in range(truncated):
            one = samples[i]
            samples[i] = SampleResult(one.problem_id, one.sample, one.correct, False, True, 8192, None, "so we have")
        write_samples(folder, name, samples)
        results[name] = summarize(samples)
    described = {"path": model or str(folder / "model"), "base": None, "adapter": None}
    write_evaluation(folder, Evaluation(described, None, dict(sampling), {"vcore_ds": "1"}, results))
    return folder
