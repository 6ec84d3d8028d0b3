"""Memory of a rank: the bytes that persist between passes, and the peak of each phase of a step, by kind.

Counted from the model's shape and the recipe's storage settings: nothing is measured or built. Other architectures are
treated as a Llama-like decoder, dense or MoE; their parameters can be given exactly (`ParameterCounts`).
tests/dist/test_memory.py compares both parts with the tensors of a real engine: transient bytes of small models are
within 17%.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import ParameterCounts, count_factors, parameter_counts
from vcore_ds.planning.settings import MemorySettings

Phase = Literal["probe", "utility", "main", "step"]
PHASES: tuple[Phase, ...] = ("probe", "utility", "main", "step")

MARGIN_BYTES = 2**30  # communicators and library workspaces
MARGIN_SHARE = 0.05  # share of the estimate added for fragmentation and everything small

COALESCING_SHARE = 0.05
"""Share of a rank's memory that unsharded gradients may take with `engine.coalesce_gradient_reduction: auto`."""

_FP32, _FP64, _INT64 = 4, 8, 8


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank."""

    persistent: Mapping[str, int]  # by kind, on the device for the whole run
    # By kind, on the device at the peak of each phase of the run, beyond the persistent bytes
    phases: Mapping[Phase, Mapping[str, int]]
    host: Mapping[str, int]  # by kind, in host memory: offloaded shards, and the copy of a checkpoint

    @property
    def persistent_bytes(self) -> int:
        """Bytes on the device for the whole run."""
        return sum(self.persistent.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of a rank."""
        return sum(self.host.values())

    @property
    def peak_phase(self) -> Phase:
        """Phase with the highest peak."""
        return max(self.phases, key=lambda phase: (self.transient_bytes(phase), phase == "main"))

    @property
    def peak_bytes(self) -> int:
        """Highest peak on the device, in bytes."""
        return self.persistent_bytes + self.transient_bytes(self.peak_phase)

    @property
    def margin_bytes(self) -> int:
        """Bytes that may come on top of `peak_bytes`."""
        return MARGIN_BYTES + int(MARGIN_SHARE * self.peak_bytes)

    def transient_bytes(self, phase: Phase) -> int:
        """Peak of a phase beyond the persistent bytes."""
        return sum(self.phases[phase].values())


def estimate_memory(
    shape: ModelShape, settings: MemorySettings, counts: ParameterCounts | None = None
) -> MemoryEstimate:
    """Estimate the memory of a rank. With tensor parallelism `shape` and `counts` are those of a rank's shard
    (`ModelShape.take_tensor_shard`); `counts` of None is `parameter_counts`."""
    counts = counts or parameter_counts(shape, settings.lora)
    device, host = _estimate_persistent(shape, settings, counts)
    model = _Model(shape, settings, counts)
    phases: dict[Phase, Mapping[str, int]] = {}
    if settings.estimator is not None and settings.probe_tokens:
        phases["probe"] = model.estimate_gradient_pass(settings.probe_tokens)
    if settings.utility_tokens:
        phases["utility"] = model.estimate_gradient_free_pass(settings.utility_tokens)
    phases["main"] = model.estimate_gradient_pass(settings.main_tokens, carries_tangents=settings.is_fused)
    # The update reads the gradient where it was reduced (`engine.deepspeed_start.update_from_buffer`).
    step = {} if settings.on_gpu or settings.zero.offloads_optimizer else {"a gradient in fp64": model.estimate_norm()}
    if settings.optimizer == "muon":
        step["a matrix of Muon"] = _estimate_muon_workspace(shape, settings, copies=6, squares=3)
    phases["step"] = step
    if "probe" in phases:
        in_direction = _estimate_direction_phase(shape, settings, counts)
        phases["probe"] = max(phases["probe"], in_direction, key=lambda parts: sum(parts.values()))
    if settings.offloads_checkpoints:
        most = max(settings.main_tokens, settings.probe_tokens)
        layer_input = model.estimate_checkpoint(most)  # whose rounding stands for that of other activations
        kept = model.estimate_kept_activations(most)
        host["activation checkpoints"] = kept * _pin(settings, layer_input) // max(layer_input, 1)
    return MemoryEstimate(device, phases, host)


def _pin(settings: MemorySettings, num_bytes: int) -> int:
    """Bytes that a tensor takes in host memory: PyTorch rounds those of pinned ones, which a GPU can copy, up to a
    power of two."""
    return 1 << (num_bytes - 1).bit_length() if settings.on_gpu and num_bytes else num_bytes


def _divide(number: int, parts: int) -> int:
    """The largest of `parts` equal shares, rounded up."""
    return -(-number // parts)


def estimate_unsharded_gradients(shape: ModelShape, settings: MemorySettings, counts: ParameterCounts) -> int:
    """Estimate the bytes of unreduced gradients on a rank: the gradient, and for 16-bit parameters the fp32 sum."""
    if settings.lora is not None:
        return _FP32 * counts.trained
    trained = counts.trained - shape.remote_expert_parameters(settings.expert)
    return trained * (_FP32 if settings.number_bytes == _FP32 else settings.number_bytes + _FP32)


def _estimate_direction_phase(shape: ModelShape, settings: MemorySettings, counts: ParameterCounts) -> dict[str, int]:
    """Estimate the bytes by kind after the probe's backward: the workspace of Muon's direction; the shard that is
    factorized, and in fp32 its part in the largest matrices of one module or layer."""
    parts: dict[str, int] = {}
    if settings.has_muon_direction:
        parts["a matrix of Muon"] = _estimate_muon_workspace(shape, settings, copies=10, squares=6)
    if settings.probe_rank is not None:
        parts["direction before it is factorized"] = settings.number_bytes * _divide(counts.trained, settings.num_ranks)
        most = max(shape.vocabulary_size * shape.hidden_size, shape.layer_parameters + shape.idle_layer_parameters)
        parts["matrices that are factorized"] = _FP32 * _divide(most, settings.num_ranks)
    return parts


def _estimate_muon_workspace(shape: ModelShape, settings: MemorySettings, *, copies: int, squares: int) -> int:
    """Compute the bytes of the largest matrix while it is orthogonalized: `copies` tensors of its shape (shards in
    flight, the matrix, intermediate results), and `squares` of the shape of the matrix times its transpose."""
    return settings.number_bytes * max(
        copies * rows * columns + squares * min(rows, columns) ** 2 for _, rows, columns in shape.list_hidden_matrices()
    )


def _estimate_persistent(
    shape: ModelShape, settings: MemorySettings, counts: ParameterCounts
) -> tuple[dict[str, int], dict[str, int]]:
    """Compute the bytes by kind, on the device and in host memory."""
    b, trained = settings.number_bytes, _divide(counts.trained, settings.num_ranks)
    b_trained = b if settings.lora is None else _FP32
    parameters = b * _divide(counts.all - counts.trained, settings.num_ranks) + b_trained * trained
    device, host = dict[str, int](), dict[str, int]()
    if settings.zero.offloads_parameters:
        host["parameters"] = _pin(settings, parameters)
    else:
        device["parameters"] = parameters
    if settings.zero.ranks_of_second_copy > 1:
        device["second copy of the parameters"] = b * _divide(counts.all, settings.zero.ranks_of_second_copy)
    optimizer_home = host if settings.zero.offloads_optimizer else device
    # An offloaded optimizer has the reduced gradient twice: as it is accumulated, and as it is updated from.
    gradients = _FP32 * trained
    optimizer_home["gradients"] = 2 * _pin(settings, gradients) if settings.zero.offloads_optimizer else gradients
    optimizer_home["master weights"] = _FP32 * trained
    if settings.optimizer != "sgd":
        optimizer_home["moments"] = 2 * _FP32 * trained
    if settings.optimizer == "muon":  # one moment instead of two
        hidden = sum(number * rows * columns for number, rows, columns in shape.list_hidden_matrices())
        optimizer_home["moments"] -= _FP32 * min(trained, _divide(hidden, settings.num_ranks))
    direction = b_trained * trained
    if settings.probe_rank is not None:
        experts, part = shape.experts, shape
        if experts is not None:
            part = replace(shape, experts=replace(experts, num_experts=experts.num_experts // settings.expert))
        direction = b * count_factors(part, settings.probe_rank)
    if settings.estimator is not None:
        device["direction" if settings.probe_rank is None else "factors of the direction"] = direction
    if settings.stages_checkpoints:
        staged = _FP32 * trained + optimizer_home.get("moments", 0)
        host["copy of the checkpoint"] = staged + direction * settings.keeps_direction
    device["reduction buffer"] = b * settings.zero.bucket_numel
    return device, host


class _Model:
    """Bytes that live no longer than a pass over the model."""

    def __init__(self, shape: ModelShape, settings: MemorySettings, counts: ParameterCounts):
        self.shape, self.settings, self.counts = shape, settings, counts
        self.b = settings.number_bytes
        self.embedding = shape.vocabulary_size * shape.hidden_size
        num_embeddings = 1 if shape.is_tied else 2
        # A rank gathers all of its experts of a layer, whichever of them tokens go through.
        active = counts.all - num_embeddings * self.embedding - shape.idle_parameters
        self.layer = max(0, active) // shape.num_layers + shape.idle_layer_parameters
        self.layer -= shape.expert_layer_parameters - shape.expert_layer_parameters // settings.expert
        # If one expert-parallel group has all ranks, its experts are not all-gathered.
        not_gathered = 1 if settings.expert == settings.num_ranks > 1 else 0
        self.gathered_layer = self.layer - not_gathered * shape.expert_layer_parameters // settings.expert
        elsewhere = shape.remote_expert_parameters(settings.expert)
        self.gathered_all = counts.all - elsewhere - not_gathered * shape.expert_parameters // settings.expert
        self.is_full = settings.lora is None
        self.trained_layer = self.layer if self.is_full else counts.trained // shape.num_layers
        experts = shape.experts
        # Copies of a token's hidden states in an MoE layer: one for each of its experts; and in flight between ranks.
        self.copies = 0 if experts is None else settings.expert_load * experts.per_token
        self.copies_in_flight = 2 * self.copies if settings.expert > 1 else 0
        # Width of the MLP that a token passes through, in an MoE model of an MoE layer; and of its unrouted part, which
        # has adapters, and with Llama's code recomputes its activated gate in the backward: experts save it.
        self.mlp_width = self.unrouted_width = shape.intermediate_size
        if experts is not None:
            self.mlp_width = math.ceil(self.copies * experts.width) + experts.shared_width
            self.unrouted_width = experts.shared_width
        self.keeps_logit_gradients = settings.keeps_logit_gradients(shape)
        # A norm saves each number of its input in its dtype, or in fp32 with the factor of the weight's gradient.
        self.norm_bytes = self.b if shape.has_llama_norms else _FP32 * (1 + self.is_full)

    def estimate_gradient_pass(self, num_tokens: int, *, carries_tangents: bool = False) -> dict[str, int]:
        """Estimate the bytes of the forward and backward of one micro-batch, by kind."""
        settings, shape, b = self.settings, self.shape, self.b
        kept = {
            "gathered parameters": self._estimate_gathered(),
            "activation checkpoints" if settings.is_checkpointed else "activations": (
                0 if settings.offloads_checkpoints else self.estimate_kept_activations(num_tokens)
            ),
        }
        coalesced = 0
        if settings.coalesces_gradients:
            coalesced = estimate_unsharded_gradients(self.shape, settings, self.counts)
        gradients = b * (self.trained_layer + min(settings.zero.bucket_numel, self.trained_layer))
        layer = self._estimate_layer_backward(num_tokens)
        loss = self._estimate_loss(num_tokens, has_gradient=True)
        if self.keeps_logit_gradients:
            kept["gradients by the logits"] = num_tokens * b * shape.vocabulary_size
        # The backward begins with the loss, while all activations are there, and ends with the layers.
        stages = [
            {"a layer's backward": layer, "whole gradients": gradients + coalesced},
            {"loss": loss, "whole gradients": coalesced},
        ]
        if carries_tangents:  # without checkpoints the values are among the kept activations
            stages.append(self._estimate_tangents(num_tokens, has_values=not settings.is_checkpointed))
        return kept | max(stages, key=lambda stage: sum(stage.values()))

    def estimate_gradient_free_pass(self, num_tokens: int) -> dict[str, int]:
        """Estimate the bytes of a JVP pass, or of a plain forward for a finite difference, by kind."""
        gathered = {"gathered parameters": self._estimate_gathered()}
        if self.settings.estimator == "jvp":
            return gathered | self._estimate_tangents(num_tokens)
        layer, loss = self._estimate_layer_forward(num_tokens), self._estimate_loss(num_tokens)
        return gathered | ({"a layer's forward": layer} if layer > loss else {"loss": loss})

    def estimate_kept_activations(self, num_tokens: int) -> int:
        """Estimate the bytes of activations that the backward needs: each layer's input, or all of them; and the last
        norm."""
        shape, b, activations = self.shape, self.b, self.settings.activations
        between = _divide(num_tokens, self.settings.tensor)
        if self.settings.is_checkpointed:
            kept = self.estimate_checkpoint(num_tokens) * (shape.num_layers + 1)
            kept += activations.num_stored * self._estimate_layer_kept(num_tokens)
            if activations.stores_attention:
                bytes_token = shape.num_heads * (b * shape.head_dim + _FP32)  # output and log-sum-exp of a layer
                kept += (shape.num_layers - activations.num_stored) * num_tokens * bytes_token
            return kept
        last_norm = between * (shape.hidden_size * (self.norm_bytes + b) + _FP32)
        return shape.num_layers * self._estimate_layer_kept(num_tokens) + last_norm

    def estimate_checkpoint(self, num_tokens: int) -> int:
        """Estimate the bytes of a layer's input."""
        return _divide(num_tokens, self.settings.tensor) * self.b * self.shape.hidden_size

    def estimate_norm(self) -> int:
        """Estimate the bytes of the largest parameter's gradient in fp64, of which DeepSpeed takes norms on CPUs."""
        sizes, lora = [size for _, *size in self.shape.list_hidden_matrices()], self.settings.lora
        numel = max(self.embedding, *map(math.prod, sizes)) if lora is None else lora.rank * max(map(max, sizes))
        return _FP64 * _divide(numel, self.settings.num_ranks)

    # Parts of a pass. With tensor parallelism a rank holds its share of the tokens' hidden states between layers.

    def _estimate_exchanged(self, num_tokens: int) -> int:
        """Estimate the bytes of the hidden states that a tensor-parallel group exchanges."""
        return 0 if self.settings.tensor == 1 else num_tokens * self.b * self.shape.hidden_size

    def _estimate_gathered(self) -> int:
        """Estimate the bytes of the parameters that DeepSpeed keeps gathered, and of those that are being
        all-gathered. On one rank they are views of the shard, unless that is in host memory."""
        if self.settings.num_ranks == 1 and not self.settings.zero.offloads_parameters:
            return 0
        layer, total = self.gathered_layer, self.gathered_all
        live = min(total, max(self.settings.zero.max_live_parameters, 2 * layer, self.embedding))
        return self.b * (live + min(layer, total))

    def _estimate_tangents(self, num_tokens: int, *, has_values: bool = False) -> dict[str, int]:
        """Estimate the bytes of a layer or of the loss, the larger, each with its group of the direction: as received
        from the ranks, and by parameter. While a layer runs, the next group is in flight. With `has_values` the layer's
        values are counted elsewhere."""
        b = self.b if self.is_full else _FP32
        layer = self.gathered_layer if self.is_full else self.trained_layer
        name, layer_bytes, loss_bytes = "tangents of the parameters", 3 * b * layer, 0
        if self.is_full:
            loss_bytes = 2 * b * self.embedding
        if self.settings.probe_rank is not None:  # factors are not all-gathered
            layer_bytes = loss_bytes = 0
        return max(
            {
                "a layer's forward": self._estimate_layer_tangents(num_tokens) // (2 if has_values else 1),
                name: layer_bytes,
            },
            {"loss": self._estimate_loss(num_tokens, has_tangent=True), name: loss_bytes},
            key=lambda stage: sum(stage.values()),
        )

    def _estimate_layer_kept(self, num_tokens: int) -> int:
        """Estimate the bytes of the tensors that autograd saves in a layer's forward."""
        shape, b, lora = self.shape, self.b, self.settings.lora
        heads = shape.num_heads + shape.num_kv_heads
        between = _divide(num_tokens, self.settings.tensor)
        # The input of a norm, and the inverse of each root mean square in fp32.
        norms = between * shape.norms_per_layer * (shape.hidden_size * self.norm_bytes + _FP32)
        norms += num_tokens * shape.normalizes_heads * heads * (shape.head_dim * self.norm_bytes + _FP32)
        if self.settings.is_checkpointed and shape.has_llama_norms:  # the input of the first norm is the checkpoint
            norms -= between * shape.hidden_size * b
        # Rotated queries and keys, values, the output, which its projection needs too; the log-sum-exp of each head.
        kv_heads = shape.num_heads if self.settings.repeats_kv_heads else shape.num_kv_heads
        attention = b * 2 * (shape.num_heads + kv_heads) * shape.head_dim + _FP32 * shape.num_heads
        mlp = b * (3 * self.mlp_width - shape.has_llama_norms * self.unrouted_width)  # gate, its activation, up
        # Outputs of the norms and of the gated activation: inputs of linear layers whose weights are trained, or whose
        # adapters take them as they are. Other adapters keep separate copies.
        inputs = 0
        if lora is None:
            inputs = b * (2 * between * shape.hidden_size + num_tokens * self.mlp_width)
        elif b == _FP32 and lora.dropout == 0:
            num_hidden = 2 if self.unrouted_width else 1
            inputs = b * (num_hidden * between * shape.hidden_size + num_tokens * self.unrouted_width)
        kept = norms + num_tokens * (attention + mlp) + inputs + self._estimate_kept_by_adapters(num_tokens)
        return kept + self._estimate_kept_by_routing(num_tokens)

    def _estimate_kept_by_routing(self, num_tokens: int) -> int:
        """Estimate the bytes that routing saves beyond the MLPs. For each expert of a token: its input, if it is
        trained; its output and its weight, for each other's gradients; its index among the experts, the row's place in
        their order, that of the token, and the way back; its share of the chosen probabilities. For each token: the
        probabilities and the sum of the chosen ones. The end of each expert's rows."""
        if (experts := self.shape.experts) is None:
            return 0
        copies = ((1 + self.is_full) * self.shape.hidden_size + 1) * self.b + 4 * _INT64 + _FP32
        return num_tokens * (int(self.copies * copies) + _FP32 * (experts.num_experts + 1)) + 4 * experts.num_experts

    def _estimate_kept_by_adapters(self, num_tokens: int) -> int:
        """Estimate the bytes that the adapters of a layer save: their inputs in fp32, with dropout masks; and the
        output of their first factor. Routed experts have none."""
        lora, shape = self.settings.lora, self.shape
        if lora is None:
            return 0
        has_mlp = self.unrouted_width > 0
        inputs = (5 if has_mlp else 3) * shape.hidden_size + shape.num_heads * shape.head_dim + self.unrouted_width
        has_dropout = lora.dropout > 0
        copies = _FP32 if has_dropout or self.b < _FP32 else 0  # an input in fp32 is kept by the layer already
        return num_tokens * ((copies + has_dropout) * inputs + (7 if has_mlp else 4) * _FP32 * lora.rank)

    def _estimate_layer_backward(self, num_tokens: int) -> int:
        """Estimate the bytes of the recomputed layer, with checkpoints, and of the gradients of its widest
        activations."""
        kept = self._estimate_layer_kept(num_tokens) if self.settings.is_checkpointed else 0
        shape, b = self.shape, self.b
        widest = 2 * self.mlp_width + 2 * shape.hidden_size
        copies = int(3 * self.copies + self.copies_in_flight)
        return kept + num_tokens * b * max(widest, copies * shape.hidden_size)

    def _estimate_layer_forward(self, num_tokens: int) -> int:
        shape, b = self.shape, self.b
        attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        adapter_bytes = 0 if self.is_full else _FP32 * self.mlp_width  # the output of one, in fp32
        widest = max(
            4 * self.mlp_width, 2 * attention, int(3 * self.copies + self.copies_in_flight) * shape.hidden_size
        )
        hidden = 4 * _divide(num_tokens, self.settings.tensor) * shape.hidden_size
        return b * hidden + self._estimate_exchanged(num_tokens) + num_tokens * (b * widest + adapter_bytes)

    def _estimate_layer_tangents(self, num_tokens: int) -> int:
        """Estimate the bytes of values and tangents together, as measured in the forward of small models: six widths of
        the MLP, or queries, keys and values twelve times (projected, normalized, rotated, laid out for the kernel),
        nine times with Llama's norms, beside the residual and the norm. Tensor-parallel layers also exchange the MLP's
        outputs: value and tangent, and the buffer of the one being sent."""
        shape, b = self.shape, self.b
        query_heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        adapter_bytes = 0 if self.is_full else 2 * _FP32  # the output of one and its tangent, in fp32
        mlp = num_tokens * (6 * b + adapter_bytes) * self.mlp_width + 3 * self._estimate_exchanged(num_tokens)
        mlp += int(2 * self.copies + 2 * self.copies_in_flight) * b * num_tokens * shape.hidden_size
        times = 9 if shape.has_llama_norms else 12
        attention = num_tokens * (times * b * (query_heads + 2 * kv_heads) + adapter_bytes * query_heads)
        return 4 * b * _divide(num_tokens, self.settings.tensor) * shape.hidden_size + max(mlp, attention)

    def _estimate_loss(self, num_tokens: int, *, has_gradient: bool = False, has_tangent: bool = False) -> int:
        shape, b = self.shape, self.b
        block = min(self.settings.activations.loss.block_bytes, _FP32 * shape.vocabulary_size * num_tokens)
        in_16_bits = block // 2 if b < _FP32 else 0  # beside the block in fp32
        if has_gradient and self.keeps_logit_gradients:
            in_16_bits = 0  # counted where they are kept
        hidden = num_tokens * b * shape.hidden_size
        # On a GPU the GEMM returns fp32. Without the kernel, of softcaps, `logsumexp` copies the block once.
        forward = block if self.settings.on_gpu else in_16_bits
        if has_tangent:
            # Logits and the loss's gradient by them; tangents are summed in the results of its GEMMs.
            return 2 * block + (0 if self.settings.on_gpu else in_16_bits) + 4 * hidden
        if not has_gradient:  # where they are gathered, beside those of the supervised tokens
            return block + forward + hidden + self._estimate_exchanged(num_tokens)
        if self.settings.is_anchored:
            # Logits of both models and their ratios; hidden states of both, and a gradient of each of the two losses.
            return 3 * block + in_16_bits + 5 * hidden
        weight_bytes = (_FP32 * (not self.keeps_logit_gradients) + b) * self.embedding if self.is_full else 0
        return block + in_16_bits + 3 * hidden + weight_bytes
