"""How well scores find right traces and predict the effect of training on them: ours and Bergson's, on the small task.

    python -m tests.experiments.peer_scores run --peer-python PATH [--seeds 0 1 2] [--halves 40]
    python -m tests.experiments.peer_scores report

In the central cell of `whole_traces.py`, with the model that its runs start from: systematic noise, 60% of 1,024 traces
wrong, a pool of 8 right ones. Bergson (`pip install bergson` in a separate environment, whose Python is PATH) only
collects the gradients of linear layers, so its dot product must equal `utility, linear layers`.

Measures, for each seed:

    AUC       probability that a right trace is above a wrong one
    recall    share of right traces among the quarter with the highest scores
    LDS       linear datamodelling score (arXiv:2303.14186): Spearman's correlation, over random halves of the traces,
              of the sum of a half's scores with the fall of the pool's loss when the model is trained on that half

Predicted before the first run: Bergson's dot product equals our utilities of linear layers to 1e-5; AUC of all gradient
scores within 0.03 of each other and above 0.95; recall above 0.9; LDS positive for all of them, EK-FAC's the highest;
the loss worse in all three.
"""

import argparse
import copy
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.experiments import selection, task, whole_traces
from tests.experiments.directions import Direction, mean_over_sequences, token_losses
from tests.experiments.processes import REPOSITORY, read_results
from tests.experiments.settings import Setting
from tests.experiments.task import Traces
from tests.experiments.training import Run, load_start_model

FOLDER = REPOSITORY / "runs" / "learning_peer_scores"
RESULTS = Path(__file__).with_suffix(".jsonl")
PEER_SCRIPT = Path(__file__).with_name("peer_bergson.py")
PEER_METHODS = ("dot", "cosine", "trackstar", "ekfac")
HALVES_STREAM = 6
LEARNING_RATE = 1e-3
"""Learning rate of the runs on halves."""


def main_setting(seed: int) -> Setting:
    row = whole_traces.grid(*whole_traces.CELLS[0])["sft, quarter of highest utility"]
    return replace(row, seed=seed, learning_rate=LEARNING_RATE)


def compute_scores(model: PreTrainedModel, traces: Traces, pool: Traces) -> dict[str, Tensor]:
    """Name -> scores `[B]`."""
    return {
        "utility": selection.mean_utilities(model, traces, pool, sign=False),
        "utility, sign": selection.mean_utilities(model, traces, pool, sign=True),
        "utility, linear layers": linear_utilities(model, traces, pool),
        "minus the loss": -selection.mean_losses(model, traces),
    }


def linear_utilities(model: PreTrainedModel, traces: Traces, pool: Traces) -> Tensor:
    """Mean utilities `[B]` along the part of the pool's gradient that belongs to the decoder's linear layers."""
    parameters = dict(model.named_parameters())
    direction = Direction(Setting(), parameters, torch.optim.SGD(model.parameters()))
    loss = mean_over_sequences(token_losses(model, pool), pool)
    for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
        if "_proj" in name:
            direction.vector[name].copy_(gradient)
    return traces.mean(direction.utilities(model, traces))


def score_with_bergson(
    python: str, model: PreTrainedModel, traces: Traces, pool: Traces, folder: Path
) -> dict[str, Any]:
    """Method -> output of `peer_bergson.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = copy.deepcopy(model)
    saved.config.max_position_embeddings = 2048  # Bergson's batches have as many tokens
    saved.save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({str(i): i for i in range(task.VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(task.END)).save_pretrained(folder / "model")
    for name, rows in (("traces", traces), ("pool", pool)):
        write_rows(folder / f"{name}.jsonl", rows)
    outputs = {}
    for method in PEER_METHODS:
        names = [str(folder / name) for name in ("model", "traces.jsonl", "pool.jsonl", f"{method}.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache")}
        command = [python, str(PEER_SCRIPT), method, *names]
        with (folder / f"{method}.log").open("w") as log:
            subprocess.run(command, check=True, env=environment, stdout=log, stderr=subprocess.STDOUT)
        outputs[method] = json.loads((folder / f"{method}.json").read_text())
    return outputs


def write_rows(path: Path, traces: Traces) -> None:
    lengths = traces.supervised.sum(1) + task.PROMPT_LENGTH  # padding follows the end
    with path.open("w") as file:
        for ids, length in zip(traces.input_ids.tolist(), lengths.tolist(), strict=True):
            labels = [-100] * task.PROMPT_LENGTH + ids[task.PROMPT_LENGTH : length]
            file.write(json.dumps({"input_ids": ids[:length], "labels": labels}) + "\n")


def train_on_halves(setting: Setting, pool: Traces, num_halves: int) -> tuple[np.ndarray, np.ndarray]:
    """Traces of each half, bool `[halves, B]`, and the fall of the pool's loss after training on it, nats
    `[halves]`."""
    random = np.random.default_rng([HALVES_STREAM, setting.seed])
    halves = np.zeros((num_halves, setting.num_traces), dtype=bool)
    falls = np.zeros(num_halves)
    for number, half in enumerate(halves):
        half[random.choice(setting.num_traces, setting.num_traces // 2, replace=False)] = True
        run = Run(replace(setting, keep=""), load_start_model(setting, whole_traces.FOLDER))
        before = float(selection.mean_losses(run.model, pool).mean())
        run.main.keep(np.flatnonzero(half))
        for k in range(setting.num_steps):
            run.step(k)
        falls[number] = before - float(selection.mean_losses(run.model, pool).mean())
    return halves, falls


def measure_scores(scores: Tensor, traces: Traces, halves: np.ndarray, falls: np.ndarray) -> dict[str, float]:
    wrong, values = traces.wrong(), scores.double().numpy()
    kept = scores.argsort(descending=True)[: round(selection.KEEP_SHARE * len(traces))]
    return {
        "auc": task.measure_trace_separation(scores, wrong),
        "recall": float((~wrong[kept]).double().mean()),
        "lds": float(spearmanr(halves @ values, falls).statistic),
    }


def run(python: str, seeds: Sequence[int], num_halves: int) -> None:
    torch.set_num_threads(1)
    whole_traces.FOLDER.mkdir(parents=True, exist_ok=True)
    done = {result["seed"] for result in read_results(RESULTS)}
    for seed in (seed for seed in seeds if seed not in done):
        setting = main_setting(seed)
        model = load_start_model(setting, whole_traces.FOLDER)
        start = Run(setting, model)
        traces, pool = start.main.whole_pool(), start.trusted.whole_pool()
        ours = compute_scores(model, traces, pool)
        peer = score_with_bergson(python, model, traces, pool, FOLDER / str(seed))
        dot = torch.tensor(peer["dot"]["scores"])
        linear = ours["utility, linear layers"].double()
        halves, falls = train_on_halves(setting, pool, num_halves)
        scores = {**ours, **{f"Bergson, {name}": torch.tensor(output["scores"]) for name, output in peer.items()}}
        result = {
            "seed": seed,
            "num_halves": num_halves,
            "difference": float((dot - linear).norm() / linear.norm()),
            "rows": {name: measure_scores(values, traces, halves, falls) for name, values in scores.items()},
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result, indent=1), flush=True)


def report() -> None:
    results = read_results(RESULTS)
    seeds = ", ".join(str(result["seed"]) for result in results)
    print(f"Seeds {seeds}.\n\n| scores | AUC | recall | LDS |\n| --- | --- | --- | --- |")
    for name in results[0]["rows"]:
        row_results = [result["rows"][name] for result in results]
        cells = [", ".join(f"{row[measure]:.3f}" for row in row_results) for measure in ("auc", "recall", "lds")]
        print(f"| {name} | {' | '.join(cells)} |")
    largest = max(result["difference"] for result in results)
    print(f"\nOur utilities of linear layers and Bergson's dot product differ by {largest:.1e} of their norm at most.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="score and train, one seed after the other")
    running.add_argument("--peer-python", required=True, help="Python of an environment that has Bergson")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--halves", type=int, default=40, help="random halves that the LDS is taken over")
    commands.add_parser("report", help="print the table")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.peer_python, arguments.seeds, arguments.halves)
    else:
        report()


if __name__ == "__main__":
    main()
