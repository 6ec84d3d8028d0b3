"""The process that `run_simulated` starts: it loads the device before PyTorch, and PyTorch before everything else.

python -m tests.helpers.simulated_cuda.child LIBRARY CALL RESULT
"""

import ctypes
import importlib.util
import pickle
import sys
from pathlib import Path


def install(library: Path) -> None:
    """Make the compiled library the CUDA device of this process. Must be called before anything imports PyTorch."""
    ctypes.CDLL(str(library))  # PyTorch looks for CUDA hooks only once, while it is imported

    from tests.helpers.simulated_cuda import communication, host_waits, kernels, stand_ins

    specification = importlib.util.spec_from_file_location(library.stem, library)
    assert specification is not None and specification.loader is not None
    simulated = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(simulated)
    simulated.when_the_host_waits(host_waits.note)
    stand_ins.install(simulated)
    communication.install(simulated.on_cpu)
    kernels.install(simulated.on_cpu)
    kernels.interpret_kernels(simulated.on_cpu)


if __name__ == "__main__":
    library, call, result = map(Path, sys.argv[1:])
    install(library)
    import tests.helpers.imports  # noqa: F401
    from tests.helpers.ranks import run_ranks

    results = [
        run_ranks(function, world_size, *arguments, start="fork")
        for function, world_size, arguments in pickle.loads(call.read_bytes())
    ]
    result.write_bytes(pickle.dumps(results))
