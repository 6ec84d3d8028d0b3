"""CPU seconds and memory of `vcore_ds.VcoreLoss` in another trainer's DeepSpeed ZeRO-3, beside a run's separate passes.

python -m tests.benchmarks.trainer [--rounds 7]     one rank, one thread
"""

import argparse
import statistics
import time
from typing import Any

import deepspeed
import torch

import vcore_ds
from tests.helpers import step_runs, tiny
from tests.helpers.allocations import Allocations
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import StepBatches
from vcore_ds.models.causal_lm import TokenLossModel

SIZES = dict(num_hidden_layers=6, hidden_size=256, intermediate_size=1024)


def measure(rounds: int) -> list[str]:
    """Lines with the seconds of steps that take turns, and with their largest and lasting allocations."""
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    batches = [tiny.make_batch(4, 128, seed=seed) for seed in (1, 2)]
    main, probe = [{"input_ids": batch.input_ids, "labels": batch.labels} for batch in batches]
    recipe = step_runs.make_recipe(probe={"direction": "adam", "clip": 1.0}, utility={"fused": False})
    run = step_runs.make_engine(TokenLossModel(tiny.qwen3(**SIZES)), recipe)
    estimator, model = step_runs.make_estimator(recipe, run), tiny.qwen3(**SIZES).train()
    vcore_ds.prepare_zero3(model)
    optimizer, vcore = torch.optim.AdamW(model.parameters(), lr=1e-4), vcore_ds.VcoreLoss([probe])
    config = tiny.deepspeed_config(gradient_clipping=1.0)
    trainer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(loss: Any) -> None:
        trainer.backward(loss)
        trainer.step()

    kinds = {
        "the trainer's own loss": lambda: step(trainer(**main).loss),
        "VcoreLoss": lambda: step(vcore(trainer, main, trainer.optimizer)),
        "a run": lambda: step_runs.train_step(run, recipe, StepBatches([batches[0]], [batches[1]]), estimator),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    num_bytes: dict[str, tuple[int, int]] = {}
    for i in range(rounds + 2):
        for kind, take in kinds.items():
            if i == 1:  # once the optimizer has its moments
                with Allocations() as counted:
                    take()
                    num_bytes[kind] = counted.peak_bytes, counted.live_bytes()
                continue
            started = time.process_time()
            take()
            if i > 1:
                seconds[kind].append(time.process_time() - started)
    gradient, numel = trainer.optimizer.grad_partitions_flat_buffer, sum(p.ds_numel for p in model.parameters())
    lines = [f"{numel:,} parameters; {gradient.nbytes / numel:.1f} bytes each of the saved partial gradient"]
    ratio = statistics.median(a / b for a, b in zip(seconds["VcoreLoss"], seconds["a run"], strict=True))
    for kind, values in seconds.items():
        peak, kept = (size / numel for size in num_bytes[kind])
        lines.append(
            f"{kind}: {statistics.median(values):.2f} s, {peak:.1f} bytes a parameter, {kept:.1f} of them stay"
        )
    return [*lines, f"VcoreLoss / a run, round by round: {ratio:.3f}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    print(*run_ranks(measure, 1, parser.parse_args().rounds)[0], sep="\n")
