"""The profiles of steps in a run's folder: traces, and tables of operations by phase."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from vcore_ds.common.errors import UserError

PROFILES = "profile"
_TABLE = re.compile(r"step_(\d{8,})_rank_(\d+)\.csv")


@dataclass(frozen=True)
class OperationRow:
    """A row of a table: an operation in a phase of the step, on one rank."""

    phase: str
    operation: str
    calls: int
    seconds: float  # on the device, without the operations that it calls
    share: float  # of the seconds of its phase


@dataclass(frozen=True)
class Profile:
    """The profile of a step on a rank."""

    step: int
    rank: int
    files: list[Path]  # trace, table and memory snapshot, those that exist
    rows: list[OperationRow]


def read_profiles(folder: Path) -> list[Profile]:
    """Read the profiles in a run's folder, by step and rank; empty if it has none. Raises UserError if a table is
    damaged."""
    profiles = []
    for table in sorted((folder / PROFILES).glob("*.csv")):
        if (match := _TABLE.fullmatch(table.name)) is None:
            continue
        try:
            with table.open(newline="") as file:
                rows = [
                    OperationRow(
                        row["phase"], row["operation"], int(row["calls"]), float(row["seconds"]), float(row["share"])
                    )
                    for row in csv.DictReader(file)
                ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{table}: is damaged ({error}); expected the operations of a profiled step. Remove the file"
            ) from None
        files = [path for suffix in (".json.gz", ".pickle", ".csv") if (path := table.with_suffix(suffix)).is_file()]
        profiles.append(Profile(int(match[1]), int(match[2]), files, rows))
    return profiles
