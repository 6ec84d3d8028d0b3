"""The time of a micro-step, as far as it depends on how a batch is spread over the ranks.

The unit is the time that one rank takes for one token's linear layers in a pass, "a token" for short, so that what
counts is the ratio of speeds: of the machine's arithmetic, of the links within a node, and of the network.
"""

from dataclasses import dataclass

from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.traffic import (
    EXCHANGES_OF_EXPERTS,
    Machine,
    exchanged,
    exchanged_numbers,
    gathered_weights,
)

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
