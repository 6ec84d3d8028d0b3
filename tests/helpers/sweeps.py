"""Sweeps of two methods on a tiny model, and their tables of losses."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from tests.helpers.commands import count_finished_steps, run_command, wait_until
from tests.helpers.jobs import Job
from tests.helpers.report_runs import step_line, write_run
from tests.helpers.setups import TinySetup
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.sweep.folder import SweepFolder
from vcore_ds.config.schema import Recipe


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


def finish_runs(sweep: SweepFolder, runs: Sequence[str], loss_of: Callable[[Recipe], float]) -> None:
    """Write the folders of these runs as if they were done, on two ranks, with held-out losses `loss_of(recipe)`."""
    tokenizer = make_tokenizer()
    for run in runs:
        text = sweep.recipe_path(run).read_text()
        loss = loss_of(Recipe.model_validate(yaml.safe_load(text)))
        lines = [step_line(step, loss=loss + 20 - step, supervised_tokens=50) for step in range(1, 21)]
        sections = {section: values for section, values in yaml.safe_load(text).items() if values is not None}
        write_run(sweep.run_folder(run), tokenizer, lines, {}, environment={"world_size": 2}, **sections)
        held_out = {"before": {"": 9}, "after": {"": loss}}
        (sweep.run_folder(run) / "held_out.json").write_text(json.dumps(held_out))


def wait_for_step(job: Job, run: Path, step: int) -> None:
    """Wait until a run of the sweep has finished a step; raises AssertionError if the sweep ends before."""

    def has_finished() -> bool:
        assert job.launcher.poll() is None, job.output
        return count_finished_steps(run) >= step

    wait_until(has_finished, f"step {step} of {run}", every_seconds=0.02)


def report_losses(sweep: Path) -> list[list[str]]:
    """Rows of the table of losses by `vcore-ds report`, header first. Times, which differ in every run, are left
    out."""
    done = run_command(f"vcore-ds report {sweep}")
    assert done.returncode == 0, done.stdout
    lines = (sweep / "report.md").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| method"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin : begin + 4]]
    end = rows[0].index("s a step")
    return [row[:end] for row in (rows[0], *rows[2:])]
