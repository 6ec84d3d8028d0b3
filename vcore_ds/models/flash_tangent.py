"""Causal attention that carries a tangent, as one Triton kernel: output, tangent and log-sum-exp of all rows at once.

The kernel itself, and its scheme, are in `vcore_ds.models.flash_tangent_kernel`.

Importing this module needs Triton, which PyTorch's CUDA wheels bring along; only `vcore_ds.models.attention` imports
it, on a GPU. With `TRITON_INTERPRET=1` Triton runs kernels on the CPU instead, which is how the tests run this one.

Shapes: b rows, A query heads, K key/value heads, T tokens of a row, D head dimension.
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

TILES = {
    # padded head dimension: (queries, keys, warps, pipeline stages)
    64: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)),
    128: ((128, 32, 8, 3), (128, 32, 8, 2), (128, 16, 8, 3), (64, 32, 4, 2)),
    256: ((128, 16, 8, 3), (128, 32, 8, 2), (128, 16, 8, 2), (32, 32, 8, 2)),
}
"""Tiles to time in bf16 and fp16; the first is taken untimed where algorithms must be deterministic. Chosen by what the
compiler makes of them for H100 and B200 (docs/reports/kernel.md), and not yet timed on either. 32 keys of dimension 256
are too many for B200's shared memory, and drop out there; the last tile of 256 is for GPUs with 100 KB."""

MAX_VALUE_DIM = 128
"""Dimensions of the values that one program sums up; another takes the rest, and computes the scores again. The sums
and their tangents for 128 queries fill the registers of an H100, and the tensor memory of a B200."""

TILES_FP32 = ((16, 16, 4, 1),)
"""The same for fp32, whose products run outside of the tensor cores, to keep its precision. Slow: for checks alone."""

TILE = ("QUERY_BLOCK", "KEY_BLOCK", "num_warps", "num_stages")
"""What the numbers of a tile are to Triton."""

INTERPRETER_TILES = (32, 32)

LONG_SEQUENCE = 2048
"""Tokens of the longest sequence from which tiles are chosen anew."""


def flash_tangent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: Sequence[Tensor | None] = (None, None, None),
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
    tiles: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Causal attention within each sequence, and its tangent.

    Args:
        query: `[b, A, T, D]`, bf16, fp16 or fp32, with any strides.
        key, value: `[b, K, T, D]` in the dtype of `query`; A is a multiple of K (grouped-query attention).
        tangents: of query, key and value, each shaped like it or None for zero.
        cu_seqlens: int32 `[num_sequences + 1]`: 0, and where each sequence ends in the rows put end to end. No sequence
            crosses the end of a row.
        max_seqlen: tokens of the longest sequence; only the choice of tiles depends on it.
        scale: factor on the scores.
        sliding_window: a query sees this many last keys, itself included; None for all.
        sinks: of the query heads, not multiplied by `scale`; None for none.
        tiles: tokens of a query block and of a key block, powers of two from 16, and optionally warps and pipeline
            stages; None times `TILES` once a shape.

    Returns:
        output `[b, A, T, D]` in the dtype of `query`, a view of a contiguous `[b, T, A, D]`; its tangent, laid out
        alike, None where all tangents are None; and the log-sum-exp of the scaled scores and the sink, fp32
        `[b, A, T]`.
    """
    batch, num_heads, num_tokens, head_dim = query.shape
    output = query.new_empty(batch, num_tokens, num_heads, head_dim).transpose(1, 2)
    d_output = None
    if any(tangent is not None for tangent in (*tangents, None if sinks is None else sinks[1])):
        d_output = query.new_empty(batch, num_tokens, num_heads, head_dim).transpose(1, 2)
    log_sum_exp = query.new_empty(batch, num_heads, num_tokens, dtype=torch.float32)
    launch(
        (query, key, value),
        tangents,
        (output, d_output, log_sum_exp),
        cu_seqlens=cu_seqlens,
        is_long=max_seqlen >= LONG_SEQUENCE,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        tiles=tiles,
    )
    return output, d_output, log_sum_exp


def launch(
    primals: tuple[Tensor, Tensor, Tensor],
    tangents: Sequence[Tensor | None],
    results: tuple[Tensor, Tensor | None, Tensor],
    *,
    cu_seqlens: Tensor,
    is_long: bool,
    scale: float,
    sliding_window: int | None,
    sinks: Sinks | None,
    tiles: tuple[int, ...] | None,
) -> None:
    """The kernel alone: `flash_tangent` into given tensors. Tokens beyond the last end are left as they are."""
    arguments, constants = kernel_arguments(
        primals,
        tangents,
        results,
        cu_seqlens=cu_seqlens,
        is_long=is_long,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
    )
    batch, num_heads, num_tokens, head_dim = primals[0].shape

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        # Whole blocks of all tokens, and one begun block a sequence: at least as many as there are.
        num_blocks = batch * num_tokens // meta["QUERY_BLOCK"] + cu_seqlens.numel() - 1
        return num_blocks, num_heads, triton.cdiv(head_dim, meta["VALUE_DIM"])

    if not triton.knobs.runtime.interpret:
        _check_driver()
    elif tiles is None:
        tiles = INTERPRETER_TILES
    with torch.cuda.device_of(primals[0]):
        if tiles is None:
            _tuned[grid](*arguments, **constants)
        else:
            attend[grid](*arguments, **constants, **dict(zip(TILE, tiles, strict=False)))


def kernel_arguments(
    primals: tuple[Tensor, Tensor, Tensor],
    tangents: Sequence[Tensor | None],
    results: tuple[Tensor, Tensor | None, Tensor],
    *,
    cu_seqlens: Tensor,
    is_long: bool,
    scale: float,
    sliding_window: int | None,
    sinks: Sinks | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `attend` takes but for the tile: by position, and the constants that it is compiled for."""
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
        int(is_long),
    )
    constants = dict(
        HEAD_DIM=head_dim,
        DIM=dim,
        VALUE_DIM=min(dim, MAX_VALUE_DIM),
        SLIDING=sliding_window is not None,
        # The interpreter multiplies bf16 as if its bits were integers.
        UPCAST=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
    )
    return arguments, constants


@functools.cache
def _check_driver() -> None:
    """Triton's launcher, which it compiles at the first launch on a machine: UserError where it cannot."""
    try:
        assert driver.active is not None
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            "utility.estimator: jvp takes attention from a Triton kernel, whose launcher did not compile here: "
            f"{error}; expected gcc, clang or a C compiler named in CC, and Python's headers, on every node "
            "(apt-get install gcc python3-dev). utility.estimator: finite_difference needs neither"
        ) from error


def _select_tiles(
    configs: Sequence["triton.Config"], arguments: Mapping[str, Any], **constants: Any
) -> list["triton.Config"]:
    """Those of the dtype and head dimension; one where its choice by time would change the last digits of a run."""
    tiles = TILES_FP32 if arguments["query"].dtype == torch.float32 else TILES[max(64, constants["DIM"])]
    if torch.are_deterministic_algorithms_enabled():
        tiles = tiles[:1]
    return [_config(*tile) for tile in tiles]


def _config(query_block: int, key_block: int, warps: int, stages: int) -> triton.Config:
    return triton.Config(dict(QUERY_BLOCK=query_block, KEY_BLOCK=key_block), num_warps=warps, num_stages=stages)


_tuned = triton.autotune(
    configs=[_config(*tile) for tiles in (*TILES.values(), TILES_FP32) for tile in tiles],
    key=["HEAD_DIM", "SLIDING", "is_long"],  # and, without being named, the dtypes of the tensors that are there
    prune_configs_by={"early_config_prune": _select_tiles},
    cache_results=True,  # on disk: a run that resumes has the tiles it had
)(attend)
