"""Steps and whole runs on a device, one by one, each a line of JSON as soon as it is measured.

    python -m tests.gpu.cases steps|runs cuda|cpu OUTPUT [--shard 0/2]

After an error a new process goes on with the next case: DeepSpeed's state is of no use then, nor, after an illegal
access, the CUDA context. `tests.gpu.comparison` compares the devices.
"""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.gpu.comparison import read_cases
from tests.helpers import device_runs
from tests.helpers.step_cases import CASES
from vcore_ds.distributed.device import uses_gpu

MEASURE = {"steps": (CASES, device_runs.measure_step_case), "runs": (device_runs.RUNS, device_runs.measure_run)}


def measure(kind: str, case: str) -> dict[str, Any]:
    with TemporaryDirectory(prefix="vcore_ds_case_") as folder:
        return MEASURE[kind][1](case, Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=MEASURE)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("output", type=Path, help="KIND_DEVICE_*.jsonl, which lines are added to")
    parser.add_argument("--shard", default="0/1", help="every n-th case from the k-th, K/N")
    arguments = parser.parse_args()
    if uses_gpu() != (arguments.device == "cuda"):
        print(f"error: expected {arguments.device}, and PyTorch uses {'cuda' if uses_gpu() else 'cpu'}")
        return 1
    shard, num_shards = map(int, arguments.shard.split("/"))
    output = arguments.output
    cases = list(MEASURE[arguments.kind][0])[shard::num_shards]
    for case in cases:
        if case in read_cases(output.parent, arguments.kind, arguments.device):
            continue
        try:
            measured = measure(arguments.kind, case)
            print(f"ok {case}: {[round(line['loss'], 5) for line in measured['straight']]}", flush=True)
        except Exception as error:
            traceback.print_exc()
            measured = {"error": "".join(traceback.format_exception_only(error))}
            print(f"bad {case}", flush=True)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, **measured}) + "\n")
        if "error" in measured:
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, "-m", "tests.gpu.cases", *sys.argv[1:]])
    all_measured = read_cases(output.parent, arguments.kind, arguments.device)
    return int(any("error" in all_measured[case] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
