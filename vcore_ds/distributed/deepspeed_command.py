"""The deepspeed command without its traceback after Ctrl-C, for the scripts in launch_scripts/."""

import runpy
import signal
import sys

import psutil


def main() -> None:
    """Run the deepspeed command with the arguments of this process."""
    try:
        runpy.run_module("deepspeed.launcher.runner", run_name="__main__")
    except KeyboardInterrupt:
        # The terminal has sent SIGINT to all processes; the ranks finish their step and save.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        psutil.wait_procs(psutil.Process().children())
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
