"""Whether utilities tell right from wrong solutions of CHAMP: SmolLM2-135M-Instruct, the quickstart's trusted traces.

    python -m tests.experiments.champ_scores

Scores the recorded solutions whose answer can be judged (`judged_traces`), of at most 320 tokens and of problems that
are not among the 16 trusted traces, along the gradient of these: `vcore-ds score` with the quickstart's recipe. Prints
the AUC, the probability that a right solution scores above a wrong one: over all pairs, and over pairs of the same
problem, which excludes the kind of problem; with 95% intervals from 2,000 resamplings of the problems.

Predicted before the first run: a model of this size cannot tell a right solution of a competition problem from a wrong
one, but style can (right ones are by GPT-4 more often): 0.5 to 0.65 over all pairs, 0.5 within 0.1 within problems,
and no better than the loss or the length.
"""

import json
import shutil

import numpy as np

from tests.experiments.processes import REPOSITORY, run_vcore_ds, write_json_lines
from vcore_ds.commands.quickstart.traces import (
    MAX_JUDGED_TOKENS,
    champ_problems,
    judged_traces,
    prepare_quickstart_data,
)
from vcore_ds.data.scores_folder import read_traces

FOLDER = REPOSITORY / "runs" / "champ_scores"
NUM_RESAMPLED = 2000


def auc(values: np.ndarray, is_right: np.ndarray, problems: np.ndarray, *, within: bool) -> float:
    """Probability that a right solution is above a wrong one, of the same problem where `within`; ties count half.
    NaN without a pair."""
    right, wrong = np.flatnonzero(is_right), np.flatnonzero(~is_right)
    higher = np.sign(values[right][:, None] - values[wrong][None]) / 2 + 0.5
    pairs = problems[right][:, None] == problems[wrong][None] if within else np.ones_like(higher, dtype=bool)
    return float(higher[pairs].mean()) if pairs.any() else float("nan")


def resample_interval(values: np.ndarray, is_right: np.ndarray, problems: np.ndarray, *, within: bool) -> np.ndarray:
    """95% interval of `auc`, `[2]`, by resampling problems; one that is drawn twice counts as two problems."""
    random, names = np.random.default_rng(0), np.unique(problems)
    traces_by_problem = [np.flatnonzero(problems == name) for name in names]
    areas = []
    for _ in range(NUM_RESAMPLED):
        drawn = [traces_by_problem[i] for i in random.integers(len(names), size=len(names))]
        rows = np.concatenate(drawn)
        copies = np.repeat(np.arange(len(drawn)), [len(traces) for traces in drawn])
        areas.append(auc(values[rows], is_right[rows], copies, within=within))
    return np.nanquantile(areas, [0.025, 0.975])


def main() -> None:
    data = prepare_quickstart_data(REPOSITORY / "runs" / "quickstart_data")
    trusted = {json.loads(line)["problem"] for line in data.trusted.read_text().splitlines()}
    traces = [trace for trace in judged_traces(champ_problems()) if trace["problem"] not in trusted]
    write_json_lines(FOLDER / "judged.jsonl", traces)
    paths = (f"data.train_path={FOLDER}/judged.jsonl", f"data.probe_path={data.trusted}")
    limits = (f"data.cutoff_length={MAX_JUDGED_TOKENS}", f"data.cache_dir={FOLDER}/cache")
    shutil.rmtree(FOLDER / "scores", ignore_errors=True)
    run_vcore_ds("score", *paths, *limits, "--output", str(FOLDER / "scores"))
    columns = read_traces(
        FOLDER / "scores", ["row", "loss", "num_supervised_tokens", "utility_mean.trusted", "utility_sum.trusted"]
    )
    is_right = np.array([traces[i]["is_right"] for i in columns["row"]])
    problems = np.array([traces[i]["problem"] for i in columns["row"]])
    measures = {
        "utility, mean": columns["utility_mean.trusted"],
        "utility, sum": columns["utility_sum.trusted"],
        "minus the loss": -columns["loss"],
        "number of tokens": columns["num_supervised_tokens"],
    }
    print(f"{is_right.sum()} right and {(~is_right).sum()} wrong solutions of {len(np.unique(problems))} problems")
    print("| AUC, right above wrong | all pairs | pairs of a problem |\n|---|---|---|")
    for name, values in measures.items():
        cells = []
        for within in (False, True):
            low, high = resample_interval(values, is_right, problems, within=within)
            cells.append(f"{auc(values, is_right, problems, within=within):.2f} ({low:.2f} to {high:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
