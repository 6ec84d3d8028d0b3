"""GPUs by name: the peaks of their data sheets, and the shares of them that a step is assumed to achieve."""

import math
from dataclasses import dataclass

from vcore_ds.common.text import GIB
from vcore_ds.planning.model_shape import ModelShape

# Bytes that ranks send each other, inside a node and between nodes, and how long they take.

EXCHANGES_OF_EXPERTS = 3
"""Exchanges of an expert-parallel group in a layer's forward: numbers of tokens, tokens, outputs of the experts. A
backward has two of them."""


@dataclass(frozen=True)
class Machine:
    """Sustained speeds of one device, the part of the peak that large passes reach."""

    flops: float  # FLOP a second of matrix multiplications
    node_bandwidth: float  # bytes a second that a device sends to others of its node
    network_bandwidth: float  # bytes a second that a device sends to other nodes
    exchange_latency: float  # seconds of an exchange without contents
    # Tokens at which matrix multiplications reach half of `flops`: the cost of a pass without tokens, in tokens
    half_speed_tokens: float


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank receives."""

    inside: float = 0.0  # from ranks of the same node
    between: float = 0.0  # from other nodes, through its share of the node's adapters

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.between + other.between)

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(self.inside * factor, self.between * factor)

    def seconds(self, machine: Machine) -> float:
        """Both ways are used at the same time."""
        return max(self.inside / machine.node_bandwidth, self.between / machine.network_bandwidth)


def estimate_gather_traffic(num_bytes: float, num_ranks: int, ranks_per_node: int) -> Traffic:
    """Estimate a rank's traffic in an all-gather or reduce-scatter of `num_bytes` over all ranks.

    Inside a node everything but the rank's shard comes over its link. From other nodes the bytes that the node does not
    hold arrive once, divided among the node's adapters, however the weights are sharded within the node.
    """
    r = ranks_per_node
    return Traffic(num_bytes * (r - 1) / r, num_bytes * (1 - r / num_ranks) / r)


def estimate_exchange_traffic(num_bytes: float, num_sharing: int, ranks_per_node: int) -> Traffic:
    """Estimate a rank's traffic when it sends `num_bytes` in all-to-alls of its sequence-parallel group, or of its
    expert-parallel group, whose tokens go to all experts evenly.

    A k-th stays on the rank. At least `gcd(k, ranks per node)` ranks of the group are in its node.
    """
    k = num_sharing
    neighbours = math.gcd(k, ranks_per_node)
    return Traffic(num_bytes * (neighbours - 1) / k, num_bytes * (k - neighbours) / k)


def count_exchanged_numbers(shape: ModelShape, sequence_parallel: int) -> int:
    """Count the numbers that a rank sends in one layer's forward for each of its tokens: queries, keys, values, and the
    output. Key and value heads are repeated until k divides their number."""
    return shape.head_dim * (2 * shape.num_heads + 2 * math.lcm(shape.num_kv_heads, sequence_parallel))


@dataclass(frozen=True)
class Gpu:
    """Peak numbers of one device in its usual server."""

    name: str
    memory_bytes: int  # memory that the driver leaves to processes, in whole GiB
    flops: float  # FLOP a second of dense bf16 matrix multiplications
    memory_bandwidth: float  # bytes a second
    node_bandwidth: float  # bytes a second in one direction to the other devices of the node
    # Bytes a second in one direction through the device's share of the node's network adapters
    network_bandwidth: float
    # FLOP a second of PyTorch's FlashAttention-2, measured over forward and backward; a backward is 2.5 forwards
    attention_flops: float
    # FLOP a second of the attention kernel with tangents, where it was measured; else it is taken to be as fast
    measured_tangent_flops: float | None = None


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA's data sheets; DGX systems have eight network adapters of 200 (A100) or 400 Gb/s.
        Gpu("A100", 79 * GIB, 312e12, 2.039e12, 300e9, 25e9, 175e12),
        Gpu("H100", 79 * GIB, 989e12, 3.35e12, 450e9, 50e9, 305e12, 490e12),
        # PCIe 5.0 x16 in one direction, as NVLink joins two to four cards at most; 400 Gb/s a GPU assumed.
        Gpu("H100 PCIe", 79 * GIB, 756e12, 2.0e12, 64e9, 50e9, 230e12),
        Gpu("H100 NVL", 92 * GIB, 835e12, 3.9e12, 64e9, 50e9, 255e12),
        Gpu("H200", 139 * GIB, 989e12, 4.8e12, 450e9, 50e9, 305e12, 490e12),
        Gpu("H200 NVL", 139 * GIB, 835e12, 4.8e12, 64e9, 50e9, 255e12),
        # HGX B200 and B300: 36 PFLOP/s sparse bf16 and 14.4 TB/s of NVLink in both directions over 8; adapters of 400
        # and 800 Gb/s.
        Gpu("B200", 178 * GIB, 2250e12, 8e12, 900e9, 50e9, 330e12),
        Gpu("B300", 267 * GIB, 2250e12, 8e12, 900e9, 100e9, 330e12),
        # GB200 NVL72: 360 PFLOP/s sparse bf16 over 72. Its NVLink joins the nodes of a rack (--gpus-per-node 72).
        Gpu("GB200", 184 * GIB, 2500e12, 8e12, 900e9, 50e9, 330e12),
        # Workstation Edition: 503.8 TFLOP/s with fp32 sums; PCIe 5.0 x16; 400 Gb/s a GPU as in RTX PRO servers.
        Gpu("RTX PRO 6000", 94 * GIB, 503.8e12, 1.792e12, 64e9, 50e9, 125e12),
    )
}
"""By the name that `--gpu` takes. Memory is what nvidia-smi shows for such devices, less what its context takes;
`attention_flops` are those of docs/planning.md, for a head dimension of 128 and 8,192 tokens or more."""

_OTHER_PEAKS = {"GH200": 989e12, "L40S": 362e12, "L4": 121e12}
"""Dense bf16 FLOP a second of devices on which single runs are timed, but no clusters planned."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP a second of a device by its driver's name; None for one that is not in the table."""
    gpu = find_gpu(device_name)
    others = (flops for name, flops in _OTHER_PEAKS.items() if name in _split_name(device_name))
    return next(others, None) if gpu is None else gpu.flops


def find_gpu(name: str) -> Gpu | None:
    """The device of that name, in any case and with any separators, also as a driver writes it."""
    matches = [gpu for gpu in GPUS.values() if _split_name(gpu.name) <= _split_name(name)]
    # An H100 PCIe is an H100 too: the longest name says most.
    return max(matches, key=lambda gpu: len(gpu.name), default=None)


def _split_name(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").replace("_", " ").split())


@dataclass(frozen=True)
class KernelTraffic:
    """Bytes of memory traffic of the kernels between the GEMMs, for each element of their 16-bit input and output, in a
    forward, a backward, and with tangents beside a forward. Counted by `tests.benchmarks.memory_traffic`; those of
    tangents from 8.6 GB for a layer of Qwen3-32B (docs/reports/performance.md)."""

    norm: tuple[float, float, float] = (4, 6, 8)
    rotary: tuple[float, float, float] = (4, 5, 4)
    gate: tuple[float, float, float] = (6, 10, 10)
    loss: tuple[float, float] = (10, 6)  # of each logit: in a forward; in a backward that computes logits again
    adds_blocks: bool = False  # whether each block of logits adds to the embedding's gradient outside its GEMM
    update: float = 40  # for each parameter of AdamW's update with clipping, beside writing the parameter


EAGER = KernelTraffic((36, 88, 8), (20, 32, 4), (10, 22, 10), (52, 40), adds_blocks=True)
"""Those of PyTorch's operations, which norms and gates unlike Llama's go through."""


@dataclass(frozen=True)
class Achieved:
    """Speeds that a step achieves, as shares of a device's data sheet, and fixed times. Those of one H200 are measured
    (docs/reports/performance.md)."""

    # Share of the peak in GEMMs, whose operands are counted as memory traffic besides: 0.81 of the H200 in a GEMM of
    # 8,192, with them; 0.76 is then the likely rate, by the eight measured steps
    compute: float = 0.76
    attention: float = 1.0  # speed of attention over `Gpu.attention_flops` and `Gpu.tangent_attention_flops`
    memory: float = 0.77  # share of the bandwidth in the kernels between GEMMs: 0.87 of the H200's measured copy
    node: float = 0.80  # NCCL's usual shares of the links, assumed
    network: float = 0.84
    hidden: float = 0.70  # share of the kernels that all-gathers and reduce-scatters can overlap with; assumed
    exchange_latency: float = 40e-6  # seconds of an all-to-all without contents; assumed
    # Seconds of hooks, Python and kernel tails for each layer of a run through the model; assumed
    layer_overhead: float = 0.8e-3
    # Host time on a CPU (2026-11-26, docs/reports/performance.md), less `layer_overhead`: 4.1 ms for a
    # layer with tangents along factors (3.9 along a whole direction), 5.3 in FP8, 3.5 for a backward.
    tangent_overhead: float = 3.3e-3  # seconds beyond these that the host takes for each layer with tangents
    # Seconds beyond these that it takes for each layer whose tangents are multiplied in FP8
    fp8_overhead: float = 1.2e-3
    # Seconds beyond `layer_overhead` that it takes for each layer's backward, and the forward that is run again
    backward_overhead: float = 2.7e-3
    # Seconds of the 45 kernels, six of them Cholesky factorizations and triangular solves, that factorize a matrix of
    # the direction: assumed
    factorization: float = 1e-3
    # Seconds that the host takes for each rank of a layer's all-gather, for which DeepSpeed makes a view in Python;
    # none where it gathers in place. Measured on a CPU (docs/reports/performance.md).
    gather_overhead: float = 2.6e-6
    # NCCL's model of its rings with protocol LL128, which it takes by default on NVLink (NVIDIA/nccl,
    # src/graph/tuning.cc, 2026-06): the time of an all-gather or reduce-scatter without contents.
    ring_latency: float = 14e-6
    ring_step_latency: float = 1.9e-6  # seconds of each step of a ring within a node; a ring of n ranks has n - 1 steps
    ring_step_latency_between: float = 4e-6  # seconds of each step from one node to the next


SLOW, FAST = Achieved(compute=0.57, attention=0.85, memory=0.60), Achieved(compute=0.85, attention=1.15, memory=0.85)
"""The ends of a plan's range."""


@dataclass(frozen=True)
class Cluster:
    """The devices of a job, and how much of their peak it achieves."""

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int = 8
    achieved: Achieved = Achieved()

    @property
    def ranks_per_node(self) -> int:
        """A rank for each GPU."""
        return min(self.gpus_per_node, self.num_gpus)

    @property
    def num_nodes(self) -> int:
        """The last one may be used in part."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def host_bytes(self) -> int:
        """Host memory of each rank, for offloaded shards: a node is assumed to have 2 TiB."""
        return 2048 * GIB // self.ranks_per_node

    @property
    def machine(self) -> Machine:
        """Sustained speeds of one device."""
        gpu, achieved = self.gpu, self.achieved
        flops, bandwidth = achieved.compute * gpu.flops, achieved.memory * gpu.memory_bandwidth
        return Machine(
            flops=flops,
            node_bandwidth=achieved.node * gpu.node_bandwidth,
            network_bandwidth=achieved.network * gpu.network_bandwidth,
            exchange_latency=achieved.exchange_latency,
            # Tokens whose GEMMs take as long as reading the bf16 weights once, and as much again for tails.
            half_speed_tokens=2 * flops / bandwidth,
        )

    def ring_seconds(self, num_ranks: int, ranks_per_node: int) -> float:
        """Seconds of an all-gather or reduce-scatter without contents over a ring of these ranks."""
        if num_ranks == 1:
            return 0.0
        achieved, num_between = self.achieved, -(-num_ranks // ranks_per_node) - 1
        num_inside = num_ranks - 1 - num_between
        between = num_between * achieved.ring_step_latency_between
        return achieved.ring_latency + num_inside * achieved.ring_step_latency + between

    @property
    def attention_flops(self) -> float:
        """Sustained FLOP a second of fused attention."""
        return self.achieved.attention * self.gpu.attention_flops

    @property
    def tangent_attention_flops(self) -> float:
        """The same of attention with tangents."""
        return self.achieved.attention * (self.gpu.measured_tangent_flops or self.gpu.attention_flops)

    @property
    def memory_bandwidth(self) -> float:
        """Sustained bytes a second of one device's memory."""
        return self.achieved.memory * self.gpu.memory_bandwidth

    def describe(self) -> str:
        """Such as `32 B200 (4 nodes of 8)`."""
        nodes = f" ({self.num_nodes} nodes of {self.gpus_per_node})" if self.num_nodes > 1 else ""
        return f"{self.num_gpus:,} {self.gpu.name}{nodes}"
