"""Bytes that ranks send each other, inside a node and between nodes, and how long they take."""

import math
from dataclasses import dataclass

from vcore_ds.planning.model_shape import ModelShape

EXCHANGES_OF_EXPERTS = 3
"""Exchanges of an expert-parallel group in a layer's forward: how many tokens go where, the tokens, what experts made
of them. A backward has two of them."""


@dataclass(frozen=True)
class Machine:
    """Sustained speeds of one device, the part of the peak that large passes reach."""

    flops: float
    """FLOP a second of matrix products."""
    node_bandwidth: float
    """Bytes a second that a device sends to others of its node."""
    network_bandwidth: float
    """Bytes a second that a device sends to other nodes."""
    exchange_latency: float
    """Seconds of an exchange without contents."""
    half_speed_tokens: float
    """Tokens at which matrix products reach half of `flops`: what a pass of no tokens costs, in tokens."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank receives."""

    inside: float = 0.0
    """From ranks of its own node."""
    between: float = 0.0
    """From other nodes, through its share of the node's adapters."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.between + other.between)

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(self.inside * factor, self.between * factor)

    def seconds(self, machine: Machine) -> float:
        """Both ways are used at the same time."""
        return max(self.inside / machine.node_bandwidth, self.between / machine.network_bandwidth)


def gathered(num_bytes: float, num_ranks: int, ranks_per_node: int) -> Traffic:
    """A rank's traffic when `num_bytes` of shards are gathered on all ranks, or reduced to shards.

    Inside a node all but the rank's own share comes over its link. From other nodes all that the node does not hold
    arrives once, divided among the node's adapters: no other division of the weights within a node changes that.
    """
    r = ranks_per_node
    return Traffic(num_bytes * (r - 1) / r, num_bytes * (1 - r / num_ranks) / r)


def gathered_weights(
    num_bytes: float, num_bytes_experts: float, num_ranks: int, ranks_per_node: int, expert: int = 1
) -> Traffic:
    """A rank's traffic when a model's weights are gathered, or their gradients reduced.

    Args:
        num_bytes: of all but the experts.
        num_bytes_experts: of all routed experts.
        expert: ranks of an expert-parallel group, neighbours that divide the experts among them. A rank's own are
            gathered from those ranks that have the same place in their groups; where there is one group, they are
            whole on the rank.
    """
    of_place, in_node = num_ranks // expert, max(1, ranks_per_node // expert)
    return gathered(num_bytes, num_ranks, ranks_per_node) + gathered(num_bytes_experts / expert, of_place, in_node)


def exchanged(num_bytes: float, num_sharing: int, ranks_per_node: int) -> Traffic:
    """A rank's traffic when it hands over `num_bytes` in all-to-alls of its sequence-parallel group, or of its
    expert-parallel group, whose tokens go to all experts evenly.

    A k-th stays with the rank. Of its group at least `gcd(k, ranks per node)` ranks are in its own node.
    """
    k = num_sharing
    neighbours = math.gcd(k, ranks_per_node)
    return Traffic(num_bytes * (neighbours - 1) / k, num_bytes * (k - neighbours) / k)


def exchanged_numbers(shape: ModelShape, sequence_parallel: int) -> int:
    """Numbers that a rank hands over in one layer's forward for each of its tokens: queries, keys, values, and the
    output. Key and value heads are repeated until k divides their number."""
    return shape.head_dim * (2 * shape.num_heads + 2 * math.lcm(shape.num_kv_heads, sequence_parallel))


def numbers_to_experts(shape: ModelShape) -> int:
    """Numbers that a rank hands over in a forward for each of its tokens with expert parallelism: its hidden states,
    to each of its experts in each layer, and back."""
    experts = shape.experts
    return 0 if experts is None else 2 * experts.num_layers * experts.per_token * shape.hidden_size


def of_hidden_states(num_bytes: float, tensor: int) -> Traffic:
    """A rank's traffic when hidden states of `num_bytes` are gathered on its tensor-parallel group, or summed over
    it and scattered: all but its own part. They are in one node."""
    return Traffic(inside=num_bytes * (tensor - 1) / tensor)
