"""What of a model and of a run decides how much memory a rank takes."""

from dataclasses import dataclass
from typing import Literal

from vcore_ds.planning.model_shape import ModelShape


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of a model's parameters, over all ranks; with tensor parallelism, of the part that one rank has."""

    all: int
    trained: int


@dataclass(frozen=True)
class AdapterShape:
    """Low-rank adapters on all linear layers of the decoder; routers and experts have none."""

    rank: int
    has_dropout: bool = False


@dataclass(frozen=True)
class MemorySettings:
    """What of a run decides how much memory a rank takes."""

    num_ranks: int
    """Ranks that shard the model; a tensor-parallel group counts as one."""
    main_tokens: int
    """Tokens of the largest main micro-batch on a rank: of a packed row, or of all rows with their padding."""
    probe_tokens: int = 0
    """The same of the probe batch; 0 for a method without one."""
    utility_tokens: int = 0
    """The same of a gradient-free pass of its own; 0 without one."""
    tensor: int = 1
    """Ranks of a tensor-parallel group, which all have the micro-batches of the group."""
    expert: int = 1
    """Ranks of an expert-parallel group, each of which has as large a part of every layer's experts."""
    expert_load: float = 1.0
    """Tokens that the fullest rank of such a group is sent, over their mean."""
    estimator: Literal["jvp", "finite_difference"] | None = None
    """How utilities are computed; None for a method without them."""
    is_fused: bool = False
    """Whether the main forward gives the utilities."""
    number_bytes: int = 2
    """Bytes of a number: 2 in bf16, 4 in fp32. Adapters are in fp32 in either."""
    adapters: AdapterShape | None = None
    """None trains all parameters."""
    has_moments: bool = True
    """AdamW, against plain SGD."""
    is_checkpointed: bool = False
    offloads_checkpoints: bool = False
    """Activations that the backward needs are in host memory until then."""
    offloads_parameters: bool = False
    offloads_optimizer: bool = False
    coalesces_gradients: bool = False
    """One reduction a step, from an unsharded gradient."""
    ranks_of_second_copy: int = 1
    """Ranks over which hierarchical partitioning divides its second copy of the parameters; 1 for no copy."""
    max_live_parameters: int = 10**9
    bucket_numel: int = 5 * 10**8
    """Elements of the buffer in which gradients are reduced."""


def parameter_counts(shape: ModelShape, adapters: AdapterShape | None = None) -> ParameterCounts:
    """The parameters of a Llama-like model or mixture of this shape, or of a part of one (`ModelShape.of_part`): norms
    are whole in each part, and so is the factor of an adapter that multiplies or gives hidden states. Biases, and norms
    within an attention of another kind, are left out: at most 0.1% of the published mixtures."""
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.normalizes_heads else 0)
    base = shape.num_layers * (shape.layer_parameters + norms) + shape.idle_parameters + shape.hidden_size
    base += shape.vocabulary_size * shape.hidden_size * (1 if shape.is_tied else 2)
    if adapters is None:
        return ParameterCounts(base, base)
    # Inputs and outputs of query, key, value and output; of gate, up and down.
    added = adapters.rank * shape.num_layers * (4 * shape.hidden_size + 2 * heads)
    added += adapters.rank * sum(3 * n * (shape.hidden_size + width) for n, width in _adapted_mlps(shape))
    return ParameterCounts(base + added, added)


def _adapted_mlps(shape: ModelShape) -> list[tuple[int, int]]:
    """Numbers and widths of the MLPs that adapters on all linear layers are put on: not of routed experts."""
    if (experts := shape.experts) is None:
        return [(shape.num_layers, shape.intermediate_size)]
    dense = shape.num_layers - experts.num_layers, shape.intermediate_size
    return [dense, (experts.num_layers if experts.shared_width else 0, experts.shared_width)]


def active_parameters(shape: ModelShape) -> int:
    """Parameters that a token goes through, embeddings included; all of a dense model's."""
    return parameter_counts(shape).all - shape.idle_parameters
