"""Launcher of `vcore_ds.models.flash_tangent_kernel`: causal attention and its JVP in one launch, or the JVP alone.

Importing this module needs Triton, which comes with PyTorch's CUDA wheels; only `vcore_ds.models.attention` imports it,
on a GPU. With `TRITON_INTERPRET=1` Triton runs kernels on the CPU, as the tests do.

Shapes: b packs or unpacked sequences of T tokens, A query heads, K key/value heads, D head dimension.
"""

import functools
import hashlib
import inspect
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_text
from vcore_ds.distributed.device import local_cache_folder
from vcore_ds.distributed.process_group import take_first_answer
from vcore_ds.models.block_attention import Sinks
from vcore_ds.models.flash_tangent_kernel import attend

Tiles = tuple[tuple[int, ...], ...]

TILES: dict[int, Tiles] = {
    # head dimension, padded to a power of two: (queries, keys, warps, pipeline stages)
    64: ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2)),
    128: ((128, 32, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2)),
    256: ((128, 32, 8, 2), (128, 16, 8, 3), (128, 16, 8, 2), (32, 32, 8, 2)),
}
"""Candidates of the autotuner in bf16 and fp16 on H100 and B200; deterministic algorithms use the first, without
timing. The fastest on an H200 (docs/reports/kernel.md): 64 keys of dimension 128 are 10% faster than 32, though they
spill, so they are not the first. For B200 chosen from the compiled code."""

TANGENT_TILES: dict[int, Tiles] = {
    64: ((128, 32, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
    128: ((128, 32, 8, 3), (128, 64, 8, 2), (128, 32, 8, 4), (64, 32, 4, 2)),
    256: ((128, 16, 8, 3), (128, 16, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
}
"""Candidates for the tangent alone. For heads of 128 the second is 10% faster than the first on an H200, and spills on
a B200."""

TILES_BY_SHARED_KIB: dict[int, tuple[dict[int, Tiles], dict[int, Tiles]]] = {
    227: (TILES, TANGENT_TILES),
    163: (
        {
            64: ((128, 32, 8, 3), (128, 64, 8, 3), (64, 32, 4, 3)),
            128: ((128, 16, 8, 4), (128, 32, 8, 3), (128, 16, 8, 3)),
            256: ((32, 64, 8, 2), (128, 16, 8, 2), (32, 32, 4, 2)),
        },
        {
            64: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3)),
            128: ((128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2)),
            256: ((32, 32, 8, 2), (32, 32, 4, 2)),
        },
    ),
    99: (
        {
            64: ((128, 32, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3)),
            128: ((128, 16, 8, 3), (128, 16, 8, 2)),
            256: ((32, 32, 4, 2), (32, 32, 8, 2)),
        },
        {
            64: ((128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 4, 3)),
            128: ((128, 32, 8, 2), (128, 16, 8, 3)),
            256: ((32, 32, 8, 2), (32, 32, 4, 2)),
        },
    ),
}
"""Least KiB of shared memory of a block of threads -> candidates for value and tangent, and for the tangent alone. The
classes are those of H100 and B200 (227), A100 (163), and of RTX PRO 6000, L40S and A40 (99)."""

EXCEEDING_TENSOR_MEMORY = {
    (128, False): {(128, 64, 8, 2)},
    (256, False): {(128, 32, 8, 2)},
    (256, True): {(128, 16, 8, 3), (128, 16, 8, 2)},
}
"""Head dimension and whether the tangent is alone -> candidates for 227 KiB that exceed the tensor memory of a B200, or
there need more shared memory than on an H100."""

MAX_VALUE_DIM = 128
"""Value dimensions of one program (256 for the tangent alone); further programs compute the rest, and the
scores again. The accumulators of value and tangent for 128 queries fill the registers of an H100, and the tensor memory
of a B200."""

TENSOR_MEMORY_COLUMNS = 512

TILES_FP32 = ((16, 16, 4, 1),)
"""Candidates in fp32, without tensor cores, whose precision is lower. Slow: only for checks."""

TILE_KEYS = ("QUERY_BLOCK", "KEY_BLOCK", "num_warps", "num_stages")
"""Triton's names for the numbers of a tile."""

INTERPRETER_TILES: tuple[int, ...] | None = (32, 32)

LONG_SEQUENCE = 2048
"""Batches whose longest sequence has at least this many tokens are autotuned separately."""


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
    given: tuple[Tensor, Tensor] | None = None,
    tiles: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute causal attention within each sequence, and its tangent.

    The inputs are those of `block_attention` in bf16, fp16 or fp32, with any strides; the sequences those of
    `SequenceLayout`, none of which crosses the end of a row; only the choice of tiles depends on `max_seqlen`. `given`:
    output and log-sum-exp from another kernel, as returned here; None to compute them. `tiles`: tokens of a query block
    and of a key block, powers of two of at least 16, and optionally warps and pipeline stages; None to autotune over
    the GPU's candidates for each shape.

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
        is_long=max_seqlen >= LONG_SEQUENCE,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        value_is_given=given is not None,
        tiles=tiles,
    )
    return output, d_output, log_sum_exp


def launch(
    primals: tuple[Tensor, Tensor, Tensor],
    tangents: Sequence[Tensor | None],
    results: tuple[Tensor, Tensor | None, Tensor],
    *,
    cu_seqlens: Tensor,
    tiles: tuple[int, ...] | None,
    **options: Any,
) -> None:
    """Launch the kernel on preallocated results: output, tangent and log-sum-exp, or the tangent alone if the value is
    given. Does not write tokens beyond the last sequence. `options`: of `make_kernel_arguments`."""
    arguments, constants = make_kernel_arguments(primals, tangents, results, cu_seqlens=cu_seqlens, **options)
    batch, num_heads, num_tokens, head_dim = primals[0].shape

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        # An upper bound: the full blocks of all tokens, and one partial block for each sequence.
        num_blocks = batch * num_tokens // meta["QUERY_BLOCK"] + cu_seqlens.numel() - 1
        return num_blocks, num_heads, triton.cdiv(head_dim, meta["VALUE_DIM"])

    if not triton.knobs.runtime.interpret:
        _check_driver()
    elif tiles is None:
        tiles = INTERPRETER_TILES
    with torch.cuda.device_of(primals[0]):
        tile = (
            _select_tuned_tile(grid, arguments, constants)
            if tiles is None
            else dict(zip(TILE_KEYS, tiles, strict=False))
        )
        attend[grid](*arguments, **constants, **tile)


def make_kernel_arguments(
    primals: tuple[Tensor, Tensor, Tensor],
    tangents: Sequence[Tensor | None],
    results: tuple[Tensor, Tensor | None, Tensor],
    *,
    cu_seqlens: Tensor,
    is_long: bool,
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
        int(is_long),
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


_tiles: dict[tuple[Any, ...], dict[str, int]] = {}
"""Kind of launch -> the tile that all ranks use."""


def _select_tuned_tile(
    grid: Callable[[dict[str, int]], tuple[int, ...]], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> dict[str, int]:
    """Return the tile of this kind of launch, the same on all ranks.

    The first rank that needs it times the candidates; each node stores the choice for later runs.
    """
    query, head_dim, is_long = arguments[0], constants["HEAD_DIM"], arguments[-1]
    dtypes = tuple(argument.dtype for argument in arguments if isinstance(argument, Tensor))
    # As the autotuner's key.
    kind = (head_dim, constants["SLIDING"], constants["VALUE_IS_GIVEN"], is_long, dtypes)
    if kind in _tiles:
        return _tiles[kind]
    candidates = _select_tiles((), {"query": query}, **constants)
    if len(candidates) == 1:
        return candidates[0].all_kwargs()
    gpu = torch.cuda.get_device_name() if query.is_cuda else "interpreter"
    kernel = Path(inspect.getfile(attend.fn)).read_text()
    question = str((gpu, triton.__version__, kernel, kind, [str(config) for config in candidates]))
    digest = hashlib.sha256(question.encode()).hexdigest()
    folder = local_cache_folder()
    file = None if folder is None else folder / "tiles" / f"{digest}.json"

    def choose() -> str:
        if file is not None and file.exists():
            return file.read_text()
        _tuned[grid](*arguments, **constants)
        tile = _tuned.best_config.all_kwargs()
        print(
            f"Forward-mode attention: timed {len(candidates)} tiles for heads of {head_dim} in "
            f"{_tuned.bench_time:.1f} s on {gpu}, chose {tile}",
            flush=True,
        )
        return json.dumps(tile)

    text = take_first_answer(f"attention tile {digest}", choose)
    if file is not None:
        with suppress(OSError):
            write_text(file, text, several_writers=True)
    _tiles[kind] = json.loads(text)
    return _tiles[kind]


def _select_tiles(
    configs: Sequence["triton.Config"], arguments: Mapping[str, Any], **constants: Any
) -> list["triton.Config"]:
    """Select candidates for the dtype, mode and head dimension; only one with deterministic algorithms, since a choice
    by timing would change the last digits of a run."""
    query = arguments["query"]
    memory = BlockMemory.read(query.device)
    tiles = half_precision_tiles(constants["DIM"], constants["VALUE_IS_GIVEN"], memory)
    if query.dtype == torch.float32:
        tiles = TILES_FP32
    if torch.are_deterministic_algorithms_enabled():
        tiles = tiles[:1]
    return [_make_config(*tile) for tile in tiles]


@dataclass(frozen=True)
class BlockMemory:
    """Memory on the chip that a block of threads may have."""

    shared_bytes: int
    has_tensor_memory: bool  # whether there are `TENSOR_MEMORY_COLUMNS`: B200, B300 and GB200

    @classmethod
    @functools.cache
    def read(cls, device: torch.device) -> "BlockMemory":
        """Read the limits of a GPU; in Triton's interpreter, return those of an H100."""
        if device.type != "cuda":
            return cls(227 * 1024, False)
        properties = torch.cuda.get_device_properties(device)
        # AMD's GPUs do not say; the tiles were chosen for none of them.
        return cls(getattr(properties, "shared_memory_per_block_optin", 0), properties.major == 10)


def half_precision_tiles(dim: int, value_is_given: bool, memory: BlockMemory) -> Tiles:
    """Return the candidates for heads padded to `dim`, in bf16 and fp16; none on a GPU with too little memory."""
    dim = max(64, dim)
    for shared_kib, tables in TILES_BY_SHARED_KIB.items():
        if memory.shared_bytes >= shared_kib * 1024:
            excluded = EXCEEDING_TENSOR_MEMORY.get((dim, value_is_given), ()) if memory.has_tensor_memory else ()
            return tuple(tile for tile in tables[value_is_given][dim] if tile not in excluded)
    return ()


def _make_config(query_block: int, key_block: int, warps: int, stages: int) -> triton.Config:
    return triton.Config(dict(QUERY_BLOCK=query_block, KEY_BLOCK=key_block), num_warps=warps, num_stages=stages)


_tuned = triton.autotune(
    configs=[_make_config(*tile) for tile in TILES[128]],  # `_select_tiles` replaces them
    key=["HEAD_DIM", "SLIDING", "VALUE_IS_GIVEN", "is_long"],  # Triton adds the dtypes of the tensors
    prune_configs_by={"early_config_prune": _select_tiles},
)(attend)
