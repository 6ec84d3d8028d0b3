"""The matrix multiplications of CPUs without bf16 instructions, on any CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

from vcore_ds.distributed import cpu_matmul


@contextmanager
def replaced_kernels() -> Iterator[None]:
    """Replace PyTorch's kernels inside the block, as `use_fast_cpu_matmul` does where that is faster."""
    library = None if cpu_matmul._replaced is not None else cpu_matmul._replace_kernels()
    try:
        yield
    finally:
        if library is not None:
            library._destroy()
