"""Time of forward-mode attention with every candidate of its tiles, by head dimension and mode.

    python -m tests.benchmarks.gpu_tiles

One layer over a pack of 16,384 tokens in four sequences, 4,096 query and 1,024 key dimensions, bf16. Several processes
compile first; then each tile is timed alone.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from tests.benchmarks.gpu_plan import pack_lengths
from vcore_ds.models.attention import Scoring, SequenceLayout, _attend_on_gpu
from vcore_ds.models.flash_tangent import BlockMemory, flash_tangent, half_precision_tiles

LENGTHS = pack_lengths(16_384)
QUERY_SIZE, KEY_SIZE = 4096, 1024
GEMMS = {False: 6, True: 5}
"""Matrix multiplications of value and tangent, and of the tangent alone."""

Case = tuple[int, bool, tuple[int, ...]]
"""Head dimension, whether the value is given, tile."""


def list_cases() -> Iterator[Case]:
    for dim in (64, 128, 256):
        for value_is_given in (False, True):
            for tile in half_precision_tiles(dim, value_is_given, BlockMemory.read(torch.device("cuda"))):
                yield dim, value_is_given, tile


def make_call(case: Case) -> Callable[[], object]:
    dim, value_is_given, tile = case
    layout = SequenceLayout.from_lengths([LENGTHS], 1, torch.device("cuda"))
    torch.manual_seed(0)
    sizes = (QUERY_SIZE, KEY_SIZE, KEY_SIZE)

    def draw() -> list[torch.Tensor]:
        drawn = (torch.randn(1, sum(LENGTHS), size // dim, dim, device="cuda") for size in sizes)
        return [x.bfloat16().transpose(1, 2) for x in drawn]

    primals, tangents, scale = draw(), draw(), dim**-0.5
    given = _attend_on_gpu([*primals, None], layout, Scoring(scale)) if value_is_given else None
    options = dict(cu_seqlens=layout.cu_seqlens, max_seqlen=layout.max_seqlen, scale=scale)
    return lambda: flash_tangent(*primals, tangents, **options, given=given, tiles=tile)


def compile_tile(case: Case) -> str:
    """Launch once, which fills Triton's cache; returns the error if it fails."""
    try:
        make_call(case)()
        torch.cuda.synchronize()
    except Exception as error:  # the tile may not fit this device
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def main() -> None:
    from triton.testing import do_bench

    cases = list(list_cases())
    with ProcessPoolExecutor(6, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = list(pool.map(compile_tile, cases))
    for case, error in zip(cases, errors, strict=True):
        dim, value_is_given, tile = case
        name = f"heads of {dim}, {'tangent alone' if value_is_given else 'value and tangent'}, tile {tile}"
        if error:
            print(f"bad {name}: {error}", flush=True)
            continue
        milliseconds = do_bench(make_call(case), warmup=10, rep=60)
        pairs = sum(length**2 / 2 for length in LENGTHS) * QUERY_SIZE / dim
        flops = 2 * dim * pairs * GEMMS[value_is_given]
        print(f"ok {name}: {milliseconds:.3f} ms, {flops / milliseconds / 1e9:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
