"""The deepspeed command without its tracebacks: after Ctrl-C, for names of GPUs, for folders of PATH without rights."""

import importlib
import os
import signal
import sys
from typing import Any

import psutil

VISIBLE = "CUDA_VISIBLE_DEVICES"


def main() -> None:
    """Run the deepspeed command with the arguments of this process."""
    # A program that is not installed, such as numactl, would be a PermissionError.
    os.environ["PATH"] = os.pathsep.join(
        folder for folder in os.get_exec_path() if os.access(folder, os.X_OK, effective_ids=True)
    )
    try:
        runner = importlib.import_module("deepspeed.launcher.runner")
        pass_device_names(runner)
        runner.main()
    except KeyboardInterrupt:
        # The terminal has sent SIGINT to all processes; the ranks finish their step and save.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        psutil.wait_procs(psutil.Process().children())
        sys.exit(128 + signal.SIGINT)


def pass_device_names(runner: Any) -> None:
    """Let DeepSpeed's runner start a rank for each GPU that CUDA_VISIBLE_DEVICES names GPU-8932f937 or MIG-3, or a rank
    without GPUs for NoDevFiles, and pass the names on: by itself it expects numbers."""
    names = os.environ.get(VISIBLE, "").split(",")
    arguments = runner.parse_args()
    if (
        all(not name or name.isdigit() for name in names)
        or arguments.num_gpus > 0
        or os.path.exists(arguments.hostfile)
    ):
        return
    del os.environ[VISIBLE]
    sys.argv[1:1] = ["--num_gpus", str(len(names))]
    encode = runner.encode_world_info  # of this a node's launcher sets CUDA_VISIBLE_DEVICES to the slots
    runner.encode_world_info = lambda slots: encode({host: [names[i] for i in ids] for host, ids in slots.items()})


if __name__ == "__main__":
    main()
