"""Sweeps of two methods on a tiny model, and their tables of losses."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.helpers.commands import count_finished_steps, run_command, wait_until
from tests.helpers.jobs import Job
from tests.helpers.setups import TinySetup


def write_sweep(
    folder: Path, setup: TinySetup, seeds: Sequence[int], changes: Sequence[str], *, vcore: Sequence[str] = ()
) -> Path:
    """Write a sweep file in a new folder, with output in its subfolder `sweep`. `vcore`: words of the cell `vcore`."""
    common = [word for word in setup.overrides(folder, *changes) if not word.startswith("run.output_dir")]
    folder.mkdir()
    values = {
        "recipe": "qwen3_4b_math_lora.yaml",
        "output_dir": str(folder / "sweep"),
        "seeds": list(seeds),
        "common": common,
        "cells": {"sft": "methods/sft.yaml", "vcore": list(vcore)},
        "reference": "sft",
    }
    path = folder / "sweep_file.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def wait_for_step(job: Job, run: Path, step: int) -> None:
    """Wait until a run of the sweep has finished a step; raises AssertionError if the sweep ends before."""

    def has_finished() -> bool:
        assert job.launcher.poll() is None, job.output
        return count_finished_steps(run) >= step

    wait_until(has_finished, f"step {step} of {run}", every_seconds=0.02)


def report_losses(sweep: Path) -> list[list[str]]:
    """Rows of the table of losses by `vcore-ds report`, header first. Costs, which differ in every run, are left
    out."""
    done = run_command(f"vcore-ds report {sweep}")
    assert done.returncode == 0, done.stdout
    lines = (sweep / "report.md").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| cell"))
    assert "\n".join(lines[begin : begin + 4]) in done.stdout
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin : begin + 4]]
    return [rows[0], *rows[2:]]
