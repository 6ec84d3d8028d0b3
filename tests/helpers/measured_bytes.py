"""Memory and traffic of a step, measured on one rank: persistent bytes, peaks of the phases, received bytes."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.allocations import Allocations, ReceivedBytes
from tests.helpers.scaled_model import CASES, Case, make_recipe
from vcore_ds.data.batches import StepBatches
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import as_partitioned
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.description import read_model
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.feed import make_rank_batches
from vcore_ds.training.setup import build_engine, build_estimator
from vcore_ds.training.step import train_step
from vcore_ds.training.step_metrics import StepRecorder
from vcore_ds.utility.direction import Direction


def choose_warm_up(case: Case) -> tuple[int, int]:
    """Number of warm-up steps, in which ZeRO-3 records the order of the layers, and the factor by which their sequences
    are shorter than the measured ones.

    One warm-up step with short sequences gives the same bytes as two with full ones, except under expert parallelism,
    where the peak of the main pass would be 5 to 9% higher.
    """
    return (2, 1) if case.expert > 1 else (1, 16)


class PhaseRecorder(StepRecorder):
    """Also keeps the peak of each phase."""

    def __init__(self, device: torch.device, allocations: Allocations):
        super().__init__(device)
        self.peaks: dict[str, int] = {}
        self._allocations = allocations

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        self._allocations.restart()
        with super().measuring(name):
            yield
        self.peaks[name] = self._allocations.peak_bytes


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Persistent bytes of this rank by kind, the peak of each phase of a step beyond them, the bytes received in the
    step, and the load of the experts."""
    recipe = make_recipe(case, folder)
    plan = plan_batch(
        derive_plan_settings(recipe),
        layout.size("shards"),
        read_model(recipe.model.path).shape,
        ranks_per_node=layout.size("job"),
    )
    engine = build_engine(derive_plan_settings(recipe), deepspeed_config(derive_plan_settings(recipe), plan))
    estimator = build_estimator(
        recipe.method, recipe.probe, recipe.utility, engine, batches_per_pass=plan.batches_per_utility_pass
    )
    num_probe = len(case.lengths) // 2

    def make_batches(lengths: list[int]) -> StepBatches:
        sequences, ids = [random_sequence(i, n) for i, n in enumerate(lengths)], list(range(len(lengths)))
        return StepBatches(
            make_rank_batches(plan.lay_out_main(ids, lengths), sequences, 0),
            make_rank_batches(plan.lay_out_probe(ids[:num_probe], lengths[:num_probe]), sequences, 0),
        )

    batches, sections = make_batches(case.lengths), (recipe.method, recipe.probe)
    num_steps, factor = choose_warm_up(case)
    short_batches = make_batches([n // factor for n in case.lengths])
    for _ in range(num_steps):
        train_step(engine, *sections, short_batches, estimator, StepRecorder(engine.device), learning_rate=1e-5)
    gc.collect()
    allocations, received = Allocations(), ReceivedBytes()
    recorder = PhaseRecorder(engine.device, allocations)
    with received, allocations:
        metrics = train_step(engine, *sections, batches, estimator, recorder, learning_rate=1e-5)
    measured = {
        "kept": count_persistent_bytes(engine, estimator.direction),
        "peaks": {phase: peak for phase, peak in recorder.peaks.items() if peak},
        "received": received.received,
        "loads": {key: value for key, value in metrics.values.items() if key.startswith("expert")},
    }
    engine.close()
    return measured


def random_sequence(sequence_id: int, num_tokens: int) -> TokenizedSequence:
    ids = np.random.default_rng(sequence_id).integers(0, 512, num_tokens, dtype=np.int32)
    return TokenizedSequence(sequence_id, ids, np.arange(num_tokens) > 0)


def count_persistent_bytes(engine: Engine, direction: Direction | None) -> dict[str, int]:
    """Bytes that the engine and the direction keep between steps, by kind."""

    def total(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    kind = "direction" if direction is None or direction.rank is None else "factors of the direction"
    zero = engine.optimizer
    states = zero.optimizer.state.values()
    return {
        "parameters": total(as_partitioned(parameter).ds_tensor for parameter in engine.module.parameters()),
        "gradients": total(engine.shards.gradients()),
        "master weights": total(engine.shards.masters()),
        "moments": total(state[key] for state in states for key in ("exp_avg", "exp_avg_sq")),
        kind: 0 if direction is None else direction.persistent_bytes,
        "reduction buffer": total(bucket.buffer for bucket in zero.ipg_buckets.values()),
    }


def measure_all(folder: str) -> list[dict[str, Any]]:
    """Measure every case in turn on this rank. A collective."""
    measured = []
    for case in CASES:
        layout.arrange(expert=case.expert)
        layout.make_sequence_groups({case.sequence_parallel})
        measured.append(measure(case, Path(folder)))
    return measured
