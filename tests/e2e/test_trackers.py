"""Files that the trackers of real runs write: TensorBoard's events and offline runs of Weights & Biases."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.commands import read_metrics
from tests.helpers.jobs import ForkedJob
from tests.helpers.setups import TinySetup
from vcore_ds.commands.cli import main
from vcore_ds.training.token_records import read_records

pytest.importorskip("tensorboard", reason="TENSORBOARD IS NOT TESTED HERE: it is in the test extra")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.e2e

NAMES = """eval/validation_loss time/seconds_probe time/supervised_tokens_per_second time/flops_training
memory/peak_memory_bytes layout/padding_share layout/probe_rank_imbalance probe/probe_loss
probe/utility_std probe/direction_norm weights/kl weights/alpha train/loss train/grad_norm train/epoch""".split()
"""Some metrics of each group (docs/tracking.md)."""
RECIPE = "launch_scripts/recipes/qwen3_32b_math_lora.yaml"
OFFLINE = {"WANDB_MODE": "offline"}


def train(setup: TinySetup, folder: Path, log: Path, num_ranks: int, *changes: str, **environment: str) -> str:
    """Run four steps with a checkpoint after every second one; returns the output."""
    overrides = setup.overrides(
        folder,
        "schedule.num_steps=4",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=9",
        "track.trackers=[tensorboard]",
        "data.validation_path=null",
        "data.validation_share=0.3",
        "run.validate_every=auto",
        *changes,
    )
    with ForkedJob(main, ["train", RECIPE, *overrides], log, num_ranks=num_ranks, **environment) as job:
        assert job.wait() == 0, job.output
        return job.output


def rewind_to_step_2(folder: Path) -> None:
    """Leave the folder as a kill after step 4 might have left it."""
    shutil.rmtree(folder / "adapter")
    shutil.rmtree(folder / "checkpoints" / "step_00000004")


def read_events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def check_scalars(events: EventAccumulator, folder: Path) -> None:
    """Assert that TensorBoard has every number of metrics.jsonl once, in fp32, and the held-out loss at the start."""
    lines = read_metrics(folder)
    before = json.loads((folder / "held_out.json").read_text())["before"][""]
    expected: dict[str, dict[int, float]] = {"validation_loss": {0: before}}
    for line in lines:
        for key, value in line.items():
            if key != "step" and value is not None:
                expected.setdefault(key, {})[line["step"]] = value
    # A tag remains although its only steps were repeated without it.
    shown = {name.partition("/")[2]: name for name in events.Tags()["scalars"] if events.Scalars(name)}
    assert shown.keys() == expected.keys() and len(expected) > 25 and set(NAMES) <= set(shown.values())
    assert {name.partition("/")[0] for name in shown.values()} == {name.partition("/")[0] for name in NAMES}
    for key, values in expected.items():
        scalars = events.Scalars(shown[key])
        assert [scalar.step for scalar in scalars] == list(values), key
        assert [scalar.value for scalar in scalars] == pytest.approx(list(values.values()), rel=1e-6), key


def test_tensorboard_and_wandb_have_all_metrics_also_after_resuming(setup: TinySetup, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = ("track.trackers=[tensorboard,wandb]", "track.group=the_group", "track.tags=[first_tag,second_tag]")
    output = train(setup, folder, tmp_path / "1.log", 2, *changes, **OFFLINE)
    assert "warning: " not in output and "Weights & Biases: offline" in output
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    check_scalars(read_events(folder), folder)
    # A tenth of four steps is one; the last loss is the result's.
    losses, held_out = [line["validation_loss"] for line in lines], json.loads((folder / "held_out.json").read_text())
    assert losses[-1] == held_out["after"][""] < losses[0] < held_out["before"][""]
    rows = json.loads((folder / "held_out_rows.json").read_text())
    numbers, num_rows = rows[str(setup.train)], len(setup.train.read_text().splitlines())
    assert len(numbers) == round(0.3 * num_rows) and len(rows) == 1
    trained = {one.sequence_id + 1 for record in read_records(folder) for one in record.sequences}
    assert trained <= set(range(1, num_rows + 1)) - set(numbers)
    (text,) = read_events(folder).Tensors("recipe/text_summary")
    assert "    run:\n" in text.tensor_proto.string_val[0].decode()

    rewind_to_step_2(folder)
    assert "Resumed after step 2" in train(setup, folder, tmp_path / "2.log", 2, *changes, **OFFLINE)
    assert len((folder / "metrics_lost.jsonl").read_text().splitlines()) == 2
    check_scalars(read_events(folder), folder)
    assert [line["validation_loss"] for line in read_metrics(folder)] == losses
    assert json.loads((folder / "held_out_rows.json").read_text()) == rows

    kept = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    run_id = (folder / "trackers" / "wandb_run_id").read_text().strip()
    assert len(kept) == 2
    for path in kept:  # both attempts belong to the same run
        content = path.read_bytes()
        assert path.name == f"run-{run_id}.wandb"
        assert all(word in content for word in (b"the_group", b"first_tag", b"second_tag", b"flops_training"))


def test_a_failing_tracker_only_causes_a_warning(setup: TinySetup, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(setup, folder, tmp_path / "1.log", 1)
    before = read_metrics(folder)
    rewind_to_step_2(folder)
    shutil.rmtree(folder / "tensorboard")
    (folder / "tensorboard").write_text("in the way")
    output = train(setup, folder, tmp_path / "2.log", 1, "run.validate_every=null")  # which changes no step
    warned = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1 and warned[0].startswith("warning: track.trackers: tensorboard: "), output
    assert [line["loss"] for line in read_metrics(folder)] == [line["loss"] for line in before]
