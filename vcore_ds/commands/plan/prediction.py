"""Cost of a recipe on a cluster: memory, seconds, GPU hours, and the fewest GPUs."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from vcore_ds.commands.plan.lengths import LengthModel, simulate, summarize_batches
from vcore_ds.commands.plan.step_cost import StepCost, StepModel
from vcore_ds.common.errors import UserError
from vcore_ds.common.text import count, gib, shorten
from vcore_ds.config.problems import RecipeError, did_you_mean
from vcore_ds.planning.batch_layout import Utilization
from vcore_ds.planning.batch_plan import BatchKind, BatchPlan, plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import Available, MemoryPlan, plan_memory
from vcore_ds.planning.hardware import FAST, GPUS, SLOW, Achieved, Cluster, Gpu, find_gpu
from vcore_ds.planning.known_models import KNOWN_MODELS, find_shape
from vcore_ds.planning.memory import COALESCING_SHARE, estimate_unsharded_gradients
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import ParameterCounts, derive_passes, parameter_counts
from vcore_ds.planning.settings import PlanSettings

MOST_GPUS = 4096  # largest cluster that is searched


@dataclass(frozen=True)
class RunPlan:
    """A recipe on a cluster."""

    settings: PlanSettings
    cluster: Cluster
    shape: ModelShape  # parameters of the whole model
    lengths: LengthModel  # lengths of the sequences in the simulated batches
    batch: BatchPlan
    memory: MemoryPlan
    passes: Mapping[BatchKind, Utilization]
    counts: ParameterCounts  # the parameters of the whole model
    cost: StepCost
    tokens_per_step: float  # tokens of the main batch, mean of the simulated batches
    # The step's cost with other shares of the peak
    estimate_cost: Callable[[Achieved], StepCost] = field(repr=False, compare=False)

    @property
    def available(self) -> Available:
        return Available(self.cluster.gpu.memory_bytes, self.cluster.host_bytes)

    @property
    def fits(self) -> bool:
        return self.available.holds(self.memory.estimate)

    @property
    def fits_with_margin(self) -> bool:
        return self.available.holds_with_margin(self.memory.estimate)

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        """Seconds of a step at the fast and the slow end of what trainers achieve; None where speeds were measured."""
        if self.cluster.achieved != Achieved():
            return None
        return self.estimate_cost(FAST).seconds_step, self.estimate_cost(SLOW).seconds_step

    def gpu_hours(self, num_steps: int) -> float:
        return num_steps * self.cost.seconds_step * self.cluster.num_gpus / 3600

    @property
    def costed_steps(self) -> int:
        """Steps that the GPU hours are given for: those of the run, or 100 where they are not known."""
        return self.settings.num_steps or 100

    def replan(self, num_gpus: int) -> "RunPlan":
        """Plan the same run on another number of GPUs. Raises RecipeError as `plan_run` does."""
        cluster = replace(self.cluster, num_gpus=num_gpus)
        return plan_run(self.settings, cluster, self.shape, lengths=self.lengths)


def describe_longest_sequence(batch: BatchPlan) -> str | None:
    """A line on the longest sequence that the recipe's packs and the model's positions allow; None where neither limits
    it. Memory is checked for the sequences of the data."""
    limits = []
    if batch.longest_sequence is not None:
        on_ranks = f"on {count(batch.main_parallel_sizes[-1], 'rank')}"
        limits.append((batch.longest_sequence, f"batch.pack_tokens_per_rank, {on_ranks}"))
    if (positions := batch.time_model.shape.max_positions) is not None:
        limits.append((positions, "the model's positions"))
    if not limits:
        return None
    num_tokens, limit = min(limits)
    return f"Longest possible sequence: {num_tokens:,} tokens ({limit})"


def warn_of_positions(settings: PlanSettings, shape: ModelShape) -> str | None:
    """Return a warning where data.cutoff_length is beyond the model's positions."""
    positions, cutoff = shape.max_positions, settings.cutoff_length
    if positions is None or cutoff <= positions:
        return None
    return (
        f"Warning: data.cutoff_length {cutoff:,} is beyond the {positions:,} positions of {settings.model.path}, and "
        f"later positions are new to the model: set it to {positions}, or extend them in its config.json (YaRN)"
    )


def find_model(path: str) -> tuple[ModelShape, str]:
    """Find the shape of a model on this machine or of a known name, and say which. Raises UserError for others."""
    known = find_shape(path)
    if known is not None:
        return known
    last = path.rstrip("/").rpartition("/")[2]
    by_lower = {name.lower(): name for name in KNOWN_MODELS}
    near = [by_lower[name] for name in difflib.get_close_matches(last.lower(), by_lower, n=1)]
    raise UserError(
        f"model.path: found {shorten(path)}, which is not on this machine; expected a model folder, a config.json, or "
        f"the name of a known model such as Qwen3-32B (docs/planning.md lists them){did_you_mean(near)}"
    )


def require_gpu(name: str) -> Gpu:
    """Find a GPU by its name. Raises UserError for one that is not known."""
    gpu = find_gpu(name)
    if gpu is not None:
        return gpu
    near = difflib.get_close_matches(name.upper(), GPUS, n=1, cutoff=0.4)
    raise UserError(f"--gpu: found {shorten(name)}; expected one of {', '.join(GPUS)}{did_you_mean(near)}")


def plan_run(
    settings: PlanSettings, cluster: Cluster, shape: ModelShape, *, lengths: LengthModel | None = None
) -> RunPlan:
    """Plan a run of a model whose whole shape is `shape`, on sequences of typical reasoning traces unless `lengths`
    says otherwise. Raises RecipeError as `plan_batch` and `deepspeed_config` do, and where no plan can be made.

    Batches have the layout that a run chooses, with the speeds that it assumes for any GPU; seconds are predicted with
    the cluster's speeds.
    """
    lengths = lengths or LengthModel()
    plan = plan_batch(settings, cluster.num_gpus, shape, ranks_per_node=cluster.gpus_per_node)
    ds_config = deepspeed_config(settings, plan)
    if plan.probe_batch_size_global is None:  # the size of the pool is not known before it is read
        plan = replace(plan, probe_batch_size_global=plan.global_batch_size)
    layouts = simulate(plan, settings.cutoff_length, lengths)
    passes = summarize_batches(layouts)
    memory = plan_memory(settings, plan, ds_config, passes, on_gpu=True)
    if "main" not in layouts or (plan.probe_batch_size_global and "probe" not in layouts):
        sizes = f"batch.global_size {settings.batch.global_size} and probe.batch_size {settings.probe.batch_size}"
        raise RecipeError([f"plan: found {sizes}; expected at most 4,096 of each"])
    if memory is None:
        raise RecipeError(
            [
                f"model.path: found {settings.model.path}, whose configuration lacks hidden or vocabulary size; "
                "expected the configuration of a decoder"
            ]
        )
    memory_settings = memory.settings
    rank_counts = parameter_counts(plan.time_model.shape, memory_settings.adapters)
    coalesces = settings.engine.coalesce_gradient_reduction
    if coalesces == "auto":
        unsharded = estimate_unsharded_gradients(plan.time_model.shape, memory_settings, rank_counts)
        coalesces = unsharded <= COALESCING_SHARE * cluster.gpu.memory_bytes
    zero = ds_config["zero_optimization"]
    model = StepModel(
        shape,
        rank_counts,
        replace(memory_settings, coalesces_gradients=coalesces),
        cluster,
        int(zero.get("stage3_max_reuse_distance", 10**9)),
        bool(zero.get("stage3_allgather_sequential", False)),
    )
    main, probe = layouts["main"], layouts.get("probe", [])
    step_passes = derive_passes(settings, memory_settings)

    def estimate_cost(achieved: Achieved) -> StepCost:
        return replace(model, cluster=replace(cluster, achieved=achieved)).estimate_step(step_passes, main, probe)

    return RunPlan(
        settings,
        cluster,
        shape,
        lengths,
        plan,
        memory,
        passes,
        parameter_counts(shape, memory_settings.adapters),
        estimate_cost(cluster.achieved),
        sum(sum(lengths) for lengths, _ in main) / len(main),
        estimate_cost,
    )


def find_smallest_cluster(plan: RunPlan) -> RunPlan | None:
    """Plan the run on the fewest GPUs of the same kind on which the recipe fits with its margin; None above
    `MOST_GPUS`.

    Parts of a node are tried in powers of two, then whole nodes.
    """
    for num_gpus in _list_sizes(plan.cluster.gpus_per_node):
        try:
            candidate = plan.replan(num_gpus)
        except RecipeError:  # no such sequence-parallel size at this world size
            continue
        if candidate.fits_with_margin:
            return candidate
    return None


def _list_sizes(gpus_per_node: int) -> Iterator[int]:
    size = 1
    while size < gpus_per_node:
        yield size
        size *= 2
    num_nodes = 1
    while num_nodes * gpus_per_node <= MOST_GPUS:
        yield num_nodes * gpus_per_node
        num_nodes += 1 if num_nodes < 16 else num_nodes // 8


# Plans in words.


def describe_verdict(plan: RunPlan) -> str:
    """Say whether a plan fits; `tight` where it does without the margin."""
    return "fits" if plan.fits_with_margin else "tight" if plan.fits else "does not fit"


def describe_range(plan: RunPlan) -> str:
    """Such as ` (2.11 to 4.07)`: the seconds of a step at both ends; empty where speeds were measured."""
    ends = plan.seconds_range
    digits = 2 if ends is not None and ends[0] >= 0.1 else 3
    return "" if ends is None else f" ({ends[0]:,.{digits}f} to {ends[1]:,.{digits}f})"


def describe_plan(plan: RunPlan) -> str:
    """One line, such as `Plan on 64 H100 (8 nodes of 8): fits, 18.8 of 79 GiB; 3.98 s per step, ...`."""
    estimate = plan.memory.estimate
    return (
        f"Plan on {plan.cluster.describe()}: {describe_verdict(plan)}, {gib(estimate.peak_bytes, 1)} of "
        f"{gib(plan.available.device, 0)} GiB; {plan.cost.seconds_step:,.3g} s per step{describe_range(plan)}, "
        f"{plan.gpu_hours(plan.costed_steps):,.1f} GPU hours for {count(plan.costed_steps, 'step')} "
        "(assumed speeds: vcore-ds plan)"
    )
