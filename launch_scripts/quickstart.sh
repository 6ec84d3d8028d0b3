#!/usr/bin/env bash
''':'
# Trains SmolLM2-135M on real reasoning traces with VCORE, on all GPUs, or on two CPU processes. Three ways to start it:
#   bash launch_scripts/quickstart.sh        deepspeed launch_scripts/quickstart.sh
#   torchrun --nproc_per_node 2 launch_scripts/quickstart.sh
# Arguments are overrides and fragments to merge: ... methods/dft.yaml schedule.num_steps=50 run.output_dir=runs/dft
# --eval evaluates the result at the end, on arithmetic and held-out problems (needs the extra `eval`: make .venv).
# This file is bash and Python at once: bash reads this part, the launchers run the part below with Python.
set -euo pipefail
pwd -P > /dev/null 2>&1 || { echo "vcore-ds: the working folder was removed: change to another one (cd)" >&2; exit 2; }
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PATH="$repository/.venv/bin:$PATH"
export PYTHONSAFEPATH=1  # the working folder may hold a queue.py
port=$(python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
echo "Starting; importing PyTorch and DeepSpeed takes some seconds"
ranks=()
accelerator=${DS_ACCELERATOR:-$(python -P "$repository/launch_scripts/gpus.py")}
if [ "$accelerator" = cpu ]; then
    export DS_ACCELERATOR=cpu
    ranks=(--num_accelerators 2)
fi
exec python -P "$repository/launch_scripts/deepspeed_command.py" --quiet --master_port "$port" "${ranks[@]}" \
    "$repository/launch_scripts/quickstart.sh" "$@"
'''
import os
import sys

# Before torch is imported: memory freed by one phase of a step serves the next, whatever the sizes.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the name that torch 2.8 knows
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from vcore_ds.commands.cli import end_process, launch  # noqa: E402
from vcore_ds.common.imports import lasting_imports  # noqa: E402

with lasting_imports():
    from launch_scripts.quickstart import RECIPE, finish, prepare

if __name__ == "__main__":  # processes that prepare data import this file
    end_process(launch(str(RECIPE), sys.argv[1:], before=prepare, after=finish))
