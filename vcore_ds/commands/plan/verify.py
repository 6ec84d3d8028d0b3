"""`--verify`: the plan's bytes against those of a real engine, on a small model of the same proportions."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcore_ds.commands.plan.scaled import (
    CASES,
    NUM_RANKS,
    Case,
    recipe_of,
    scaled_shape,
    write_config,
    write_deepspeed_json,
)
from vcore_ds.errors import RunFailed
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.gpus import GPUS, Cluster
from vcore_ds.planning.memory_plan import plan_memory
from vcore_ds.planning.memory_settings import parameter_counts
from vcore_ds.planning.model_shape import ModelShape, shape_on_disk
from vcore_ds.planning.passes import StepPasses
from vcore_ds.planning.step_cost import StepModel
from vcore_ds.planning.utilization import summarize

BOUND = 0.10
"""Largest error that passes, as a share of what was measured."""

MODEL, DEEPSPEED_JSON, MEASURED = "model", "deepspeed.json", "measured.json"
"""What the folder holds that the ranks work in."""

TIMEOUT_SECONDS = 900.0
"""Time for the ranks to end; they take a minute or two."""


@dataclass(frozen=True)
class Comparison:
    """A kind of bytes of one rank, in one case."""

    case: str
    kind: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)

    @property
    def holds(self) -> bool:
        return abs(self.error) <= BOUND


def verify(large: ModelShape) -> list[Comparison]:
    """Runs a step of every case on two CPU ranks and compares it with the plan.

    Raises RunFailed where the ranks do not get to the end.
    """
    with tempfile.TemporaryDirectory(prefix="vcore_plan_") as name:
        folder = Path(name)
        prepare(large, folder)
        launch(folder)
        measured = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
        return compare(folder, measured)


def prepare(large: ModelShape, folder: Path) -> None:
    """Writes the small model with random weights, and its DeepSpeed JSON."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    small = scaled_shape(large)
    write_config(small, folder / MODEL)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / MODEL)).save_pretrained(folder / MODEL)
    write_deepspeed_json(large, small, folder / DEEPSPEED_JSON)


def launch(folder: Path) -> None:
    """The ranks' processes, on CPUs whatever this machine has."""
    command = [
        sys.executable,
        "-m",
        "vcore_ds.distributed.torchrun",
        "--standalone",
        "--nproc_per_node",
        str(NUM_RANKS),
    ]
    command += ["-m", "vcore_ds.commands.plan.verify_rank", str(folder)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as launcher:
        try:
            _, errors = launcher.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # which it passes on; killed, it would leave the ranks behind
            raise RunFailed(f"--verify: the ranks have not ended after {TIMEOUT_SECONDS:,.0f} s") from None
    if launcher.returncode != 0:
        raise RunFailed(f"--verify: the ranks ended with {launcher.returncode}:\n{errors[-4000:]}")


def compare(folder: Path, measured: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Every kind of bytes of every case.

    Args:
        measured: of one rank, by case, as `verify_rank.measure` returns it.
    """
    return [found for case, of_case in zip(CASES, measured, strict=True) for found in _compare(case, folder, of_case)]


def _compare(case: Case, folder: Path, measured: Mapping[str, Any]) -> Iterator[Comparison]:
    shape = shape_on_disk(str(folder / MODEL))
    assert shape is not None  # written by `prepare`
    recipe = recipe_of(case, folder / MODEL, folder / DEEPSPEED_JSON)
    plan = plan_batch(recipe, NUM_RANKS, shape, ranks_per_node=NUM_RANKS)
    config = deepspeed_config(recipe, plan)
    lengths, of_probe = case.lengths, case.lengths[: len(case.lengths) // 2]
    main = lengths, plan.spread_main(range(len(lengths)), lengths)
    probe = of_probe, plan.spread_probe(range(len(of_probe)), of_probe)
    memory = plan_memory(recipe, plan, config, {"main": summarize([main[1]]), "probe": summarize([probe[1]])})
    assert memory is not None
    kept = measured["kept"]
    for kind, num_bytes in memory.estimate.persistent.items():
        yield Comparison(case.name, kind, num_bytes, kept[kind])
    peaks = {phase: sum(kept.values()) + peak for phase, peak in measured["peaks"].items()}
    for phase in ("probe", "main"):
        predicted = memory.estimate.persistent_bytes + memory.estimate.transient_bytes(phase)
        yield Comparison(case.name, f"peak in {phase}", predicted, peaks[phase])
    yield Comparison(case.name, "peak", memory.estimate.peak_bytes, max(peaks.values()))
    # The speeds of the GPU play no part in bytes.
    cluster = Cluster(GPUS["H100"], NUM_RANKS, NUM_RANKS)
    reuse_distance = config["zero_optimization"]["stage3_max_reuse_distance"]
    counts = parameter_counts(shape, memory.settings.adapters)
    model = StepModel(shape, counts, memory.settings, cluster, reuse_distance)
    traffic = model.step(StepPasses.of(memory.settings), [main], [probe]).traffic
    received, k = measured["received"], case.sequence_parallel
    gathers = traffic["parameters"] + traffic["tangents"]
    yield Comparison(case.name, "received in gathers", gathers.inside, received["gathers"])
    yield Comparison(case.name, "received in reductions", traffic["gradients"].inside, received["reductions"])
    if k > 1:  # a k-th of what is counted stays with the rank
        exchanges = received["exchanges"] * (k - 1) / k
        yield Comparison(case.name, "received in exchanges", traffic["shared rows"].inside, exchanges)


def describe_comparisons(found: Sequence[Comparison]) -> str:
    """A table, and whether all of it holds."""
    lines = [f"{'case':12} {'bytes of a rank':24} {'predicted':>12} {'measured':>12}  error"]
    for one in found:
        mark = "" if one.holds else f"  over {BOUND:.0%}"
        lines.append(
            f"{one.case:12} {one.kind:24} {one.predicted:12,.0f} {one.measured:12,.0f}  {one.error:+.1%}{mark}"
        )
    worst = max(found, key=lambda one: abs(one.error))
    lines.append(f"Largest error: {worst.error:+.1%} ({worst.case}, {worst.kind}); the bound is {BOUND:.0%}")
    return "\n".join(lines)
