"""The memory of a recipe on the ranks of a job, and what would make it smaller."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vcore_ds.common.text import count, gib
from vcore_ds.config.files import SHIPPED_DEEPSPEED_CONFIGS
from vcore_ds.planning.batch_layout import Utilization, list_sequence_parallel_sizes
from vcore_ds.planning.batch_plan import BatchKind, BatchPlan, find_other_expert_sizes
from vcore_ds.planning.memory import MemoryEstimate, estimate_memory
from vcore_ds.planning.model_shape import estimate_fullest_load
from vcore_ds.planning.passes import ParameterCounts
from vcore_ds.planning.settings import AdapterShape, MemorySettings, PlanSettings

_MIN_PACK_TOKENS = 1024
"""Shortest pack that is offered as a remedy: passes over shorter ones spend their time on all-gathers."""

_MOST_RANKS = 1024  # largest job that is offered as a remedy


@dataclass(frozen=True)
class Available:
    """Bytes that one rank may use."""

    device: int
    host: int
    is_cpu: bool = False  # whether the device is the host: offloaded shards take the same memory

    def holds(self, estimate: MemoryEstimate) -> bool:
        """Whether the estimate fits, without a margin."""
        return self._fits(estimate, 0)

    def holds_with_margin(self, estimate: MemoryEstimate) -> bool:
        return self._fits(estimate, estimate.margin_bytes)

    def _fits(self, estimate: MemoryEstimate, margin: int) -> bool:
        if self.is_cpu:
            return estimate.peak_bytes + estimate.host_bytes + margin <= self.device
        return estimate.peak_bytes + margin <= self.device and estimate.host_bytes <= self.host


_Change = tuple[Mapping[str, str], Mapping[str, Any]]
"""Overrides of a recipe, and the fields of `MemorySettings` that they change."""


@dataclass(frozen=True)
class MemoryChange:
    """A change that needs less memory."""

    change: str  # overrides, a number of ranks, or both
    estimate: MemoryEstimate


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
        return self._estimate_changed({})

    def find_memory_changes(self, available: Available) -> list[MemoryChange]:
        """Find the changes that need less memory, one by one, cheapest first; if none is enough, also all of them
        together."""
        changes = [*self._list_changes(available)]
        remedies = [self._apply(change) for change in changes]
        remedies += self._find_more_ranks(available)
        if len(changes) > 1 and not any(available.holds(remedy.estimate) for remedy in remedies):
            overrides = {key: value for change, _ in changes for key, value in change.items()}
            together = overrides, {key: value for _, settings in changes for key, value in settings.items()}
            remedies.append(self._apply(together))
            if not available.holds(remedies[-1].estimate):
                remedies += self._find_more_ranks(available, together)
        return remedies

    def _apply(self, change: _Change, num_ranks: int | None = None) -> MemoryChange:
        """`num_ranks`: ranks of the job; None for no change."""
        overrides, settings = change
        if num_ranks is not None:
            settings = {**settings, "num_ranks": num_ranks // self.settings.tensor}
        ranks = [] if num_ranks is None else [f"{num_ranks} ranks"]
        words = [" ".join(f"{key}={value}" for key, value in overrides.items())] if overrides else []
        return MemoryChange(" and ".join([*ranks, *words]), self._estimate_changed(settings))

    def _list_changes(self, available: Available) -> Iterator[_Change]:
        settings = self.settings
        if settings.stages_checkpoints:
            yield ({"checkpoint.async": "false"}, {"stages_checkpoints": False})
        if not settings.is_checkpointed:
            yield ({"model.gradient_checkpointing": "true"}, {"is_checkpointed": True})
        yield from self._list_expert_changes()
        yield from self._list_micro_batch_changes()
        if available.is_cpu:  # offloading moves nothing there
            return
        if settings.number_bytes == 2:
            for name, all_of_it in (("offload_optimizer", False), ("offload_all", True)):
                if settings.offloads_optimizer and (settings.offloads_parameters or not all_of_it):
                    continue
                file = f"{SHIPPED_DEEPSPEED_CONFIGS.name}/zero3_bf16_{name}.json"
                offloaded = {"offloads_optimizer": True, "offloads_parameters": all_of_it, "ranks_of_second_copy": 1}
                yield ({"engine.deepspeed_config": file}, offloaded)
        if not settings.offloads_checkpoints:
            key = {} if settings.is_checkpointed else {"model.gradient_checkpointing": "true"}
            overrides = {**key, "model.activation_offload": "true"}
            yield (overrides, {"is_checkpointed": True, "offloads_checkpoints": True})

    def _list_expert_changes(self) -> Iterator[_Change]:
        """List expert parallelism over the ranks of a node, and at the largest possible size."""
        experts, in_node = self.plan.time_model.shape.experts, self.plan.time_model.ranks_per_node
        larger = [n for n in self.other_expert_sizes if n > self.settings.expert]
        for size in dict.fromkeys([*(n for n in larger if n == in_node), *larger[-1:]]):
            assert experts is not None  # whose sizes these are
            changed = {"expert": size, "expert_load": estimate_fullest_load(experts.num_experts, size)}
            yield ({"parallel.expert": str(size)}, changed)

    def _list_micro_batch_changes(self) -> Iterator[_Change]:
        """List changes with fewer tokens on a rank: half a pack, one sequence, or a larger sequence-parallel size."""
        plan, pack = self.plan, self.plan.pack_tokens_per_rank
        if pack is not None:
            half = pack // 2
            if half >= _MIN_PACK_TOKENS and plan.main_parallel_sizes[-1] * half >= self.cutoff_length:
                yield ({"batch.pack_tokens_per_rank": str(half)}, self._scale_tokens(half / pack))
            return
        if plan.micro_batch_size_per_rank is not None and plan.micro_batch_size_per_rank > 1:
            share = 1 / plan.micro_batch_size_per_rank
            yield ({"batch.micro_batch_size_per_rank": "1"}, self._scale_tokens(share))
        shape = plan.time_model.shape
        larger = [
            k for k in list_sequence_parallel_sizes(plan.num_ranks, shape.num_heads) if k > self.sequence_parallel
        ]
        if larger and shape.no_sequence_parallelism is None:
            overrides = {"batch.sequence_parallel": str(larger[0])}
            if plan.probe_batch_size_global != 0:
                overrides["probe.sequence_parallel"] = str(larger[0])
            yield (overrides, self._scale_tokens(self.sequence_parallel / larger[0]))

    def _scale_tokens(self, share: float) -> dict[str, int]:
        keys = ("main_tokens", "probe_tokens", "utility_tokens")
        return {key: round(getattr(self.settings, key) * share) for key in keys}

    def _find_more_ranks(self, available: Available, change: _Change = ({}, {})) -> Iterator[MemoryChange]:
        """Find the smallest number of ranks that fits, by doubling."""
        num_ranks = 2 * self.settings.num_ranks * self.settings.tensor
        while num_ranks <= _MOST_RANKS:
            remedy = self._apply(change, num_ranks)
            if available.holds(remedy.estimate):
                yield remedy
                return
            num_ranks *= 2

    def _estimate_changed(self, changed: Mapping[str, Any]) -> MemoryEstimate:
        return estimate_memory(self.plan.time_model.shape, replace(self.settings, **changed), self.counts)


def plan_memory(
    settings: PlanSettings,
    plan: BatchPlan,
    deepspeed_config: Mapping[str, Any],
    passes: Mapping[BatchKind, Utilization],
    counts: ParameterCounts | None = None,
    *,
    on_gpu: bool,
) -> MemoryPlan | None:
    """Plan the memory of a run; None for a model whose sizes are unknown.

    `passes` says how the passes over the main and the probe batch use the ranks; where one is missing, its
    micro-batches are as large as the recipe allows. `counts` are those of the model itself, or of a rank's part with
    tensor parallelism; None, or zeros, for those of its shape.
    """
    shape = plan.time_model.shape
    if shape.hidden_size == 0:
        return None
    zero = deepspeed_config["zero_optimization"]
    counts = counts if counts is not None and counts.all > 0 else None
    hpz = zero.get("zero_hpz_partition_size", 1)
    longest = plan.pack_tokens_per_rank or settings.cutoff_length * (plan.micro_batch_size_per_rank or 1)
    tokens = {part: utilization.most_tokens for part, utilization in passes.items()}
    main_tokens = tokens.get("main", longest)
    model, lora = settings.model, settings.lora
    has_utility_pass = settings.estimator is not None and not settings.is_fused
    memory_settings = MemorySettings(
        num_ranks=plan.num_ranks,
        main_tokens=main_tokens,
        probe_tokens=tokens.get("probe", longest) if plan.probe_batch_size_global != 0 else 0,
        utility_tokens=main_tokens * plan.batches_per_utility_pass if has_utility_pass else 0,
        tensor=plan.tensor,
        expert=plan.time_model.expert,
        expert_load=1.0
        if shape.experts is None
        else estimate_fullest_load(shape.experts.num_experts, plan.time_model.expert),
        estimator=settings.estimator,
        probe_rank=settings.probe.rank if settings.estimator == "jvp" and lora is None else None,
        rank_passes=settings.probe.rank_passes,
        fp8_tangents=settings.utility.tangent_precision == "fp8",
        is_fused=settings.is_fused,
        number_bytes=2 if model.precision == "bf16" else 4,
        adapters=None if lora is None else AdapterShape(lora.rank, lora.dropout > 0.0),
        is_anchored=settings.method.is_anchored,
        optimizer=settings.optimizer.name,
        has_muon_direction=settings.estimator is not None and settings.probe.direction == "muon",
        is_checkpointed=model.gradient_checkpointing,
        offloads_checkpoints=model.activation_offload,
        offloads_parameters=_is_offloaded(zero, "offload_param"),
        offloads_optimizer=_is_offloaded(zero, "offload_optimizer"),
        stages_checkpoints=settings.stages_checkpoints,
        keeps_direction=settings.estimator is not None and settings.probe.every > 1,
        # `auto` stays within the margin.
        coalesces_gradients=settings.engine.coalesce_gradient_reduction is True,
        ranks_of_second_copy=min(hpz, plan.num_ranks) if isinstance(hpz, int) else 1,
        on_gpu=on_gpu,
        **{field: int(zero[key]) for key, field in _SIZES.items() if isinstance(zero.get(key), int | float)},
    )
    sequence_parallel = passes["main"].typical_parallel_size if "main" in passes else 1
    other_expert_sizes = find_other_expert_sizes(settings, plan.num_ranks_of_job, shape)
    return MemoryPlan(plan, memory_settings, sequence_parallel, settings.cutoff_length, counts, other_expert_sizes)


_SIZES = {"stage3_max_live_parameters": "max_live_parameters", "reduce_bucket_size": "bucket_numel"}
"""DeepSpeed's keys for sizes in elements, and their fields in `MemorySettings`."""


def _is_offloaded(zero: Mapping[str, Any], key: str) -> bool:
    section = zero.get(key)
    return isinstance(section, Mapping) and section.get("device") == "cpu"


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
    phase = estimate.peak_phase
    lines = [
        f"memory: found {gib(room)} GiB of {where} for each rank; expected {gib(needed)} GiB, estimated for "
        f"{count(plan.plan.num_ranks_of_job, 'rank')} and {plan.settings.main_tokens:,} tokens in a micro-batch:",
        *_format_table("for the whole run", estimate.persistent),
        *_format_table(f"at the peak, in {phase}", estimate.phases[phase]),
        *_format_table("in host memory", estimate.host),
        "These need less memory:",
        *format_memory_changes(plan, available),
        "engine.memory_check=false starts anyway",
    ]
    return "\n".join(lines)


def _format_table(title: str, kinds: Mapping[str, int]) -> list[str]:
    """Format GiB by kind, one line each, below their sum; nothing where there are none."""
    if not kinds:
        return []
    rows = [f"  {gib(num_bytes):>10}    {kind}" for kind, num_bytes in kinds.items() if num_bytes]
    return [f"  {gib(sum(kinds.values())):>10}  {title}", *rows]


def format_memory_changes(plan: MemoryPlan, available: Available) -> list[str]:
    """Format the changes that take less memory, a line each."""
    lines = []
    for remedy in plan.find_memory_changes(available):
        estimate = remedy.estimate
        host = f" and {gib(estimate.host_bytes)} in host memory" if estimate.host else ""
        verdict = "" if available.holds(estimate) else ", not enough alone"
        lines.append(f"  {remedy.change}: {gib(estimate.peak_bytes)} GiB{host}{verdict}")
    return lines or ["  (no recipe setting makes it fit)"]
