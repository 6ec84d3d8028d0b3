"""Compile the simulated device, once per version of PyTorch and of the sources: 30 s of CPU time."""

import hashlib
import shutil
import subprocess
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock
from torch.utils import cpp_extension

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
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        raise NoCompiler("no C++ compiler was found (apt-get install g++)")
    with FileLock(folder / "lock"):  # pytest's workers start at the same time
        if not target.exists():
            with TemporaryDirectory(dir=folder) as made:
                done = subprocess.run(compiler_command(Path(made, target.name)), capture_output=True, text=True)
                assert done.returncode == 0, done.stdout + done.stderr
                target.parent.mkdir(exist_ok=True)
                Path(made, target.name).replace(target)
    return target


def compiler_command(library: Path) -> list[str]:
    """Arguments of the compiler. `cpp_extension.load` writes them into a build file, where a path with a space falls
    apart."""
    command = [cpp_extension.get_cxx_compiler(), "-shared", "-fPIC", "-std=c++20", "-O1"]
    command += [f"-DTORCH_EXTENSION_NAME={MODULE}", "-o", str(library)]
    command += [f"-isystem{folder}" for folder in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    command += [str(source) for source in SOURCES if source.suffix == ".cpp"]
    command += [f"-L{folder}" for folder in cpp_extension.library_paths()]
    return [*command, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
