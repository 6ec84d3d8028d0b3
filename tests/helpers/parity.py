"""Compare steps of the real engine with the oracle, quantity by quantity; called through `run_ranks`."""

import copy
import gc
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import numpy as np
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.soak import IS_SOAK
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.data.batches import Batch, StepBatches
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.deepspeed_start import start_deepspeed
from vcore_ds.engine.sharded_loading import partition_experts
from vcore_ds.method.baselines import random_mask
from vcore_ds.training.followed import FollowedTraces, measure_followed
from vcore_ds.training.weighting import compute_log_probabilities


@dataclass(frozen=True)
class Case:
    lora: bool = False
    tied: bool = False
    checkpointing: bool = False
    persistence_threshold: int = 0
    coalesce: bool = False
    num_main: int = 8
    num_probe: int = 4
    num_tokens: int = 24
    """Of the longest sequence."""
    max_steps: int = 3
    without_tokens: tuple[int, ...] = ()
    """Rows of the main batch whose tokens are not supervised."""
    batches_per_utility_pass: int = 1
    probe_every: int = 1
    sequence_parallel: tuple[int, int] = (1, 1)
    """Sequence-parallel sizes of the main batch and of the probe."""
    packed: bool = False
    """Whether the sequences of a micro-batch are packed into one row."""
    num_heads: int = 4
    num_kv_heads: int = 2
    vocabulary: int = tiny.VOCABULARY
    num_layers: int = 2
    tensor: int = 1
    """Tensor-parallel size, in megatron-core's parallel layers."""
    expert: int = 1
    """Expert-parallel size; above 1, experts have no adapters."""
    moe_kind: str | None = None
    """Kind of an MoE model, see `tiny.moe_model`; None for a Qwen3."""
    follows: bool = False
    """Whether three traces are followed, and measured after the last step."""
    config: dict[str, Any] = field(default_factory=dict)
    """Changes of the section `zero_optimization` of DeepSpeed's configuration."""
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """2, so that the second step uses the state that the first leaves; outside `make soak` 1 for SGD without
        clipping, which has no state but the parameters. 3 where a direction is kept for several steps, and in bf16,
        where the worst of a few roundings says little. At most `max_steps`."""
        if self.probe_every > 1 or self.sections.get("model", {}).get("precision") == "bf16":
            return min(3, self.max_steps)
        optimizer, method = self.sections.get("optimizer", {}), self.sections.get("method", {})
        has_past = optimizer.get("name") != "sgd" or optimizer.get("gradient_clipping") is not None
        return min(2 if has_past or method.get("name") == "iw_sft" or IS_SOAK else 1, self.max_steps)


def run_case(case: Case) -> dict[str, float]:
    """Worst deviation of each quantity over all steps."""
    gc.freeze()  # DeepSpeed keeps every engine and collects garbage at each start, which would traverse all of them
    recipe = step_runs.make_recipe(**case.sections)
    start_process_group(10, case.tensor, case.expert)
    layout.make_sequence_groups(case.sequence_parallel)
    sizes = dict(
        tied=case.tied,
        num_attention_heads=case.num_heads,
        num_key_value_heads=case.num_kv_heads,
        vocab_size=case.vocabulary,
        num_hidden_layers=case.num_layers,
    )
    dtype = torch.bfloat16 if recipe.model.precision == "bf16" else torch.float32
    if case.moe_kind is None:
        plain = tiny.qwen3(dtype=dtype, **sizes)
    else:
        sizes = dict(num_hidden_layers=case.num_layers)
        plain = tiny.moe_model(case.moe_kind, dtype=dtype, **sizes)
        plain.set_experts_implementation("eager")  # a loop over experts, which supports forward mode
    if case.tensor > 1:
        from tests.helpers import megatron  # only here: megatron-core takes seconds to import

        model = megatron.make_parallel_model(plain, checkpointing=case.checkpointing)
    else:
        model = tiny.token_loss_model(
            lora=case.lora,
            checkpointing=case.checkpointing,
            moe_kind=case.moe_kind,
            on_experts=case.expert == 1,
            dtype=dtype,
            **sizes,
        )
    if case.expert > 1:
        start_deepspeed()
        deepspeed.zero.Init(module=model, config_dict_or_path=tiny.deepspeed_config(bf16=dtype == torch.bfloat16))
    partition_experts(model)
    if case.lora:
        plain = tiny.with_lora(plain, on_experts=case.expert == 1)
    plain = plain.float()  # the oracle computes in fp32, from the same weights
    reference = step_runs.make_reference(plain, recipe)
    engine = step_runs.make_engine(
        model, recipe, persistence_threshold=case.persistence_threshold, coalesce=case.coalesce, zero=case.config
    )

    def assemble(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return megatron.assemble(model, plain, tensors) if case.tensor > 1 else tensors

    estimator = step_runs.make_estimator(recipe, engine, case.batches_per_utility_pass)
    mains = [make_batch(case, 10 + k) for k in range(case.num_steps)]
    followed = tiny.make_batch(3, seed=90)
    if recipe.method.name == "iw_sft" and not case.lora:  # as `vcore-ds reference`, but all rows on every rank
        for main in (*mains, followed):
            rows = [tiny.take_rows(main, [row]) for row in range(main.num_sequences)]
            main.reference_log_probability = torch.cat(compute_log_probabilities(engine, rows))
    prepare = PREPARE.get(recipe.method.name, lambda batch: None)
    followed_options = dict(followed=followed, followed_kept=prepare(followed)) if case.follows else {}
    worst = dict.fromkeys(("utilities", "weights", "alpha", "gradient", "parameters", "loss"), 0.0)
    for k, main in enumerate(mains):
        probe = tiny.make_batch(case.num_probe, case.num_tokens, seed=50 + k, vocabulary=case.vocabulary)
        masks, is_last = prepare(main), k == case.num_steps - 1
        if k % case.probe_every != 0 or recipe.method.name != "vcore":
            probe = None
        k_main, k_probe = case.sequence_parallel
        dealt_probe = [] if probe is None else step_runs.deal(probe, 2, k_probe, packed=case.packed)
        dealt = StepBatches(step_runs.deal(main, 2, k_main, packed=case.packed), dealt_probe)
        recorded = step_runs.Recorder(engine)
        rate = recipe.optimizer.learning_rate
        metrics = step_runs.train_step(engine, recipe, dealt, estimator, recorded, learning_rate=rate)
        has_local_alpha = recipe.method.alpha_scope == "micro_batch"
        groups = step_runs.micro_batch_rows(case.num_main, 2, k_main) if has_local_alpha else None
        options = step_runs.reference_options(recipe) | (followed_options if is_last else {})
        expected = step_runs.reference_step(reference, main, probe, groups=groups, kept=masks, **options)

        def note(quantity: str, deviation: float) -> None:
            assert deviation == deviation, f"{quantity} is NaN"
            worst[quantity] = max(worst.get(quantity, 0.0), deviation)

        for i, (utilities, weights) in recorded.by_sequence(dealt.main).items():
            if len(weights) == 0:
                continue
            note("weights", step_runs.relative_error(weights, expected["weights"][i]))
            if expected["utilities"] is not None:
                note("utilities", step_runs.relative_error(utilities, expected["utilities"][i]))
        note("alpha", abs(metrics.values["alpha"] - expected["alpha"]))
        note("loss", abs(metrics.values["loss"] - expected["loss"]))
        gradient = assemble(recorded.gradient)
        note(
            "gradient",
            step_runs.relative_error(
                torch.cat([gradient[name].flatten() for name in expected["gradient"]]),
                torch.cat([g.flatten() for g in expected["gradient"].values()]),
            ),
        )
        parameters = step_runs.gather_parameters(engine)
        for name, parameter in assemble(parameters).items():
            note("parameters", float((parameter - expected["parameters"][name]).abs().max()))
        if case.tensor > 1:
            norm = float(torch.cat([g.flatten() for g in expected["gradient"].values()]).norm())
            note("norm", abs(metrics.values["grad_norm"] / norm - 1))
            note("drift", megatron.measure_drift(model, parameters))
        if recipe.method.name == "asft":
            note("base_kl", abs(metrics.values["base_kl"] / expected["base_kl"] - 1))
        worst["total_weight"] = metrics.values["total_weight"]
        if case.follows and is_last:
            traces = FollowedTraces([("training data", i) for i in range(3)], step_runs.deal(followed, 2))
            measured = measure_followed(engine, recipe.method, traces, estimator, seed=0)
            assert sorted(measured) == list(range(layout.rank("shards"), 3, layout.size("shards")))
            for i, trace in measured.items():
                for name, values in expected["followed"][i].items():
                    assert (getattr(trace, name) is None) == (values is None)
                    if values is not None:
                        measured_values = torch.from_numpy(getattr(trace, name))
                        note(f"followed {name}", step_runs.relative_error(measured_values, values))
    engine.close()
    return worst


def make_batch(case: Case, seed: int) -> Batch:
    batch = copy.copy(tiny.make_batch(case.num_main, case.num_tokens, seed=seed, vocabulary=case.vocabulary))
    for row in case.without_tokens:
        batch.labels[row] = -100
    return batch


def keep_some(batch: Batch) -> list[torch.Tensor]:
    """Keep 40% of each row's targets, always with the last two; returns the masks over the targets."""
    masks, batch.kept = [], torch.zeros_like(batch.labels, dtype=torch.bool)
    for row in range(batch.num_sequences):
        targets = batch.labels[row] != -100
        in_answer = np.zeros(int(targets.sum()), dtype=np.bool_)
        in_answer[-2:] = True
        masks.append(torch.from_numpy(random_mask(in_answer, 0.4, generator(Stream.RANDOM_MASK, 5, row))))
        batch.kept[row, targets] = masks[-1]
    return masks


def store_weights(batch: Batch) -> list[torch.Tensor]:
    """Give each token a loss weight, some of them 0; returns the weights of each row's targets."""
    factors = torch.rand(batch.labels.shape, generator=torch.Generator().manual_seed(7)) * 4 - 1
    batch.loss_weights = factors.clamp(min=0)
    return [batch.loss_weights[row, batch.labels[row] != -100] for row in range(batch.num_sequences)]


PREPARE = {"random": keep_some, "stored": store_weights}
"""By method: adds the data that the method reads from a batch, and returns the oracle's `kept`."""


def assert_parity(deviations_by_rank: list[dict[str, float]]) -> None:
    """Print and check the deviations that `run_case` returned on each rank."""
    for rank, worst in enumerate(deviations_by_rank):
        print(f"rank {rank}: " + "  ".join(f"{quantity} {value:.1e}" for quantity, value in worst.items()))
        for quantity in ("utilities", "weights", "alpha", "gradient", "loss"):
            assert worst[quantity] < 1e-5, quantity
        assert worst["parameters"] < 1e-6
