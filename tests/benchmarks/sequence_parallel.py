"""Sequence parallelism on 4 ranks: memory of a rank by length and sequence-parallel size, and the time of a step.

    python -m tests.benchmarks.sequence_parallel memory
    python -m tests.benchmarks.sequence_parallel time [--rounds 5]
    python -m tests.benchmarks.sequence_parallel long

`memory`: peak of a forward and backward of one sequence beyond the tensors that persist between steps, counted tensor
by tensor, for 8,192 to 32,768 tokens. All that grows with the length should be divided by the number of ranks.

`time`: seconds of a step on four sequences of very different lengths, at the sequence-parallel size that the plan
chooses and without sequence parallelism, in turns.

`long`: one step on a sequence of 131,072 tokens, split over four ranks.
"""

import argparse
import statistics
import time

import torch

from tests.helpers import step_runs, tiny
from tests.helpers.allocations import Allocations
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import Batch, StepBatches
from vcore_ds.distributed import layout
from vcore_ds.planning.model_shape import ModelShape, layer_parameters
from vcore_ds.planning.spread import CPU, MicroBatchLimit, TimeModel, spread
from vcore_ds.train.settings import derive_step_settings
from vcore_ds.train.step import take_direction
from vcore_ds.utility.estimators import compute_jvp_utilities

NUM_RANKS = 4
SIZES = (1, 2, 4)
LENGTHS = (8_192, 16_384, 32_768)
LONGEST_IN_BLOCKS = 16_384
"""Tokens of the longest sequence whose attention is also measured in blocks, which takes minutes on a CPU."""
LONG = 131_072
SMALL = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16)

SEQUENCES = (3_072, 768, 384, 192)
MEDIUM = dict(
    hidden_size=256, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    num_hidden_layers=4,
)  # fmt: skip


def make_sequence(num_tokens: int, sequence_parallel: int) -> Batch:
    """One sequence whose tokens are all supervised except the first."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, tiny.VOCABULARY, (1, num_tokens), generator=generator)
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch([num_tokens], ids, labels, sequence_parallel=sequence_parallel)


def measure_memory() -> dict[tuple[str, int, int], int]:
    """(pass, tokens, sequence-parallel size) -> peak bytes."""
    layout.make_sequence_groups(SIZES)
    recipe = step_runs.make_recipe()
    engine = step_runs.make_engine(tiny.token_loss_model(checkpointing=True, **SMALL), recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    take_direction(estimator.direction, derive_step_settings(recipe), [make_sequence(256, 1)])
    peaks = {}
    for num_tokens in LENGTHS:
        for k in SIZES:
            batch = make_sequence(num_tokens, k)
            with Allocations() as allocations, engine.accumulation(1):
                engine.backward(engine.token_losses(batch).mean())
            peaks["forward and backward", num_tokens, k] = allocations.peak_bytes
            if num_tokens > LONGEST_IN_BLOCKS:
                continue
            with Allocations() as allocations:
                compute_jvp_utilities(engine, estimator.direction, [batch])
            peaks["forward mode", num_tokens, k] = allocations.peak_bytes
    engine.close()
    return peaks


def report_memory() -> None:
    peaks = run_ranks(measure_memory, NUM_RANKS, timeout_seconds=3600)[0]
    for kind in ("forward and backward", "forward mode"):
        print(f"{kind}: peak MiB of a rank, and KiB for each of its tokens (T / k)")
        per_token = []
        for num_tokens in sorted({n for measured, n, _ in peaks if measured == kind}):
            cells = []
            for k in SIZES:
                peak = peaks[kind, num_tokens, k]
                per_token.append(peak / (num_tokens / k) / 2**10)
                cells.append(f"k = {k}: {peak / 2**20:7.1f} MiB {per_token[-1]:6.2f} KiB")
            print(f"  {num_tokens:6,} tokens   " + "   ".join(cells))
        middle = (max(per_token) + min(per_token)) / 2
        print(f"  proportional to T / k within {max(per_token) / middle - 1:.1%}")


def make_packs(sequence_parallel: int | None) -> tuple[int, list[Batch]]:
    """This rank's packs of the four sequences, and their sequence-parallel size; None lets the plan choose the size."""
    hidden, heads, kv_heads, head_dim = (
        MEDIUM[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    parameters = layer_parameters(hidden, heads, kv_heads, head_dim, MEDIUM["intermediate_size"])
    shape = ModelShape(MEDIUM["num_hidden_layers"], heads, kv_heads, head_dim, parameters)
    chosen = spread(
        range(len(SEQUENCES)),
        SEQUENCES,
        parallel_sizes=SIZES if sequence_parallel is None else [sequence_parallel],
        limit=MicroBatchLimit(pack_tokens_per_rank=sum(SEQUENCES)),
        time_model=TimeModel(shape, NUM_RANKS, NUM_RANKS, CPU),
    )
    k, packs = chosen.sequence_parallel, []
    for ids in chosen.list_group_ids(layout.rank("data", k)):
        parts = [make_sequence(SEQUENCES[i], 1) for i in ids]
        input_ids, labels = (torch.cat([getattr(p, name) for p in parts], 1) for name in ("input_ids", "labels"))
        lengths = torch.tensor([SEQUENCES[i] for i in ids])
        segments = torch.repeat_interleave(torch.arange(len(ids)), lengths)[None] if len(ids) > 1 else None
        packs.append(Batch(list(ids), input_ids, labels, segments=segments, sequence_parallel=k))
    return k, packs


def measure_times(rounds: int) -> tuple[int, dict[str, list[tuple[float, float]]]]:
    """The sequence-parallel size that the plan chooses, and by method the seconds of a step without and with it."""
    layout.make_sequence_groups(SIZES)
    unshared, (size, shared) = make_packs(1)[1], make_packs(None)
    seconds: dict[str, list[tuple[float, float]]] = {}
    for name, method in {"sft": {"name": "sft"}, "vcore, jvp": {"kl_budget": 0.05}}.items():
        recipe = step_runs.make_recipe(method=method)
        engine = step_runs.make_engine(tiny.token_loss_model(checkpointing=True, **MEDIUM), recipe)
        estimator = step_runs.make_estimator(recipe, engine)

        def measure_step(packs: list[Batch], engine=engine, recipe=recipe, estimator=estimator) -> float:
            batches = StepBatches(packs, packs if estimator.direction is not None else [])
            layout.sum_over("job", [0.0])  # start at the same time
            started = time.perf_counter()
            step_runs.train_step(engine, recipe, batches, estimator)
            return time.perf_counter() - started

        pairs = [(measure_step(unshared), measure_step(shared)) for _ in range(rounds + 1)]
        seconds[name] = pairs[1:]  # the first warms up
        engine.close()
    return size, seconds


def report_times(rounds: int) -> None:
    by_rank = run_ranks(measure_times, NUM_RANKS, rounds, timeout_seconds=3600)
    print(
        f"sequences of {SEQUENCES} tokens on {NUM_RANKS} ranks; the plan chooses sequence-parallel size {by_rank[0][0]}"
    )
    for name in by_rank[0][1]:
        slowest = [
            tuple(max(rank_times[1][name][i][side] for rank_times in by_rank) for side in (0, 1)) for i in range(rounds)
        ]
        ratios = [alone / shared for alone, shared in slowest]
        print(
            f"  {name:<12} {statistics.median(a for a, _ in slowest):.2f} s without sequence parallelism, "
            f"{statistics.median(b for _, b in slowest):.2f} s at that size: {statistics.median(ratios):.2f} x faster "
            f"({min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds)"
        )


def measure_long_step() -> tuple[float, int, float]:
    """Loss, peak bytes and seconds of a step on one very long sequence."""
    layout.make_sequence_groups([NUM_RANKS])
    recipe = step_runs.make_recipe(method={"name": "sft"})
    model = tiny.token_loss_model(checkpointing=True, num_hidden_layers=1, **SMALL)
    engine = step_runs.make_engine(model, recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    batches = StepBatches([make_sequence(LONG, NUM_RANKS)], [])
    started = time.perf_counter()
    with Allocations() as allocations:
        metrics = step_runs.train_step(engine, recipe, batches, estimator)
    engine.close()
    return float(metrics.values["loss"]), allocations.peak_bytes, time.perf_counter() - started


def report_long() -> None:
    for rank, (loss, peak, seconds) in enumerate(run_ranks(measure_long_step, NUM_RANKS, timeout_seconds=3600)):
        print(f"rank {rank}: {LONG:,} tokens, loss {loss:.4f}, peak {peak / 2**20:.0f} MiB, {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "time", "long"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.what == "memory":
        report_memory()
    elif arguments.what == "time":
        report_times(arguments.rounds)
    else:
        report_long()


if __name__ == "__main__":
    main()
