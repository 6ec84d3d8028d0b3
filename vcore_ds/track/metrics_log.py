"""Where a run's lines go: metrics.jsonl, and the sinks beside it."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vcore_ds.errors import UserError
from vcore_ds.files.run_folder import METRICS
from vcore_ds.files.user_paths import writing
from vcore_ds.track.console import Console
from vcore_ds.track.sinks import BackgroundSink


class MetricsLog:
    """Written by rank 0 only.

    A disk that fills must not end rank 0 alone while the others wait for it, so lines that cannot be written wait in
    memory until `flush`, whose failure the caller shares with all ranks. The file holds whole lines at all times.
    """

    def __init__(self, folder: Path, console: Console, sinks: Sequence[BackgroundSink] = ()):
        """Args:
        folder: the run's; new lines follow those that are there.
        sinks: get the lines too.
        """
        self._path, self._console, self._sinks = folder / METRICS, console, sinks
        # Unbuffered: what a killed run had measured is in the file.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""

    def write(self, values: dict[str, Any]) -> None:
        """One line; null for a number that is not finite, which JSON cannot hold. Warns where it cannot be written."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        is_first_to_wait = not self._waiting
        self._waiting += json.dumps(clean).encode() + b"\n"
        try:
            self._write_waiting()
        except OSError as error:
            if is_first_to_wait:
                self._console.warn(
                    f"{self._path} cannot be written ({error.strerror}): its lines are kept in memory, and the run "
                    "ends at the next checkpoint unless they can be written by then"
                )
        numbers = {key: value for key, value in clean.items() if value is not None}
        for sink in self._sinks:
            sink.write(numbers)

    def flush(self) -> None:
        """Puts all lines on the disk: a checkpoint may not outlive them.

        Raises:
            UserError: they cannot be written.
        """
        try:
            with writing("run.output_dir", self._path, "room for the metrics of the steps"):
                self._write_waiting()
                os.fsync(self._file.fileno())
        except UserError as error:
            raise UserError(f"{error}. Once it can be written, the same command resumes the run") from None

    def close(self) -> None:
        """Closes the file and all sinks, which wait for what they have not sent yet."""
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _write_waiting(self) -> None:
        """Appends all waiting lines, or none of them (OSError)."""
        descriptor, rest = self._file.fileno(), self._waiting
        end = os.fstat(descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, end)  # a disk with some room has taken the beginning of a line
            raise
        self._waiting = b""
