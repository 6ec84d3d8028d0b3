"""Results of a part, as JSON and as a Markdown table, with device, driver, date and command."""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.gpu.parts import RESULTS
from vcore_ds.distributed.device import find_driver_version, uses_gpu


def results_folder() -> Path:
    """The folder of the results, set for each part by `tests.gpu.session`."""
    return Path(os.environ.get(RESULTS, "runs/gpu"))


def work_folder(name: str) -> Path:
    """Folder for a part's models and runs, which are no results: they would be copied back with them."""
    return Path(tempfile.gettempdir()) / f"vcore_ds_{name}_{os.getuid()}"


def is_simulated() -> bool:
    """Whether this process's GPU is the simulated device."""
    return "VCORE_DS_SIMULATED_CUDA" in os.environ


def is_real_gpu() -> bool:
    return uses_gpu() and not is_simulated()


def describe_devices(num_devices: int) -> str:
    """Number and name of the devices, driver, and versions of torch and NCCL."""
    if not uses_gpu():
        return f"{num_devices} x CPU, torch {torch.__version__}, gloo"
    if is_simulated():
        return f"{num_devices} x simulated {torch.cuda.get_device_name()}, torch {torch.__version__}, gloo"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    driver = find_driver_version()
    return f"{num_devices} x {torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, NCCL {nccl}"


def write_results(
    name: str, num_devices: int, title: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()
) -> None:
    """Print a table of `rows`, and write NAME/results.md and NAME/results.json in the folder of the results."""
    device, date = describe_devices(num_devices), datetime.now(UTC).strftime("%Y-%m-%d")
    command = command_line()
    columns = list(rows[0])
    lines = [f"**{title}** {device}; {date}; `{command}`", ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(_show(row[column]) for column in columns)} |" for row in rows]
    text = "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"
    print(text, flush=True)
    folder = results_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(text, encoding="utf-8")
    content = {"title": title, "device": device, "date": date, "command": command, "rows": list(rows), "notes": notes}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def command_line() -> str:
    """The module and arguments of this process, without its launcher."""
    specification = sys.modules["__main__"].__spec__
    module = sys.argv[0] if specification is None else specification.name
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.3g}"
    return str(value)
