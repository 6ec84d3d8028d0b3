"""What of a model and of a run decides how much memory a rank takes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of a model's parameters, over all ranks."""

    all: int
    trained: int


@dataclass(frozen=True)
class AdapterShape:
    """Low-rank adapters on all linear layers of the decoder."""

    rank: int
    has_dropout: bool = False


@dataclass(frozen=True)
class MemorySettings:
    """What of a run decides how much memory a rank takes."""

    num_ranks: int
    main_tokens: int
    """Tokens of the largest main micro-batch on a rank: of a packed row, or of all rows with their padding."""
    probe_tokens: int = 0
    """The same of the probe batch; 0 for a method without one."""
    utility_tokens: int = 0
    """The same of a gradient-free pass of its own; 0 without one."""
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
