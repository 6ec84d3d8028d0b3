"""The memory of a recipe on the ranks of a job, and what would make it smaller."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from vcore_ds.common.text import count, gib
from vcore_ds.config.load import SHIPPED_DEEPSPEED_CONFIGS
from vcore_ds.planning.batch_layout import Utilization, list_sequence_parallel_sizes
from vcore_ds.planning.batch_plan import BatchKind, BatchPlan, find_other_expert_sizes
from vcore_ds.planning.deepspeed_json import read_zero_settings
from vcore_ds.planning.memory import COALESCING_SHARE, MemoryEstimate, estimate_memory, estimate_unsharded_gradients
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import ParameterCounts, estimate_fullest_load, parameter_counts
from vcore_ds.planning.settings import ActivationMemory, LossMemory, MemorySettings, PlanSettings

_MIN_PACK_TOKENS = 1024
"""Shortest pack that is offered: passes over shorter ones spend their time on all-gathers."""

_MOST_RANKS = 1024  # largest job that is offered


@dataclass(frozen=True)
class Available:
    """Bytes that one rank may use."""

    device: int
    host: int
    is_cpu: bool = False  # whether the device is the host: offloaded shards take the same memory

    def holds(self, estimate: MemoryEstimate, margin: int = 0) -> bool:
        """Whether the estimate fits and leaves `margin` bytes."""
        if self.is_cpu:
            return estimate.peak_bytes + estimate.host_bytes + margin <= self.device
        return estimate.peak_bytes + margin <= self.device and estimate.host_bytes <= self.host

    def holds_with_margin(self, estimate: MemoryEstimate) -> bool:
        return self.holds(estimate, estimate.margin_bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """A recipe's memory, and how it depends on what can be changed."""

    plan: BatchPlan
    settings: MemorySettings
    sequence_parallel: int  # sequence-parallel size of most passes over the main batch
    cutoff_length: int  # longest sequence, in tokens
    # Parameters of the model itself, or of a rank's part; None for those of its shape
    counts: ParameterCounts | None = None
    other_expert_sizes: Sequence[int] = ()  # other possible expert-parallel sizes, ascending

    @property
    def estimate(self) -> MemoryEstimate:
        return self._estimate_changed()

    def find_memory_changes(self, available: Available) -> dict[str, MemoryEstimate]:
        """Find the changes that need less memory, each alone, cheapest first: overrides of the recipe, and the smallest
        number of ranks that fits, by doubling."""
        changes = {words: self._estimate_changed(**fields) for words, fields in self._list_changes(available)}
        num_ranks = 2 * self.settings.num_ranks
        while num_ranks * self.settings.tensor <= _MOST_RANKS:
            estimate = self._estimate_changed(num_ranks=num_ranks)
            if available.holds(estimate):
                return {**changes, f"{num_ranks * self.settings.tensor} ranks": estimate}
            num_ranks *= 2
        return changes

    def _estimate_changed(self, **fields: Any) -> MemoryEstimate:
        """Estimate the memory with other values of some fields of `MemorySettings`."""
        return estimate_memory(self.plan.time_model.shape, replace(self.settings, **fields), self.counts)

    def _list_changes(self, available: Available) -> Iterator[tuple[str, dict[str, Any]]]:
        """List overrides of the recipe, and the fields of `MemorySettings` that they change."""
        settings, checkpointed = self.settings, "model.gradient_checkpointing=true"
        if settings.stages_checkpoints:
            yield "checkpoint.async=false", {"stages_checkpoints": False}
        recomputes_all = replace(settings.activations, num_stored=0, stores_attention=False)
        if not settings.is_checkpointed or settings.activations != recomputes_all:
            yield checkpointed, {"is_checkpointed": True, "activations": recomputes_all}
        larger, in_node = (
            [n for n in self.other_expert_sizes if n > settings.expert],
            self.plan.time_model.ranks_per_node,
        )
        for size in dict.fromkeys([*(n for n in larger if n == in_node), *larger[-1:]]):
            load = estimate_fullest_load(self.plan.time_model.shape, size)
            yield f"parallel.expert={size}", {"expert": size, "expert_load": load}
        yield from self._list_fewer_tokens()
        if available.is_cpu:  # offloading moves nothing there
            return
        if settings.number_bytes == 2:
            for name, all_of_it in (("offload_optimizer", False), ("offload_all", True)):
                if not settings.zero.offloads_optimizer or (all_of_it and not settings.zero.offloads_parameters):
                    file = f"engine.deepspeed_config={SHIPPED_DEEPSPEED_CONFIGS.name}/zero3_bf16_{name}.json"
                    zero = replace(settings.zero, offloads_parameters=all_of_it, ranks_of_second_copy=1)
                    yield file, {"zero": replace(zero, offloads_optimizer=True)}
        if not settings.offloads_checkpoints:
            words = ([] if settings.is_checkpointed else [checkpointed]) + ["model.activation_offload=true"]
            yield " ".join(words), {"is_checkpointed": True, "offloads_checkpoints": True}

    def _list_fewer_tokens(self) -> Iterator[tuple[str, dict[str, int]]]:
        """List changes with fewer tokens on a rank: half a pack, one sequence, or a larger sequence-parallel size."""
        plan, pack, micro = self.plan, self.plan.pack_tokens_per_rank, self.plan.micro_batch_size_per_rank
        if pack is not None:
            half = pack // 2
            if half >= _MIN_PACK_TOKENS and plan.main_parallel_sizes[-1] * half >= self.cutoff_length:
                yield f"batch.pack_tokens_per_rank={half}", self._scale_tokens(half / pack)
            return
        if micro is not None and micro > 1:
            yield "batch.micro_batch_size_per_rank=1", self._scale_tokens(1 / micro)
        shape = plan.time_model.shape
        possible = list_sequence_parallel_sizes(plan.num_ranks, shape.num_heads)
        larger = next((k for k in possible if k > self.sequence_parallel), None)
        if larger is not None and shape.no_sequence_parallelism is None:
            sections = ["batch"] if plan.probe_batch_size_global == 0 else ["batch", "probe"]
            words = " ".join(f"{section}.sequence_parallel={larger}" for section in sections)
            yield words, self._scale_tokens(self.sequence_parallel / larger)

    def _scale_tokens(self, share: float) -> dict[str, int]:
        keys = ("main_tokens", "probe_tokens", "utility_tokens")
        return {key: round(getattr(self.settings, key) * share) for key in keys}


def choose_activations(
    shape: ModelShape,
    settings: MemorySettings,
    counts: ParameterCounts | None,
    available: Available,
    *,
    recomputes_all: bool,
) -> ActivationMemory:
    """Choose what a step keeps for its backward instead of computing it again: what saves most time for its bytes
    first, as long as the estimate leaves its margin. `recomputes_all`: every checkpointed layer keeps its input alone;
    so do those of architectures that are not counted exactly. `shape`, `counts`: as for `estimate_memory`."""
    chosen = ActivationMemory(shape.num_layers)

    def keep_first(candidates: Iterable[ActivationMemory]) -> None:
        """Choose the first that fits, if any does."""
        nonlocal chosen
        for activations in candidates:
            estimate = estimate_memory(shape, replace(settings, activations=activations), counts)
            if available.holds_with_margin(estimate):
                chosen = activations
                return

    keeps_layers = settings.is_checkpointed and not recomputes_all and shape.is_counted
    if settings.on_gpu:
        keep_first(replace(chosen, loss=LossMemory(block_bytes)) for block_bytes in _LOSS_BLOCKS)
    if keeps_layers:
        keep_first([replace(chosen, stores_attention=True)])
    keeping = replace(chosen, loss=replace(chosen.loss, keeps_logit_gradients=True))
    if replace(settings, activations=keeping).keeps_logit_gradients(shape):
        keep_first([keeping])
    if keeps_layers:
        keep_first(replace(chosen, num_stored=number) for number in range(shape.num_layers, 0, -1))
    return chosen


_LOSS_BLOCKS = (2**31, 2**30, 2**29)
"""Bytes of a block of the token loss on GPUs, largest first. Each block of a backward adds its term to an fp32 sum of
the output embedding's gradient, and the GEMMs of small blocks do not fill a GPU."""


def plan_memory(
    settings: PlanSettings,
    plan: BatchPlan,
    deepspeed_config: Mapping[str, Any],
    passes: Mapping[BatchKind, Utilization],
    counts: ParameterCounts | None = None,
    *,
    on_gpu: bool,
    available: Available | None = None,
) -> MemoryPlan | None:
    """Plan the memory of a run; None for a model whose sizes are unknown.

    `passes` says how the passes over the main and the probe batch use the ranks; where one is missing, its
    micro-batches are as large as the recipe allows. `counts` are those of the model itself, or of a rank's part with
    tensor parallelism; None, or zeros, for those of its shape. `available` decides what is not recomputed
    (`choose_activations`); with None everything is.
    """
    shape = plan.time_model.shape
    if shape.hidden_size == 0:
        return None
    longest = plan.pack_tokens_per_rank or settings.cutoff_length * (plan.micro_batch_size_per_rank or 1)
    main_tokens, probe_tokens = (passes[p].most_tokens if p in passes else longest for p in ("main", "probe"))
    has_utility_pass = settings.estimator is not None and not settings.is_fused
    memory_settings = MemorySettings(
        num_ranks=plan.num_ranks,
        main_tokens=main_tokens,
        probe_tokens=probe_tokens if plan.probe_batch_size_global != 0 else 0,
        utility_tokens=main_tokens * plan.batches_per_utility_pass if has_utility_pass else 0,
        tensor=plan.tensor,
        expert=plan.time_model.expert,
        expert_load=estimate_fullest_load(shape, plan.time_model.expert),
        estimator=settings.estimator,
        probe_rank=settings.probe.rank if settings.estimator == "jvp" else None,
        rank_passes=settings.probe.rank_passes,
        fp8_tangents=settings.utility.tangent_precision == "fp8",
        is_fused=settings.is_fused,
        number_bytes=2 if settings.model.precision == "bf16" else 4,
        lora=settings.lora,
        is_anchored=settings.method.is_anchored,
        optimizer=settings.optimizer.name,
        has_muon_direction=settings.estimator is not None and settings.probe.direction == "muon",
        is_checkpointed=bool(settings.model.gradient_checkpointing),
        offloads_checkpoints=settings.model.activation_offload,
        stages_checkpoints=settings.stages_checkpoints,
        keeps_direction=settings.estimator is not None and settings.probe.every > 1,
        # `auto` stays within the margin.
        coalesces_gradients=settings.engine.coalesce_gradient_reduction is True,
        repeats_kv_heads=on_gpu and (settings.model.precision == "fp32" or not _has_grouped_attention()),
        on_gpu=on_gpu,
        zero=read_zero_settings(deepspeed_config, plan.num_ranks),
    )
    known_counts = counts if counts is not None and counts.all > 0 else None
    if available is not None:
        recomputes_all = settings.model.gradient_checkpointing != "auto" or settings.model.activation_offload
        filled = memory_settings
        if settings.engine.coalesce_gradient_reduction == "auto":  # which would take the margin that is left
            unsharded = estimate_unsharded_gradients(
                shape, filled, known_counts or parameter_counts(shape, filled.lora)
            )
            filled = replace(filled, coalesces_gradients=unsharded <= 2 * COALESCING_SHARE * available.device)
        activations = choose_activations(shape, filled, known_counts, available, recomputes_all=recomputes_all)
        memory_settings = replace(memory_settings, activations=activations)
    return MemoryPlan(
        plan,
        memory_settings,
        passes["main"].typical_parallel_size if "main" in passes else 1,
        settings.cutoff_length,
        known_counts,
        find_other_expert_sizes(settings, plan.num_ranks_of_job, shape),
    )


def _has_grouped_attention() -> bool:
    """Whether PyTorch's attention of packed sequences takes fewer key and value heads than query heads."""
    major, minor, *_ = version("torch").split(".")
    return (int(major), int(minor)) >= (2, 12)


# Memory in words.


def describe_memory(plan: MemoryPlan) -> str:
    """One line on a rank's memory."""
    estimate = plan.estimate
    host = f", {gib(estimate.host_bytes, 1)} GiB in host memory" if estimate.host else ""
    return (
        f"Memory of each rank, estimated: {gib(estimate.persistent_bytes, 1)} GiB for the whole run, "
        f"{gib(estimate.peak_bytes, 1)} GiB at the peak ({estimate.peak_phase}, "
        f"{plan.settings.main_tokens:,} tokens in a micro-batch){host}"
    )


def describe_recomputation(settings: MemorySettings) -> str:
    """One line on what the backward of a checkpointed model computes again; empty for other models."""
    if not settings.is_checkpointed:
        return ""
    activations = settings.activations
    recomputed = activations.num_layers - activations.num_stored
    if recomputed == 0:
        return "Activation checkpoints: none; memory suffices for the activations of all layers"
    attention = " from the output of their attention" if activations.stores_attention else ""
    return f"Activation checkpoints: {recomputed} of {count(activations.num_layers, 'layer')} recomputed{attention}"


def describe_tightness(plan: MemoryPlan, available: Available) -> str:
    """The warning of a run that fits without a margin."""
    estimate = plan.estimate
    return (
        f"memory: the estimate is {gib(estimate.peak_bytes)} of {gib(available.device)} GiB for each rank, in "
        f"{estimate.peak_phase}, and may be short by {gib(estimate.margin_bytes)} GiB. These need less memory:\n"
        + "\n".join(format_memory_changes(plan, available))
    )


def find_shortage(estimate: MemoryEstimate, available: Available) -> tuple[str, int, int]:
    """Return which memory is short in a run that does not fit, its bytes for each rank, and the bytes needed."""
    needed = estimate.peak_bytes + (estimate.host_bytes if available.is_cpu else 0)
    if needed <= available.device:
        return "host memory", available.host, estimate.host_bytes
    return "host memory" if available.is_cpu else "GPU memory", available.device, needed


def describe_shortage(plan: MemoryPlan, available: Available) -> str:
    """The message of a run that does not fit: bytes by kind, and the changes that take less."""
    estimate = plan.estimate
    where, room, needed = find_shortage(estimate, available)
    lines = [
        f"memory: found {gib(room)} GiB of {where} for each rank; expected {gib(needed)} GiB, estimated for "
        f"{count(plan.plan.num_ranks_of_job, 'rank')} and {plan.settings.main_tokens:,} tokens in a micro-batch:"
    ]
    tables = {
        "for the whole run": estimate.persistent,
        f"at the peak, in {estimate.peak_phase}": estimate.phases[estimate.peak_phase],
        "in host memory": estimate.host,
    }
    for title, kinds in tables.items():
        if kinds:
            lines.append(f"  {gib(sum(kinds.values())):>10}  {title}")
        lines += [f"  {gib(num_bytes):>10}    {kind}" for kind, num_bytes in kinds.items() if num_bytes]
    changes = format_memory_changes(plan, available)
    return "\n".join([*lines, "These need less memory:", *changes, "engine.memory_check=false starts anyway"])


def describe_exhaustion(plan: MemoryPlan, *, is_cpu: bool) -> str:
    """The remedies for a rank that was out of memory, whatever the estimate says: the changes that need less."""
    estimate = plan.estimate
    less = Available(estimate.peak_bytes + is_cpu * estimate.host_bytes - 1, estimate.host_bytes, is_cpu)
    changes = {words: other for words, other in plan.find_memory_changes(less).items() if less.holds(other)}
    lines = [f"  {change}: {gib(other.peak_bytes)} GiB" for change, other in changes.items()]
    return "\n".join(
        [
            f"The estimate is {gib(estimate.peak_bytes)} GiB for each rank, in {estimate.peak_phase}, with "
            f"{plan.settings.main_tokens:,} tokens in a micro-batch. These need less memory:",
            *(lines or ["  (no recipe setting)"]),
        ]
    )


def format_memory_changes(plan: MemoryPlan, available: Available) -> list[str]:
    """Format the changes that take less memory, a line each."""
    lines = []
    for change, estimate in plan.find_memory_changes(available).items():
        host = f" and {gib(estimate.host_bytes)} in host memory" if estimate.host else ""
        verdict = "" if available.holds(estimate) else ", not enough alone"
        lines.append(f"  {change}: {gib(estimate.peak_bytes)} GiB{host}{verdict}")
    return lines or ["  (no recipe setting makes it fit)"]
