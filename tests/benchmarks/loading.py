"""Bytes read, host memory and seconds of loading into shards, compared with transformers, on four ranks.

    python -m tests.benchmarks.loading [--rounds 3] [--models small large] [--folder DIR]

The two ways take turns, with new processes for each load and from a cold page cache (the model's files are dropped from
it). Models have random weights and are written to a temporary folder in `--folder`, which needs room for 4.6 GB:

- small: the shape of SmolLM2-135M, an fp32 file of 538 MB, loaded in bf16, so that every value is cast
- large: a Qwen3 of 2.0 billion parameters, tied embeddings, bf16 files of at most 1 GB, 4.0 GB together, loaded in bf16

Counted on each rank while it loads: bytes fetched from the disk for it (`read_bytes` of /proc/self/io: reads and mapped
pages alike), bytes asked for in reads (`rchar`, without mapped pages), elements of broadcasts in bytes,
and private memory (RssAnon, sampled every 2 ms) beyond that before. glibc is told to return freed memory, of which it
otherwise keeps, by chance, up to the size of the model.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.engine.sharded_loading import load_and_broadcast, load_sharded

NUM_RANKS = 4
WAYS = {"one process reads": load_and_broadcast, "every rank reads": load_sharded}
MODELS: dict[str, tuple[PretrainedConfig, torch.dtype]] = {
    "small": (
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        ),
        torch.float32,
    ),
    "large": (
        Qwen3Config(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=39,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        torch.bfloat16,
    ),
}


class Measured(NamedTuple):
    """Measurements of one rank's load."""

    from_disk: int
    asked_for: int
    broadcast: int
    peak: int
    shards: int
    seconds: float


def load(folder: str, way: str) -> Measured:
    broadcast, peak, done = 0, 0, threading.Event()
    real, before = deepspeed.comm.broadcast, read_status_bytes("RssAnon:")

    def count_and_broadcast(tensor: torch.Tensor, *arguments, **keywords):
        nonlocal broadcast
        broadcast += tensor.nbytes
        return real(tensor, *arguments, **keywords)

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, read_status_bytes("RssAnon:") - before)

    deepspeed.comm.broadcast = count_and_broadcast
    watcher = threading.Thread(target=watch)
    watcher.start()
    torch.distributed.barrier()
    io, started = read_io_bytes(), time.perf_counter()
    model = WAYS[way](
        folder, tiny.deepspeed_config(bf16=True), dtype=torch.bfloat16, attention="auto", gradient_checkpointing=False
    )
    torch.distributed.barrier()
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    read = {key: value - io[key] for key, value in read_io_bytes().items()}
    shards = sum(parameter.ds_tensor.nbytes for parameter in model.parameters())
    return Measured(read["read_bytes"], read["rchar"], broadcast, peak, shards, seconds)


def read_status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def read_io_bytes() -> dict[str, int]:
    return {
        key: int(value)
        for key, value in map(str.split, Path("/proc/self/io").read_text().replace(":", "").splitlines())
    }


def write_model(name: str, folder: str) -> int:
    """Write the model; returns the bytes of its files."""
    config, dtype = MODELS[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size="1GB")
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def format_mb(values: list[int]) -> str:
    low, high = round(min(values) / 1e6), round(max(values) / 1e6)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for name in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="loading_") as temporary:
            folder = Path(temporary)
            # In a separate process, so that its memory is freed.
            (num_bytes,) = run_ranks(write_model, 1, name, str(folder))
            loads: dict[str, list[list[Measured]]] = {way: [] for way in WAYS}
            for k in range(arguments.rounds):
                for way in list(WAYS)[:: 1 if k % 2 == 0 else -1]:
                    drop_from_cache(folder)
                    loads[way].append(run_ranks(load, NUM_RANKS, str(folder), way))
        print(f"{name}: files of {num_bytes / 1e6:,.0f} MB, {NUM_RANKS} ranks, MB on rank 0 | on the others")
        for way, rounds in loads.items():
            first, others = [ranks[0] for ranks in rounds], [one for ranks in rounds for one in ranks[1:]]
            for field in ("from_disk", "asked_for", "broadcast", "peak", "shards"):
                pair = (format_mb([getattr(one, field) for one in group]) for group in (first, others))
                print(f"  {way:<18} {field:<10} {' | '.join(pair)}")
            seconds = [max(one.seconds for one in ranks) for ranks in rounds]
            print(f"  {way:<18} seconds    {statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})")


if __name__ == "__main__":
    main()
