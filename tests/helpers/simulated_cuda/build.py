"""Compile the simulated device, once per version of PyTorch and of the sources: 30 s of CPU time.

    python -m tests.helpers.simulated_cuda.build FOLDER

is run by `compile_device` in a new process, because PyTorch loads a library that it has compiled.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock

SOURCES = [Path(__file__).with_name(name) for name in ("device.cpp", "operators.cpp", "device.h")]
MODULE = "simulated_cuda_device"


class NoCompiler(Exception):
    """No C++ compiler was found on this machine."""


def compile_device(folder: Path) -> Path:
    """Compile the device into `folder`, unless an earlier call did; returns the library's path.

    Raises:
        NoCompiler: the message says what to install.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:12]
    target = folder / f"torch_{torch.__version__}_{sysconfig.get_config_var('SOABI')}_{digest}" / f"{MODULE}.so"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise NoCompiler("no C++ compiler was found (apt-get install g++)")
    with FileLock(folder / "lock"):  # pytest's workers start at the same time
        if not target.exists():
            with TemporaryDirectory(dir=folder) as made:
                command = [sys.executable, "-m", "tests.helpers.simulated_cuda.build", made]
                done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
                assert done.returncode == 0, done.stdout + done.stderr
                target.parent.mkdir(exist_ok=True)
                Path(made, target.name).replace(target)
    return target


if __name__ == "__main__":
    from torch.utils.cpp_extension import load

    files = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    load(MODULE, files, extra_cflags=["-O1"], build_directory=sys.argv[1], is_python_module=False)
