"""Disks that are full."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mount_small_disk(folder: Path, num_bytes: int) -> Iterator[bool]:
    """Mount a tmpfs of this size on `folder`. Yields whether it is mounted, which takes root and the right to mount."""
    options = ["-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(["mount", *options], capture_output=True).returncode == 0
    yield is_mounted
    if is_mounted:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def limiting_files(num_bytes: int) -> Iterator[None]:
    """Limit the size of files, which cuts off a write as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
