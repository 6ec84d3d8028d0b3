"""Host memory while a model is loaded: each rank needs its shards and a constant, not the whole model."""

import threading
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.engine import sharded_loading
from vcore_ds.models import load_causal_lm

pytestmark = pytest.mark.dist

SIZES = dict(vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12, head_dim=256)


def own_memory_bytes() -> int:
    """Memory of this process without the files that it has mapped, which the kernel can drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def load(folder: str) -> tuple[int, int]:
    """(bytes of this rank's shards, highest memory while loading) beyond what was there before."""
    before, highest, done = own_memory_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, own_memory_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with sharded_loading(tiny.deepspeed_config()):
        model = load_causal_lm(folder, dtype=torch.float32, attention="sdpa", gradient_checkpointing=False)
    done.set()
    watcher.join()
    return sum(parameter.ds_tensor.numel() * 4 for parameter in model.parameters()), highest


def test_a_rank_does_not_hold_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # glibc keeps freed memory, by chance up to a whole model's; what is asked here is what loading needs.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    model = tiny.qwen3(**SIZES)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="40MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 8
    del model
    for shards, highest in run_ranks(load, 2, str(tmp_path), start="spawn"):
        print(f"model {total / 2**20:.0f} MiB; a rank's shards {shards / 2**20:.0f}, highest {highest / 2**20:.0f} MiB")
        assert shards == pytest.approx(total / 2, rel=0.01)
        assert highest < shards + total / 4
