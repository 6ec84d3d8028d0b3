"""A stopped and resumed run equals one that was not stopped: to the last bit at its world size, within rounding at
another. Also checkpoints that cannot be written or read, and the fidelity command's training steps against a run's."""

import errno
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.helpers import resumed_runs
from tests.helpers.ranks import run_ranks
from tests.helpers.resume_scenarios import (
    ACROSS_SIZES,
    ACROSS_STOP,
    CASES,
    DRAWN_IN_STEPS,
    KEPT,
    STOPPED_TWICE,
    run_on_four_ranks,
    run_on_one_rank,
    run_on_two_ranks,
    write_setup,
)
from tests.helpers.resumed_runs import NUM_STEPS
from tests.helpers.small_disk import limiting_files, mount_small_disk
from vcore_ds.engine import checkpoint_shards
from vcore_ds.training.checkpoints import MARGIN_BYTES
from vcore_ds.training.token_records import read_records

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_setup(folder)
    return folder


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A small disk; None where this process may mount none."""
    folder = tmp_path_factory.mktemp("disk")
    with mount_small_disk(folder, MARGIN_BYTES + 16 * 2**20) as is_mounted:
        yield folder if is_mounted else None


@pytest.fixture(scope="module")
def outcomes(setup: Path, disk: Path | None) -> dict[str, Any]:
    first, second = run_ranks(run_on_two_ranks, 2, setup, disk)
    assert first["train_on_full_disk"] == second["train_on_full_disk"]
    for name in ("ask_whether_save_is_due", "save_without_room", "start_in_separate_folders"):
        assert first[name] == second[name]  # else one rank would wait for the other
    for name in ("save_where_one_rank_cannot_write", "save_asynchronously_where_one_rank_cannot_write"):
        assert first[name]["message"] == second[name]["message"]
    return first


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(outcomes: dict[str, Any], name: str):
    assert outcomes[name] == []


@pytest.mark.parametrize("step, rank", [(3, 0), (3, 1), (4, 0), (4, 1)])
def test_a_profile_has_the_phases_and_operations_of_a_step(
    outcomes: dict[str, Any], setup: Path, step: int, rank: int
) -> None:
    folder = setup / f"{STOPPED_TWICE}_stopped"
    profiles = sorted((folder / "profile").iterdir())
    assert [path.name for path in profiles] == [
        f"step_0000000{step}_rank_{rank}.json.gz" for step in (3, 4) for rank in (0, 1)
    ]
    with gzip.open(profiles[2 * (step - 3) + rank]) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    ranges = {event["name"]: event for event in events if event["cat"] == "user_annotation"}
    phases = ["probe", "utility", "main", "step"]
    assert set(phases) <= ranges.keys()
    for phase in phases:
        start, end = ranges[phase]["ts"], ranges[phase]["ts"] + ranges[phase]["dur"]
        inside = Counter(event["name"] for event in events if start <= event["ts"] <= end)
        assert len(inside) > 5 and ("aten::mm" in inside) == (phase != "step")
    assert [ranges[phase]["ts"] for phase in phases] == sorted(ranges[phase]["ts"] for phase in phases)


def test_the_loss_by_a_low_rank_is_reported_before_the_first_step(outcomes: dict[str, Any], setup: Path):
    start = (setup / "bf16_offload_all_stopped" / "start.txt").read_text()
    energy, correlation = re.search(r"probe.rank 4 keeps ([\d.]+)% of .* correlate with ([\d.]+) ", start).groups()
    lines = resumed_runs.read_deterministic_metrics(setup / "bf16_offload_all_stopped")
    assert float(energy) == pytest.approx(100 * lines[0]["direction_energy"], abs=2.0)  # another random sketch
    assert 0.5 < float(correlation) < 1


def test_only_kept_traces_are_trained_on(outcomes: dict[str, Any], setup: Path):
    for name in ("iw_sft_full_straight", "random_full_stopped", "vcore_trusted_full_stopped"):
        trained, num_trusted = set(), 0
        for record in read_records(setup / name):
            trained |= {one.sequence_id for one in record.sequences if not record.is_trusted(one)}
            num_trusted += sum(map(record.is_trusted, record.sequences))
        assert trained == KEPT, name  # four steps are more than one epoch of them
        assert (num_trusted > 0) == ("trusted" in name)
        kept = json.loads((setup / name / "environment.json").read_text())["kept"]
        assert kept["kept_of_source"] == {"train.jsonl": [6, 12]} and kept["set"] == "right"
        assert "6 of 12 traces kept" in (setup / name / "start.txt").read_text()


def test_a_rank_that_cannot_write_is_named_by_all_and_nothing_is_lost(outcomes: dict[str, Any]):
    failing = outcomes["save_where_one_rank_cannot_write"]
    message = failing["message"]
    assert "the checkpoint of step 3 could not be written: rank 1 on host" in message
    assert "failing/checkpoints/step_00000003.unfinished/state: " in message and "Is a directory" in message
    assert failing["checkpoints"] == ["step_00000002"] and failing["differing"] == []


def test_an_asynchronous_checkpoint_holds_the_state_of_its_step(outcomes: dict[str, Any]):
    outcome = outcomes["save_asynchronously"]
    assert outcome["in flight"][2] and outcome["held"] == [] and outcome["finished"] == []
    metrics = {line["step"]: {key for key in line if "checkpoint" in key} for line in outcome["metrics"]}
    assert "seconds_checkpoint" in metrics[2] & metrics[3] & metrics[5]
    complete = {"checkpoint_bytes", "seconds_checkpoint_write"}
    assert not metrics[4] and complete <= metrics[5]  # held until the end of step 3, and over before that of step 4


def test_a_kill_during_an_asynchronous_save_loses_nothing(outcomes: dict[str, Any]):
    outcome, lines = outcomes["save_asynchronously"], "\n".join(outcomes["save_asynchronously"]["lines"])
    assert outcome["checkpoints"] == ["step_00000001", "step_00000002.unfinished"]
    assert "warning: skipped checkpoint step_00000002.unfinished: not finished" in lines
    assert "Resumed after step 1 from" in lines and outcome["killed"] == []


def test_a_thread_that_cannot_write_ends_the_run_on_all_ranks_at_the_next_step(outcomes: dict[str, Any]):
    failing = outcomes["save_asynchronously_where_one_rank_cannot_write"]
    assert "the checkpoint of step 2 could not be written: rank 1 on host" in failing["message"]
    assert "Earlier checkpoints are untouched" in failing["message"]
    assert failing["checkpoints"] == ["step_00000001"] and failing["steps"] == 3


def test_a_full_disk_is_named_as_the_cause(tmp_path: Path):
    """A limit of 1 MB on files makes a write fail in the middle, as a full disk does."""
    writer = checkpoint_shards._Writer(tmp_path)
    with limiting_files(2**20), pytest.raises(CheckpointException) as raised:
        dcp.save({"a": torch.zeros(2**20)}, storage_writer=writer, no_dist=True)
    cause, _ = raised.value.failures[0]
    assert isinstance(cause, OSError) and cause.errno == errno.EFBIG


def test_a_disk_that_fills_between_checkpoints_ends_all_ranks_and_loses_no_line(
    outcomes: dict[str, Any], disk: Path | None
):
    if disk is None:
        pytest.skip("NOT TESTED: a disk that fills between checkpoints, as no tmpfs can be mounted here (not root?)")
    path = disk / "run" / "metrics.jsonl"
    assert outcomes["train_on_full_disk"]["message"].startswith(
        f"run.output_dir: {path}: cannot be written: No space left on device (0 bytes free"
    )
    steps = outcomes["train_on_full_disk"]["steps"]
    assert steps == [*range(1, len(steps) + 1)] and 2 <= len(steps) < NUM_STEPS
    assert outcomes["train_on_full_disk"]["differing"] == []


def test_a_damaged_checkpoint_is_skipped_with_its_reason_and_the_one_before_it_taken(outcomes: dict[str, Any]):
    lines = "\n".join(outcomes["resume_damaged"]["lines"])
    assert "warning: skipped checkpoint step_00000004: state/__1_0.distcp: its SHA-256 differs from" in lines
    assert "Resumed after step 2 from" in lines
    assert "step_00000004.rejected" in lines
    assert outcomes["resume_damaged"]["lost"] == [3, 4] and outcomes["resume_damaged"]["steps"] == [1, 2, 3, 4]
    records, lost = outcomes["resume_damaged"]["records"], outcomes["resume_damaged"]["lost_records"]
    names = [[f"{kind}_0000000{step}.npz" for step in (1, 2, 3, 4)] for kind in ("followed", "step")]
    assert list(records) == names[0] + names[1]
    assert lost == {
        name: records[name] for names_of_kind in names for name in names_of_kind[2:4]
    }  # written again, bit for bit


def test_no_checkpoint_that_verifies_is_an_error_not_a_new_start(outcomes: dict[str, Any]):
    refusal = outcomes["resume_damaged"]["refusal"]
    assert "found no checkpoint that verifies" in refusal
    assert "step_00000004: state/__0_0.distcp" in refusal and "step_00000002: state/__0_0.distcp" in refusal


def test_unfinished_checkpoints_alone_start_a_new_run(outcomes: dict[str, Any]):
    lines = "\n".join(outcomes["resume_unfinished"])
    assert "skipped checkpoint step_00000002: no COMPLETE: its writing was interrupted" in lines
    assert "skipped checkpoint step_00000003.unfinished: not finished" in lines
    assert "holds this run without a checkpoint: it begins at its first step" in lines
    assert outcomes["resume_unfinished"][-2:] == ["step_00000001", "step_00000002.rejected"]


@pytest.mark.parametrize(
    ("check", "part"),
    [
        ("save_without_room", "bytes free; expected 1,000,000,000,000,"),
        ("resume_with_other_data", "data.train_path: "),
        # Even where one node has a run to resume.
        ("start_in_separate_folders", "expected run.output_dir on a file system that all nodes share"),
    ],
)
def test_a_run_that_cannot_save_or_resume_says_why(outcomes: dict[str, Any], check: str, part: str):
    assert part in outcomes[check]


def test_the_first_ranks_clock_decides_for_all_ranks(outcomes: dict[str, Any]):
    assert outcomes["ask_whether_save_is_due"] == [False, False, True]


def test_a_longer_run_and_a_branch_equal_the_long_run(outcomes: dict[str, Any], setup: Path):
    outcome = outcomes["lengthen_and_branch"]
    assert outcome["branch"] == outcome["longer"] == outcome["lost"] == []
    stable, decay = [5e-4, *[1e-3] * 4], [1e-3 * (0.1 + 0.9 * share) for share in (1, 0.5)]
    assert outcome["rates"] == pytest.approx([*stable, *decay], rel=1e-12)
    assert outcome["set aside"] == ["adapter_step_00000006"]
    assert "adapter" in outcome["finished"] and "adapter_step_00000006" not in outcome["finished"]


def test_a_schedule_with_other_learning_rates_for_past_steps_is_refused(outcomes: dict[str, Any], setup: Path):
    messages = outcomes["lengthen_and_branch"]["messages"]
    checkpoint = setup / "short" / "checkpoints" / "step_00000006"
    for name, step in (("cosine", 4), ("warmup", 1)):
        assert messages[name].startswith("schedule: ") and str(checkpoint) in messages[name]
        assert f"from step {step} on" in messages[name]
    assert messages["batch"].startswith(f"checkpoint.branch_from: {setup}/short/checkpoints/step_00000004: ")
    assert "  batch.global_size: 2 there, 4 here\n" in messages["batch"]


def test_the_checkpoints_with_the_lowest_held_out_loss_are_kept_through_a_resume(outcomes: dict[str, Any]):
    losses, lines = outcomes["keep_best_checkpoints"]["losses"], outcomes["keep_best_checkpoints"]["lines"]
    ranked = sorted(losses, key=lambda step: (losses[step], step))
    assert len(ranked) == NUM_STEPS
    kept = sorted({*ranked[:2], NUM_STEPS})
    assert outcomes["keep_best_checkpoints"]["checkpoints"] == [f"step_0000000{step}" for step in kept]
    best = f"Lowest held-out loss: {losses[ranked[0]]:.4f}, step_0000000{ranked[0]}."
    assert sum(line.startswith(best) for line in lines) == (ranked[0] != NUM_STEPS)


def test_adapters_are_resumed_only_on_the_weights_that_they_were_trained_on(outcomes: dict[str, Any], setup: Path):
    refused, restored = outcomes["resume_on_other_base"]
    assert refused.startswith(f"model.path: {setup / 'model'}: found other weights than ")
    assert restored == "no error"


@pytest.mark.parametrize("name", DRAWN_IN_STEPS)
def test_the_fidelity_command_trains_as_a_run_does_bit_for_bit(outcomes: dict[str, Any], name: str):
    assert outcomes["fidelity"][name] == []


def test_a_run_resumed_at_another_world_size_equals_an_uninterrupted_one(setup: Path, outcomes):
    run_ranks(run_on_four_ranks, 4, setup)
    run_ranks(run_on_one_rank, 1, setup)
    expected = resumed_runs.read_deterministic_metrics(setup / "across_straight")
    tensors = resumed_runs.load_checkpoint_tensors(setup / "across_straight")
    for name in ("across_2_to_1", "across_4_to_1", *ACROSS_SIZES):
        lines = resumed_runs.read_deterministic_metrics(setup / name)
        used = [(line["sequence_parallel"], line["probe_sequence_parallel"]) for line in lines]
        for used_sizes, wanted in zip(used[::-1], ACROSS_SIZES.get(name, [])[::-1], strict=False):
            assert used_sizes[0] == wanted[0] and used_sizes[1] in (wanted[1], None)
        if name.endswith("_to_1"):
            assert all(main == 1 for main, _ in used[ACROSS_STOP:])
        for key in ("loss", "weighted_loss", "grad_norm", "direction_norm"):
            assert [line[key] for line in lines] == pytest.approx([line[key] for line in expected], rel=1e-5), name
        for tensor, values in resumed_runs.load_checkpoint_tensors(setup / name).items():
            # A few updates of 1e-3, whose rounding Adam magnifies where a gradient is about as small as its eps.
            torch.testing.assert_close(values, tensors[tensor], rtol=1e-4, atol=1e-5, msg=f"{name}: {tensor}")
