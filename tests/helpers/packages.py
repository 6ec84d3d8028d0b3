"""Which source files belong to the package, and which to DeepSpeed."""

import importlib.util
from functools import cache
from pathlib import Path

# Compared with entire folders: the clone, and so its environment, may be in a folder named `vcore_ds` too.
PARENTS = {
    name: Path(str(specification.origin)).parents[1]
    for name in ("vcore_ds", "deepspeed")
    if (specification := importlib.util.find_spec(name)) is not None
}


@cache
def path_in_package(file: str) -> str:
    """The path of a source file from its package on, such as `deepspeed/runtime/engine.py`; empty for other files."""
    for name, parent in PARENTS.items():
        if Path(file).is_relative_to(parent / name):
            return Path(file).relative_to(parent).as_posix()
    return ""
