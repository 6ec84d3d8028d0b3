"""The time of a micro-step, as far as it depends on how a batch is spread over the ranks.

The unit is the time that one rank takes for one token's linear layers in a pass, "a token" for short, so that what
counts is the ratio of speeds: of the machine's arithmetic, of the links within a node, and of the network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vcore_ds.planning.hardware import (
    EXCHANGES_OF_EXPERTS,
    Machine,
    exchanged,
    exchanged_numbers,
    gathered_weights,
)
from vcore_ds.planning.memory import MemorySettings
from vcore_ds.planning.model_shape import ModelShape

_BYTES = 2
"""Bytes of a bf16 number."""

H100 = Machine(400e12, 360e9, 42e9, 40e-6, 300.0)
"""An HGX node: 40% of 989 TFLOP/s in bf16, 0.8 of NVLink's 450 GB/s in one direction, 0.85 of one 400 Gb/s adapter a
GPU. Data sheets and usual shares, not measured here. On a B200 arithmetic and NVLink are both twice as fast."""

CPU = Machine(65e9, 1e9, 1e9, 4e-4, 16.0)
"""A core of a server and gloo over the loopback device, measured on four cores: for runs and tests without GPUs."""


@dataclass(frozen=True)
class TimeModel:
    """Times of a model's micro-steps on the ranks of a job, in tokens."""

    shape: ModelShape
    num_ranks: int
    ranks_per_node: int
    machine: Machine = H100
    expert: int = 1
    """Ranks of an expert-parallel group."""

    def work(self, num_tokens: int) -> float:
        """Linear layers and attention of one sequence on one rank."""
        return num_tokens * (1.0 + num_tokens / self.shape.attention_length)

    @property
    def micro_step(self) -> float:
        """What a micro-step costs whatever it holds: it gathers the weights of every layer once, and its kernels start.

        A parameter is `_BYTES` to be gathered, and 2 FLOP for each token; so the gather costs as much as
        `flops * _BYTES / (2 * bandwidth)` tokens, whatever the model: about 1,000 on H100s, within a node (where all
        but a rank's own share comes over its link) as between nodes (where the node's adapters bring in one copy
        together). It is added to the work although a part of it runs behind it: a step with little work has nothing to
        hide it behind, and in one with much work it is small. In a mixture of experts the weights are all gathered and
        read, and a token's FLOP are those of a few experts: so many times as many tokens. Expert parallelism gathers
        and reads a part of the experts, and adds the latency of a layer's exchanges.
        """
        shape, machine = self.shape, self.machine
        active, of_experts = shape.num_layers * shape.layer_parameters, shape.expert_parameters
        others = active + shape.idle_parameters - of_experts
        moved = gathered_weights(others, of_experts, self.num_ranks, self.ranks_per_node, self.expert)
        tokens = machine.flops * _BYTES / 2 * moved.seconds(machine) / active
        tokens += machine.half_speed_tokens * (others + of_experts / self.expert) / active
        if self.expert > 1:
            tokens += EXCHANGES_OF_EXPERTS * machine.exchange_latency / self._seconds_per_token
        return tokens

    def exchange(self, sequence_parallel: int) -> float:
        """Sending query, key, value and output of one of this rank's tokens to its sequence-parallel group.

        What goes to the ranks of other nodes and what stays in the node are on their way at the same time. The slowest
        rank counts.
        """
        handed_over = _BYTES * exchanged_numbers(self.shape, sequence_parallel)
        traffic = exchanged(handed_over, sequence_parallel, self.ranks_per_node)
        return traffic.seconds(self.machine) / self._seconds_per_token

    def exchanges(self, sequence_parallel: int) -> float:
        """The latency of a layer's two exchanges, in every micro-step."""
        return 0.0 if sequence_parallel == 1 else 2 * self.machine.exchange_latency / self._seconds_per_token

    @property
    def _seconds_per_token(self) -> float:
        """Time of a token in the linear layers of one decoder layer."""
        return 2 * self.shape.layer_parameters / self.machine.flops


# Arithmetic of a pass, for the share of a device's speed that a step uses (MFU).


def linear_flops_per_token(shape: ModelShape) -> int:
    """FLOP of a forward's linear layers and head for one token, which goes through few of a layer's experts."""
    return 2 * (shape.num_layers * shape.layer_parameters + shape.vocabulary_size * shape.hidden_size)


def flops_of_all_weights(shape: ModelShape) -> int:
    """The same for a token that went through all experts: proportional to the weights that a pass reads."""
    return linear_flops_per_token(shape) + 2 * shape.idle_parameters


def routed_flops_per_token(shape: ModelShape) -> int:
    """What of a forward's FLOP for one token its experts compute, without shared ones; 0 in a dense model."""
    experts = shape.experts
    return 0 if experts is None else 6 * shape.hidden_size * experts.num_layers * experts.per_token * experts.width


def attention_flops_per_square(shape: ModelShape) -> int:
    """FLOP of a forward's causal attention over a sequence, divided by the square of its tokens: scores and values,
    half of them hidden."""
    return 2 * shape.num_layers * shape.num_heads * shape.head_dim


def forward_flops(shape: ModelShape, lengths: Iterable[int], *, linear: float = 1.0, attention: float = 1.0) -> float:
    """FLOP of the products in one forward over sequences of so many tokens: linear layers, head, causal attention.

    Args:
        linear, attention: how often a pass takes the products of both.
    """
    per_token = linear * linear_flops_per_token(shape)
    per_square = attention * attention_flops_per_square(shape)
    return float(sum(per_token * n + per_square * n * n for n in lengths))


# The passes of an optimizer step, each in multiples of what a plain forward does.


@dataclass(frozen=True)
class PassWork:
    """What one micro-step of a pass does, in multiples of what a plain forward does."""

    linear: int
    """Products of linear layers."""
    attention: int
    """Products of attention."""
    gathers: int
    """Gathers of all parameters."""
    exchanges: int
    """Exchanges of a forward within a sequence-parallel group."""
    runs: int
    """Runs through the layers."""
    tangent_gathers: int = 0
    """Gathers of the direction of all trained parameters."""
    reduces: bool = False
    """Whether the gradient is reduced."""

    def exchanges_of_hidden_states(self, num_layers: int, *, is_full: bool) -> tuple[int, int]:
        """Exchanges over a tensor-parallel group, of hidden states of all tokens or, where values and tangents
        travel together, of twice as many: how many there are, and how many hidden states they hold of each token.

        A layer gathers and scatters before and after attention and MLP, once more in a backward, and gathers the inputs
        of trained weights again; the embedding and the head have one each. tests/dist/test_megatron.py counts them.

        Args:
            is_full: all parameters are trained; nothing is sent to a frozen embedding.
        """
        in_layers = 4 * self.exchanges + (2 if self.reduces and is_full else 0)
        at_the_ends = 2 * self.runs - (1 if self.reduces and not is_full else 0)
        held = num_layers * in_layers + at_the_ends
        return held - self.tangent_gathers * (4 * num_layers + 2), held

    def __add__(self, other: "PassWork") -> "PassWork":
        return PassWork(
            self.linear + other.linear,
            self.attention + other.attention,
            self.gathers + other.gathers,
            self.exchanges + other.exchanges,
            self.runs + other.runs,
            self.tangent_gathers + other.tangent_gathers,
            self.reduces or other.reduces,
        )


FORWARD = PassWork(1, 1, 1, 1, 1)


def tangents_beside(settings: MemorySettings) -> PassWork:
    """What tangents add to a forward."""
    # Products of a weight with the input's tangent and, where it is trained, of its tangent with the input.
    linear = 2 if settings.adapters is None else 1
    return PassWork(linear, 2, gathers=0, exchanges=1, runs=1, tangent_gathers=1)


@dataclass(frozen=True)
class StepFlops:
    """FLOP of the products of an optimizer step, over all ranks."""

    training: float
    """Forward and backward of the main batch, as in plain fine-tuning."""
    extra: float
    """All others: probe, tangents, forwards for utilities or of a reference."""

    @property
    def total(self) -> float:
        """What plain fine-tuning does, and what the method adds."""
        return self.training + self.extra


@dataclass(frozen=True)
class StepPasses:
    """The passes of an optimizer step; None for one that it does not have."""

    training: PassWork
    """What plain fine-tuning does with the main batch."""
    main: PassWork
    """The same, with the tangents where they travel along."""
    probe: PassWork | None = None
    utility: PassWork | None = None
    """A pass of its own over the main batch."""
    steps_per_probe: int = 1

    @classmethod
    def of(cls, settings: MemorySettings, *, reference_forwards: int = 0, steps_per_probe: int = 1) -> "StepPasses":
        """Args:
        reference_forwards: forwards over the main batch that serve no utilities, such as a reference model's.
        """
        # A backward takes the products for the inputs and, where weights are trained, those for the weights.
        is_full, again = settings.adapters is None, int(settings.is_checkpointed)
        linear = (3 if is_full else 2) + again
        train = PassWork(linear, 3 + again, gathers=2, exchanges=2 + again, runs=2, reduces=True)
        tangents = tangents_beside(settings)
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
        """FLOP of a step with batches of sequences of so many tokens; without a probe batch none for the probe."""

        def of(work: PassWork | None, lengths: Sequence[int]) -> float:
            if work is None:
                return 0.0
            return forward_flops(shape, lengths, linear=work.linear, attention=work.attention)

        training = of(self.training, main)
        return StepFlops(training, of(self.main, main) - training + of(self.utility, main) + of(self.probe, probe))
