"""Time to score a trace (`vcore-ds score`) over that of an SFT step, and accuracy of its utility in bf16.

    python -m tests.benchmarks.scoring [--rounds 7] [--only full lora checkpointed] [--output FILE.json]

Model, batches and SFT step are those of `overhead`: |B| = 32, two CPU ranks. SFT steps and scoring of the same batch
take turns. Scores are along a given direction, at full rank and at rank 16 (`probe.rank`; adapters' matrices stay at
full rank). Ratios are taken round by round, of seconds and of rank 0's CPU seconds, which depend less on other load.
The correlation is Spearman's, over 128 traces, of the mean utility of a trace in bf16 with that in fp32, along the same
direction.

Predicted before the first run, by counting matrix multiplications, with a forward as 1: an SFT step is 3 (2 with
adapters alone, 4 where activations are recomputed), a scored batch 3 (2 with adapters). So 1 without checkpoints and
0.75 with them, or less, since scoring has no update and neither reduces nor clips gradients. Along a low-rank
direction, predicted before the first run of that row: 2 of 3, and 2 of 4 with checkpoints, or less for the same reason;
0.60 and 0.47."""

import argparse
import json
import statistics
import time
from functools import partial

import torch
from scipy.stats import spearmanr

from tests.benchmarks.overhead import SFT, OurLoop, Variant, make_feed, ratio
from tests.helpers.ranks import run_ranks
from vcore_ds.distributed import layout
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import compute_jvp_losses_and_utilities
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode

VARIANTS = {"full": Variant(SFT), "lora": Variant(SFT, lora=True), "checkpointed": Variant(SFT, checkpointing=True)}
NUM_COMPARED_BATCHES = 4
"""Batches of 32 traces."""


def measure(name: str, num_rounds: int) -> dict:
    """Seconds of SFT steps and of scoring, and the rank correlation of the two precisions."""
    feed, loop = make_feed(), OurLoop(VARIANTS[name])
    engine = loop.engine
    direction = Direction(engine)
    direction.compute(feed.step(0).probe, normalization="sequence", clip=None)
    directions = {"score": direction}
    if not VARIANTS[name].lora:
        directions["score, rank 16"] = direction.with_rank(16)
    seconds: dict[str, list[float]] = {what: [] for what in ("sft", *directions)}
    cpu_seconds: dict[str, list[float]] = {what: [] for what in seconds}
    for k in range(num_rounds + 1):
        batches = feed.step(k)
        works = {
            what: partial(compute_jvp_losses_and_utilities, engine, along, batches.main)
            for what, along in directions.items()
        }
        works["sft"] = partial(loop.step, batches)
        for what in works if k % 2 else reversed(works):
            torch.distributed.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            works[what]()
            cpu = time.process_time() - cpu_start
            torch.distributed.barrier()
            if k > 0:  # the first round allocates, and records ZeRO-3's trace
                seconds[what].append(time.perf_counter() - start)
                cpu_seconds[what].append(cpu)
    return dict(seconds=seconds, cpu_seconds=cpu_seconds, spearman=correlate_precisions(engine, feed, direction))


def correlate_precisions(engine, feed, direction: Direction) -> float:
    """Spearman's correlation of the traces' mean utilities in bf16 with those in fp32."""
    means: dict[str, dict[int, float]] = {"bf16": {}, "fp32": {}}
    for k in range(NUM_COMPARED_BATCHES):
        batches = feed.step(k).main
        utilities = {"bf16": [values for _, values in compute_jvp_losses_and_utilities(engine, direction, batches)]}
        with forward_mode(engine, direction, torch.float32):
            utilities["fp32"] = [compute_losses_and_utilities(engine, batch)[1] for batch in batches]
        for precision, by_batch in utilities.items():
            for batch, values in zip(batches, by_batch, strict=True):
                parts = values.double().split(batch.num_supervised_tokens().tolist())
                means[precision] |= {i: float(part.mean()) for i, part in zip(batch.sequence_ids, parts, strict=False)}
    by_rank = layout.gather_objects("job", means)
    gathered = {precision: {i: v for rank in by_rank for i, v in rank[precision].items()} for precision in means}
    ids = sorted(gathered["fp32"])
    return float(spearmanr([gathered["bf16"][i] for i in ids], [gathered["fp32"][i] for i in ids]).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each ratio")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="only these ratios")
    parser.add_argument("--output", help="write the numbers as JSON")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.only:
        measured = run_ranks(measure, 2, name, arguments.rounds, timeout_seconds=3600)[0]
        print(f"{name}: Spearman bf16 / fp32 {measured['spearman']:.4f}")
        results[name] = measured
        for clock in ("seconds", "cpu_seconds"):
            times = measured[clock]
            for what in times:
                if what == "sft":
                    continue
                ratios = ratio(times[what], times["sft"])
                results[name][f"ratio_of_{clock}, {what}"] = ratios
                medians = (f"{key} {statistics.median(times[key]):.2f}" for key in ("sft", what))
                print(f"  {clock:11} {what} / SFT", *(f"{k} {v:.3f}" for k, v in ratios.items()), *medians, flush=True)
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
