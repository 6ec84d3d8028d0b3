"""Compiles `device.cpp`, once for each PyTorch and each version of the source: about a minute.

python -m tests.helpers.simulated_cuda.build FOLDER     what `compiled` runs, as loading it changes a process
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

SOURCE = Path(__file__).with_name("device.cpp")
MODULE = "simulated_cuda_device"


class CannotCompile(Exception):
    """Why: there is no compiler, or what it said."""


def compiled(folder: Path) -> Path:
    """The compiled device in `folder`, from an earlier call where there is one.

    Raises:
        CannotCompile: on this machine, and why.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    target = folder / f"torch_{torch.__version__}_{sysconfig.get_config_var('SOABI')}_{digest}" / f"{MODULE}.so"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise CannotCompile("no C++ compiler was found (apt-get install g++)")
    with FileLock(folder / "lock"):  # pytest's workers start at once
        if not target.exists():
            with TemporaryDirectory(dir=folder) as made:
                command = [sys.executable, "-m", "tests.helpers.simulated_cuda.build", made]
                done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
                if done.returncode != 0:
                    raise CannotCompile(f"{SOURCE.name} does not compile:\n{done.stdout}{done.stderr}")
                target.parent.mkdir(exist_ok=True)
                Path(made, target.name).replace(target)
    return target


if __name__ == "__main__":
    from torch.utils.cpp_extension import load

    load(MODULE, [str(SOURCE)], extra_cflags=["-O1"], build_directory=sys.argv[1], is_python_module=False)
