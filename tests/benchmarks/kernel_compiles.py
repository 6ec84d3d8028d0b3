"""Registers and spills of the attention kernel with tangents, compiled for GPUs that this machine lacks, as JSON.

    python -m tests.benchmarks.kernel_compiles [--gpu "RTX PRO 6000" A100] [--head-dim 256] [--tile 64,32,4,2]

Triton compiles ahead of time and includes NVIDIA's assembler and disassembler. For the tiles of every GPU, in bf16 with
all tangents, for value and tangent and for the tangent of a given value: registers of a thread, spilled bytes, shared
memory, columns of tensor memory, whether the GPU has that much, and whether the assembler serializes matrix
multiplications; and of the loop over keys all instructions, those of the tensor cores, how much of their work is
needed, and the waits for them. Nothing is launched, so there are no times. `--tile` compiles another tile.

Triton decides once per process whether there is a GPU, so tests run this file as a command.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from vcore_ds.models import pointwise_kernels
from vcore_ds.models.flash_tangent import TILE_KEYS, choose_tiles, flash_tangent, make_kernel_arguments
from vcore_ds.models.flash_tangent_kernel import attend
from vcore_ds.models.token_loss_kernel import logit_gradient_kernel, losses_and_normalizers_kernel

CARDS = {
    "A100": (80, 163),
    "A40": (86, 99),
    "L40S": (89, 99),
    "H100": (90, 227),
    "B200": (100, 227),
    "B300": (103, 227),
    "RTX PRO 6000": (120, 99),
}
"""Compute capability, and KiB of shared memory that a block of threads may have (CUDA C++ programming guide, technical
specifications per compute capability)."""


TENSOR_MEMORY_COLUMNS = 512


def has_tensor_memory(card: str) -> bool:
    return CARDS[card][0] // 10 == 10


HEADS, KV_HEADS, NUM_TOKENS = 8, 2, 4096
"""Sizes that do not change the compiled kernel."""

SLIDING_WINDOW = 1024


class NoDevice(DriverBase):
    """Driver that answers what Triton asks while it compiles."""

    capability = 90
    get_benchmarker = get_empty_cache_for_benchmark = map_python_to_cpp_type = None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True)
class Compiled:
    """Result of compiling one tile for one GPU. Instructions are counted in the loop over keys."""

    gpu: str
    head_dim: int
    value_is_given: bool
    windowed_with_sinks: bool
    tile: str
    """Queries, keys, warps, pipeline stages."""
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_memory_columns: int
    fits: bool
    is_serialized: bool
    """Whether the assembler reports that it serializes matrix multiplications."""
    products: str
    """Instructions of the tensor cores: HGMMA (H100), UTCHMMA (B200), HMMA (others)."""
    repeated: float | None
    """For HMMA, multiplications over those needed: warps may compute the same scores."""
    num_instructions: int
    num_waits: int


def compile_tile(
    card: str, head_dim: int, tile: Sequence[int], *, value_is_given: bool, windowed_with_sinks: bool = False
) -> Compiled:
    """Compile the kernel in bf16 with all tangents."""
    NoDevice.capability, shared_kib = CARDS[card]

    def empty(heads: int) -> torch.Tensor:  # memory layout as of a model's projections
        return torch.empty(1, NUM_TOKENS, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)

    query, key = empty(HEADS), empty(KV_HEADS)
    sinks = torch.empty(HEADS)
    arguments, constants = make_kernel_arguments(
        (query, key, key),
        (query, key, key),
        (query, query, torch.empty(1, HEADS, NUM_TOKENS)),
        cu_seqlens=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        scale=0.1,
        sliding_window=SLIDING_WINDOW if windowed_with_sinks else None,
        sinks=(sinks, sinks) if windowed_with_sinks else None,
        value_is_given=value_is_given,
    )
    with contextlib.redirect_stdout(io.StringIO()) as log:
        kernel = attend.warmup(*arguments, **constants, **dict(zip(TILE_KEYS, tile, strict=True)), grid=(1, 1, 1))
    shared_bytes, columns = kernel.metadata.shared, kernel.metadata.tmem_size or 0
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    assert spilled is not None and registers is not None, log.getvalue()
    products, num_waits, num_instructions = _loop_over_keys(kernel.asm["cubin"])
    needed = tile[0] * tile[1] * (3 * constants["DIM"] + (2 if value_is_given else 3) * constants["VALUE_DIM"])
    return Compiled(
        gpu=card,
        head_dim=head_dim,
        value_is_given=value_is_given,
        windowed_with_sinks=windowed_with_sinks,
        tile=" ".join(map(str, tile)),
        registers=int(registers[1]),
        spilled_bytes=int(spilled[1]) + int(spilled[2]),
        shared_bytes=shared_bytes,
        tensor_memory_columns=columns,
        fits=shared_bytes <= 1024 * shared_kib and columns <= TENSOR_MEMORY_COLUMNS * has_tensor_memory(card),
        is_serialized="serialized" in log.getvalue(),
        products=", ".join(f"{number} {name}" for name, number in sorted(products.items())),
        repeated=products["HMMA"] * HMMA_PRODUCTS * tile[2] / needed if set(products) == {"HMMA"} else None,
        num_instructions=num_instructions,
        num_waits=num_waits,
    )


HMMA_PRODUCTS = 16 * 8 * 16
"""Multiplications of one HMMA.16816, that of 16 bits."""


def _loop_over_keys(cubin: bytes) -> tuple[Counter[str], int, int]:
    """Instructions of the tensor cores, waits for them, and all instructions, in the loop with most of the first, the
    shortest if several have as many."""
    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(programs / "cuobjdump"), "-sass", file.name]  # which calls nvdisasm
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        sass = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([^;]*);", sass)
    instructions = [(int(address, 16), words.split()) for address, words in lines]
    # Behind the last exit are retries of waits, whose backward branches are no loops. A kernel that exceeds the tensor
    # memory is compiled to nothing, without an exit.
    end = max((address for address, words in instructions if words[0] == "EXIT"), default=0)
    loops = []
    for address, words in instructions:
        target = re.fullmatch(r"0x([0-9a-f]+)", words[-1])
        if words[0].startswith("BRA") and target is not None and int(target[1], 16) < address < end:
            loops.append((int(target[1], 16), address))
    most: tuple[Counter[str], int, int] = Counter(), 0, 0
    for first, last in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        names = [words[0] for address, words in instructions if first <= address <= last]
        products = Counter(name.split(".")[0] for name in names if re.match("HGMMA|UTC.*MMA|HMMA", name))
        if products.total() > most[0].total():
            waits = [name for name in names if name.startswith(("WARPGROUP.DEPBAR", "SYNCS.PHASECHK"))]
            most = products, len(waits), len(names)
    return most


def count_compiles(head_dim: int) -> int:
    """Number of kernels that Triton would compile for batches of all kinds in one run. Nothing is compiled."""
    keys = set()

    def keep(*, key: str, **others: Any) -> bool:
        keys.add(key)
        return True  # do not compile

    packs = ([1], [5], [16], [48, 1], [32], [33], [2048], [4096, 5], [1] * 16, [16] * 16, [7] * 17)
    triton.knobs.runtime.jit_cache_hook = keep
    for lengths in ([pack] * number for pack in packs for number in (1, 3)):
        num_tokens = sum(lengths[0])
        query = torch.empty(len(lengths), num_tokens, HEADS, head_dim, dtype=torch.bfloat16).transpose(1, 2)
        ends = torch.tensor([0, *(n for pack in lengths for n in pack)]).cumsum(0, dtype=torch.int32)
        options = dict(cu_seqlens=ends, scale=0.1, tile=(128, 32, 8, 3))
        flash_tangent(query, query, query, (query, query, query), **options)
    triton.knobs.runtime.jit_cache_hook = None
    return len(keys)


def compile_pointwise(card: str) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of the kernels of `pointwise_kernels` and the token loss, with sizes of Qwen3-32B."""
    NoDevice.capability = CARDS[card][0]
    x, weight, inverse = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 5120), (5120,), (64, 1)))
    query = torch.empty(1, 8, 64, 128, dtype=torch.bfloat16).transpose(1, 2)
    angles = torch.empty(1, 1, 8, 128, dtype=torch.bfloat16)
    logits, losses, targets = torch.empty(8, 151_936), torch.empty(8), torch.zeros(8, dtype=torch.int64)
    gradient = logits.bfloat16()
    calls = {
        "tangent of a norm": lambda: pointwise_kernels.rms_norm_tangent_kernel(x, weight, inverse.float(), x, weight),
        "tangent of a head's norm": lambda: pointwise_kernels.rms_norm_tangent_kernel(
            query, weight[:128], query[..., :1].float(), query, weight[:128]
        ),
        "rotary embedding": lambda: pointwise_kernels.rotate_kernel(query, angles, angles),
        "gated activation": lambda: pointwise_kernels.gated_silu_kernel(x, x),
        "its gradient": lambda: pointwise_kernels.gated_silu_backward_kernel(x, x, x),
        "its tangent": lambda: pointwise_kernels.gated_silu_tangent_kernel(x, x, x, x),
        "token loss": lambda: losses_and_normalizers_kernel(logits, targets, losses, losses, gradient),
        "token loss without a gradient": lambda: losses_and_normalizers_kernel(logits, targets, losses, losses, None),
        "logit gradients": lambda: logit_gradient_kernel(logits, targets, losses, losses, gradient),
    }
    results = {}
    launch = KernelInterface.__getitem__
    for name, call in calls.items():
        KernelInterface.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
        with contextlib.redirect_stdout(io.StringIO()) as log:
            call()
        KernelInterface.__getitem__ = launch
        registers = re.search(r"Used (\d+) registers", log.getvalue())
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
        assert registers is not None and spilled is not None, log.getvalue()
        results[name] = int(registers[1]), int(spilled[1]) + int(spilled[2])
    return results


def compile_tiles(options: argparse.Namespace) -> Iterator[Compiled]:
    """Compile the tiles that the command line asks for, one by one: together they take minutes."""
    for i, gpu in enumerate(options.gpu):
        tiles = choose_tiles(1024 * CARDS[gpu][1], has_tensor_memory(gpu))
        assert tiles is not None
        for j, head_dim in enumerate(options.head_dim):
            for is_given in ((i + j) % 2 == 1,) if options.quick else (False, True):
                tile = options.tile or tiles[triton.next_power_of_2(head_dim)][is_given]
                for windowed_with_sinks in (is_given,) if options.quick else (False, True):
                    yield compile_tile(
                        gpu, head_dim, tile, value_is_given=is_given, windowed_with_sinks=windowed_with_sinks
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256], help="dimensions of a head")
    parser.add_argument("--gpu", nargs="+", choices=list(CARDS), default=list(CARDS))
    parser.add_argument(
        "--tile", type=lambda words: tuple(map(int, words.split(","))), help="queries,keys,warps,stages instead"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one kernel for each GPU and head dimension, in turn: with all tangents, or the tangent alone with window "
        "and sinks",
    )
    options = parser.parse_args()
    driver.set_active(NoDevice())
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # a cached kernel has no log
    compiled = [asdict(one) for one in compile_tiles(options)]
    pointwise = {gpu: compile_pointwise(gpu) for gpu in options.gpu}
    num_compiles = {head_dim: count_compiles(head_dim) for head_dim in options.head_dim}
    print(json.dumps(dict(tiles=compiled, num_compiles=num_compiles, pointwise=pointwise)))


if __name__ == "__main__":
    main()
