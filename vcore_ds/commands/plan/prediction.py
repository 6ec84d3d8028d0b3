"""Cost of a recipe on a cluster: memory, seconds, GPU hours, and the fewest GPUs."""

import difflib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import count, gib, shorten
from vcore_ds.config.load import SHIPPED_DEEPSPEED_CONFIGS
from vcore_ds.config.problems import RecipeError, did_you_mean
from vcore_ds.planning.batch_layout import Utilization, summarize
from vcore_ds.planning.batch_plan import BatchKind, BatchPlan, plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import Available, MemoryPlan, plan_memory
from vcore_ds.planning.hardware import FAST, GPUS, SLOW, Achieved, Cluster, Gpu, find_gpu
from vcore_ds.planning.known_models import KNOWN_MODELS, find_shape
from vcore_ds.planning.memory import COALESCING_SHARE, estimate_unsharded_gradients
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import ParameterCounts, derive_passes, parameter_counts
from vcore_ds.planning.settings import PlanSettings
from vcore_ds.planning.step_cost import LaidOutBatch, StepCost, StepModel

MOST_GPUS = 4096  # largest cluster that is searched

SIMULATED_MEAN = 2970  # tokens of the mean simulated sequence: reasoning traces as those of the paper

_SIMULATED_SIGMA = 0.85  # spread of the logarithms of simulated lengths

_SIMULATED_SEQUENCES = 4096  # sequences in all simulated batches together, which bounds the time that they take

_SIMULATED_BATCHES = 40


@dataclass(frozen=True)
class LengthModel:
    """Lengths of the sequences in simulated batches: those of sampled sequences or, without any, of typical reasoning
    traces."""

    mean: float = SIMULATED_MEAN  # tokens of the mean sequence; of simulated ones before long ones are cut
    sampled: tuple[int, ...] = ()  # tokens of sampled training sequences
    # The same of data.probe_path; empty where the probe is drawn from the training data, or it was not sampled
    sampled_probe: tuple[int, ...] = ()
    num_sequences: int | None = None  # training sequences in all; None where that is not known
    source: str = ""  # the sample, in words
    num_held_out: int | None = None  # held-out sequences; None where that is not known

    def draw_batches(self, part: BatchKind, batch_size: int, longest: int) -> list[list[int]]:
        """Draw the lengths in tokens of simulated batches, cut at `longest`: fewer batches if they are large; none if
        one alone would take long, or has no sequences."""
        generator = random.Random(0)
        sampled = (part == "probe" and self.sampled_probe) or self.sampled
        mu = math.log(self.mean) - _SIMULATED_SIGMA**2 / 2

        def draw_length() -> int:
            tokens = generator.choice(sampled) if sampled else int(generator.lognormvariate(mu, _SIMULATED_SIGMA))
            return max(2, min(longest, tokens))

        num_batches = min(_SIMULATED_BATCHES, _SIMULATED_SEQUENCES // batch_size) if batch_size else 0
        return [[draw_length() for _ in range(batch_size)] for _ in range(num_batches)]

    def describe(self, longest: int) -> str:
        """A line on where the lengths come from; `longest` as in `draw_batches`."""
        if self.sampled:
            return f"Lengths: {self.source}"
        return (
            f"Assumed: lengths of typical reasoning traces (lognormal, mean {self.mean:,.0f} tokens, cut at "
            f"{longest:,})"
        )


def simulate(plan: BatchPlan, longest: int, model: LengthModel) -> dict[BatchKind, list[LaidOutBatch]]:
    """Simulate batches with lengths of at most `longest` tokens. Leaves out batches too large to simulate quickly."""
    main = model.draw_batches("main", plan.global_batch_size, longest)
    probe = model.draw_batches("probe", plan.probe_batch_size_global or 0, longest)
    simulated: dict[BatchKind, list[LaidOutBatch]] = {
        "main": [(lengths, plan.lay_out_main(range(len(lengths)), lengths)) for lengths in main],
        "probe": [(lengths, plan.lay_out_probe(range(len(lengths)), lengths)) for lengths in probe],
    }
    return {part: batches for part, batches in simulated.items() if batches}


def summarize_batches(simulated: Mapping[BatchKind, list[LaidOutBatch]]) -> dict[BatchKind, Utilization]:
    """Sum up how simulated batches use the ranks."""
    return {part: summarize([layout for _, layout in batches]) for part, batches in simulated.items()}


@dataclass(frozen=True)
class RunPlan:
    """A recipe on a cluster."""

    settings: PlanSettings
    cluster: Cluster
    shape: ModelShape  # of the whole model
    lengths: LengthModel
    batch: BatchPlan
    memory: MemoryPlan
    counts: ParameterCounts  # of the whole model
    tokens_per_step: float  # tokens of the main batch, mean of the simulated batches
    # The step's cost with some shares of the peak
    estimate_cost: Callable[[Achieved], StepCost] = field(repr=False, compare=False)
    cost: StepCost  # with the cluster's
    seconds_forward: float  # of the main batch, without a gradient

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
    def verdict(self) -> str:
        """Whether it fits; `tight` where it does without the margin."""
        return "fits" if self.fits_with_margin else "tight" if self.fits else "does not fit"

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        """Seconds of a step at the fast and the slow end of what trainers achieve; None where speeds were measured."""
        if self.cluster.achieved != Achieved():
            return None
        return self.estimate_cost(FAST).seconds_step, self.estimate_cost(SLOW).seconds_step

    @property
    def costed_steps(self) -> int:
        """Steps that the GPU hours are given for: those of the run, or 100 where they are not known."""
        return self.settings.num_steps or 100

    def gpu_hours(self, num_steps: int) -> float:
        return num_steps * self.cost.seconds_step * self.cluster.num_gpus / 3600

    def describe_range(self) -> str:
        """Such as ` (2.11 to 4.07)`: the seconds of a step at both ends; empty where speeds were measured."""
        if (ends := self.seconds_range) is None:
            return ""
        digits = 2 if ends[0] >= 0.1 else 3
        return f" ({ends[0]:,.{digits}f} to {ends[1]:,.{digits}f})"

    def describe(self) -> str:
        """One line, such as `Plan on 64 H100 (8 nodes of 8): fits, 18.8 of 79 GiB; 3.98 s per step, ...`."""
        return (
            f"Plan on {self.cluster.describe()}: {self.verdict}, {gib(self.memory.estimate.peak_bytes, 1)} of "
            f"{gib(self.available.device, 0)} GiB; {self.cost.seconds_step:,.3g} s per step{self.describe_range()}, "
            f"{self.gpu_hours(self.costed_steps):,.1f} GPU hours for {count(self.costed_steps, 'step')} "
            "(assumed speeds: vcore-ds plan)"
        )


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
    by_lower = {name.lower(): name for name in KNOWN_MODELS}
    last = path.rstrip("/").rpartition("/")[2].lower()
    near = [by_lower[name] for name in difflib.get_close_matches(last, by_lower, n=1)]
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
    raise UserError(
        f"--gpu: found {shorten(name)}; expected one of {', '.join(GPUS)}, or for `plan` the nearest of them "
        f"with the values of its data sheet (--gpu-memory, --tflops and others){did_you_mean(near)}"
    )


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
    batches = simulate(plan, settings.cutoff_length, lengths)
    main, probe = batches.get("main", []), batches.get("probe", [])
    if not main or (plan.probe_batch_size_global and not probe):
        sizes = f"batch.global_size {settings.batch.global_size} and probe.batch_size {settings.probe.batch_size}"
        raise RecipeError([f"plan: found {sizes}; expected at most {_SIMULATED_SEQUENCES:,} of each"])
    available = Available(cluster.gpu.memory_bytes, cluster.host_bytes)
    memory = plan_memory(settings, plan, ds_config, summarize_batches(batches), on_gpu=True, available=available)
    if memory is None:
        found = f"found {settings.model.path}, whose configuration lacks hidden or vocabulary size"
        raise RecipeError([f"model.path: {found}; expected the configuration of a decoder"])
    counts = parameter_counts(plan.time_model.shape, memory.settings.lora)
    coalesces = settings.engine.coalesce_gradient_reduction
    if coalesces == "auto":
        unsharded = estimate_unsharded_gradients(plan.time_model.shape, memory.settings, counts)
        coalesces = unsharded <= COALESCING_SHARE * cluster.gpu.memory_bytes
    step_settings = replace(memory.settings, coalesces_gradients=coalesces)
    passes = derive_passes(settings, memory.settings)
    time = replace(plan.time_model, number_bytes=memory.settings.number_bytes)

    def model_step(achieved: Achieved) -> StepModel:
        achieving = replace(cluster, achieved=achieved)
        return StepModel(time, counts, step_settings, achieving)

    def estimate_cost(achieved: Achieved) -> StepCost:
        return model_step(achieved).estimate_step(passes, main, probe)

    return RunPlan(
        settings,
        cluster,
        shape,
        lengths,
        plan,
        memory,
        parameter_counts(shape, memory.settings.lora),
        sum(sum(lengths) for lengths, _ in main) / len(main),
        estimate_cost,
        estimate_cost(cluster.achieved),
        model_step(cluster.achieved).estimate_forward(main),
    )


def find_smallest_cluster(plan: RunPlan) -> RunPlan | None:
    """Plan the run on the fewest GPUs of the same kind on which the recipe fits with its margin; None above
    `MOST_GPUS`.

    Parts of a node are tried in powers of two, then whole nodes.
    """
    for num_gpus in _list_sizes(plan.cluster.gpus_per_node):
        cluster = replace(plan.cluster, num_gpus=num_gpus)
        try:
            candidate = plan_run(plan.settings, cluster, plan.shape, lengths=plan.lengths)
        except RecipeError:  # no such sequence-parallel size at this world size
            continue
        if candidate.fits_with_margin:
            return candidate
    return None


_ON_GPUS_ALONE = ("zero3_bf16.json", "zero3_bf16_large.json", "zero3_bf16_hierarchical.json")
_WORTH_A_CHANGE = 0.97  # of a step's seconds


def find_faster_config(plan: RunPlan) -> tuple[str, RunPlan] | None:
    """Find the shipped DeepSpeed JSON without offloading that gives the fastest step and fits with its margin; None
    where it saves little, or the recipe has a JSON of another kind."""
    configs = [f"{SHIPPED_DEEPSPEED_CONFIGS.name}/{name}" for name in _ON_GPUS_ALONE]
    best: tuple[str, RunPlan] | None = None
    engine, most_seconds = plan.settings.engine, _WORTH_A_CHANGE * plan.cost.seconds_step
    for config in configs if engine.deepspeed_config in configs else ():
        settings = replace(plan.settings, engine=engine.model_copy(update={"deepspeed_config": config}))
        with suppress(RecipeError):  # not on this number of nodes
            other = plan_run(settings, plan.cluster, plan.shape, lengths=plan.lengths)
            if other.fits_with_margin and other.cost.seconds_step < most_seconds:
                best = f"engine.deepspeed_config={config}", other
                most_seconds = _WORTH_A_CHANGE * other.cost.seconds_step
    return best


def _list_sizes(gpus_per_node: int) -> Iterator[int]:
    size = 1
    while size < gpus_per_node:
        yield size
        size *= 2
    num_nodes = 1
    while num_nodes * gpus_per_node <= MOST_GPUS:
        yield num_nodes * gpus_per_node
        num_nodes += 1 if num_nodes < 16 else num_nodes // 8
