"""The layout of the global batch, the probe batch and the gradient-free passes on the ranks of a job."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vcore_ds.common.text import count
from vcore_ds.config.problems import RecipeError
from vcore_ds.planning.batch_layout import BatchLayout, MicroBatchLimit, lay_out_batch, list_sequence_parallel_sizes
from vcore_ds.planning.hardware import Machine
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import H100, TimeModel
from vcore_ds.planning.settings import PlanSettings

# Possible parallel sizes, and refusals of impossible ones.


def explain_refused_differences(path: str, *, has_jvp: bool = True) -> str:
    """Explain why no finite difference is taken with an MoE model, for a recipe that asks for one. `has_jvp`: whether
    its attention has a forward-mode derivative."""
    instead = "jvp (utility.estimator=jvp utility.epsilon=null)" if has_jvp else "another architecture"
    return (
        f"utility.estimator: found finite_difference together with model.path {path}, an MoE model: the "
        "perturbation sends tokens to other experts, and the jumps of their losses are taken for utility; expected "
        f"{instead}, or a method without utilities (methods/sft.yaml)"
    )


def check_parallel_sizes(settings: PlanSettings, num_ranks: int, ranks_per_node: int, shape: ModelShape) -> None:
    """Raise RecipeError where `parallel.tensor` or `parallel.expert` does not divide the ranks of the job, `tensor`
    those of a full node and the model's heads and MLP, or `expert` its experts. `shape` is that of the whole model."""
    beside, on_node = f"together with model.path {settings.model.path}", min(ranks_per_node, num_ranks)
    divided = [
        ("tensor", num_ranks, f"on {count(num_ranks, 'rank')}"),
        ("tensor", on_node, f"with {count(on_node, 'rank')} on a node"),
        ("expert", num_ranks, f"on {count(num_ranks, 'rank')}"),
    ]
    if not shape.is_assumed:
        num_experts = 1 if shape.experts is None else shape.experts.num_experts
        kind = "a dense model" if shape.experts is None else f"whose layers have {num_experts} experts"
        divided += [
            ("tensor", shape.num_kv_heads, f"{beside}, which has {shape.num_kv_heads} key/value heads"),
            ("tensor", shape.intermediate_size, f"{beside}, whose MLP has the width {shape.intermediate_size}"),
            ("expert", num_experts, f"{beside}, {kind}"),
        ]
    problems: dict[str, str] = {}
    for name, number, where in divided:
        if number % (size := getattr(settings.parallel, name)):
            expected = "1" if number == 1 else f"a divisor of {number}"
            problems.setdefault(name, f"parallel.{name}: found {size} {where}; expected {expected}")
    if problems:
        raise RecipeError(problems.values())


def find_other_expert_sizes(settings: PlanSettings, num_ranks: int, shape: ModelShape) -> list[int]:
    """Other possible expert-parallel sizes, ascending: the powers of two, and all ranks."""
    is_on_experts = settings.lora is not None and "experts" in settings.lora.target_modules
    if shape.experts is None or settings.model.provider != "huggingface" or is_on_experts:
        return []
    most = math.gcd(num_ranks, shape.experts.num_experts)
    sizes = {2**i for i in range(most.bit_length()) if most % 2**i == 0} | {most}
    return sorted(sizes - {settings.parallel.expert})


def find_sequence_parallel_sizes(
    settings: PlanSettings, section: Literal["batch", "probe"], num_ranks: int, shape: ModelShape
) -> tuple[int, ...]:
    """Sequence-parallel sizes that are possible in the passes over this section's batch, ascending. A tensor-parallel
    group counts as one of `num_ranks`, and `shape` is that of a rank's part.

    Raises RecipeError where the recipe's size is impossible, or the longest sequence does not fit into the largest
    pack.
    """
    key, wanted, model = f"{section}.sequence_parallel", getattr(settings, section).sequence_parallel, settings.model
    # Any number of heads may be that of a model that cannot be seen.
    heads = num_ranks if shape.is_assumed and wanted != "auto" else shape.num_heads
    possible = list_sequence_parallel_sizes(num_ranks, heads) if shape.no_sequence_parallelism is None else [1]
    if wanted != "auto" and wanted not in possible:
        where, sizes = f"on {count_ranks(num_ranks, settings.parallel.tensor)}", ", ".join(map(str, possible))
        if shape.no_sequence_parallelism is not None:
            why = f"model.path {model.path}, {shape.no_sequence_parallelism}"
            where = "together with " + (why if model.attention == "auto" else f"model.attention {model.attention}")
        raise RecipeError([f"{key}: found {wanted} {where}; expected auto or one of {sizes}"])
    chosen = tuple(possible if wanted == "auto" else [wanted])
    longest, pack = settings.cutoff_length, settings.batch.pack_tokens_per_rank
    if pack is not None and chosen[-1] * pack < longest:
        raise RecipeError(
            [
                f"batch.pack_tokens_per_rank: found {pack} together with data.cutoff_length {longest}, where {key} "
                f"divides a pack among at most {count(chosen[-1], 'rank')}; expected {-(-longest // chosen[-1])} or "
                f"more, or data.cutoff_length {chosen[-1] * pack} or less"
            ]
        )
    return chosen


BatchKind = Literal["main", "probe"]  # a pass over a batch that has its own sequence-parallel size

_Section = Literal["batch", "probe"]  # the recipe's section for each of them

_SEQUENCES_PER_GROUP = 8  # sequences that each group of ranks should have, so that their packs can be made about equal


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of one optimizer step on the ranks of a job; all sizes in sequences."""

    num_ranks: int  # ranks that may have different micro-batches; a tensor-parallel group counts as one
    global_batch_size: int  # |B|, over all ranks and micro-batches
    micro_batch_size_per_rank: int | None  # None where the time model chooses it for each micro-batch
    # Maximum tokens of a pack on each rank of a sequence-parallel group; None where the recipe does not say
    pack_tokens_per_rank: int | None
    num_trusted_global: int  # sequences of |B| that are drawn from the pool in data.probe_path
    # |B'|, over all ranks; None for the whole pool, 0 where no probe batch is drawn
    probe_batch_size_global: int | None
    probe_micro_batch_size_per_rank: int | None  # sequences of B' per rank in one forward and backward; None as above
    utility_micro_batch_size_per_rank: int | None  # sequences per rank in one gradient-free forward; None as above
    # Possible sequence-parallel sizes of the main batch, ascending; also in validation
    main_parallel_sizes: tuple[int, ...]
    probe_parallel_sizes: tuple[int, ...]  # the same of the probe batch
    time_model: TimeModel
    tensor: int = 1  # ranks of a tensor-parallel group

    @property
    def num_ranks_of_job(self) -> int:
        return self.num_ranks * self.tensor

    @property
    def batches_per_utility_pass(self) -> int:
        """Main micro-batches in one gradient-free forward."""
        if self.utility_micro_batch_size_per_rank is None or self.micro_batch_size_per_rank is None:
            return 1
        return max(1, self.utility_micro_batch_size_per_rank // self.micro_batch_size_per_rank)

    @property
    def sequence_parallel_sizes(self) -> list[int]:
        """All sequence-parallel sizes that are possible in some pass, ascending."""
        return sorted({*self.main_parallel_sizes, *self.probe_parallel_sizes})

    def lay_out_main(
        self, ids: Sequence[int], lengths: Sequence[int], micro_batch_size: int | None = None
    ) -> BatchLayout:
        """Lay out the sequences `ids`, of `lengths` tokens, over all ranks. `micro_batch_size`: sequences per rank in a
        forward; None for that of the main batch."""
        limit = self._make_limit(micro_batch_size or self.micro_batch_size_per_rank)
        sizes = self.main_parallel_sizes
        return lay_out_batch(ids, lengths, parallel_sizes=sizes, limit=limit, time_model=self.time_model)

    def lay_out_probe(self, ids: Sequence[int], lengths: Sequence[int]) -> BatchLayout:
        """Lay out a probe batch."""
        limit, sizes = self._make_limit(self.probe_micro_batch_size_per_rank), self.probe_parallel_sizes
        return lay_out_batch(ids, lengths, parallel_sizes=sizes, limit=limit, time_model=self.time_model)

    def _make_limit(self, micro_batch_size: int | None) -> MicroBatchLimit:
        return MicroBatchLimit(self.pack_tokens_per_rank, micro_batch_size, self.may_pack)

    @property
    def is_packed(self) -> bool:
        """Whether the sequences of a main micro-batch are one pack."""
        return self._make_limit(self.micro_batch_size_per_rank).is_packed

    @property
    def shares_forwards(self) -> bool:
        """Whether several sequences may share a forward."""
        other_sizes = (self.probe_micro_batch_size_per_rank, self.utility_micro_batch_size_per_rank)
        return self.is_packed or any(size != 1 for size in (self.micro_batch_size_per_rank, *other_sizes))

    @property
    def may_pack(self) -> bool:
        """Whether the attention knows packed sequences by their lengths, so that packing them costs nothing."""
        shape = self.time_model.shape
        return shape.unpackable is None and shape.no_sequence_parallelism is None

    def describe_warning(self, part: BatchKind) -> str:
        """Describe that a part's batches leave many ranks waiting, and which settings to change."""
        section: _Section = "probe" if part == "probe" else "batch"
        key, size = "batch.global_size", self.global_batch_size
        sizes, micro = self.main_parallel_sizes, self.micro_batch_size_per_rank
        if part == "probe":
            key, size = "probe.batch_size", self.probe_batch_size_global or 0  # 0 for the whole pool
            sizes, micro = self.probe_parallel_sizes, self.probe_micro_batch_size_per_rank
        shape = self.time_model.shape
        enough = _SEQUENCES_PER_GROUP * self.num_ranks // sizes[-1]
        remedy = f"set {key} to {max(enough, 2 * size)} or more, or use fewer ranks" if size else "use fewer ranks"
        possible = list_sequence_parallel_sizes(self.num_ranks, shape.num_heads)
        if shape.no_sequence_parallelism is None and list(sizes) != possible:
            remedy = f"set {section}.sequence_parallel to auto"
        elif size >= enough and not self._make_limit(micro).is_packed:
            remedy = "set batch.pack_tokens_per_rank to data.cutoff_length and every micro_batch_size_per_rank to 1"
        return f"the {part} batch leaves much of the ranks' time unused: {remedy}"

    def describe(self) -> str:
        """One line, such as `32 sequences a step on 8 ranks, 2 in a micro-batch; probe 4`."""
        if self.pack_tokens_per_rank is not None:
            held = f"in packs of at most {self.pack_tokens_per_rank:,} tokens a rank"
        elif self.micro_batch_size_per_rank is None:
            held = "short ones packed" if self.may_pack else "those of similar length in a micro-batch"
        else:
            held = f"{self.micro_batch_size_per_rank} in a micro-batch"
        probe = {None: "; probe the whole pool", 0: ""}.get(
            self.probe_batch_size_global, f"; probe {self.probe_batch_size_global}"
        )
        held += f", {self.num_trusted_global} of them trusted" if self.num_trusted_global else ""
        ranks = count_ranks(self.num_ranks, self.tensor)
        return f"{count(self.global_batch_size, 'sequence')} a step on {ranks}, {held}{probe}"


def plan_batch(
    settings: PlanSettings, num_ranks: int, shape: ModelShape, *, ranks_per_node: int = 8, machine: Machine = H100
) -> BatchPlan:
    """Plan a recipe's batches on `num_ranks` ranks, a tensor-parallel group as one: its ranks share their sequences.

    Raises RecipeError where the recipe's tensor-, expert- or sequence-parallel sizes do not fit the ranks, the
    nodes or the model, sequences share a forward in which this model would let them change each other, the longest
    sequence would not fit into the largest pack, or finite differences are asked for with an MoE model.
    """
    if settings.estimator == "finite_difference" and shape.experts is not None:
        raise RecipeError([explain_refused_differences(settings.model.path)])
    model, batch, probe = settings.model, settings.batch, settings.probe
    check_parallel_sizes(settings, num_ranks, ranks_per_node, shape)
    tensor, expert = settings.parallel.tensor, settings.parallel.expert
    ranks_per_node = min(ranks_per_node, num_ranks)
    num_ranks, ranks_per_node, shape = num_ranks // tensor, ranks_per_node // tensor, shape.take_tensor_shard(tensor)
    shape = shape.adapt_to_length(settings.cutoff_length)
    check_shared_forwards(settings, shape)
    if model.attention != "auto":
        shape = replace(shape, no_sequence_parallelism="whose attention is not replaced")
    micro: int | None = None
    if batch.micro_batch_size_per_rank != "auto":
        micro = batch.micro_batch_size_per_rank
    elif batch.pack_tokens_per_rank is not None or settings.method.alpha_scope == "micro_batch" or shape.is_alone:
        micro = 1  # a pack; with alpha_scope micro_batch, sequences that share a micro-batch would change alpha
    has_probe = settings.estimator is not None
    sections: tuple[_Section, ...] = ("batch", "probe") if has_probe else ("batch",)
    sizes = {section: find_sequence_parallel_sizes(settings, section, num_ranks, shape) for section in sections}
    return BatchPlan(
        num_ranks=num_ranks,
        global_batch_size=batch.global_size,
        micro_batch_size_per_rank=micro,
        pack_tokens_per_rank=batch.pack_tokens_per_rank,
        num_trusted_global=settings.num_trusted,
        probe_batch_size_global=(None if probe.batch_size == "all" else probe.batch_size) if has_probe else 0,
        probe_micro_batch_size_per_rank=probe.micro_batch_size_per_rank or micro,
        utility_micro_batch_size_per_rank=settings.utility.micro_batch_size_per_rank or micro,
        main_parallel_sizes=sizes["batch"],
        probe_parallel_sizes=sizes.get("probe", (1,)),
        time_model=TimeModel(shape, num_ranks, ranks_per_node, machine, expert),
        tensor=tensor,
    )


def check_shared_forwards(settings: PlanSettings, shape: ModelShape) -> None:
    """Raise RecipeError where sequences would share a forward in which they change each other's losses. `shape` is that
    for sequences of data.cutoff_length (`ModelShape.adapt_to_length`)."""
    batch, beside = settings.batch, f"together with model.path {settings.model.path}"
    problems = []
    if batch.pack_tokens_per_rank is not None and shape.unpackable is not None:
        problems.append(
            f"batch.pack_tokens_per_rank: found {batch.pack_tokens_per_rank} {beside}, {shape.unpackable}; expected "
            "null: packed sequences would change each other's losses"
        )
    if shape.is_alone:
        remedy = f"data.cutoff_length of at most {shape.rope_limit}"
        if shape.rope == "dynamic":
            problems.append(
                f"data.cutoff_length: found {settings.cutoff_length} {beside}, whose rotary embedding (dynamic) "
                f"then depends on the sequences of earlier forwards; expected at most {shape.rope_limit}"
            )
        sizes = {
            "batch": batch.micro_batch_size_per_rank,
            "probe": settings.probe.micro_batch_size_per_rank,
            "utility": settings.utility.micro_batch_size_per_rank,
        }
        problems += [
            f"{section}.micro_batch_size_per_rank: found {size} {beside}, {shape.unpackable}; expected 1, or {remedy}"
            for section, size in sizes.items()
            if isinstance(size, int) and size > 1
        ]
    if problems:
        raise RecipeError(problems)


def count_ranks(number: int, tensor: int) -> str:
    """Such as `8 ranks`, or `4 tensor-parallel groups of 2 ranks`."""
    return count(number, "rank") if tensor == 1 else f"{count(number, 'tensor-parallel group')} of {tensor} ranks"
