"""Folders for compiled kernels, on the disk of the node."""

import os
import stat
import tempfile
from pathlib import Path

from vcore_ds.distributed.device import local_rank


def use_local_compile_caches() -> None:
    """Make Triton compile into a folder of this rank, and PyTorch and DeepSpeed into one of this node, in the node's
    temporary folder; they are kept between starts. Variables that the user has set stay.

    Triton's default is a folder in the home, where the ranks of all nodes that share it overwrite each other's files
    (https://github.com/triton-lang/triton/issues/2688).
    """
    folder = local_cache_folder()
    if folder is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton" / f"rank_{local_rank()}"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))


def local_cache_folder() -> Path | None:
    """This user's folder in the node's temporary folder (TMPDIR, or /tmp); None if it cannot be made, or is another
    user's, whose code would be run."""
    folder = Path(tempfile.gettempdir()) / f"vcore_ds_{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() else None
