"""Launcher of `vcore_ds.models.flash_tangent_kernel`: causal attention and its JVP in one launch, or the JVP alone.

Importing this module needs Triton, which comes with PyTorch's CUDA wheels; only `vcore_ds.models.attention` imports it,
on a GPU. With `TRITON_INTERPRET=1` Triton runs kernels on the CPU, as the tests do.

Shapes: b packs or unpacked sequences of T tokens, A query heads, K key/value heads, D head dimension.
"""

import functools
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

from vcore_ds.common.errors import UserError
from vcore_ds.models.block_attention import Sinks
from vcore_ds.models.flash_tangent_kernel import attend

Tile = tuple[int, ...]
"""Queries, keys, warps, pipeline stages."""

Tiles = Mapping[int, tuple[Tile, Tile]]
"""In bf16 and fp16, by head dimension, padded to a power of two: for value and tangent, and for the tangent alone."""

# By the least KiB of shared memory of a block of threads: of the tiles that spill no registers the fastest on an H200,
# and elsewhere by the compiled code (docs/reports/kernel.md).
TILES: dict[int, Tiles] = {
    227: {  # H100, H200
        64: ((64, 64, 4, 3), (128, 32, 8, 3)),
        128: ((128, 32, 8, 3), (128, 64, 8, 2)),
        256: ((128, 32, 8, 2), (128, 16, 8, 3)),
    },
    163: {  # A100
        64: ((128, 32, 8, 3), (128, 64, 8, 3)),
        128: ((128, 16, 8, 4), (128, 32, 8, 3)),
        256: ((32, 64, 8, 2), (32, 32, 8, 2)),
    },
    99: {  # RTX PRO 6000, L40S, A40
        64: ((128, 32, 8, 3), (128, 64, 8, 2)),
        128: ((128, 16, 8, 3), (128, 32, 8, 2)),
        256: ((32, 32, 4, 2), (32, 32, 8, 2)),
    },
}

TENSOR_MEMORY_TILES: Tiles = {
    64: ((64, 64, 4, 3), (128, 32, 8, 3)),
    128: ((128, 32, 8, 3), (128, 32, 8, 3)),
    256: ((128, 16, 8, 3), (64, 32, 8, 2)),
}
"""Of B200, B300 and GB200, whose matrix multiplications accumulate in tensor memory."""

FP32_TILE = (16, 16, 4, 1)
"""Without tensor cores, whose precision is lower. Slow: only for checks."""

INTERPRETER_TILE = (32, 32)

TILE_KEYS = ("QUERY_BLOCK", "KEY_BLOCK", "num_warps", "num_stages")
"""Triton's names for the numbers of a tile."""

MAX_VALUE_DIM = 128
"""Value dimensions of one program (256 for the tangent alone); further programs compute the rest, and the
scores again. The accumulators of value and tangent for 128 queries fill the registers of an H100, and the tensor memory
of a B200."""


@functools.cache
def find_tiles(device: torch.device) -> Tiles | None:
    """Return the tiles of a GPU, or in Triton's interpreter those of an H100; None if its memory is too small."""
    if device.type != "cuda":
        return TILES[227]
    properties = torch.cuda.get_device_properties(device)
    # AMD's GPUs do not say; the tiles were chosen for none of them.
    return choose_tiles(getattr(properties, "shared_memory_per_block_optin", 0), properties.major == 10)


def choose_tiles(shared_bytes: int, has_tensor_memory: bool) -> Tiles | None:
    """Return the tiles of a GPU by the memory on the chip that a block of threads may have."""
    if has_tensor_memory:
        return TENSOR_MEMORY_TILES
    return next((tiles for kib, tiles in TILES.items() if shared_bytes >= 1024 * kib), None)


def flash_tangent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: Sequence[Tensor | None] = (None, None, None),
    *,
    cu_seqlens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute causal attention within each sequence, and its tangent.

    The inputs are those of `block_attention` in bf16, fp16 or fp32, with any strides; the sequences those of
    `SequenceLayout`, none of which crosses the end of a row. `given`: output and log-sum-exp from another kernel, as
    returned here; None to compute them. `tile`: None for the GPU's; queries and keys are powers of two of at least 16.

    Returns the output `[b, A, T, D]` in the dtype of `query`, a view of a contiguous `[b, T, A, D]`; its tangent in the
    same layout, None if all tangents are None; and the log-sum-exp of the scaled scores and the sink, fp32 `[b, A, T]`.
    """
    batch, num_heads, num_tokens, head_dim = query.shape
    output, log_sum_exp = given or (
        query.new_empty(batch, num_tokens, num_heads, head_dim).transpose(1, 2),
        query.new_empty(batch, num_heads, num_tokens, dtype=torch.float32),
    )
    d_output = None
    if any(tangent is not None for tangent in (*tangents, None if sinks is None else sinks[1])):
        d_output = query.new_empty(batch, num_tokens, num_heads, head_dim).transpose(1, 2)
    launch(
        (query, key, value),
        tangents,
        (output, d_output, log_sum_exp),
        cu_seqlens=cu_seqlens,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        value_is_given=given is not None,
        tile=tile,
    )
    return output, d_output, log_sum_exp


def launch(
    primals: tuple[Tensor, Tensor, Tensor],
    tangents: Sequence[Tensor | None],
    results: tuple[Tensor, Tensor | None, Tensor],
    *,
    cu_seqlens: Tensor,
    tile: Tile | None,
    **options: Any,
) -> None:
    """Launch the kernel on preallocated results: output, tangent and log-sum-exp, or the tangent alone if the value is
    given. Does not write tokens beyond the last sequence. `options`: of `make_kernel_arguments`."""
    query = primals[0]
    arguments, constants = make_kernel_arguments(primals, tangents, results, cu_seqlens=cu_seqlens, **options)
    if triton.knobs.runtime.interpret:
        tile = tile or INTERPRETER_TILE
    else:
        _check_driver()
    if tile is None:
        tiles = find_tiles(query.device)
        assert tiles is not None  # as the caller has checked
        is_fp32 = query.dtype == torch.float32
        tile = FP32_TILE if is_fp32 else tiles[max(64, constants["DIM"])][constants["VALUE_IS_GIVEN"]]
    batch, num_heads, num_tokens, head_dim = query.shape
    # An upper bound: the full blocks of all tokens, and one partial block for each sequence.
    num_blocks = batch * num_tokens // tile[0] + cu_seqlens.numel() - 1
    grid = num_blocks, num_heads, triton.cdiv(head_dim, constants["VALUE_DIM"])
    with torch.cuda.device_of(query):
        attend[grid](*arguments, **constants, **dict(zip(TILE_KEYS, tile, strict=False)))


def make_kernel_arguments(
    primals: tuple[Tensor, Tensor, Tensor],
    tangents: Sequence[Tensor | None],
    results: tuple[Tensor, Tensor | None, Tensor],
    *,
    cu_seqlens: Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: Sinks | None,
    value_is_given: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `attend` without the tile: positional ones, and compile-time constants."""
    query, key, _ = primals
    num_heads, num_tokens, head_dim = query.shape[1:]
    dim = max(16, triton.next_power_of_2(head_dim))
    tensors = (*primals, *tangents, *results)
    arguments = (
        *tensors,
        *(None if tensor is None else tensor.stride() for tensor in tensors[:-1]),
        *results[2].stride(),
        *(None if tensor is None else tensor.float().contiguous() for tensor in sinks or (None, None)),
        cu_seqlens,
        cu_seqlens.numel() - 1,
        num_tokens,
        num_heads // key.shape[1],
        scale,
        0 if sliding_window is None else sliding_window,
    )
    constants = dict(
        HEAD_DIM=head_dim,
        DIM=dim,
        VALUE_DIM=min(dim, MAX_VALUE_DIM * (2 if value_is_given else 1)),
        SLIDING=sliding_window is not None,
        VALUE_IS_GIVEN=value_is_given,
        # Triton's interpreter multiplies bf16 as if its bits were integers.
        UPCAST=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
    )
    return arguments, constants


@functools.cache
def _check_driver() -> None:
    """Raise UserError if Triton cannot compile its launcher, as the first launch on a machine does."""
    try:
        assert driver.active is not None
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            "utility.estimator: jvp needs a Triton kernel for attention, whose launcher did not compile here: "
            f"{error}; expected gcc, clang or a C compiler named in CC, and Python's headers, on every node "
            "(apt-get install gcc python3-dev). utility.estimator: finite_difference needs neither"
        ) from error
