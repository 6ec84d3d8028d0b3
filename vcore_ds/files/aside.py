"""What has to be on the disk before something else is."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Puts a file, or a folder's names, which a file's own fsync does not cover, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
