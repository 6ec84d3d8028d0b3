"""Where a run's lines go: metrics.jsonl, and Weights & Biases beside it."""

import json
import math
import os
from pathlib import Path
from typing import Any

from vcore_ds.files.run_folder import METRICS
from vcore_ds.track.wandb_log import WandbLog


class MetricsLog:
    """Written by rank 0 only."""

    def __init__(self, folder: Path, wandb: WandbLog | None = None):
        """Args:
        folder: the run's; new lines follow those that are there.
        wandb: gets the lines too; None without.
        """
        # Line-buffered: what a killed run had measured is on disk.
        self._file = open(folder / METRICS, "a", buffering=1)  # noqa: SIM115
        self._wandb = wandb

    def write(self, values: dict[str, Any]) -> None:
        """One line; null for a number that is not finite, which JSON cannot hold."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(clean) + "\n")
        if self._wandb is not None:
            self._wandb.write(clean)

    def flush(self) -> None:
        """Puts the lines on the disk: a checkpoint may not outlive them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.close()
