"""The deepspeed command for the scripts in launch_scripts/, without its tracebacks: after Ctrl-C, with GPUs that are
named by UUID, and with a folder in PATH that cannot be read."""

import importlib
import os
import re
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
    """Let DeepSpeed's runner start a rank for each GPU in CUDA_VISIBLE_DEVICES, named GPU-8932f937 or MIG-3, and pass
    the names on: by itself it expects numbers. Where the variable hides all GPUs (-1, NoDevFiles), let the ranks that
    it starts on the CPUs have none."""
    arguments = runner.parse_args()
    if VISIBLE not in os.environ or arguments.num_gpus > 0 or os.path.exists(arguments.hostfile):
        return
    names = [name for name in os.environ.pop(VISIBLE).split(",") if name.strip()]
    if names and all(name.strip().isdigit() for name in names):
        os.environ[VISIBLE] = ",".join(names)
        return
    if names and re.match(r"\s*(\d|GPU-|MIG-)", names[0]):
        sys.argv[1:1] = ["--num_gpus", str(len(names))]
    else:
        names = []
    # The launcher of a node sets CUDA_VISIBLE_DEVICES to the slots that are encoded.
    encode = runner.encode_world_info
    runner.encode_world_info = lambda slots: encode(
        {host: [names[i] if names else -1 for i in ids] for host, ids in slots.items()}
    )


if __name__ == "__main__":
    main()
