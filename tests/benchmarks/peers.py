"""Target tokens per CPU second of `vcore_ds`, as shipped and at its best settings, compared with other trainers at
theirs.

    python -m tests.benchmarks.peers [--steps 4] [--repetitions 3] [--peer-python PATH] [--only NAME ...]

Every trainer trains the model of `peer_fixture.py` on the same 32 traces a step, in bf16 on two CPU ranks of ZeRO-3.
Ours and the bare DeepSpeed loop share two processes and take turns, step by step; TRL runs in separate processes
between two repetitions, with the Python of `--peer-python`, an environment that has trl, deepspeed and accelerate.
CPU seconds are user and system time of both ranks, without the first step: on a shared machine they vary less than wall
time. Ratios are taken repetition by repetition.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks import overhead, peer_fixture
from tests.helpers import step_runs
from tests.helpers.ranks import run_ranks
from vcore_ds.common.random_streams import Stream
from vcore_ds.config.load import SHIPPED_DEEPSPEED_CONFIGS
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch, collate, pack
from vcore_ds.data.dataset import RandomDraws
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.planning.batch_layout import pack_batch, split_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import TimeModel
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.feed import Feed
from vcore_ds.training.setup import build_engine, build_estimator, plan_ranks

FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 1e-2}}
SFT = {"method": {"name": "sft"}}
PACKED = {"batch": {"pack_tokens_per_rank": 1024}, "engine": {"coalesce_gradient_reduction": True}}
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": SFT,
    "sft, packed": SFT | PACKED,
    "finite difference": FINITE_DIFFERENCE,
    "jvp": {},
}
"""Name -> sections of the recipe that differ from its defaults."""
BARE = {"bare loop, 4 a micro-batch": 4, "bare loop, packed": None}
TRL = "trl"


class Traces(list[TokenizedSequence]):
    """The fixture as a data set that a `Feed` reads."""

    def __init__(self) -> None:
        super().__init__(
            TokenizedSequence(
                i, np.array(ids, dtype=np.int32), np.arange(len(ids)) >= peer_fixture.count_prompt_tokens(len(ids))
            )
            for i, ids in enumerate(peer_fixture.draw_token_ids())
        )
        self.lengths = np.array([len(trace) for trace in self], dtype=np.int32)


class FixtureOrder:
    """The main batches, the same for every trainer."""

    def step(self, k: int) -> list[int]:
        return peer_fixture.draw_step_ids(k)


class OurLoop:
    """The steps of `vcore-ds train`."""

    def __init__(self, folder: Path, traces: Traces, sections: dict[str, dict[str, Any]]):
        engine = {"deepspeed_config": "ds_configs/zero3_bf16.json"} | sections.get("engine", {})
        self.recipe: Recipe = step_runs.make_recipe(
            **{
                **sections,
                "model": {"path": str(folder / peer_fixture.MODEL), "precision": "bf16"},
                "data": {"train_path": "none", "cutoff_length": peer_fixture.LONGEST},
                "batch": {"global_size": peer_fixture.BATCH_SIZE} | sections.get("batch", {}),
                "engine": engine,
            }
        )
        plan = plan_ranks(derive_plan_settings(self.recipe))
        self.engine = build_engine(
            derive_plan_settings(self.recipe), deepspeed_config(derive_plan_settings(self.recipe), plan)
        )
        sections = (self.recipe.method, self.recipe.probe, self.recipe.utility)
        self.estimator = build_estimator(*sections, self.engine, batches_per_pass=plan.batches_per_utility_pass)
        probes = None
        if self.estimator.direction is not None:
            probes = RandomDraws([len(traces)], peer_fixture.PROBE_SIZE, 0, Stream.PROBE)
        self.feed = Feed(traces, plan, FixtureOrder(), probes, traces, None, traces, pad_token_id=0, probe_every=1)

    def step(self, k: int) -> None:
        step_runs.train_step(self.engine, self.recipe, self.feed.step(k), self.estimator)


class BareLoop:
    """`overhead.BareLoop` with long sequences beside long ones; or with packs, whose sequences the model tells apart by
    their positions."""

    def __init__(self, folder: Path, traces: Traces, micro_batch_size: int | None):
        self.traces, self.micro_batch_size = traces, micro_batch_size
        config = json.loads((SHIPPED_DEEPSPEED_CONFIGS / "zero3_bf16.json").read_text())
        config |= {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
        model = AutoModelForCausalLM.from_pretrained(folder / peer_fixture.MODEL, dtype=torch.bfloat16)
        self.loop = overhead.BareLoop(model, config)

    def step(self, k: int) -> None:
        self.loop.step(self.make_batches(peer_fixture.draw_step_ids(k)))

    def make_batches(self, ids: Sequence[int]) -> list[Batch]:
        lengths = [len(self.traces[i]) for i in ids]
        groups: dict[str, Any] = dict(num_groups=layout.size("shards"))
        if self.micro_batch_size is not None:
            spread = split_batch(lengths, **groups, micro_batch_size=self.micro_batch_size)
        else:
            work = TimeModel(ModelShape(8, 4, 2, 64, 1_044_480), 2, 2).work
            spread = pack_batch(lengths, **groups, pack_tokens=peer_fixture.LONGEST, work=work, micro_step_cost=0.0)
        batches = []
        for ranks in spread:
            sequences = [self.traces[ids[i]] for i in ranks[layout.rank("shards")]]
            batches.append(collate(sequences, 0) if self.micro_batch_size is not None else pack([sequences], 0))
        return batches


def measure(folder: Path, names: Sequence[str], num_steps: int) -> dict[str, tuple[float, float]]:
    """CPU seconds of this rank and wall seconds of `num_steps` steps, by name."""
    traces = Traces()
    makers: dict[str, Callable[[], OurLoop | BareLoop]] = {
        name: lambda sections=sections: OurLoop(folder, traces, sections) for name, sections in OURS.items()
    } | {name: lambda micro=micro: BareLoop(folder, traces, micro) for name, micro in BARE.items()}
    loops = {name: makers[name]() for name in makers if name in names}
    seconds = dict.fromkeys(loops, (0.0, 0.0))
    for k in range(num_steps + 1):
        order = list(loops)
        for name in order[k % len(order) :] + order[: k % len(order)]:
            torch.distributed.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            loops[name].step(k)
            torch.distributed.barrier()
            if k > 0:  # the first step allocates, and records ZeRO-3's trace
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                seconds[name] = (seconds[name][0] + cpu, seconds[name][1] + wall)
    return seconds


def measure_trl(folder: Path, python: str, num_steps: int) -> tuple[float, float]:
    """CPU seconds of both ranks of TRL, and wall seconds."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    output = folder / "trl.json"
    ranks = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        command = [python, "-m", "tests.benchmarks.peer_trl", str(folder), str(num_steps), f"{output}.{rank}"]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    exit_codes = [process.wait() for process in ranks]
    if any(exit_codes):
        sys.exit(f"TRL failed under {python}")
    seconds = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(2)]
    return sum(cpu for cpu, _ in seconds), seconds[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peer-python", help="Python of an environment with trl; without it TRL is left out")
    parser.add_argument("--only", nargs="+", default=[*OURS, *BARE, TRL], help="names of loops")
    arguments = parser.parse_args()
    num_targets = sum(peer_fixture.count_targets(peer_fixture.draw_step_ids(k)) for k in range(1, arguments.steps + 1))
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peer_fixture.write(folder)
        for _ in range(arguments.repetitions):
            first, second = run_ranks(measure, 2, folder, arguments.only, arguments.steps, timeout_seconds=3600)
            for loop, (cpu, wall) in first.items():
                seconds.setdefault(loop, []).append((cpu + second[loop][0], wall))
            if arguments.peer_python and TRL in arguments.only:
                seconds.setdefault(TRL, []).append(measure_trl(folder, arguments.peer_python, arguments.steps))
    print(f"{num_targets:,} target tokens in {arguments.steps} steps; min, median, max of the repetitions")
    best = max(
        (name for name in seconds if name in (*BARE, TRL)), key=lambda name: -total_cpu(seconds[name]), default=None
    )
    for loop, times in seconds.items():
        per_cpu = sorted(num_targets / cpu for cpu, _ in times)
        per_wall = statistics.median(num_targets / wall for _, wall in times)
        line = f"{loop:<38} {per_cpu[0]:7,.0f} {statistics.median(per_cpu):7,.0f} {per_cpu[-1]:7,.0f} per CPU second"
        if best is not None:
            ratios = sorted(theirs / ours for (theirs, _), (ours, _) in zip(seconds[best], times, strict=True))
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            line += f" ({per_wall:,.0f} wall); {spread} x {best}"
        print(line)


def total_cpu(times: Sequence[tuple[float, float]]) -> float:
    return sum(cpu for cpu, _ in times)


if __name__ == "__main__":
    main()
