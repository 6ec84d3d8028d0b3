"""Seconds of a pass over a model's layers: the formula by which batches are laid out and `vcore-ds plan` predicts.

A run lays its batches out with the speeds of a fixed card, so that they do not depend on those given to `plan`.
"""

from dataclasses import dataclass

from vcore_ds.planning.hardware import (
    EXCHANGES_OF_EXPERTS,
    Machine,
    Traffic,
    count_exchanged_numbers,
    estimate_exchange_traffic,
    estimate_weights_traffic,
)
from vcore_ds.planning.model_shape import ModelShape

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
        others = self._active + shape.idle_parameters - shape.expert_parameters
        moved = self.estimate_gather(others, shape.expert_parameters)
        tokens = machine.flops * self.number_bytes / 2 * moved.seconds(machine) / self._active
        tokens += self.read
        if self.expert > 1:
            tokens += EXCHANGES_OF_EXPERTS * machine.exchange_latency / self._seconds_per_token_and_layer
        return tokens

    @property
    def read(self) -> float:
        """Time of a pass of no tokens, which reads all weights of the layers."""
        shape = self.shape
        others = self._active + shape.idle_parameters - shape.expert_parameters
        return self.machine.half_speed_tokens * (others + shape.expert_parameters / self.expert) / self._active

    def estimate_gather(self, others: float, experts: float) -> Traffic:
        """Estimate the traffic of an all-gather or reduce-scatter of `experts` numbers or bytes of routed experts, and
        `others`."""
        return estimate_weights_traffic(others, experts, self.num_ranks, self.ranks_per_node, self.expert)

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
