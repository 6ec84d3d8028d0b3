"""Seconds and bytes of an optimizer step by phase: GEMMs, all-gathers, reduce-scatters, exchanges and the update.

Every pass is counted in multiples of one forward. Everything runs at an assumed share of the peak
(`hardware.Achieved`); all-gathers and reduce-scatters hide behind a share of the GEMMs. docs/planning.md has the
formulas.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vcore_ds.planning.hardware import (
    EXCHANGES_OF_EXPERTS,
    Cluster,
    Traffic,
    count_exchanged_numbers,
    count_numbers_to_experts,
    estimate_exchange_traffic,
    estimate_gather_traffic,
    estimate_hidden_state_traffic,
    estimate_weights_traffic,
)
from vcore_ds.planning.memory import (
    MemorySettings,
    ParameterCounts,
    Phase,
    count_factors,
    list_unrouted_mlps,
)
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.packing import list_padded_lengths
from vcore_ds.planning.spread import Spread

NUM_ITERATIONS = 5
"""Newton-Schulz iterations of Muon."""

# FLOP of a pass.


def linear_flops_per_token(shape: ModelShape) -> int:
    """FLOP of a forward's linear layers and head for one token, which goes through few of a layer's experts."""
    return 2 * (shape.num_layers * shape.layer_parameters + shape.vocabulary_size * shape.hidden_size)


def flops_of_all_weights(shape: ModelShape) -> int:
    """The same for a token that went through all experts: proportional to the weights that a pass reads."""
    return linear_flops_per_token(shape) + 2 * shape.idle_parameters


def routed_flops_per_token(shape: ModelShape) -> int:
    """FLOP of the routed experts in a token's forward; 0 in a dense model."""
    experts = shape.experts
    return 0 if experts is None else 6 * shape.hidden_size * experts.num_layers * experts.per_token * experts.width


_BYTES_OF_QUANTIZATION = 17
"""Memory traffic of rounding an element of bf16 to FP8 by PyTorch's operations: absolute value, largest of a row,
quotient in fp32, conversion."""


def quantized_bytes(shape: ModelShape, num_tokens: float) -> float:
    """Memory traffic of rounding to FP8 in a forward with tangents: the weights of linear layers but those of experts
    and head, and the tangents of their inputs, once for each of the seven layers."""
    weights = (linear_flops_per_token(shape) - routed_flops_per_token(shape)) / 2
    weights -= shape.vocabulary_size * shape.hidden_size
    inputs = shape.num_layers * (3 * shape.hidden_size + shape.num_heads * shape.head_dim)
    for number, width in list_unrouted_mlps(shape):
        inputs += number * (2 * shape.hidden_size + width)
    return _BYTES_OF_QUANTIZATION * (weights + num_tokens * inputs)


def attention_flops_per_square(shape: ModelShape) -> int:
    """FLOP of a forward's causal attention over a sequence, divided by the square of its tokens: scores and values,
    half of them hidden."""
    return 2 * shape.num_layers * shape.num_heads * shape.head_dim


def forward_flops(shape: ModelShape, lengths: Iterable[int], *, linear: float = 1.0, attention: float = 1.0) -> float:
    """FLOP of the GEMMs of one forward over sequences of these lengths: linear layers, head, causal attention.

    Args:
        linear, attention: multiples of a forward's GEMMs that a pass computes.
    """
    per_token = linear * linear_flops_per_token(shape)
    per_square = attention * attention_flops_per_square(shape)
    return float(sum(per_token * n + per_square * n * n for n in lengths))


# The passes of an optimizer step, in multiples of a plain forward.


@dataclass(frozen=True)
class PassWork:
    """One micro-step of a pass, in multiples of a plain forward."""

    linear: int
    """GEMMs of linear layers."""
    attention: int
    """GEMMs of attention that the result needs."""
    gathers: int
    """All-gathers of all parameters."""
    exchanges: int
    """Exchanges of a forward within a sequence-parallel group."""
    runs: int
    """Runs through the layers."""
    tangent_gathers: int = 0
    """All-gathers of the direction of all trained parameters."""
    fp8: int = 0
    """GEMMs of linear layers, among `linear`, that run in FP8, in half the time; not those of experts and head."""
    low_rank: int = 0
    """Rank r of the direction's factors in the GEMMs `Q (B x)`, which replace those of the weights' tangents; 0 for
    none."""
    reduces: bool = False
    """Whether the gradient is reduced."""
    attention_again: float = 0.0
    """GEMMs of attention that its kernels compute again: they take time and count nothing in the MFU."""

    def count_hidden_state_exchanges(self, num_layers: int) -> tuple[int, int]:
        """Count the exchanges over a tensor-parallel group, of hidden states of all tokens or, where values and
        tangents travel together, twice the hidden states. Returns their number, and the hidden states they hold of each
        token.

        A layer all-gathers before and reduce-scatters after attention and MLP, once more in a backward, and all-gathers
        the inputs of trained weights again; the embedding and the head have one each. tests/dist/test_megatron.py
        counts them.
        """
        held = num_layers * (4 * self.exchanges + 2 * self.reduces) + 2 * self.runs
        return held - self.num_with_tangents * (4 * num_layers + 2), held

    @property
    def num_with_tangents(self) -> int:
        """Forwards in which tangents travel with the values."""
        return max(self.tangent_gathers, int(self.low_rank > 0))

    def linear_multiple(self, shape: ModelShape) -> float:
        """GEMMs of linear layers, with those of a low-rank direction's factors, in multiples of a plain forward's."""
        if self.low_rank == 0:
            return self.linear
        num_active = sum(number * rows * columns for number, rows, columns in shape.list_weight_matrices(active=True))
        return self.linear + count_factors(shape, self.low_rank, active=True) / num_active

    def linear_time_multiple(self, shape: ModelShape) -> float:
        """The same, with a GEMM in FP8 as half of one."""
        in_head = 2 * shape.vocabulary_size * shape.hidden_size
        in_fp8 = 1 - (in_head + routed_flops_per_token(shape)) / linear_flops_per_token(shape)
        return self.linear_multiple(shape) - 0.5 * self.fp8 * in_fp8

    def __add__(self, other: "PassWork") -> "PassWork":
        return PassWork(
            self.linear + other.linear,
            self.attention + other.attention,
            self.gathers + other.gathers,
            self.exchanges + other.exchanges,
            self.runs + other.runs,
            self.tangent_gathers + other.tangent_gathers,
            self.fp8 + other.fp8,
            max(self.low_rank, other.low_rank),
            self.reduces or other.reduces,
            self.attention_again + other.attention_again,
        )


FORWARD = PassWork(1, 1, 1, 1, 1)


def derive_tangent_work(settings: MemorySettings, *, is_fused: bool) -> PassWork:
    """Derive the work that tangents add to a forward.

    Args:
        is_fused: the forward is the main one, whose values FlashAttention computes.
    """
    # GEMMs of a weight with the input's tangent and, where it is trained, of its tangent with the input. A forward of
    # attention has two GEMMs, its tangent another four, in one kernel; beside FlashAttention's values that kernel has
    # five, as it computes the scores again.
    fp8, rank, again = int(settings.fp8_tangents), settings.probe_rank, 0.5 if is_fused else 0.0
    if rank is not None:
        return PassWork(1, 2, gathers=0, exchanges=1, runs=1, fp8=fp8, low_rank=rank, attention_again=again)
    linear = 2 if settings.adapters is None else 1
    return PassWork(linear, 2, gathers=0, exchanges=1, runs=1, tangent_gathers=1, fp8=fp8, attention_again=again)


@dataclass(frozen=True)
class StepFlops:
    """FLOP of an optimizer step, over all ranks."""

    training: float
    """Forward and backward of the main batch, as in plain fine-tuning."""
    extra: float
    """All others: probe, tangents, forwards for utilities or of a reference."""

    @property
    def total(self) -> float:
        """Training and extra FLOP."""
        return self.training + self.extra


@dataclass(frozen=True)
class StepPasses:
    """The passes of an optimizer step; None for one that it does not have."""

    training: PassWork
    """The main batch in plain fine-tuning."""
    main: PassWork
    """The same, with the tangents where they travel along."""
    probe: PassWork | None = None
    utility: PassWork | None = None
    """A separate pass over the main batch."""
    steps_per_probe: int = 1

    @classmethod
    def derive(cls, settings: MemorySettings, *, reference_forwards: int = 0, steps_per_probe: int = 1) -> "StepPasses":
        """Derive the passes of a step.

        Args:
            reference_forwards: forwards over the main batch that serve no utilities, such as a reference model's.
        """
        # A backward has GEMMs for the inputs and, where weights are trained, for the weights.
        is_full, again = settings.adapters is None, int(settings.is_checkpointed)
        linear = (3 if is_full else 2) + again
        # The backward of FlashAttention computes the scores again, half a forward.
        train = PassWork(linear, 3 + again, gathers=2, exchanges=2 + again, runs=2, reduces=True, attention_again=0.5)
        tangents = derive_tangent_work(settings, is_fused=settings.is_fused)
        forwards = reference_forwards
        utility: PassWork | None = None
        if settings.estimator == "jvp" and not settings.is_fused:
            utility = FORWARD + tangents
        elif settings.estimator == "finite_difference":
            # With dropout the main forward has a mask, and cannot serve as the loss before the perturbation.
            forwards += 2 if settings.adapters is not None and settings.adapters.has_dropout else 1
        for _ in range(forwards):
            utility = FORWARD if utility is None else utility + FORWARD
        has_probe = settings.estimator is not None and settings.probe_tokens > 0
        main = train + tangents if settings.is_fused else train
        return cls(train, main, train if has_probe else None, utility, steps_per_probe)

    def flops(self, shape: ModelShape, main: Sequence[int], probe: Sequence[int]) -> StepFlops:
        """Count the FLOP of a step with batches of sequences of these lengths; an empty probe batch adds none."""

        def count_flops(work: PassWork | None, lengths: Sequence[int]) -> float:
            if work is None:
                return 0.0
            return forward_flops(shape, lengths, linear=work.linear_multiple(shape), attention=work.attention)

        training = count_flops(self.training, main)
        return StepFlops(
            training,
            count_flops(self.main, main) - training + count_flops(self.utility, main) + count_flops(self.probe, probe),
        )


# Seconds and bytes of a step, from its passes.


_FP32 = 4

SpreadBatch = tuple[Sequence[int], Spread]
"""Lengths in tokens of a batch's sequences, and their spread, whose ids are positions in the lengths."""

_NEVER_HIDDEN = 0.1
"""Share of all-gathers and reduce-scatters that nothing hides: those of the first and the last layer."""

_PARAMETERS_OF_A_LAYER = 7
"""Parameters of a layer that are gathered: queries, keys, values, output, and three of the MLP, or of the experts and
their router. Norms are small enough to be kept on each rank."""

HOST_LINK = 50e9
"""Bytes a second between a device and its host: 0.8 of PCIe 5.0 x16."""

HOST_MEMORY = 40e9
"""Bytes a second of host memory for each rank: an eighth of two sockets, shared with everything else."""


@dataclass(frozen=True)
class StepCost:
    """Predictions for one optimizer step."""

    seconds: Mapping[Phase, float]
    """By phase; 0 for one that the step does not have."""
    parts: Mapping[str, float]
    """The same seconds by cause: GEMMs, exchanges, all-gathers and reduce-scatters as far as they are not hidden."""
    traffic: Mapping[str, Traffic]
    """Bytes that a rank receives, by kind."""

    @property
    def seconds_step(self) -> float:
        """Sum over the phases."""
        return sum(self.seconds.values())

    @property
    def total_traffic(self) -> Traffic:
        """Sum over the kinds."""
        return sum(self.traffic.values(), Traffic())


@dataclass
class _Sums:
    """Sums over the passes of a step and the batches."""

    seconds: dict[Phase, float] = field(
        default_factory=lambda: {"probe": 0.0, "utility": 0.0, "main": 0.0, "step": 0.0}
    )
    parts: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def spend(self, phase: Phase, part: str, seconds: float) -> None:
        self.seconds[phase] += seconds
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def move(self, kind: str, traffic: Traffic) -> None:
        self.traffic[kind] = self.traffic.get(kind, Traffic()) + traffic


@dataclass(frozen=True)
class StepModel:
    """A model and a cluster, for the costs of steps."""

    shape: ModelShape
    counts: ParameterCounts
    """With tensor parallelism, of the part that one GPU has."""
    settings: MemorySettings
    cluster: Cluster
    reuse_distance: int = 10**9
    """Parameters between two uses of a layer within which ZeRO-3 keeps it gathered."""
    gathers_in_place: bool = False
    """DeepSpeed's `stage3_allgather_sequential`: one all-gather for each parameter, without copies."""

    def estimate_step(self, passes: StepPasses, main: Sequence[SpreadBatch], probe: Sequence[SpreadBatch]) -> StepCost:
        """Estimate the cost of a step, mean over the batches.

        Args:
            main, probe: batches, spread over the GPUs of the cluster, or over its tensor-parallel groups.
        """
        sums = _Sums()
        for batch in main:
            if passes.utility is not None:
                self._add_pass(sums, "utility", passes.utility, batch, 1 / len(main))
            self._add_pass(sums, "main", passes.main, batch, 1 / len(main))
        if passes.probe is not None:
            for batch in probe:
                self._add_pass(sums, "probe", passes.probe, batch, 1 / (len(probe) * passes.steps_per_probe))
            self._add_factorization(sums, 1 / passes.steps_per_probe)
        self._add_update(sums, passes)
        return StepCost(sums.seconds, sums.parts, sums.traffic)

    def scoring_seconds(self, main: Sequence[SpreadBatch]) -> float:
        """Seconds in which `vcore-ds score` takes a batch along one direction, mean over the batches."""
        sums = _Sums()
        for batch in main:
            self._add_pass(
                sums, "utility", FORWARD + derive_tangent_work(self.settings, is_fused=False), batch, 1 / len(main)
            )
        return sums.seconds["utility"]

    def needed_flops(self, passes: StepPasses, main: Sequence[Sequence[int]], probe: Sequence[Sequence[int]]) -> float:
        """FLOP that a step needs over all ranks, mean over batches of sequences of these lengths.

        Args:
            passes: without activation checkpoints, since recomputation is not needed.
        """
        main_flops = sum(passes.flops(self.shape, lengths, []).total for lengths in main) / max(1, len(main))
        probe_flops = sum(passes.flops(self.shape, [], lengths).total for lengths in probe) / max(1, len(probe))
        return main_flops + probe_flops / passes.steps_per_probe

    def _add_pass(self, sums: _Sums, phase: Phase, work: PassWork, batch: SpreadBatch, weight: float) -> None:
        """Add all micro-steps of one pass over one batch."""
        machine, achieved, shape = self.cluster.machine, self.cluster.achieved, self._shard_shape
        b, (lengths, spread) = self.settings.number_bytes, batch
        k, num_micro_steps = spread.sequence_parallel, len(spread.micro_steps)
        settings = self.settings
        # Seconds. All ranks of an expert-parallel group wait for the one that is sent most tokens.
        per_token = linear_flops_per_token(shape) + (settings.expert_load - 1) * routed_flops_per_token(shape)
        per_token /= machine.flops
        all_weights_flops = flops_of_all_weights(shape) - 2 * shape.remote_expert_parameters(settings.expert)
        per_square = attention_flops_per_square(shape) / self.cluster.attention_flops
        reduces_once = self.settings.coalesces_gradients
        for step, groups in enumerate(spread.micro_steps):
            seconds_before = sums.seconds[phase]
            linear = attention = tokens = 0.0
            for positions in groups:
                unpadded = [lengths[i] for i in positions]
                padded = list_padded_lengths(unpadded, k, is_packed=spread.is_packed)
                squares = sum(n * n for n in (unpadded if spread.is_packed else padded))
                group_linear, group_attention = per_token * sum(padded) / k, per_square * squares / k
                if group_linear + group_attention > linear + attention:
                    linear, attention, tokens = group_linear, group_attention, sum(padded) / k
            empty_pass = all_weights_flops * machine.half_speed_tokens / machine.flops  # a pass of no tokens
            compute = work.linear_time_multiple(shape) * (linear + empty_pass)
            compute += (work.attention + work.attention_again) * attention
            compute += work.fp8 * quantized_bytes(shape, tokens) / self.cluster.memory_bandwidth
            # ZeRO++'s second copy is made by the first all-gather of a step, which crosses all ranks.
            makes_copy = self._num_in_copy < self._num_groups and phase == "main" and step == 0
            moved: dict[str, Traffic] = self._estimate_gathers(work, makes_copy)
            if work.reduces and (step == num_micro_steps - 1 or not reduces_once):
                moved["gradients"] = self._estimate_trained_traffic(b)
            hidden = sum((traffic.seconds(machine) for traffic in moved.values()), 0.0)
            hidden += self._estimate_host_copy_seconds(work) + self._estimate_ring_seconds(
                work, makes_copy, reduces="gradients" in moved
            )
            if k > 1:
                handed_over = b * count_exchanged_numbers(shape, k) * shape.num_layers * tokens * work.exchanges
                moved["sequence-parallel activations"] = estimate_exchange_traffic(
                    handed_over, k, self._groups_per_node
                )
                seconds = moved["sequence-parallel activations"].seconds(machine)
                seconds += work.exchanges * 2 * shape.num_layers * machine.exchange_latency
                sums.spend(phase, "exchanges", weight * seconds)
            if settings.expert > 1:
                handed_over = b * count_numbers_to_experts(shape) * tokens * work.exchanges
                moved["expert-parallel tokens"] = estimate_exchange_traffic(
                    handed_over, settings.expert, self._groups_per_node
                )
                seconds = settings.expert_load * moved["expert-parallel tokens"].seconds(machine)
                seconds += work.exchanges * EXCHANGES_OF_EXPERTS * shape.num_layers * machine.exchange_latency
                sums.spend(phase, "exchanges", weight * seconds)
            if self.settings.tensor > 1:
                moved["tensor-parallel activations"], num_exchanges = self.estimate_tensor_exchanges(work, tokens)
                seconds = (
                    moved["tensor-parallel activations"].seconds(machine) + num_exchanges * machine.exchange_latency
                )
                sums.spend(phase, "exchanges", weight * seconds)
            exposed = max(hidden - achieved.hidden * compute, _NEVER_HIDDEN * hidden)
            sums.spend(phase, "matrix multiplications", weight * compute)
            sums.spend(phase, "all-gathers and reduce-scatters", weight * exposed)
            sums.spend(phase, "overhead", weight * work.runs * shape.num_layers * achieved.layer_overhead)
            if self.settings.offloads_checkpoints and work.reduces:
                checkpoints = b * tokens / self.settings.tensor * shape.hidden_size * (shape.num_layers + 1)
                sums.spend(phase, "copies to the host", weight * 2 * checkpoints / HOST_LINK)
            # The device waits where the host needs longer to launch a pass than the device to compute it.
            seconds_waiting = weight * self._estimate_launch_seconds(work, makes_copy) - (
                sums.seconds[phase] - seconds_before
            )
            if seconds_waiting > 0:
                sums.spend(phase, "launches on the host", seconds_waiting)
            for kind, traffic in moved.items():
                sums.move(kind, traffic * weight)

    def _estimate_ring_seconds(self, work: PassWork, makes_copy: bool, *, reduces: bool) -> float:
        """Estimate the latency of the all-gathers and reduce-scatters of one micro-step: one for each layer, embedding
        and head, or one for each parameter."""
        num_layers, in_node = self.shape.num_layers, self._groups_per_node
        over_all_ranks = self.cluster.ring_seconds(self._num_groups, in_node)
        within_copy = self.cluster.ring_seconds(self._num_in_copy, min(self._num_in_copy, in_node))
        num_gathers = 2 + num_layers * (_PARAMETERS_OF_A_LAYER if self.gathers_in_place else 1)
        num_others = (2 + num_layers) * (work.tangent_gathers + int(reduces))
        seconds_gathers = work.gathers * within_copy + makes_copy * (over_all_ranks - within_copy)
        return num_gathers * seconds_gathers + num_others * over_all_ranks

    def _estimate_launch_seconds(self, work: PassWork, makes_copy: bool) -> float:
        """Estimate the host time of a pass: Python and launches of its layers, and of all-gathers, which grows with the
        ranks."""
        achieved = self.cluster.achieved
        per_layer = work.runs * achieved.layer_overhead + work.num_with_tangents * achieved.tangent_overhead
        per_layer += work.fp8 * achieved.fp8_overhead + work.reduces * achieved.backward_overhead
        if not self.gathers_in_place and self._num_groups > 1:
            num_ranks = work.gathers * self._num_in_copy + makes_copy * (self._num_groups - self._num_in_copy)
            per_layer += num_ranks * achieved.gather_overhead
        return self.shape.num_layers * per_layer

    def _add_factorization(self, sums: _Sums, weight: float) -> None:
        """Add the factorization of a low-rank direction: in each pass two GEMMs with the rank's shard, and the sums of
        `G Omega` and `Q^T G` over the ranks, in fp32 and not hidden."""
        rank, shape = self.settings.probe_rank, self._shard_shape
        if rank is None:
            return
        experts, expert_part = shape.experts, 0
        if experts is not None:
            expert_part = 3 * experts.num_layers * experts.num_experts * rank * (shape.hidden_size + experts.width)
        others = count_factors(shape, rank) - expert_part
        weight *= self.settings.rank_passes
        # An all-reduce is a reduce-scatter and an all-gather.
        traffic = self._estimate_gather_over_shards(2 * _FP32 * others, 2 * _FP32 * expert_part)
        sums.move("factors of the direction", traffic * weight)
        sums.spend("probe", "all-gathers and reduce-scatters", weight * traffic.seconds(self.cluster.machine))
        flops = 4 * rank * self.counts.trained / self._num_groups
        sums.spend("probe", "matrix multiplications", weight * flops / self.cluster.machine.flops)

    def estimate_tensor_exchanges(self, work: PassWork, num_tokens: float) -> tuple[Traffic, int]:
        """Estimate the exchanges of one micro-step over a tensor-parallel group, and count them. Those of the losses, 8
        bytes for each token and GPU, are left out, and so is the sum of the gradients that all of them have, once a
        pass."""
        settings, shape = self.settings, self.shape
        num_exchanges, num_hidden = work.count_hidden_state_exchanges(shape.num_layers)
        num_bytes = float(settings.number_bytes * num_hidden * shape.hidden_size)
        return estimate_hidden_state_traffic(num_bytes * num_tokens, settings.tensor), num_exchanges

    def _estimate_gathers(self, work: PassWork, makes_copy: bool) -> dict[str, Traffic]:
        """Estimate the all-gathers of one micro-step.

        Args:
            makes_copy: whether the first one makes ZeRO++'s second copy.
        """
        counts, b = self.counts, self.settings.number_bytes
        expert_part = b * self.shape.expert_parameters
        others = b * (counts.all - counts.trained) + self._bytes_trained * counts.trained - expert_part
        moved = self._estimate_gather(others, expert_part) * (work.gathers - work.reduces)
        if makes_copy:
            moved += (
                self._estimate_gather_over_shards(others, expert_part) + self._estimate_gather(others, expert_part) * -1
            )
        if work.reduces:
            moved += self._estimate_gather(*self._count_gathered_again(others, expert_part))
        traffic = {"parameters": moved}
        if work.tangent_gathers:
            traffic["tangents"] = self._estimate_trained_traffic(self._bytes_trained) * work.tangent_gathers
        return traffic

    def _count_gathered_again(self, others: float, expert_part: float) -> tuple[float, float]:
        """Return the bytes that a backward all-gathers again after its forward: of all parameters but the experts, and
        of the experts.

        It needs layers and head. ZeRO-3 keeps what is used again within the reuse distance, as it walks through the
        order of the modules: a layer, where the layers after it and the head have fewer parameters; the last layer in
        any case; the head, where twice its own are fewer.
        """
        shape, b, reuse = self._shard_shape, self.settings.number_bytes, self.reuse_distance
        head = shape.vocabulary_size * shape.hidden_size
        embeddings = head if shape.is_tied else 2 * head
        layer = (self.counts.all - embeddings - shape.remote_expert_parameters(self.settings.expert)) / shape.num_layers
        num_kept = max(1, math.ceil((reuse - head) / layer))
        share = max(0, shape.num_layers - num_kept) / shape.num_layers
        head_again = b * head if reuse <= 2 * head else 0
        return share * (others - b * embeddings) + head_again, share * expert_part

    def _estimate_host_copy_seconds(self, work: PassWork) -> float:
        """Estimate the seconds of copies of offloaded shards between host and device in one micro-step."""
        settings, n = self.settings, self._num_groups
        num_bytes = 0.0
        if settings.offloads_parameters:
            num_bytes += work.gathers * settings.number_bytes * self.counts.all / n
        if settings.offloads_optimizer and work.reduces:
            num_bytes += _FP32 * self.counts.trained / n
        return num_bytes / HOST_LINK

    def _add_update(self, sums: _Sums, passes: StepPasses) -> None:
        """Add the optimizer's update and the direction's: bytes of a shard, read and written."""
        settings, memory = self.settings, self.cluster.memory_bandwidth
        shard = self.counts.trained / self._num_groups
        # Norm and alpha read and write the gradient; the update reads gradient, master and moments, writes the last
        # three and the parameter.
        moments = 0 if settings.optimizer == "sgd" else 4 * _FP32
        update = (3 + 1 + 2) * _FP32 + moments + settings.number_bytes
        if settings.offloads_optimizer:
            sums.spend("step", "update", shard * update / HOST_MEMORY + shard * settings.number_bytes / HOST_LINK)
        else:
            sums.spend("step", "update", shard * update / memory)
        if settings.optimizer == "muon":
            self._add_orthogonalization(sums, "step", 1.0, num_exchanges=2, wide=4, square=2)
        if settings.estimator is None:
            return
        if passes.probe is not None and settings.has_muon_direction:
            # The derivative of the iterations: gradient and momentum go in, the direction comes out.
            self._add_orthogonalization(sums, "probe", 1 / passes.steps_per_probe, num_exchanges=3, wide=10, square=4)
        if passes.probe is not None:  # reads the gradient and the moments, writes the direction
            read = 3 * _FP32 + settings.number_bytes
            sums.spend("probe", "update", shard * read / memory / passes.steps_per_probe)
        if settings.estimator == "finite_difference":  # perturbed and put back
            sums.spend("utility", "update", 2 * shard * (_FP32 + 2 * settings.number_bytes) / memory)

    def _add_orthogonalization(
        self, sums: _Sums, phase: Phase, weight: float, *, num_exchanges: int, wide: int, square: int
    ) -> None:
        """Add Newton-Schulz iterations of all matrices, divided among the ranks, and the exchanges of their shards.

        Args:
            num_exchanges: all-to-alls of the shards.
            wide: FLOP of an iteration, in units of `n^2 m` for a matrix of n rows and m >= n columns.
            square: the same in units of `n^3`.
        """
        hidden = self._shard_shape.list_hidden_matrices()
        sizes = [(number, min(rows, columns), max(rows, columns)) for number, rows, columns in hidden]
        flops = NUM_ITERATIONS * sum(number * n * n * (wide * m + square * n) for number, n, m in sizes)
        shard = self.settings.number_bytes * sum(number * n * m for number, n, m in sizes) / self._num_groups
        traffic = estimate_exchange_traffic(num_exchanges * shard, self._num_groups, self._groups_per_node) * weight
        sums.move("matrices of Muon", traffic)
        sums.spend(phase, "exchanges", traffic.seconds(self.cluster.machine))
        sums.spend(phase, "matrix multiplications", weight * flops / self._num_groups / self.cluster.machine.flops)

    def _estimate_trained_traffic(self, number_bytes: int) -> Traffic:
        """Estimate a reduce-scatter of all gradients, or an all-gather of the direction."""
        expert_part = self.shape.expert_parameters if self.settings.adapters is None else 0
        others = self.counts.trained - expert_part
        return self._estimate_gather_over_shards(number_bytes * others, number_bytes * expert_part)

    def _estimate_gather(self, others: float, expert_part: float) -> Traffic:
        """Estimate an all-gather of parameters: only over the ranks that share a second copy, if there is one."""
        in_copy = self._num_in_copy
        if in_copy < self._num_groups:
            return estimate_gather_traffic(others + expert_part, in_copy, min(in_copy, self._groups_per_node))
        return self._estimate_gather_over_shards(others, expert_part)

    def _estimate_gather_over_shards(self, others: float, expert_part: float) -> Traffic:
        return estimate_weights_traffic(
            others, expert_part, self._num_groups, self._groups_per_node, self.settings.expert
        )

    @property
    def _bytes_trained(self) -> int:
        return self.settings.number_bytes if self.settings.adapters is None else _FP32

    @property
    def _shard_shape(self) -> ModelShape:
        """Shape of a GPU's shard of every layer."""
        return self.shape.take_tensor_shard(self.settings.tensor)

    @property
    def _num_groups(self) -> int:
        """GPUs that shard the model, a tensor-parallel group as one."""
        return self.cluster.num_gpus // self.settings.tensor

    @property
    def _num_in_copy(self) -> int:
        """Ranks over which parameters are gathered: those that share a second copy, or all."""
        num_ranks = self.settings.ranks_of_second_copy
        return num_ranks if num_ranks > 1 else self._num_groups

    @property
    def _groups_per_node(self) -> int:
        return self.cluster.ranks_per_node // self.settings.tensor
