"""When do utilities find entirely wrong traces, and does it pay (docs/reports/whole-traces.md)?

    python -m tests.experiments.whole_traces run       what is missing of the grid
    python -m tests.experiments.whole_traces report    the tables, from what has been run

Learning rates are chosen for each row in the central cell, on CHOOSING_SEEDS, which no table reports: the rate with
the highest mean accuracy, and the lowest loss among equals. Other cells and pools take the rates of the central one.
Results are appended to RESULTS, and finished runs are skipped, so it may be stopped and started again at any time.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.experiments import task
from tests.experiments.settings import Setting, choose_rate, parse_setting, read_results, whole_traces_table
from tests.experiments.training import CHOOSING, REPORTED, Run, evaluate, keep, load_start_model
from tests.helpers.commands import REPOSITORY

FOLDER = REPOSITORY / "runs" / "learning_whole_traces"
RESULTS = Path(__file__).with_suffix(".jsonl")  # committed with the code, so that the tables can be made again
SEEDS, CHOOSING_SEEDS = (0, 1, 2, 3, 4), (10, 11)
RATES = (3e-4, 1e-3, 3e-3)
NUM_TRACES, NUM_STEPS = 1024, 100
TRUSTED_SHARE = 0.2  # 4 trusted sequences in addition to 16 of the training data
POOL = 8
WITHIN = 0.005  # nats within a trace if the budget is over the batch
CELLS = [(noise, share) for share in (0.6, 0.3, 0.8) for noise in ("systematic", "random")]
"""Noise and share of wrong traces; the central cell first."""
# Size and share of wrong traces of pools in the central cell
POOLS = ((4, 0.0), (16, 0.0), (64, 0.0), (8, 0.25), (16, 0.25))
MAIN_ROWS = (
    "before training",
    "sft",
    "sft + trusted",
    "sft on the pool alone",
    "dft",
    "sft, quarter of lowest loss",
    "sft, quarter of highest utility",
    "vcore, 0.5 nats within",
    "vcore, 1 over the batch",
    "sft, right traces alone",
)
MAJORITY_ROWS = (
    "vcore, training probe, 0.5 within",
    "vcore, training probe, 1 over the batch",
    "vcore, previous step, 0.5 within",
)
"""Additional rows for cells where right traces are the majority."""
POOL_ROWS = (
    "sft",
    "sft + trusted",
    "sft on the pool alone",
    "sft, quarter of highest utility",
    "vcore, 0.5 nats within",
    "vcore, 1 over the batch",
)


def grid(noise: str, wrong_traces: float, pool_size: int = POOL, pool_wrong_traces: float = 0.0) -> dict[str, Setting]:
    """Name -> row, without seed and learning rate (0)."""
    sft = Setting(0.0, num_steps=NUM_STEPS, noise=noise, wrong_traces=wrong_traces, num_traces=NUM_TRACES)
    dft = replace(sft, method="dft")
    with_training_probe = replace(sft, method="vcore", direction="adam", kl_budget=0.5, probe_size=32)
    over_batch = {"kl_budget": WITHIN, "batch_kl_budget": 1.0}
    pool = {"pool_size": pool_size, "pool_wrong_traces": pool_wrong_traces}
    within = replace(with_training_probe, probe_data="pool", probe_size=pool_size, **pool)
    batch = replace(within, **over_batch)
    trusted = {**pool, "trusted_share": TRUSTED_SHARE}
    utility = replace(sft, keep="utility", **pool)
    previous = replace(with_training_probe, probe_source="previous_step")
    return {
        "before training": replace(sft, num_steps=0),
        "sft": sft,
        "sft + trusted": replace(sft, **trusted),
        "sft on the pool alone": replace(sft, main_data="pool", num_traces=0, **pool),
        "dft": dft,
        "dft + trusted": replace(dft, **trusted),
        "sft, random quarter": replace(sft, keep="random"),
        "sft, quarter of lowest loss": replace(sft, keep="loss"),
        "sft, quarter of highest utility": utility,
        "sft, quarter of highest utility, sign": replace(utility, keep="utility_sign"),
        "sft, quarter whose loss fell most": replace(utility, keep="fall"),
        "sft, quarter of highest utility, twice": replace(utility, keep_again=True),
        "vcore, 0.5 nats within": within,
        "vcore, 0.5 nats within, + trusted": replace(within, **trusted),
        "vcore, 0.5 over the batch": replace(batch, batch_kl_budget=0.5),
        "vcore, 1 over the batch": batch,
        "vcore, 2 over the batch": replace(batch, batch_kl_budget=2.0),
        "vcore, 1 over the batch, + trusted": replace(batch, **trusted),
        "vcore, 1 over the batch, quarter of highest utility": replace(batch, keep="utility"),
        "vcore, 1 over the batch, every 5": replace(batch, probe_every=5),
        "vcore, 1 over the batch, B' 2": replace(batch, probe_size=2),
        "vcore, 1 over the batch, B' 2, decay 0.9": replace(batch, probe_size=2, probe_decay=0.9),
        "vcore, 1 over the batch, rank 4": replace(batch, probe_rank=4),
        "vcore, 1 over the batch, rank 16": replace(batch, probe_rank=16),
        "vcore, 0.5 nats within, rank 4": replace(within, probe_rank=4),
        "vcore, 0.5 nats within, rank 16": replace(within, probe_rank=16),
        "vcore, training probe, 0.5 within": with_training_probe,
        "vcore, training probe, 1 over the batch": replace(with_training_probe, **over_batch),
        "vcore, previous step, 0.5 within": previous,
        "vcore, previous step, 1 over the batch": replace(previous, **over_batch),
        "sft, right traces alone": replace(sft, keep="right"),
    }


def make_cell_rows(noise: str, wrong_traces: float) -> dict[str, Setting]:
    """Rows of a cell; the central cell has all."""
    rows = grid(noise, wrong_traces)
    if (noise, wrong_traces) == CELLS[0]:
        return rows
    return {name: rows[name] for name in (*MAIN_ROWS, *(MAJORITY_ROWS if wrong_traces < 0.5 else ()))}


def make_pool_rows(pool_size: int, pool_wrong_traces: float) -> dict[str, Setting]:
    rows = grid(*CELLS[0], pool_size, pool_wrong_traces)
    return {name: rows[name] for name in POOL_ROWS}


def choose_row_rate(name: str, results: Sequence[dict[str, Any]]) -> float:
    """Learning rate of a row of the central cell; raises ValueError if it has not been run at all rates on all
    CHOOSING_SEEDS."""
    row = grid(*CELLS[0])[name]
    return choose_rate(row, list_rates(row), results, CHOOSING_SEEDS)


def list_rates(row: Setting) -> Sequence[float]:
    return RATES if row.num_steps > 0 else RATES[:1]


def iter_runs() -> Iterator[Setting]:
    """Yield all runs: the central cell at all rates on CHOOSING_SEEDS, then everything at the chosen rates on SEEDS."""
    centre = grid(*CELLS[0])
    for seed in CHOOSING_SEEDS:
        for row in centre.values():
            yield from (replace(row, learning_rate=rate, seed=seed) for rate in list_rates(row))
    results = read_results(RESULTS)
    rates = {name: choose_row_rate(name, results) for name in centre}
    tables = [centre, *(make_cell_rows(*cell) for cell in CELLS[1:]), *(make_pool_rows(*pool) for pool in POOLS)]
    for seed in SEEDS:
        for rows in tables:
            yield from (replace(row, learning_rate=rates[name], seed=seed) for name, row in rows.items())


def train(setting: Setting) -> dict[str, Any]:
    """Train once; returns the results."""
    model = load_start_model(setting, FOLDER)
    run, start = Run(setting, model), time.process_time()
    areas, shares = [], []
    for k in range(setting.num_steps):
        if setting.keep and (k == 0 or (setting.keep_again and k == setting.num_steps // 2)):
            scores = keep(setting, model, run)
            areas.append(task.measure_trace_separation(scores, run.main.whole_pool().wrong))
        traces, weights = run.step(k)
        if k % (setting.num_steps // 20) == 0 and setting.main_data == "training":
            shares.append(float(weights[traces.wrong[traces.sequence_index]].sum() / weights.sum()))
            if setting.method != "sft" and not setting.keep:
                scored = weights if run.last_utilities is None else run.last_utilities
                areas.append(task.measure_trace_separation(traces.mean(scored), traces.wrong))
    result = {"seconds": round(time.process_time() - start, 2)}
    evaluated = evaluate(model, CHOOSING if setting.seed in CHOOSING_SEEDS else REPORTED)
    result |= {name: round(value, 5) for name, value in evaluated.items()}
    for name, values in (("auc", areas), ("weight_on_wrong", shares)):
        finite = [value for value in values if value == value]
        if finite:
            result[name] = round(sum(finite) / len(finite), 4)
    return result


def run() -> None:
    """Run the settings that have no result yet, and append their results."""
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    done = {parse_setting(result) for result in read_results(RESULTS)}
    for setting in iter_runs():
        if setting in done:
            continue
        result = train(setting)
        with RESULTS.open("a") as file:
            file.write(json.dumps({**setting.changed(), **result}) + "\n")
        done.add(setting)
        print(setting.changed(), result, flush=True)


def report() -> None:
    results = read_results(RESULTS)
    rates = {}
    for name in grid(*CELLS[0]):
        with contextlib.suppress(ValueError):  # not yet run
            rates[name] = choose_row_rate(name, results)
    for cell in CELLS:
        print(f"### {cell[0].capitalize()} noise, {cell[1]:.0%} of the traces wrong\n")
        print(whole_traces_table(make_cell_rows(*cell), rates, results, SEEDS) + "\n")
    for size, wrong in POOLS:
        print(f"### Pool of {size}" + (f", {wrong:.0%} of it wrong" if wrong else "") + "\n")
        print(whole_traces_table(make_pool_rows(size, wrong), rates, results, SEEDS) + "\n")
    print(f"{len(results)} runs, {sum(result['seconds'] for result in results) / 60:.0f} minutes of one core.")


if __name__ == "__main__":
    {"run": run, "report": report}[sys.argv[1]]()
