"""A run that is killed and started again by the same command: it resumes, and a finished run is left alone."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.commands import read_metrics
from tests.helpers.jobs import ForkedJob
from tests.helpers.setups import TinySetup
from vcore_ds.commands.cli import main
from vcore_ds.training import console

pytestmark = pytest.mark.e2e

NUM_STEPS = 12
RECIPE = "launch_scripts/recipes/qwen3_32b_math_lora.yaml"


def main_until_killed(arguments: Sequence[str]) -> int:
    """Run the command, which kills itself as it prints step 7."""
    say = console.say

    def say_or_die(text: str = "") -> None:
        say(text)
        if text.startswith(f"step 7/{NUM_STEPS} "):
            os.kill(os.getpid(), signal.SIGKILL)

    console.say = say_or_die
    return main(arguments)


def test_a_killed_run_resumes_and_a_finished_run_is_refused(setup: TinySetup, tmp_path: Path):
    folder = tmp_path / "run"
    changes = ("methods/sft.yaml", f"schedule.num_steps={NUM_STEPS}", "checkpoint.every_steps=2")
    arguments = ["train", RECIPE, *setup.overrides(folder, *changes)]
    with ForkedJob(main_until_killed, arguments, tmp_path / "log") as job:
        assert job.wait() == 1 and f"checkpoint: {folder}/checkpoints/step_00000006: " in job.output, job.output
    newest = max(path.parent.name for path in (folder / "checkpoints").glob("step_????????/COMPLETE"))
    step = int(newest.removeprefix("step_"))
    num_written = len(read_metrics(folder))
    assert step == 6 and num_written in (6, 7) and not (folder / "adapter").exists()

    with ForkedJob(main, arguments, tmp_path / "again.log") as again:
        assert again.wait() == 0, again.output
    assert f"Resumed after step {step} from {folder}/checkpoints/{newest}" in again.output
    before = [text for text in job.output.splitlines() if text.startswith("Held-out loss before training")]
    assert before and before[0] in again.output  # not measured again at the resumed step
    lines = read_metrics(folder)
    assert [each["step"] for each in lines] == list(range(1, NUM_STEPS + 1))
    assert [each["step"] for each in lines if "seconds_checkpoint" in each][:1] == [3]
    assert all(each["checkpoint_bytes"] > 0 for each in lines if "checkpoint_bytes" in each)
    lost = folder / "metrics_lost.jsonl"
    num_lost = len(lost.read_text().splitlines()) if lost.exists() else 0
    assert num_lost == num_written - step
    assert [entry["step"] for entry in json.loads((folder / "environment.json").read_text())["resumed"]] == [step]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000010", "step_00000012"]

    with ForkedJob(main, arguments, tmp_path / "finished.log") as finished:
        assert finished.wait() == 2 and "Traceback" not in finished.output
    assert f"run.output_dir: {folder}: holds a run that has finished, with its result in adapter/" in finished.output
