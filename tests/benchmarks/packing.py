"""Training tokens per second with packs against unpacked sequences, on the quickstart's traces.

    make quickstart && python -m tests.benchmarks.packing [--rounds 5]

One engine for each method in the same two processes; the layouts of a batch take turns, step by step over the same
sequences, and the ratios are taken round by round. The model is a Qwen3 of 16.9M parameters in bf16 with ids taken
modulo its vocabulary: only the lengths matter, those of all traces within 1,024 tokens. |B| = 32, |B'| = 4.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from tests.benchmarks.overhead import MODEL, OurLoop, Variant, ratio
from tests.helpers import step_runs
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import Batch, StepBatches, collate, idle_batch, pack
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.dataset import MainOrder
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.packing import Waste
from vcore_ds.planning.spread import CPU, MicroBatchLimit, TimeModel, spread

QUICKSTART = Path("runs/quickstart_data")
NUM_MAIN, NUM_PROBE, CUTOFF = 32, 4, 1024
LAYOUTS = {"unpacked, 1 in a micro-batch": 1, "unpacked, 4 in a micro-batch": 4, "packs of 1,024": None}
METHODS = {"sft": dict(method={"name": "sft"}), "vcore, jvp": dict()}
SHAPE = ModelShape(8, 6, 2, 64, 1_720_320)
"""The model's shape; its attention length is 4,480 tokens."""


def read_traces(folder: str) -> list[TokenizedSequence]:
    store = TokenStore(folder)
    return [
        TokenizedSequence(i, sequence.input_ids % MODEL["vocab_size"], sequence.supervised)
        for i, sequence in enumerate(store)
    ]


def make_batches(ids: list[int], all_traces: list[TokenizedSequence], micro: int | None) -> tuple[list[Batch], Waste]:
    """This rank's micro-batches, and the share of padding and waiting in the global batch."""
    num_ranks = layout.size("shards")
    assignment = spread(
        ids,
        [len(all_traces[i]) for i in ids],
        parallel_sizes=[1],
        limit=MicroBatchLimit(CUTOFF) if micro is None else MicroBatchLimit(None, micro),
        time_model=TimeModel(SHAPE, num_ranks, num_ranks, CPU),
    )
    batches = []
    for positions in assignment.list_group_ids(layout.rank("shards")):
        sequences = [all_traces[i] for i in positions]
        if not sequences:
            batches.append(idle_batch(0))
        else:
            batches.append(collate(sequences, 0) if micro is not None else pack([sequences], 0))
    return batches, assignment.waste


def measure(num_rounds: int, folder: str) -> dict:
    all_traces = read_traces(folder)
    order = MainOrder([len(all_traces)], NUM_MAIN, seed=0)
    seconds_per_token: dict[str, dict[str, list[float]]] = {}
    wastes: dict[str, list] = {name: [] for name in LAYOUTS}
    for method, sections in METHODS.items():
        loop = OurLoop(Variant(sections))
        seconds = seconds_per_token[method] = {name: [] for name in LAYOUTS}
        for k in range(num_rounds + 1):
            names = list(LAYOUTS)
            for name in names[k % len(names) :] + names[: k % len(names)]:
                ids = order.step(k)
                main, waste = make_batches(ids, all_traces, LAYOUTS[name])
                probe, _ = make_batches(order.step(100 + k)[:NUM_PROBE], all_traces, LAYOUTS[name] and 1)
                torch.distributed.barrier()
                started = time.perf_counter()
                batches = StepBatches(main, probe if loop.estimator.direction is not None else [])
                step_runs.train_step(loop.engine, loop.recipe, batches, loop.estimator)
                torch.distributed.barrier()
                if k > 0:  # the first round allocates
                    seconds[name].append((time.perf_counter() - started) / sum(len(all_traces[i]) for i in ids))
                    wastes[name].append((waste.padding_share, waste.rank_imbalance))
        loop.engine.close()
    return dict(seconds_per_token=seconds_per_token, wastes=wastes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(str(QUICKSTART / "SmolLM2-135M-Instruct"))
    folder = find_or_make_store(str(QUICKSTART / "train.jsonl"), tokenizer, cutoff_length=CUTOFF, overlong="drop")
    measured = run_ranks(measure, 2, arguments.rounds, str(folder), timeout_seconds=3600)[0]
    *unpacked, packed = LAYOUTS
    for name, pairs in measured["wastes"].items():
        padding, imbalance = (statistics.mean(values) for values in zip(*pairs, strict=True))
        print(f"{name:<32} padding {padding:6.2%}, slowest rank {imbalance:.3f} x mean")
    for method, times in measured["seconds_per_token"].items():
        for name in LAYOUTS:
            print(f"{method:<12} {name:<32} {1 / statistics.median(times[name]):8.0f} tokens/s")
        for name in unpacked:
            spread = "  ".join(f"{key} {value:.2f}" for key, value in ratio(times[name], times[packed]).items())
            print(f"{method:<12} packed / {name}: {spread}")


if __name__ == "__main__":
    main()
