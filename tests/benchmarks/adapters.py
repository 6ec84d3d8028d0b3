"""Time of a LoRA step whose adapters are added before rounding, over the same step with the forward of peft.

    python -m tests.benchmarks.adapters [--rounds 7] [--output FILE.json]

Batches, model and ZeRO-3 settings of `tests.benchmarks.overhead`, adapters of rank 8 on every linear layer, loaded as a
run loads them: base in bf16, adapters in fp32. The engines take turns, step by step over the same batches; ratios are
taken round by round.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
from peft.tuners import lora
from torch import nn

from tests.benchmarks.overhead import MODEL, VARIANTS, deepspeed_config, make_feed, ratio
from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import StepBatches
from vcore_ds.models.lora_linear import LoraLinear
from vcore_ds.train.settings import derive_engine_settings
from vcore_ds.train.setup import build_engine

METHODS = ("sft", "jvp")


def use_peft_forward(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is LoraLinear:
            module.__class__, module.base_layer.__class__ = lora.Linear, nn.Linear


class Loop:
    def __init__(self, method: str, folder: str, dropout: float):
        model = {"path": folder, "precision": "bf16"}
        adapters = {"rank": 8, "alpha": 16, "dropout": dropout, "target_modules": "all-linear"}
        self.recipe = step_runs.make_recipe(model=model, lora=adapters, **VARIANTS[method].sections)
        self.engine = build_engine(derive_engine_settings(self.recipe), deepspeed_config())
        self.estimator = step_runs.make_estimator(self.recipe, self.engine)

    def step(self, batches: StepBatches) -> None:
        step_runs.train_step(self.engine, self.recipe, batches, self.estimator)


def measure(num_rounds: int, folder: str, dropout: float) -> dict[str, list[float]]:
    feed, loops = make_feed(), {}
    for method in METHODS:
        loops[method], loops[f"{method}, peft"] = (Loop(method, folder, dropout) for _ in range(2))
        use_peft_forward(loops[f"{method}, peft"].engine.module)
    seconds = {name: [] for name in loops}
    for k in range(num_rounds + 1):
        batches = feed.step(k)
        names = list(loops)
        for name in names[k % 4 :] + names[: k % 4]:
            torch.distributed.barrier()
            start = time.perf_counter()
            loops[name].step(batches)
            torch.distributed.barrier()
            if k > 0:  # the first round allocates, and records ZeRO-3's trace
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of the four loops")
    parser.add_argument("--dropout", type=float, default=0.1, help="of the adapters; the recipes: 0.05, 0.1")
    parser.add_argument("--output", help="write the numbers as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny.qwen3(tied=True, dtype=torch.bfloat16, **MODEL).save_pretrained(folder)
        seconds = run_ranks(measure, 2, arguments.rounds, folder, arguments.dropout, timeout_seconds=3600)[0]
    for name, times in seconds.items():
        print(f"  {name:10} median {statistics.median(times):6.2f} s a step")
    ratios = {f"{method} / {method}, peft": ratio(seconds[method], seconds[f"{method}, peft"]) for method in METHODS}
    for pair, statistic in ratios.items():
        print(f"{pair:18} " + "  ".join(f"{name} {value:.3f}" for name, value in statistic.items()))
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump({"seconds": seconds, "ratios": ratios}, file, indent=2)


if __name__ == "__main__":
    main()
