"""Seconds and bytes of an optimizer step on a cluster: counted FLOP, bytes of memory traffic and transfers, each at the
speed that it reaches (`hardware.Achieved`). docs/planning.md has the formula."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vcore_ds.planning.batch_layout import BatchLayout, list_padded_lengths
from vcore_ds.planning.hardware import (
    EAGER,
    EXCHANGES_OF_EXPERTS,
    Cluster,
    KernelTraffic,
    Traffic,
    estimate_exchange_traffic,
    estimate_gather_traffic,
)
from vcore_ds.planning.memory import PHASES, Phase
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import (
    FORWARD,
    ParameterCounts,
    PassWork,
    StepPasses,
    TimeModel,
    count_factors,
    linear_flops_per_token,
    list_unrouted_mlps,
    routed_flops_per_token,
)
from vcore_ds.planning.settings import MemorySettings

NUM_ITERATIONS = 5  # Newton-Schulz iterations of Muon

_BYTES_OF_QUANTIZATION = 17
"""Memory traffic of rounding an element of bf16 to FP8 by PyTorch's operations: absolute value, largest of a row,
quotient in fp32, conversion."""

_NEVER_HIDDEN = 0.1
"""Share of all-gathers and reduce-scatters that nothing hides: those of the first and the last layer."""

_PARAMETERS_OF_A_LAYER = 7
"""Parameters of a layer that are gathered: queries, keys, values, output, and three of the MLP, or of the experts and
their router. Norms are small enough to be kept on each rank."""

_HOST_LINK = 50e9  # bytes a second between a device and its host: 0.8 of PCIe 5.0 x16

_HOST_MEMORY = 40e9
"""Bytes a second of host memory for each rank: an eighth of two sockets, shared with everything else."""

_FP32 = 4

LaidOutBatch = tuple[Sequence[int], BatchLayout]
"""Lengths in tokens of a batch's sequences, and their layout, whose ids are positions in the lengths."""


def quantized_bytes(shape: ModelShape, num_tokens: float) -> float:
    """Memory traffic of rounding to FP8 in a forward with tangents: the weights of linear layers but those of experts
    and head, and the tangents of their inputs, once for each of the seven layers."""
    weights = (linear_flops_per_token(shape) - routed_flops_per_token(shape)) / 2
    weights -= shape.vocabulary_size * shape.hidden_size
    inputs = shape.num_layers * (3 * shape.hidden_size + shape.num_heads * shape.head_dim)
    for number, width in list_unrouted_mlps(shape):
        inputs += number * (2 * shape.hidden_size + width)
    return _BYTES_OF_QUANTIZATION * (weights + num_tokens * inputs)


@dataclass
class StepCost:
    """Predictions for one optimizer step."""

    # By phase; 0 for one that the step does not have
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    traffic: dict[str, Traffic] = field(default_factory=dict)  # bytes that a rank receives, by kind

    @property
    def seconds_step(self) -> float:
        """Sum over the phases."""
        return sum(self.seconds.values())

    def add(self, phase: Phase, seconds: float, weight: float, traffic: Mapping[str, Traffic] | None = None) -> None:
        """Add seconds and bytes, times `weight`."""
        self.seconds[phase] += weight * seconds
        for kind, moved in (traffic or {}).items():
            self.traffic[kind] = self.traffic.get(kind, Traffic()) + moved * weight


@dataclass(frozen=True)
class StepModel:
    """A model and a cluster, for the costs of steps."""

    time: TimeModel  # of a GPU's shard of every layer
    counts: ParameterCounts  # with tensor parallelism, of the part that one GPU has
    settings: MemorySettings
    cluster: Cluster
    kernels: KernelTraffic | None = None  # None for those that a run takes

    def estimate_step(
        self, passes: StepPasses, main: Sequence[LaidOutBatch], probe: Sequence[LaidOutBatch]
    ) -> StepCost:
        """Estimate the cost of a step, mean over the main and the probe batches."""
        cost = StepCost()
        for batch in main:
            if passes.utility is not None:
                self._add_pass(cost, "utility", passes.utility, batch, 1 / len(main))
            self._add_pass(cost, "main", passes.main, batch, 1 / len(main))
        if passes.probe is not None:
            for batch in probe:
                self._add_pass(cost, "probe", passes.probe, batch, 1 / (len(probe) * passes.steps_per_probe))
            self._add_factorization(cost, 1 / passes.steps_per_probe)
        self._add_update(cost, passes)
        return cost

    def estimate_forward(self, main: Sequence[LaidOutBatch]) -> float:
        """Estimate the seconds of a forward without a gradient, mean over the main batches."""
        cost = StepCost()
        for batch in main:
            self._add_pass(cost, "utility", FORWARD, batch, 1 / len(main))
        return cost.seconds_step

    def _add_pass(self, cost: StepCost, phase: Phase, work: PassWork, batch: LaidOutBatch, weight: float) -> None:
        """Add all micro-steps of one pass over one batch."""
        last, (lengths, batch_layout) = len(batch[1].micro_steps) - 1, batch
        settings, k = self.settings, batch_layout.sequence_parallel

        def measure_group(positions: Sequence[int]) -> tuple[float, float]:
            """Tokens of a rank, and their squares in causal attention."""
            unpadded = [lengths[i] for i in positions]
            padded = list_padded_lengths(unpadded, k, is_packed=batch_layout.is_packed)
            return sum(padded) / k, sum(n * n for n in (unpadded if batch_layout.is_packed else padded)) / k

        for step, groups in enumerate(batch_layout.micro_steps):
            slowest = max(map(measure_group, groups), key=lambda group: self._estimate_compute(FORWARD, *group))
            reduces = work.reduces > 0 and (step == last or not settings.coalesces_gradients)
            # ZeRO++'s second copy is made by the first all-gather of a step, which crosses all ranks.
            makes_copy = self._num_in_copy < self.time.num_ranks and phase == "main" and step == 0
            compute = self._estimate_compute(work, *slowest)
            exposed, gathered = self._estimate_exposed(work, compute, makes_copy, reduces=reduces)
            exchange_seconds, exchanged = self._estimate_exchanges(work, k, slowest[0])
            seconds = compute + exchange_seconds + exposed
            seconds += work.runs * self.time.shape.num_layers * self.cluster.achieved.layer_overhead
            if settings.offloads_checkpoints and work.reduces:
                numbers = slowest[0] / settings.tensor * self.time.shape.hidden_size * (self.time.shape.num_layers + 1)
                seconds += 2 * settings.number_bytes * numbers / _HOST_LINK
            # The device waits where the host needs longer to launch a pass than the device to compute it.
            seconds = max(seconds, self._estimate_launch_seconds(work, makes_copy))
            cost.add(phase, seconds, weight, gathered | exchanged)

    def _estimate_compute(self, work: PassWork, tokens: float, squares: float) -> float:
        """Estimate the seconds of a micro-step's kernels on one rank: FLOP of GEMMs and of attention at the rates that
        they reach, and bytes of memory traffic, which GEMMs and all other kernels read and write once. All ranks of an
        expert-parallel group wait for the one that is sent most tokens."""
        settings, shape, cluster = self.settings, self.time.shape, self.cluster
        head, routed = 2 * shape.vocabulary_size * shape.hidden_size, routed_flops_per_token(shape)
        layers, multiple = linear_flops_per_token(shape) - head, work.linear_multiple(shape)
        # Logits are not recomputed with the layers, and the tangents share a GEMM with the gradient.
        others = self._computes_logits_again - (work.forwards - 1) - work.num_with_tangents
        head_multiple = multiple + work.reduces * others
        flops = multiple * (layers + (settings.expert_load - 1) * routed) - 0.5 * work.fp8 * (layers - routed)
        seconds = (flops + head_multiple * head) * tokens / cluster.machine.flops
        attention = work.attention + work.attention_again - work.attention_with_tangents
        per_square = 2 * shape.num_layers * shape.num_heads * shape.head_dim * squares
        seconds += per_square * attention / cluster.attention_flops
        seconds += per_square * work.attention_with_tangents / cluster.tangent_attention_flops
        num_bytes = self._count_layer_bytes(work, multiple, tokens)
        num_bytes += self._count_loss_bytes(work, head_multiple, tokens)
        num_bytes += work.fp8 * quantized_bytes(shape, tokens)
        trained = self.counts.trained  # reduced: copied to the bucket and out of it, divided, and added in fp32
        num_bytes += work.reduces * trained * (6 * settings.number_bytes + 16 / self.time.num_ranks)
        return seconds + num_bytes / cluster.memory_bandwidth

    @property
    def _computes_logits_again(self) -> bool:
        return self.settings.lora is None and not self.settings.keeps_logit_gradients(self.time.shape)

    @property
    def _kernels(self) -> KernelTraffic:
        return self.kernels or (KernelTraffic() if self.time.shape.has_llama_norms else EAGER)

    def _count_layer_bytes(self, work: PassWork, multiple: float, tokens: float) -> float:
        """Count the memory traffic of a pass over all layers; `multiple`: of a forward's GEMMs."""
        shape, kernels, b = self.time.shape, self._kernels, self.settings.number_bytes
        hidden, width = shape.hidden_size, shape.intermediate_size
        if shape.experts is not None:
            width = shape.experts.active_width
        heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        weights = shape.num_layers * shape.layer_parameters + shape.idle_parameters
        weights -= shape.remote_expert_parameters(self.settings.expert)
        # Inputs and outputs of queries, keys, values, output, gate, up, down; weights once.
        in_gemms = multiple * b * ((7 * hidden + 3 * width + 2 * heads) * tokens * shape.num_layers + weights)
        between = hidden / self.settings.tensor  # numbers of each token between the layers' halves
        normalized = shape.norms_per_layer * between + shape.normalizes_heads * heads
        passes = (work.forwards, work.reduces, work.num_with_tangents)
        per_token = sum(
            number * (norm * normalized + rotary * heads + gate * width + residual * between)
            for number, norm, rotary, gate, residual in zip(
                passes, kernels.norm, kernels.rotary, kernels.gate, (12, 6, 12), strict=True
            )
        )
        return in_gemms + b / 2 * per_token * tokens * shape.num_layers

    def _count_loss_bytes(self, work: PassWork, multiple: float, tokens: float) -> float:
        """Count the memory traffic of the head and the token loss; `multiple`: of the head's GEMMs."""
        shape, kernels, b = self.time.shape, self._kernels, self.settings.number_bytes
        logits, embedding = tokens * shape.vocabulary_size, shape.vocabulary_size * shape.hidden_size
        num_blocks = math.ceil(4 * logits / self.settings.activations.loss.block_bytes)
        again = work.reduces * self._computes_logits_again
        num_forwards = work.runs - work.reduces - work.num_with_tangents
        in_loss = logits * (kernels.loss[0] * num_forwards + kernels.loss[1] * again)
        sums = again * (num_blocks if kernels.adds_blocks else 1)
        # A GEMM writes logits in fp32 or reads their gradients in 16 bits: 3 bytes in the mean.
        return in_loss + (2 + 4 * 2) * sums * embedding + multiple * (3 * logits + num_blocks * b * embedding)

    def _estimate_exchanges(self, work: PassWork, k: int, tokens: float) -> tuple[float, dict[str, Traffic]]:
        """Estimate the seconds and bytes of exchanges within sequence-, expert- and tensor-parallel groups."""
        settings, shape, machine = self.settings, self.time.shape, self.cluster.machine
        moved, num_exchanges, seconds = dict[str, Traffic](), 0.0, 0.0
        if k > 1:  # of queries, keys and values, and of outputs
            moved["sequence-parallel activations"] = self.time.estimate_exchange_traffic(k) * (
                tokens * shape.num_layers * work.exchanges
            )
            num_exchanges += 2 * work.exchanges * shape.num_layers
        if settings.expert > 1:
            # Hidden states are sent to each of a token's experts in each layer, and back.
            experts = shape.experts
            copies = 0 if experts is None else 2 * experts.num_layers * experts.per_token
            num_bytes = settings.number_bytes * (copies * shape.hidden_size) * tokens * work.exchanges
            traffic = estimate_exchange_traffic(num_bytes, settings.expert, self.time.ranks_per_node)
            moved["expert-parallel tokens"] = traffic
            num_exchanges += work.exchanges * EXCHANGES_OF_EXPERTS * shape.num_layers
            seconds += (settings.expert_load - 1) * traffic.seconds(machine)
        if settings.tensor > 1:
            moved["tensor-parallel activations"], number = self.estimate_tensor_exchanges(work, tokens)
            num_exchanges += number
        seconds += sum(traffic.seconds(machine) for traffic in moved.values())
        return seconds + num_exchanges * machine.exchange_latency, moved

    def _estimate_exposed(
        self, work: PassWork, compute: float, makes_copy: bool, *, reduces: bool
    ) -> tuple[float, dict[str, Traffic]]:
        """Estimate the seconds of all-gathers and reduce-scatters that a micro-step waits for, and their bytes.

        DeepSpeed all-gathers `prefetch_numel` elements of the next layer beside the present one, and the rest when the
        layer begins; this, and the first layer, nothing hides. The others overlap with a share of the kernels.
        """
        moved, machine = self._estimate_gathers(work, makes_copy, reduces=reduces), self.cluster.machine
        num_layers, in_node = self.time.shape.num_layers, self.time.ranks_per_node
        # Latencies: one all-gather for each layer, embedding and head, or one for each parameter.
        over_all_ranks = self.cluster.ring_seconds(self.time.num_ranks, in_node)
        within_copy = self.cluster.ring_seconds(self._num_in_copy, min(self._num_in_copy, in_node))
        num_gathers = 2 + num_layers * (_PARAMETERS_OF_A_LAYER if self.settings.zero.gathers_in_place else 1)
        parameters = moved["parameters"].seconds(machine)
        parameters += num_gathers * (work.gathers * within_copy + makes_copy * (over_all_ranks - within_copy))
        others = sum((traffic.seconds(machine) for kind, traffic in moved.items() if kind != "parameters"), 0.0)
        others += (2 + num_layers) * (work.tangent_gathers + int(reduces)) * over_all_ranks
        others += self._count_host_bytes(work) / _HOST_LINK
        late = parameters * max(0.0, 1 - self.settings.zero.prefetch_numel / self._count_layer())
        hideable = parameters + others - late
        exposed = late + max(hideable - self.cluster.achieved.hidden * compute, _NEVER_HIDDEN * hideable)
        return exposed, moved

    def _count_layer(self) -> float:
        """Parameters of a layer that are all-gathered, mean of the layers."""
        shape = self.time.shape
        embeddings = shape.vocabulary_size * shape.hidden_size * (1 if shape.is_tied else 2)
        return (self.counts.all - embeddings - shape.remote_expert_parameters(self.settings.expert)) / shape.num_layers

    def _estimate_launch_seconds(self, work: PassWork, makes_copy: bool) -> float:
        """Estimate the host time of a pass: Python and launches of its layers, and of all-gathers, which grows with the
        ranks."""
        achieved = self.cluster.achieved
        per_layer = work.runs * achieved.layer_overhead + work.num_with_tangents * achieved.tangent_overhead
        per_layer += work.fp8 * achieved.fp8_overhead + work.reduces * achieved.backward_overhead
        if not self.settings.zero.gathers_in_place and self.time.num_ranks > 1:
            num_ranks = work.gathers * self._num_in_copy + makes_copy * (self.time.num_ranks - self._num_in_copy)
            per_layer += num_ranks * achieved.gather_overhead
        return self.time.shape.num_layers * per_layer

    def _add_factorization(self, cost: StepCost, weight: float) -> None:
        """Add the factorization of a low-rank direction: in each pass two GEMMs with the rank's shard, and the sums of
        `G Omega` and `Q^T G` over the ranks, in fp32 and not hidden."""
        rank, shape = self.settings.probe_rank, self.time.shape
        if rank is None:
            return
        experts, expert_part = shape.experts, 0
        if experts is not None:
            expert_part = 3 * experts.num_layers * experts.num_experts * rank * (shape.hidden_size + experts.width)
        others = count_factors(shape, rank) - expert_part
        # An all-reduce is a reduce-scatter and an all-gather.
        traffic = self.time.estimate_gather(2 * _FP32 * others, 2 * _FP32 * expert_part)
        seconds = 4 * rank * self.counts.trained / self.time.num_ranks / self.cluster.machine.flops
        seconds += traffic.seconds(self.cluster.machine)
        seconds += self.cluster.achieved.factorization * sum(number for number, *_ in shape.list_weight_matrices())
        cost.add("probe", seconds, weight * self.settings.rank_passes, {"factors of the direction": traffic})

    def estimate_tensor_exchanges(self, work: PassWork, num_tokens: float) -> tuple[Traffic, float]:
        """Estimate the exchanges of one micro-step over a tensor-parallel group, which is in one node, and count them.
        Left out are those of the losses, 8 bytes for each token and GPU, and the sum of the gradients that all of them
        have, once a pass."""
        settings = self.settings
        num_exchanges, num_hidden = work.count_hidden_state_exchanges(self.time.shape.num_layers)
        num_bytes = float(settings.number_bytes * num_hidden * self.time.shape.hidden_size) * num_tokens
        return Traffic(inside=num_bytes * (settings.tensor - 1) / settings.tensor), num_exchanges

    def _estimate_gathers(self, work: PassWork, makes_copy: bool, *, reduces: bool) -> dict[str, Traffic]:
        """Estimate the all-gathers and the reduce-scatter of one micro-step; with `makes_copy` the first one makes
        ZeRO++'s second copy."""
        counts, b = self.counts, self.settings.number_bytes
        expert_part = b * self.time.shape.expert_parameters
        others = b * (counts.all - counts.trained) + self._bytes_trained * counts.trained - expert_part
        moved = self._estimate_gather(others, expert_part) * (work.gathers - work.reduces)
        if makes_copy:
            moved += self.time.estimate_gather(others, expert_part) + self._estimate_gather(others, expert_part) * -1
        if work.reduces:
            moved += self._estimate_gather(*self._count_gathered_again(others, expert_part))
        traffic = {"parameters": moved}
        if work.tangent_gathers:
            traffic["tangents"] = self._estimate_trained_traffic(self._bytes_trained) * work.tangent_gathers
        if reduces:
            traffic["gradients"] = self._estimate_trained_traffic(b)
        return traffic

    def _count_gathered_again(self, others: float, expert_part: float) -> tuple[float, float]:
        """Return the bytes that a backward all-gathers again after its forward: of all parameters but the experts, and
        of the experts.

        It needs layers and head. ZeRO-3 keeps what is used again within the reuse distance, as it walks through the
        order of the modules: a layer, where the layers after it and the head have fewer parameters; the last layer in
        any case; the head, where twice its own are fewer.
        """
        shape, b, reuse = self.time.shape, self.settings.number_bytes, self.settings.zero.reuse_distance
        head = shape.vocabulary_size * shape.hidden_size
        embeddings = head if shape.is_tied else 2 * head
        num_kept = max(1, math.ceil((reuse - head) / self._count_layer()))
        share = max(0, shape.num_layers - num_kept) / shape.num_layers
        head_again = b * head if reuse <= 2 * head else 0
        return share * (others - b * embeddings) + head_again, share * expert_part

    def _count_host_bytes(self, work: PassWork) -> float:
        """Count the bytes of offloaded shards that are copied between host and device in one micro-step."""
        settings = self.settings
        gathered = work.gathers * settings.number_bytes * self.counts.all if settings.zero.offloads_parameters else 0
        reduced = work.reduces * _FP32 * self.counts.trained if settings.zero.offloads_optimizer else 0
        return gathered / self.time.num_ranks + reduced / self.time.num_ranks

    def _add_update(self, cost: StepCost, passes: StepPasses) -> None:
        """Add the optimizer's update and the direction's: bytes of a shard, read and written."""
        settings, memory = self.settings, self.cluster.memory_bandwidth
        shard = self.counts.trained / self.time.num_ranks
        moments = 4 * _FP32 if settings.optimizer == "sgd" else 0  # of AdamW, which plain SGD lacks
        update = self._kernels.update - moments + settings.number_bytes
        if settings.zero.offloads_optimizer:
            cost.add("step", shard * update / _HOST_MEMORY + shard * settings.number_bytes / _HOST_LINK, 1.0)
        else:
            cost.add("step", shard * update / memory, 1.0)
        if settings.optimizer == "muon":
            self._add_orthogonalization(cost, "step", 1.0, num_exchanges=2, wide=4, square=2)
        if settings.estimator is None:
            return
        if passes.probe is not None and settings.has_muon_direction:
            # The derivative of the iterations: gradient and momentum go in, the direction comes out.
            self._add_orthogonalization(cost, "probe", 1 / passes.steps_per_probe, num_exchanges=3, wide=10, square=4)
        if passes.probe is not None:  # reads the gradient and the moments, writes the direction
            read = 3 * _FP32 + settings.number_bytes
            cost.add("probe", shard * read / memory, 1 / passes.steps_per_probe)
        if settings.estimator == "finite_difference":  # perturbed and put back
            cost.add("utility", 2 * shard * (_FP32 + 2 * settings.number_bytes) / memory, 1.0)

    def _add_orthogonalization(
        self, cost: StepCost, phase: Phase, weight: float, *, num_exchanges: int, wide: int, square: int
    ) -> None:
        """Add Newton-Schulz iterations of all matrices, divided among the ranks, and the all-to-alls of their shards.
        An iteration takes `wide * n^2 m + square * n^3` FLOP for a matrix of n rows and m >= n columns."""
        hidden = self.time.shape.list_hidden_matrices()
        sizes = [(number, min(rows, columns), max(rows, columns)) for number, rows, columns in hidden]
        flops = NUM_ITERATIONS * sum(number * n * n * (wide * m + square * n) for number, n, m in sizes)
        shard = self.settings.number_bytes * sum(number * n * m for number, n, m in sizes) / self.time.num_ranks
        traffic = estimate_exchange_traffic(num_exchanges * shard, self.time.num_ranks, self.time.ranks_per_node)
        seconds = traffic.seconds(self.cluster.machine) + flops / self.time.num_ranks / self.cluster.machine.flops
        cost.add(phase, seconds, weight, {"matrices of Muon": traffic})

    def _estimate_trained_traffic(self, number_bytes: int) -> Traffic:
        """Estimate a reduce-scatter of all gradients, or an all-gather of the direction."""
        expert_part = self.time.shape.expert_parameters if self.settings.lora is None else 0
        others = self.counts.trained - expert_part
        return self.time.estimate_gather(number_bytes * others, number_bytes * expert_part)

    def _estimate_gather(self, others: float, expert_part: float) -> Traffic:
        """Estimate an all-gather of parameters: only over the ranks that share a second copy, if there is one."""
        in_copy = self._num_in_copy
        if in_copy < self.time.num_ranks:
            return estimate_gather_traffic(others + expert_part, in_copy, min(in_copy, self.time.ranks_per_node))
        return self.time.estimate_gather(others, expert_part)

    @property
    def _bytes_trained(self) -> int:
        return self.settings.number_bytes if self.settings.lora is None else _FP32

    @property
    def _num_in_copy(self) -> int:
        """Ranks over which parameters are gathered: those that share a second copy, or all."""
        num_ranks = self.settings.zero.ranks_of_second_copy
        return num_ranks if num_ranks > 1 else self.time.num_ranks
