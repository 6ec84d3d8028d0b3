"""Runs of a tiny model that are killed and started again until they have finished, and their comparison."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.chaos import inject
from tests.chaos.inject import Fault
from tests.helpers.commands import drop_machine_keys
from tests.helpers.jobs import ForkedJob, Job
from tests.helpers.resumed_runs import load_checkpoint_tensors, read_token_records
from tests.helpers.setups import TinySetup, sums, write_conversations, write_model
from vcore_ds.commands import cli

RECIPE = "launch_scripts/recipes/qwen3_32b_math_lora.yaml"
NUM_SHARDS = 2
"""Number of ranks over which ZeRO-3 shards the states."""
SAVE_EVERY = 2


@dataclass
class TinyRun:
    """VCORE with forward mode on LoRA adapters with dropout, in fp32; every third step probes, so that some checkpoints
    hold a direction."""

    folder: Path
    setup: TinySetup
    num_steps: int
    changes: tuple[str, ...] = ()
    tensor: int = 1
    """Tensor-parallel size, in parallel layers."""
    logs: list[Path] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        return NUM_SHARDS * self.tensor

    @property
    def overrides(self) -> list[str]:
        parallel = ("model.provider=megatron", f"parallel.tensor={self.tensor}") if self.tensor > 1 else ()
        return self.setup.overrides(
            self.folder,
            f"schedule.num_steps={self.num_steps}",
            "probe.every=3",
            "lora.dropout=0.05",
            f"checkpoint.every_steps={SAVE_EVERY}",
            "checkpoint.keep_last=3",
            *parallel,
            *self.changes,
        )

    @property
    def arguments(self) -> list[str]:
        """Arguments of `vcore-ds`, the same at every attempt."""
        return ["train", RECIPE, *self.overrides]

    def start(self, fault: Fault | None = None, **environment: str) -> Job:
        """Start the run on all of its ranks, as a user types it; `fault` strikes in it."""
        module = "vcore_ds.commands.cli"
        if fault is not None:
            module, environment = "tests.chaos.inject", environment | fault.environment
        launcher = f"python -m vcore_ds.distributed.torchrun --nproc_per_node {self.num_ranks} -m {module}"
        return Job(f"{launcher} {' '.join(self.arguments)}", self._next_log(), **environment)

    def fork(self, fault: Fault | None = None) -> ForkedJob:
        """Start the same ranks without launcher and imports."""
        main, environment = (cli.main, {}) if fault is None else (inject.main, fault.environment)
        return ForkedJob(main, self.arguments, self._next_log(), num_ranks=self.num_ranks, **environment)

    def _next_log(self) -> Path:
        self.logs.append(self.folder.parent / f"{self.folder.name}.{len(self.logs)}.log")
        return self.logs[-1]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:08d}"

    def marked_steps(self) -> list[int]:
        """Steps of the checkpoints that are marked complete, intact or not."""
        marks = (self.folder / "checkpoints").glob("step_????????/COMPLETE")
        return sorted(int(mark.parent.name.removeprefix("step_")) for mark in marks)

    def steps_taken(self) -> list[int]:
        return [line["step"] for line in read_deterministic_lines(self.folder / "metrics.jsonl")]

    def steps_lost(self) -> list[int]:
        """Steps that had to be taken again; one that was lost twice is listed twice."""
        return [line["step"] for line in read_deterministic_lines(self.folder / "metrics_lost.jsonl")]

    def differences(self, undisturbed: "TinyRun") -> list[str]:
        """List everything that is not equal bit for bit: tensors of the last checkpoint, exported files, token records,
        metrics of the steps, and of those that were lost and taken again."""
        here, there = (load_checkpoint_tensors(run.folder, self.num_steps) for run in (self, undisturbed))
        differing = sorted(here.keys() ^ there.keys())
        differing += [name for name in here.keys() & there.keys() if not torch.equal(here[name], there[name])]
        exported = {path.name for run in (self, undisturbed) for path in (run.folder / "adapter").iterdir()}
        exported.remove("README.md")  # the model card says how long the run took, and where it was
        differing += [name for name in sorted(exported) if self._read_export(name) != undisturbed._read_export(name)]
        records, records_there = read_token_records(self.folder), read_token_records(undisturbed.folder)
        names = records.keys() | records_there.keys()
        differing += sorted(name for name in names if records.get(name) != records_there.get(name))
        if self.steps_taken() != list(range(1, self.num_steps + 1)):
            differing.append(f"metrics.jsonl holds steps {self.steps_taken()}")
        expected = {line["step"]: line for line in read_deterministic_lines(undisturbed.folder / "metrics.jsonl")}
        for name in ("metrics.jsonl", "metrics_lost.jsonl"):
            for line in read_deterministic_lines(self.folder / name):
                other = expected.get(line["step"], {})
                keys = [key for key in line.keys() | other.keys() if line.get(key) != other.get(key)]
                differing += [f"{name}: step {line['step']}: {key}" for key in keys]
        return differing

    def _read_export(self, name: str) -> bytes | None:
        path = self.folder / "adapter" / name
        return path.read_bytes() if path.is_file() else None


def read_deterministic_lines(path: Path) -> list[dict[str, Any]]:
    """Read metrics without the keys that depend on the machine, and without a line that a kill has left incomplete."""
    if not path.exists():
        return []
    return [drop_machine_keys(json.loads(text)) for text in path.read_text().splitlines() if text.endswith("}")]


def make_setup(folder: Path, pairs: list[tuple[str, str]]) -> TinySetup:
    """Write model and data; `pairs` are the questions and answers to train on."""
    model = write_model(folder / "model")
    return TinySetup(
        untied=model,
        tied=model,
        train=write_conversations(folder / "train.jsonl", pairs),
        validation=write_conversations(folder / "validation.jsonl", sums(range(100, 104))),
        cache=folder / "cache",
    )
