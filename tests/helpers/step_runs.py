"""Steps of the real engine on this rank, with intermediate results recorded; called through `run_ranks`."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

from tests.helpers import tiny
from tests.helpers.oracle import Muon, Reference
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch, StepBatches, idle_batch
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import is_expert_block
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.training.setup import build_estimator
from vcore_ds.training.step import train_step as take_step
from vcore_ds.training.step_metrics import MicroBatchResult, StepMetrics, StepRecorder
from vcore_ds.utility.estimators import Estimator

LEARNING_RATE = 1e-4
"""Within the paper's range, 2e-5 to 2e-4. Adam divides by the gradient's magnitude, so where a gradient is near zero,
its rounding error moves the parameter by a good part of the learning rate."""


def make_recipe(**sections: dict[str, Any]) -> Recipe:
    """A recipe whose files are never read; `sections` replace the defaults below."""
    base: dict[str, Any] = {
        "model": {"path": "none", "precision": "fp32"},
        "data": {"train_path": "none"},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "schedule": {"num_steps": 1},
        "run": {"output_dir": "none"},
        "engine": {"deepspeed_config": "none"},
        "method": {"kl_budget": 0.05},
    }
    return Recipe(**{**base, **sections})


def make_engine(
    model, recipe: Recipe, *, persistence_threshold: int = 0, coalesce: bool = False, zero: dict[str, Any] | None = None
) -> Engine:
    """An engine with the recipe's optimizer. `zero`: changes of DeepSpeed's section `zero_optimization`."""
    config = tiny.deepspeed_config(
        bf16=recipe.model.precision == "bf16",
        gradient_clipping=recipe.optimizer.gradient_clipping or 0.0,
        persistence_threshold=persistence_threshold,
    )
    config["zero_optimization"] |= zero or {}
    return Engine(model, build_optimizer(model, recipe.optimizer), config, coalesce_gradient_reduction=coalesce)


def deal(batch: Batch, micro_batch_size: int, sequence_parallel: int = 1, *, packed: bool = False) -> list[Batch]:
    """This rank's micro-batches of a global batch: rows are dealt out in turn, with idle batches when they run out.
    `sequence_parallel`: number of ranks that share a sequence or pack. `packed`: whether the sequences of a micro-batch
    are one pack."""
    k = sequence_parallel
    indices = list(range(layout.rank("data", k), batch.num_sequences, layout.size("data", k)))
    most = -(-batch.num_sequences // layout.size("data", k))
    parts = [indices[start : start + micro_batch_size] for start in range(0, most, micro_batch_size)]
    take = tiny.pack_rows if packed else tiny.take_rows
    return [take(batch, part, k) if part else idle_batch(0, k) for part in parts]


def make_estimator(recipe: Recipe, engine: Engine, batches_per_pass: int = 1) -> Estimator:
    return build_estimator(recipe.method, recipe.probe, recipe.utility, engine, batches_per_pass=batches_per_pass)


def train_step(
    engine: Engine,
    recipe: Recipe,
    batches: StepBatches,
    estimator: Estimator,
    recorder: StepRecorder | None = None,
    **options: Any,
) -> StepMetrics:
    """`vcore_ds.training.step.train_step`, with `LEARNING_RATE` as the default."""
    recorder = StepRecorder(engine.device) if recorder is None else recorder
    options = {"learning_rate": LEARNING_RATE, **options}
    return take_step(engine, recipe.method, recipe.probe, batches, estimator, recorder, **options)


class Recorder(StepRecorder):
    """A recorder that also keeps intermediate results of a step in host memory: utilities and weights by sequence, and
    the gradient before clipping."""

    def __init__(self, engine: Engine):
        super().__init__(engine.device, keep_tokens=True)
        self.results: list[MicroBatchResult] = []
        self.gradient: dict[str, torch.Tensor] = {}
        self._engine = engine

    def add(self, result: MicroBatchResult) -> None:
        self.results.append(result)
        super().add(result)

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        if name == "step":
            self.gradient = {
                name.removeprefix("causal_lm."): gather_experts(parameter, safe_get_full_grad(parameter)).cpu()
                for name, parameter in self._engine.trainable
            }
        with super().measuring(name):
            yield

    def by_sequence(self, batches: Sequence[Batch]) -> dict[int, tuple[torch.Tensor | None, torch.Tensor]]:
        """Sequence id -> (utilities, weights), for this rank's sequences."""
        results = {}
        for batch, result in zip(batches, self.results, strict=True):
            for row, sequence_id in enumerate(batch.sequence_ids):
                is_in_row, utilities = result.tokens.sequence_index == row, result.tokens.utilities
                weights = result.weights.weights[is_in_row].cpu()
                results[sequence_id] = (None if utilities is None else utilities[is_in_row].cpu(), weights)
        return results


def gather_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """Unsharded fp32 parameters by name. A collective."""
    return {
        name.removeprefix("causal_lm."): gather_experts(parameter, safe_get_full_fp32_param(parameter)).cpu()
        for name, parameter in engine.trainable
    }


def gather_experts(parameter: torch.nn.Parameter, gathered: torch.Tensor) -> torch.Tensor:
    """Copy of a gathered parameter; a block of experts is joined with the other ranks' blocks. A collective."""
    if not is_expert_block(parameter):
        return gathered.clone()
    return layout.all_gather("expert", gathered).flatten(0, 1)


def without_padding(engine: Engine, vector: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a vector over this rank's shards, one per parameter, without padding."""
    return [engine.shards.shard(vector, p)[: engine.shards.numel(p)] for _, p in engine.trainable]


def relative_error(measured: torch.Tensor, expected: torch.Tensor) -> float:
    return float((measured.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def make_reference(model, recipe: Recipe) -> Reference:
    """The oracle on a copy of `model`, with eager attention and the recipe's optimizer."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
            module.config._attn_implementation = "eager"
    trained = [p for p in plain.parameters() if p.requires_grad]
    adamw = recipe.optimizer
    if adamw.name == "sgd":
        optimizer = torch.optim.SGD(trained, lr=adamw.learning_rate)
    elif adamw.name == "muon":
        optimizer = Muon(
            [(name, p) for name, p in plain.named_parameters() if p.requires_grad],
            lr=adamw.learning_rate, momentum=adamw.momentum, betas=adamw.betas, eps=adamw.eps,
            weight_decay=adamw.weight_decay,
        )  # fmt: skip
    else:
        optimizer = torch.optim.AdamW(
            trained, lr=adamw.learning_rate, betas=adamw.betas, eps=adamw.eps, weight_decay=0.0
        )
    return Reference(plain, optimizer)


def reference_step(reference: Reference, *batches: Any, **options: Any) -> dict[str, Any]:
    """The oracle's step, and under `parameters` the trained parameters after it. The first rank computes it for all
    ranks, whose results would be the same."""
    shared: list[Any] = [None]
    if layout.is_first():
        expected = reference.step(*batches, **options)
        shared = [{**expected, "parameters": {name: p.detach() for name, p in reference.trained.items()}}]
    torch.distributed.broadcast_object_list(shared)
    return shared[0]


def reference_options(recipe: Recipe) -> dict[str, Any]:
    return dict(
        method=recipe.method.name,
        temperature=recipe.method.temperature,
        kl_budget=recipe.method.kl_budget,
        normalization=recipe.method.normalization,
        alpha=recipe.method.alpha,
        cap=recipe.method.alpha_cap,
        clip=recipe.optimizer.gradient_clipping,
        epsilon=recipe.utility.epsilon,
        optimizer=recipe.probe.direction,
        probe_clip=recipe.probe.clip,
        base_measure=recipe.method.base_measure,
        batch_kl_budget=recipe.method.batch_kl_budget,
        probe_loss=recipe.probe.loss,
        kl_weight=recipe.method.kl_weight,
        min_probability=recipe.method.min_probability,
    )


def micro_batch_rows(num_rows: int, micro_batch_size: int, sequence_parallel: int = 1) -> list[list[int]]:
    """Indices of the rows in each micro-batch of all ranks, as dealt by `deal`."""
    num_groups = layout.size("data", sequence_parallel)
    per_rank = [list(range(group, num_rows, num_groups)) for group in range(num_groups)]
    return [
        rows[start : start + micro_batch_size] for rows in per_rank for start in range(0, len(rows), micro_batch_size)
    ]
