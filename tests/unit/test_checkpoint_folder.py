"""Checkpoint folders: written, verified, deleted. Run folders: which are resumed, and which are refused."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.recipes import smallest_recipe
from tests.helpers.resumed_runs import make_run_state
from tests.helpers.small_disk import limiting_files
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe, differing_keys
from vcore_ds.config.sections import CheckpointConfig
from vcore_ds.training import checkpoint_folder as files
from vcore_ds.training.checkpoints import Checkpoints, check_compared
from vcore_ds.training.metrics_log import MetricsLog
from vcore_ds.training.run_folder import begin, can_resume, move_lost_metrics, move_lost_tokens
from vcore_ds.training.token_records import record_path

CONTENT = {
    "state/__0_0.distcp": b"first rank" * 100,
    "state/__1_0.distcp": b"second rank" * 99,
    "run_state.json": b"{}",
}


def write_checkpoint(checkpoints: Path, step: int) -> Path:
    unfinished = files.begin(checkpoints, step, num_bytes=1)
    for name, content in CONTENT.items():
        (unfinished / name).write_bytes(content)
    return files.finish(checkpoints, step, 2, {name: files.hash_file(unfinished / name) for name in CONTENT})


def find_problem(folder: Path) -> str | None:
    return files.find_problem(folder, say=lambda _: None)


def list_names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_the_lowest_held_out_losses_are_kept(tmp_path: Path):
    """Equal losses go to the earlier step; NaN is written as null; other data, and a damaged file, do not compare."""
    states = {
        1: {"held_out_loss": 0.5, "held_out_digest": "other"},
        2: {"held_out_loss": None, "held_out_digest": "a"},
        3: {"held_out_loss": 2.0, "held_out_digest": "a"},
        4: {"held_out_loss": 1.0, "held_out_digest": "a"},
        5: {},
        6: {"held_out_loss": 2.0, "held_out_digest": "a"},
        7: {"held_out_loss": 3.0, "held_out_digest": "a"},
    }
    for step, state in states.items():
        (write_checkpoint(tmp_path, step) / "run_state.json").write_text(json.dumps(state))
    (write_checkpoint(tmp_path, 8) / "run_state.json").write_text("{")
    ranked = files.rank_by_loss(tmp_path, "a")
    assert [(loss, files.parse_step(folder)) for loss, folder in ranked] == [(1.0, 4), (2.0, 3), (2.0, 6), (3.0, 7)]
    files.remove_old(tmp_path, keep_last=1, keep_every_steps=None, best=[folder for _, folder in ranked[:2]])
    assert list_names(tmp_path) == ["step_00000003", "step_00000004", "step_00000008"]


def test_keep_best_is_refused_where_a_run_of_epochs_has_no_checkpoint_to_compare():
    """With a schedule in steps, a rule of the recipe refuses this already."""
    recipe = smallest_recipe()
    recipe["data"]["validation_path"], recipe["run"]["validate_every"] = "v.jsonl", 10
    recipe["schedule"] = {"num_epochs": 1}
    recipe["checkpoint"] = {"keep_best": 1, "every_steps": 4}
    made = Recipe.model_validate(recipe)
    check_compared(made.checkpoint, made.run, num_steps=21)
    with pytest.raises(UserError, match="keep_best: found step 20 as the first with a checkpoint and an evaluation"):
        check_compared(made.checkpoint, made.run, num_steps=20)


def test_a_written_checkpoint_verifies_and_lists_its_files(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoints", 100)
    assert folder == tmp_path / "checkpoints" / "step_00000100" and find_problem(folder) is None
    assert list_names(tmp_path / "checkpoints") == ["step_00000100"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 100 and manifest["world_size"] == 2
    assert {name: record["bytes"] for name, record in manifest["files"].items()} == {
        name: len(content) for name, content in CONTENT.items()
    }
    assert list_names(folder) == ["COMPLETE", "manifest.json", "run_state.json", "state"]


def lose_complete(folder: Path) -> None:
    (folder / "COMPLETE").unlink()


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def change_format(folder: Path) -> None:
    edit("manifest.json", lambda content: content.replace(b'"format": 1', b'"format": 99'))(folder)
    (folder / "COMPLETE").write_text(files.hash_file(folder / "manifest.json").sha256)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        edit("state/__1_0.distcp", lambda content: content[:500]),
        "state/__1_0.distcp: found 500 bytes; manifest.json says 1,089",
    ),
    (
        edit("state/__0_0.distcp", lambda content: content[:123] + bytes([content[123] ^ 1]) + content[124:]),
        "state/__0_0.distcp: its SHA-256 differs from manifest.json",
    ),
    (lambda folder: (folder / "state/__1_0.distcp").unlink(), "state/__1_0.distcp: missing"),
    (lose_complete, "no COMPLETE: its writing was interrupted"),
    (edit("COMPLETE", lambda content: b""), "COMPLETE says ''"),
    (edit("COMPLETE", lambda content: b"\xff\xfe"), "COMPLETE cannot be read"),
    (edit("manifest.json", lambda content: content.replace(b": 100", b": 101")), "one of the two is damaged"),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read: FileNotFoundError"),
    (change_format, "found format 99; this version reads format 1"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[reason for _, reason in DAMAGES])
def test_damage_is_detected_and_named(tmp_path: Path, damage: Callable[[Path], object], reason: str):
    folder = write_checkpoint(tmp_path, 100)
    damage(folder)
    problem = find_problem(folder)
    assert problem is not None and reason in problem


@pytest.mark.parametrize("name", CONTENT)
def test_one_of_several_readers_finds_the_damage(tmp_path: Path, name: str):
    folder = write_checkpoint(tmp_path, 100)
    (folder / name).write_bytes(b"")
    said: list[str] = []
    problems = [files.find_problem(folder, said.append, part=part, num_parts=2) for part in range(2)]
    assert sum(problem is not None and f"{name}: found 0 bytes" in problem for problem in problems) == 1
    assert None in problems and said == ["verifying step_00000100: 2.09e-06 GB"] * 2


def test_a_lack_of_room_is_reported_before_anything_is_written(tmp_path: Path):
    with pytest.raises(OSError, match=r"found [\d,]+ bytes free; expected 1,000,000,000,000,000,000 for a checkpoint"):
        files.begin(tmp_path / "checkpoints", 5, num_bytes=10**18)
    assert list_names(tmp_path / "checkpoints") == []


def test_a_file_that_another_node_wrote_elsewhere_is_reported_missing(tmp_path: Path):
    files.begin(tmp_path, 5, num_bytes=1)
    with pytest.raises(OSError, match="expected run.output_dir on a file system that all nodes share"):
        files.finish(tmp_path, 5, 2, {"state/__8_0.distcp": files.FileRecord(5, "0")})
    assert list_names(tmp_path) == ["step_00000005.unfinished"]  # nothing with a checkpoint's name


def test_leftovers_of_an_interrupted_attempt_are_replaced(tmp_path: Path):
    (files.begin(tmp_path, 100, num_bytes=1) / "state" / "left").write_text("over")
    damaged = tmp_path / "step_00000100"
    damaged.mkdir()
    (damaged / "COMPLETE").write_text("")
    folder = write_checkpoint(tmp_path, 100)
    assert find_problem(folder) is None and not (folder / "state" / "left").exists()


def test_the_newest_checkpoints_and_one_every_interval_are_kept(tmp_path: Path):
    for step in range(10, 80, 10):
        write_checkpoint(tmp_path, step)
        files.remove_old(tmp_path, keep_last=2, keep_every_steps=30)
    assert list_names(tmp_path) == [f"step_000000{step}" for step in (30, 60, 70)]


def test_unfinished_checkpoints_never_displace_a_good_one(tmp_path: Path):
    good = write_checkpoint(tmp_path, 10)
    for step in (20, 30, 40):
        lose_complete(write_checkpoint(tmp_path, step))
    files.remove_old(tmp_path, keep_last=1, keep_every_steps=None)
    assert find_problem(good) is None


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On NFS, a folder with a file that another process reads cannot be removed."""
    for step in (10, 20):
        write_checkpoint(tmp_path / "checkpoints", step)

    def refuse(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))

    monkeypatch.setattr(files.shutil, "rmtree", refuse)
    kept = CheckpointConfig(keep_last=1)
    warning = Checkpoints(tmp_path / "checkpoints", kept, "", make_run_state()).remove_old()
    assert warning is not None and "step_00000010" in warning
    assert find_problem(tmp_path / "checkpoints" / "step_00000010") is not None  # what is left is no checkpoint
    assert find_problem(tmp_path / "checkpoints" / "step_00000020") is None


def test_newer_checkpoints_that_did_not_verify_are_set_aside(tmp_path: Path):
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    files.begin(tmp_path, 40, num_bytes=1)
    files.set_aside_newer(tmp_path, 10)
    assert list_names(tmp_path) == ["step_00000010", "step_00000020.rejected", "step_00000030.rejected"]
    shutil.copytree(tmp_path / "step_00000010", tmp_path / "step_00000020")
    files.set_aside_newer(tmp_path, 10)  # a second time with the same number
    rejected = ["step_00000020.rejected", "step_00000020.rejected_2", "step_00000030.rejected"]
    assert list_names(tmp_path) == ["step_00000010", *rejected] and (tmp_path / rejected[0] / "COMPLETE").exists()
    assert [folder.name for folder in files.list_checkpoints(tmp_path)] == ["step_00000010"]


def test_checkpoints_are_listed_newest_first(tmp_path: Path):
    for name in ("step_00000009", "step_00000010", "step_100000000", "step_7", "notes", "step_00000011.unfinished"):
        (tmp_path / name).mkdir()
    newest_first = ["step_100000000", "step_00000010", "step_00000009"]
    assert [folder.name for folder in files.list_checkpoints(tmp_path)] == newest_first
    (tmp_path / "step_00000010" / "COMPLETE").write_text("")
    unfinished = ["step_00000009", "step_00000011.unfinished", "step_100000000"]
    assert [folder.name for folder in files.list_unfinished(tmp_path)] == unfinished
    assert files.list_checkpoints(tmp_path / "none") == []


def make_recipe(folder: Path, **sections: dict) -> Recipe:
    values = smallest_recipe()
    values["run"]["output_dir"] = str(folder)
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return Recipe(**values)


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A stopped run's folder."""
    begin(tmp_path / "run", dump_recipe(make_recipe(tmp_path / "run")), world_size=2, num_done=0)
    return tmp_path / "run"


def test_which_folders_are_new_and_which_are_resumed(tmp_path: Path):
    assert not can_resume(make_recipe(tmp_path / "new"))
    assert not can_resume(make_recipe(tmp_path))
    (tmp_path / "recipe.yaml.unfinished").write_text("killed here")
    assert not can_resume(make_recipe(tmp_path))
    begin(tmp_path / "run", dump_recipe(make_recipe(tmp_path / "run")), world_size=2, num_done=0)
    assert can_resume(make_recipe(tmp_path / "run"))
    assert can_resume(make_recipe((tmp_path / "run").rename(tmp_path / "moved")))


OTHER_RECIPE = {"optimizer": {"learning_rate": 0.2}, "method": {"kl_budget": 0.06}, "lora": {"rank": 4, "alpha": 8.0}}


@pytest.mark.parametrize(
    ("changes", "prepare", "parts"),
    [
        ({"checkpoint": {"resume": "never"}}, None, ["holds another run; expected a new or empty one"]),
        ({}, lambda used: (used / "model").mkdir(), ["holds a run that has finished, with its result in model/"]),
        (
            OTHER_RECIPE,
            None,
            [f"{key}: {there} there, {here} here" for key, there, here in (
                ("optimizer.learning_rate", 0.1, 0.2), ("method.kl_budget", 0.05, 0.06), ("lora.rank", "null", 4)
            )],
        ),
        ({}, lambda used: (used / "recipe.yaml").write_text("method: {nme: sft}\n"), ["does not know"]),
    ],
)  # fmt: skip
def test_a_folder_that_holds_something_else_is_refused(used: Path, changes: dict, prepare, parts: list[str]):
    if prepare is not None:
        prepare(used)
    with pytest.raises(UserError, match=f"run.output_dir: {used}: ") as raised:
        can_resume(make_recipe(used, **changes))
    assert all(part in str(raised.value) for part in parts)
    # And the keys of the section that is null there.
    assert str(raised.value).count(" there, ") == (2 + 5 if changes == OTHER_RECIPE else 0)


def test_keys_that_do_not_change_the_computation_may_differ(tmp_path: Path):
    here = make_recipe(
        tmp_path / "elsewhere",
        run={"log_every": 7},
        checkpoint={"every_steps": 5, "keep_last": 9},
        engine={"deepspeed_config": "other.json", "timeout_minutes": 3.0},
        batch={"micro_batch_size_per_rank": 4},
        data={"train_path": "moved.jsonl"},
        model={"gradient_checkpointing": True},
    )
    assert differing_keys(make_recipe(tmp_path), here) == {}
    # With one alpha per micro-batch, what a sequence is batched with matters.
    there, here = (
        make_recipe(tmp_path, method={"alpha_scope": "micro_batch"}, batch=b)
        for b in ({}, {"micro_batch_size_per_rank": 4})
    )
    assert differing_keys(there, here) == {"batch.micro_batch_size_per_rank": ("auto", 4)}


def test_a_key_is_compared_by_default():
    """A new key is compared by default, until someone decides that it may differ."""
    there = make_recipe(Path("a"))
    here = make_recipe(Path("b"), run={"seed": 1}, data={"cutoff_length": 99}, probe={"every": 2})
    assert set(differing_keys(there, here)) == {"run.seed", "data.cutoff_length", "probe.every"}


def write_lines(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(text)


def test_metrics_after_the_checkpoint_are_moved_not_deleted(tmp_path: Path):
    line = '{{"step": {}, "loss": 1.0}}\n'.format
    write_lines(tmp_path, "".join(map(line, range(1, 6))) + '{"step": 6, "lo')
    assert move_lost_metrics(tmp_path, 3) == 3
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(map(line, range(1, 4)))
    assert (tmp_path / "metrics_lost.jsonl").read_text() == line(4) + line(5) + '{"step": 6, "lo\n'
    write_lines(tmp_path, "".join(map(line, range(1, 5))))
    assert move_lost_metrics(tmp_path, 3) == 1
    assert (tmp_path / "metrics_lost.jsonl").read_text().splitlines()[-1] == line(4).strip()
    assert move_lost_metrics(tmp_path, 3) == 0


def test_records_of_tokens_after_the_checkpoint_are_moved(tmp_path: Path):
    move_lost_tokens(tmp_path, 3)  # a run without records
    for attempt, step in ((1, 1), (1, 3), (1, 4), (1, 100_000_000), (2, 4)):
        path = record_path(tmp_path, step)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"attempt {attempt}")
        if (attempt, step) == (1, 100_000_000):
            move_lost_tokens(tmp_path, 3)
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [
        f"step_0000000{step}.npz" for step in (1, 3, 4)
    ]
    move_lost_tokens(tmp_path, 3)
    assert {path.name: path.read_text() for path in (tmp_path / "tokens_lost").iterdir()} == {
        "step_00000004.npz": "attempt 2",
        "step_100000000.npz": "attempt 1",
    }
    record_path(tmp_path, 2, "followed").write_text("followed")
    move_lost_tokens(tmp_path, 0)
    assert "followed_00000002.npz" in [path.name for path in (tmp_path / "tokens_lost").iterdir()]
    assert not list((tmp_path / "tokens").iterdir())


def test_a_resumed_run_adds_to_its_folder(used: Path):
    begin(used, dump_recipe(make_recipe(used)), world_size=2, num_done=0, kept={"digest": "a"})
    first = json.loads((used / "environment.json").read_text())
    log = MetricsLog(used)
    log.write({"step": 1, "loss": 2.0})
    log.close()
    changed = make_recipe(used, run={"log_every": 9})
    begin(used, dump_recipe(changed), world_size=4, num_done=1, kept={"digest": "moved"})
    second = MetricsLog(used)
    second.write({"step": 2, "loss": float("nan")})
    second.flush()
    second.close()
    assert [json.loads(line) for line in (used / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": None},
    ]
    environment = json.loads((used / "environment.json").read_text())
    assert (first["world_size"], first["kept"]) == (2, {"digest": "a"})
    assert {key: environment[key] for key in first} == first
    assert [(entry["step"], entry["world_size"]) for entry in environment["resumed"]] == [(1, 4)]
    assert (used / "recipe.yaml").read_text() == dump_recipe(changed)
    assert sorted(path.name for path in used.iterdir()) == [
        "environment.json",
        "metrics.jsonl",
        "recipe.yaml",
        "start.txt",
    ]


def test_a_run_that_begins_again_is_described_by_its_new_start(used: Path):
    """Without a checkpoint no step of an earlier start remains, so its ranks, versions and scores do not apply."""
    for world_size, num_done, kept in ((1, 0, {"digest": "a"}), (2, 3, {"digest": "a"}), (4, 0, {"digest": "b"})):
        begin(used, dump_recipe(make_recipe(used)), world_size, num_done, kept)
    environment = json.loads((used / "environment.json").read_text())
    assert (environment["world_size"], environment["kept"]) == (4, {"digest": "b"}) and "resumed" not in environment
    begin(used, dump_recipe(make_recipe(used)), 4, 0)
    assert "kept" not in json.loads((used / "environment.json").read_text())


def test_metrics_wait_until_the_disk_has_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, log = tmp_path / "metrics.jsonl", MetricsLog(tmp_path)
    log.write({"step": 1})
    with limiting_files(path.stat().st_size + 5):
        log.write({"step": 2})
        log.write({"step": 3})
        assert path.read_text() == '{"step": 1}\n'
        with pytest.raises(UserError) as raised:
            log.flush()
        assert path.read_text() == '{"step": 1}\n'
    assert capsys.readouterr().out.count(f"warning: {path} cannot be written (File too large)") == 1
    message = str(raised.value)
    assert message.startswith(f"run.output_dir: {path}: cannot be written: File too large (")
    assert "expected room for the metrics of the steps: make room, or name a place on another disk" in message
    log.flush()
    log.write({"step": 4})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
