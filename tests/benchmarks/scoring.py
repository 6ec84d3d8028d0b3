"""What a scored trace costs (`vcore-ds score`) over a trace of an SFT step, and how right its utility is in bf16.

    python -m tests.benchmarks.scoring [--rounds 7] [--only full lora checkpointed] [--output FILE.json]

Model, batches and SFT step are those of `overhead`: |B| = 32, two CPU ranks. SFT takes a step on a batch while the same
batch is scored along a direction that is there already, whole and with a rank of 16 (`probe.rank`; adapters' matrices
are kept whole), in turns. Ratios are taken round by round, of seconds and of
rank 0's CPU seconds, which other load on the machine moves less. The correlation is Spearman's, over 128 traces, of
each trace's mean utility in bf16 with the same in fp32, along the same direction.

Predicted before the first run, by counting products, with a forward as 1: an SFT step is 3 (2 with adapters alone, 4
where activations are recomputed), a scored batch 3 (2 with adapters). So 1 without checkpoints and 0.75 with them; less
what a step does beside its products (the update, gradients that are reduced and clipped), which a scoring does not.
Along a direction of a rank, before the first run of that row: 2 of 3, and 2 of 4 with checkpoints, less the same; 0.60
and 0.47.
"""

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

VARIANTS = {
    "full": Variant(SFT),
    "lora": Variant(SFT, lora=True),
    "checkpointed": Variant(SFT, checkpointing=True),
}
NUM_COMPARED = 4
"""Batches of 32 traces."""


def measure(name: str, num_rounds: int) -> dict:
    """Seconds of SFT steps and of scorings, and the rank correlation of the two precisions."""
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
    return dict(seconds=seconds, cpu_seconds=cpu_seconds, spearman=agreement(engine, feed, direction))


def agreement(engine, feed, direction: Direction) -> float:
    """Of the traces' mean utilities in bf16 with those in fp32."""
    means: dict[str, dict[int, float]] = {"bf16": {}, "fp32": {}}
    for k in range(NUM_COMPARED):
        batches = feed.step(k).main
        found = {"bf16": [values for _, values in compute_jvp_losses_and_utilities(engine, direction, batches)]}
        with forward_mode(engine, direction, torch.float32):
            found["fp32"] = [compute_losses_and_utilities(engine, batch)[1] for batch in batches]
        for precision, of_batches in found.items():
            for batch, values in zip(batches, of_batches, strict=True):
                parts = values.double().split(batch.num_supervised_tokens().tolist())
                means[precision] |= {i: float(part.mean()) for i, part in zip(batch.sequence_ids, parts, strict=False)}
    of_ranks = layout.gather_objects("job", means)
    whole = {precision: {i: v for of_rank in of_ranks for i, v in of_rank[precision].items()} for precision in means}
    ids = sorted(whole["fp32"])
    return float(spearmanr([whole["bf16"][i] for i in ids], [whole["fp32"][i] for i in ids]).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each ratio")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="these ratios alone")
    parser.add_argument("--output", help="write the numbers as JSON")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.only:
        measured = run_ranks(measure, 2, name, arguments.rounds, timeout_seconds=3600)[0]
        print(f"{name}: Spearman bf16 / fp32 {measured['spearman']:.4f}")
        found[name] = measured
        for clock in ("seconds", "cpu_seconds"):
            of_clock = measured[clock]
            for what in of_clock:
                if what == "sft":
                    continue
                of_pair = ratio(of_clock[what], of_clock["sft"])
                found[name][f"ratio_of_{clock}, {what}"] = of_pair
                medians = (f"{of} {statistics.median(of_clock[of]):.2f}" for of in ("sft", what))
                print(f"  {clock:11} {what} / SFT", *(f"{k} {v:.3f}" for k, v in of_pair.items()), *medians, flush=True)
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
