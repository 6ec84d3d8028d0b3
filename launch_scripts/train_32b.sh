#!/usr/bin/env bash
''':'
# Trains Qwen3-32B with VCORE, full-parameter, on the GPUs of this machine (or of a hostfile). Three ways to start it:
#   deepspeed launch_scripts/train_32b.sh    deepspeed --hostfile HOSTS launch_scripts/train_32b.sh
#   bash launch_scripts/train_32b.sh
#   torchrun --nproc_per_node 8 launch_scripts/train_32b.sh
# Arguments are overrides and fragments to merge, and --recipe FILE is another recipe:
#   deepspeed launch_scripts/train_32b.sh --recipe launch_scripts/recipes/qwen3_32b_math_lora.yaml methods/dft.yaml
# This file is bash and Python at once: bash reads this part, the launchers run the part below with Python.
set -euo pipefail
pwd -P > /dev/null 2>&1 || { echo "vcore-ds: the working folder was removed: change to another one (cd)" >&2; exit 2; }
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PATH="$repository/.venv/bin:$PATH"
export PYTHONSAFEPATH=1  # the working folder may hold a queue.py
port=$(python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
exec python -P "$repository/launch_scripts/deepspeed_command.py" --quiet --master_port "$port" \
    "$repository/launch_scripts/train_32b.sh" "$@"
'''
import os
import sys

# Before torch is imported: memory freed by one phase of a step serves the next, whatever the sizes.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the name that torch 2.8 knows
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
repository = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, repository)
from vcore_ds.commands.cli import end_process, launch  # noqa: E402

if __name__ == "__main__":  # processes that prepare data import this file
    recipe = os.path.join(repository, "launch_scripts", "recipes", "qwen3_32b_math_full.yaml")
    end_process(launch(recipe, sys.argv[1:]))
