"""Parameters of a model, the passes of an optimizer step with their FLOP, and seconds (docs/planning.md)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from vcore_ds.config.sections import LoraConfig
from vcore_ds.planning.hardware import (
    EXCHANGES_OF_EXPERTS,
    Machine,
    Traffic,
    count_exchanged_numbers,
    estimate_exchange_traffic,
    estimate_gather_traffic,
)
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.settings import MemorySettings, PlanSettings

# Parameters.


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of a model's parameters over all ranks; with tensor parallelism, of one rank's shard."""

    all: int
    trained: int


def parameter_counts(shape: ModelShape, lora: LoraConfig | None = None) -> ParameterCounts:
    """Count the parameters of a Llama-like model of this shape, dense or MoE, or of a tensor-parallel shard of one
    (`ModelShape.take_tensor_shard`), which has whole norms. Biases, and norms of other kinds of attention, are left
    out: at most 0.1% of the published MoE models."""
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.normalizes_heads else 0)
    base = shape.num_layers * (shape.layer_parameters + norms) + shape.idle_parameters + shape.hidden_size
    base += shape.vocabulary_size * shape.hidden_size * (1 if shape.is_tied else 2)
    if lora is None:
        return ParameterCounts(base, base)
    # Inputs and outputs of query, key, value and output; of gate, up and down.
    added = lora.rank * shape.num_layers * (4 * shape.hidden_size + 2 * heads)
    added += lora.rank * sum(3 * n * (shape.hidden_size + width) for n, width in list_unrouted_mlps(shape))
    return ParameterCounts(base + added, added)


def list_unrouted_mlps(shape: ModelShape) -> list[tuple[int, int]]:
    """List the numbers of MLPs in all layers and their widths; of MoE layers the shared expert alone."""
    if (experts := shape.experts) is None:
        return [(shape.num_layers, shape.intermediate_size)]
    dense = shape.num_layers - experts.num_layers, shape.intermediate_size
    return [dense, (experts.num_layers if experts.shared_width else 0, experts.shared_width)]


def active_parameters(shape: ModelShape) -> int:
    """Count the parameters that a token passes through, embeddings included; in a dense model, all."""
    return parameter_counts(shape).all - shape.idle_parameters


def count_factors(shape: ModelShape, rank: int, *, active: bool = False) -> int:
    """Count the elements of the factors `Q [out, r]` and `B [r, in]` of all weight matrices; `active` as in
    `ModelShape.list_weight_matrices`. A matrix with a dimension of at most `rank` is not factorized and counts in
    full."""
    return sum(
        number * (rank * (rows + columns) if min(rows, columns) > rank else rows * columns)
        for number, rows, columns in shape.list_weight_matrices(active=active)
    )


# FLOP of a pass.


def linear_flops_per_token(shape: ModelShape) -> int:
    """FLOP of a forward's linear layers and head for one token, which goes through few of a layer's experts."""
    return 2 * (shape.num_layers * shape.layer_parameters + shape.vocabulary_size * shape.hidden_size)


def routed_flops_per_token(shape: ModelShape) -> int:
    """FLOP of the routed experts in a token's forward; 0 in a dense model."""
    experts = shape.experts
    return 0 if experts is None else 6 * shape.hidden_size * experts.num_layers * experts.per_token * experts.width


def forward_flops(shape: ModelShape, lengths: Iterable[int], *, linear: float = 1.0, attention: float = 1.0) -> float:
    """FLOP of the GEMMs of a pass over sequences of these lengths, which computes `linear` times those of a forward's
    linear layers and head, and `attention` times those of its causal attention."""
    per_token = linear * linear_flops_per_token(shape)
    # Scores and values of causal attention, half of them hidden
    per_square = attention * (2 * shape.num_layers * shape.num_heads * shape.head_dim)
    return float(sum(per_token * n + per_square * n * n for n in lengths))


# The passes of an optimizer step, in multiples of a plain forward.


@dataclass(frozen=True)
class PassWork:
    """One micro-step of a pass, in multiples of a plain forward."""

    linear: float  # GEMMs of linear layers
    attention: float  # GEMMs of attention that the result needs
    gathers: int  # all-gathers of all parameters
    exchanges: float  # exchanges of a forward within a sequence-parallel group
    runs: int  # runs through the layers
    tangent_gathers: int = 0  # all-gathers of the direction of all trained parameters
    # GEMMs of linear layers, among `linear`, that run in FP8, in half the time; not those of experts and head
    fp8: int = 0
    # Rank r of the direction's factors in the GEMMs `Q (B x)`, which replace those of the weights' tangents; 0 for
    # none
    low_rank: int = 0
    reduces: int = 0  # 1 where the gradient is reduced
    # GEMMs of attention that its kernels compute again: they take time and count nothing in the MFU
    attention_again: float = 0.0
    attention_with_tangents: float = 0.0  # of both, those in the kernel with tangents

    @property
    def forwards(self) -> float:
        """Plain forwards of a layer, with those that are computed again."""
        return self.exchanges - self.reduces - self.num_with_tangents

    def count_hidden_state_exchanges(self, num_layers: int) -> tuple[float, float]:
        """Count the exchanges over a tensor-parallel group, of hidden states of all tokens or, where values and
        tangents travel together, twice the hidden states. Returns their number, and the hidden states they hold of each
        token, in the mean of the layers.

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

    def __add__(self, other: "PassWork") -> "PassWork":
        return PassWork(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


FORWARD = PassWork(1, 1, 1, 1, 1)


def derive_tangent_work(settings: MemorySettings, *, is_fused: bool) -> PassWork:
    """Derive the work that tangents add to a forward; with `is_fused` to the main one, whose values FlashAttention
    computes."""
    # GEMMs of a weight with the input's tangent and, where it is trained, of its tangent with the input. A forward of
    # attention has two GEMMs, its tangent another four, in one kernel; beside FlashAttention's values that kernel has
    # five, as it computes the scores again.
    rank, again = settings.probe_rank, 0.5 if is_fused else 0.0
    work = PassWork(
        1, 2, gathers=0, exchanges=1, runs=1, fp8=int(settings.fp8_tangents), low_rank=rank or 0,
        attention_again=again, attention_with_tangents=2 + again,
    )  # fmt: skip
    if rank is not None:
        return work
    return replace(work, linear=2 if settings.lora is None else 1, tangent_gathers=1)


@dataclass(frozen=True)
class StepPasses:
    """The passes of an optimizer step; None for one that it does not have."""

    training: PassWork  # the main batch in plain fine-tuning
    main: PassWork  # the same, with the tangents where they travel along
    probe: PassWork | None = None
    utility: PassWork | None = None  # a separate pass over the main batch
    steps_per_probe: int = 1

    @classmethod
    def derive(cls, settings: MemorySettings, *, other_forwards: int = 0, steps_per_probe: int = 1) -> "StepPasses":
        """Derive the passes of a step with `other_forwards` over the main batch that serve no utilities."""
        # A backward has GEMMs for the inputs and, where weights are trained, for the weights.
        is_full, activations = settings.lora is None, settings.activations
        again = activations.recomputed_share if settings.is_checkpointed else 0.0
        attention = 3 + again * (not activations.stores_attention)
        linear = (3 if is_full else 2) + again
        # The backward of FlashAttention computes the scores again, half a forward.
        train = PassWork(linear, attention, gathers=2, exchanges=2 + again, runs=2, reduces=1, attention_again=0.5)
        tangents = derive_tangent_work(settings, is_fused=settings.is_fused)
        forwards = other_forwards
        utility: PassWork | None = None
        if settings.estimator == "jvp" and not settings.is_fused:
            utility = FORWARD + tangents
        elif settings.estimator == "finite_difference":
            # With dropout the main forward has a mask, and cannot serve as the loss before the perturbation.
            forwards += 2 if settings.lora is not None and settings.lora.dropout > 0 else 1
        for _ in range(forwards):
            utility = FORWARD if utility is None else utility + FORWARD
        has_probe = settings.estimator is not None and settings.probe_tokens > 0
        main = train + tangents if settings.is_fused else train
        return cls(train, main, train if has_probe else None, utility, steps_per_probe)

    def flops(self, shape: ModelShape, main: Sequence[int], probe: Sequence[int]) -> tuple[float, float]:
        """Count the FLOP of a step over all ranks, with batches of sequences of these lengths; an empty probe batch has
        none. Returns those of plain fine-tuning, and all others: probe, tangents, forwards without a gradient."""

        def count_flops(work: PassWork | None, lengths: Sequence[int]) -> float:
            if work is None:
                return 0.0
            return forward_flops(shape, lengths, linear=work.linear_multiple(shape), attention=work.attention)

        training = count_flops(self.training, main)
        extra = count_flops(self.main, main) - training
        return training, extra + count_flops(self.utility, main) + count_flops(self.probe, probe)


def derive_passes(settings: PlanSettings, memory: MemorySettings) -> StepPasses:
    """Derive the passes of an optimizer step."""
    method, steps_per_probe = settings.method, settings.probe.every if settings.estimator is not None else 1
    # iw_sft with adapters and asft run the model without its adapters in every step; entropies beside utilities take a
    # forward too.
    runs_reference = (method.reads_reference or method.is_anchored) and settings.lora is not None
    forwards = runs_reference + (method.uses_utilities and method.prediction_statistic is not None)
    return StepPasses.derive(memory, other_forwards=forwards, steps_per_probe=steps_per_probe)


def derive_needed_passes(settings: PlanSettings, memory: MemorySettings) -> StepPasses:
    """Derive the passes without activation checkpoints: recomputation does not count."""
    return derive_passes(settings, replace(memory, is_checkpointed=False))


# Seconds of a pass over a model's layers: the formula by which batches are laid out and `vcore-ds plan` predicts.
#
# A run lays its batches out with the speeds of a fixed card, so that they do not depend on those given to `plan`.

H100 = Machine(400e12, 360e9, 42e9, 40e-6, 300.0)
"""An HGX node: 40% of 989 TFLOP/s in bf16, 0.8 of NVLink's 450 GB/s in one direction, 0.85 of one 400 Gb/s adapter a
GPU. Data sheets and usual shares, not measured here. On a B200 arithmetic and NVLink are both twice as fast."""

CPU = Machine(65e9, 1e9, 1e9, 4e-4, 16.0)
"""A core of a server and gloo over the loopback device, measured on four cores: for runs and tests without GPUs."""


@dataclass(frozen=True)
class TimeModel:
    """Times of a model's micro-steps on the ranks of a job, in units of one token's linear layers
    (`seconds_per_token`)."""

    shape: ModelShape
    num_ranks: int
    ranks_per_node: int
    machine: Machine = H100
    expert: int = 1  # ranks of an expert-parallel group
    number_bytes: int = 2

    def work(self, num_tokens: int) -> float:
        """Linear layers and attention of one sequence on one rank."""
        return num_tokens * (1.0 + num_tokens / self.shape.attention_length)

    @property
    def micro_step(self) -> float:
        """Fixed cost of a micro-step: it all-gathers the weights of every layer once, and its kernels start.

        A parameter takes `number_bytes` in an all-gather, and 2 FLOP for each token; so the all-gather costs as much as
        `flops * number_bytes / (2 * bandwidth)` tokens for any model: about 1,000 on H100s, both within a node
        (everything but the rank's shard comes over its link) and between nodes (the node's adapters together bring in
        one copy). It is added to the work although it partly overlaps with it: little work cannot hide it, and beside
        much work it is small. An MoE model all-gathers and reads all weights, while a token takes the FLOP of a few
        experts, which multiplies these tokens. Expert parallelism all-gathers and reads a part of the experts, and adds
        the latency of a layer's exchanges.
        """
        shape, machine = self.shape, self.machine
        moved = self.estimate_gather(self._gathered_others, shape.expert_parameters)
        tokens = machine.flops * self.number_bytes / 2 * moved.seconds(machine) / self._active
        tokens += self.read
        if self.expert > 1:
            tokens += EXCHANGES_OF_EXPERTS * machine.exchange_latency / self._seconds_per_token_and_layer
        return tokens

    @property
    def read(self) -> float:
        """Time of a pass of no tokens, which reads all weights of the layers."""
        read = self._gathered_others + self.shape.expert_parameters / self.expert
        return self.machine.half_speed_tokens * read / self._active

    def estimate_gather(self, others: float, experts: float) -> Traffic:
        """Estimate a rank's traffic in an all-gather or reduce-scatter of `experts` numbers or bytes of all routed
        experts, and `others`.

        Neighbouring ranks of an expert-parallel group shard the experts: a rank all-gathers its experts from the ranks
        with the same place in the other groups; with one group it already holds them.
        """
        num_groups, in_node = self.num_ranks // self.expert, max(1, self.ranks_per_node // self.expert)
        return estimate_gather_traffic(others, self.num_ranks, self.ranks_per_node) + estimate_gather_traffic(
            experts / self.expert, num_groups, in_node
        )

    def estimate_exchange_traffic(self, sequence_parallel: int) -> Traffic:
        """Estimate the bytes of query, key, value and output of a token in a layer, sent to the sequence-parallel
        group."""
        handed_over = self.number_bytes * count_exchanged_numbers(self.shape, sequence_parallel)
        return estimate_exchange_traffic(handed_over, sequence_parallel, self.ranks_per_node)

    def estimate_exchange(self, sequence_parallel: int) -> float:
        """Estimate the time to send query, key, value and output of a token to the rank's sequence-parallel group.

        Transfers within the node and to other nodes overlap. The slowest rank counts.
        """
        traffic = self.estimate_exchange_traffic(sequence_parallel)
        return traffic.seconds(self.machine) / self._seconds_per_token_and_layer

    def estimate_exchange_latency(self, sequence_parallel: int) -> float:
        """Estimate the latency of a layer's two exchanges, in every micro-step."""
        if sequence_parallel == 1:
            return 0.0
        return 2 * self.machine.exchange_latency / self._seconds_per_token_and_layer

    @property
    def seconds_per_token(self) -> float:
        """Seconds of a token in the linear layers of all decoder layers."""
        return self.shape.num_layers * self._seconds_per_token_and_layer

    @property
    def _seconds_per_token_and_layer(self) -> float:
        return 2 * self.shape.layer_parameters / self.machine.flops

    @property
    def _active(self) -> int:
        """Parameters of all layers that a token passes through."""
        return self.shape.num_layers * self.shape.layer_parameters

    @property
    def _gathered_others(self) -> int:
        """Parameters of all layers but the routed experts."""
        return self._active + self.shape.idle_parameters - self.shape.expert_parameters


SPREAD_OF_EXPERTS = 0.25
"""Standard deviation of the tokens of a layer's experts, over their mean. Assumed: a run measures the load of the
fullest expert (docs/reading-a-report.md)."""


def estimate_fullest_load(shape: ModelShape, num_ranks: int) -> float:
    """Estimate the tokens sent to the fullest of the ranks that shard each layer's experts, over their mean; 1 without
    experts.

    A rank has the sum of `num_experts / num_ranks` experts, whose loads are assumed independent, and the largest of
    n normal numbers lies about `sqrt(2 ln n)` deviations above their mean.
    """
    if shape.experts is None:
        return 1.0
    return 1 + SPREAD_OF_EXPERTS * math.sqrt(2 * math.log(num_ranks) * num_ranks / shape.experts.num_experts)
