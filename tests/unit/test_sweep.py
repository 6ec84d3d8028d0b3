"""Sweeps: from a file to the recipes of its runs, the sweep's folder, the states of its runs, and the tables."""

import fcntl
import json
import math
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from tests.helpers.recipes import smallest_recipe
from tests.helpers.setups import sums, write_conversations, write_model
from tests.helpers.sweeps import finish_runs
from vcore_ds.commands.cli import main
from vcore_ds.commands.report.sweep import OVERLAPS, ROSE, SettingRuns, find_best, judge_cells
from vcore_ds.commands.sweep import begin_sweep, check_inputs, describe, run_here
from vcore_ds.commands.sweep.folder import ATTEMPT, State, Sweep, SweepFolder, load_sweep, read_sweep_folder
from vcore_ds.common.errors import UserError
from vcore_ds.config.problems import RecipeError

SWEEPS = sorted((Path(__file__).resolve().parents[2] / "launch_scripts" / "sweeps").glob("*.yaml"))
SFT = ["method.name=sft", "method.kl_budget=null"]
GRID = {"method": {"sft": SFT, "vcore": None}, "optimizer.learning_rate": [0.1, 1e-5]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe."""
    monkeypatch.chdir(tmp_path)
    recipe = smallest_recipe() | {"engine": {"deepspeed_config": "ds_configs/zero3_bf16.json"}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def write(**changes: Any) -> Path:
    """sweep.yaml in the working directory; a change to None removes the key."""
    values = {
        "recipe": "base.yaml",
        "output_dir": "out",
        "seeds": [1, 2],
        "cells": {"sft": SFT, "vcore": None},
    } | changes
    path = Path("mine.yaml")
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}, sort_keys=False))
    return path


def load_changed(**changes: Any) -> Sweep:
    return load_sweep(write(**changes))


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_grid_is_the_product_of_its_axes(folder: Path) -> None:
    sweep = load_changed(cells=None, grid=GRID, reference="sft", common=["run.log_every=7"])
    names = ["sft,learning_rate=0.1", "sft,learning_rate=1e-05", "vcore,learning_rate=0.1", "vcore,learning_rate=1e-05"]
    assert sweep.references == dict(zip(names, [None, None, *names[:2]], strict=True))
    assert list(sweep.runs) == [f"{name}/seed_{seed}" for name in names for seed in (1, 2)]
    first, *_, last = sweep.runs.values()
    assert (last.method.name, last.optimizer.learning_rate, last.run.seed, last.run.log_every) == ("vcore", 1e-5, 2, 7)
    assert first.method.name == "sft" and last.run.output_dir == "out/runs/vcore,learning_rate=1e-05/seed_2"
    both = load_changed(cells={"sft": SFT}, grid={"method.kl_budget": [0.1, 0.2]}, reference="sft")
    assert both.references == {"kl_budget=0.1": "sft", "kl_budget=0.2": "sft", "sft": None}


MANY = {f"axis_{i}": dict.fromkeys("abcdefghij") for i in range(20)}
PROBLEMS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"recipe": 3, "output_dir": None, "seeds": [-1], "seed": 4, "cells": {"a b": None, "c": 3},
         "grid": {"x": [], "y": 3}},
        ["mine.yaml:1: recipe: found 3", "output_dir: found nothing", "seeds: found -1", "seed: found 4",
         'cells.a b: found "a b"', 'cells.c: found 3', "grid.x: found []",
         "grid.y: found 3"],
    ),
    ({"seeds": [1, 1]}, ["mine.yaml:3: seeds: found [1, 1]"]),
    ({"reference": "other"}, ['reference: found "other"']),
    ({"cells": None, "grid": MANY}, ["mine.yaml:6: grid: found 200,000,000,000,000,000,000 runs"]),
    ({"cells": dict.fromkeys(map(str, range(5000)))}, ["cells: found 10,000 runs"]),
    ({"grid": {"run.seed": [1, 2]}, "cells": None}, ["mine.yaml: seed=1, seed=2: found two cells"]),
    ({"cells": {"a": None}, "grid": {"x": {"a": None}}}, ["mine.yaml:6: cells: found cells of one name"]),
    ({"cells": {"a": None, "b": "method.kl_budget=0.05", "c": SFT}}, ["mine.yaml: a, b: found two cells"]),
    # Before anything starts, all problems of all cells; one of all cells is reported once, without the cells.
    (
        {"cells": {"a": "optimizer.learning_rate=x", "b": ["method.kl_budgte=1", "absent.yaml"], "c": None}},
        ["mine.yaml: a: override optimizer.learning_rate=x", "mine.yaml: b: absent.yaml: found no such file"],
    ),
    ({"common": ["optimizer.learning_rate=x"]}, ["override optimizer.learning_rate=x"]),
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("changes", "expected"), PROBLEMS)
def test_all_problems_are_reported_at_once(
    folder: Path, changes: dict[str, Any], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecipeError) as error:
        load_changed(**changes)
    for part in expected:
        assert sum(part in problem for problem in error.value.problems) == 1, part
    assert len(error.value.problems) >= len(expected)
    assert main(["sweep", "mine.yaml"]) == 2
    assert expected[0] in capsys.readouterr().err and not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: *nothing", "mine.yaml:1:9: found no YAML"),
        ("model: {path: a}", "mine.yaml: found no sweep; .* `recipe: FILE`"),
        ("- 1", "mine.yaml: found [[]1[]]"),
        ("recipe: a\nrecipe: b", "mine.yaml:2:1: found no YAML: the key recipe a second time"),
        (None, "mine.yaml: cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(folder: Path, text: str | None, message: str) -> None:
    if text is not None:
        Path("mine.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_sweep("mine.yaml")


def test_sequence_parallel_sizes_need_not_divide_unknown_heads_or_ranks(folder: Path) -> None:
    assert load_sweep(write(common=["batch.sequence_parallel=3"]), num_ranks=3).runs
    assert load_sweep(write(common=["batch.sequence_parallel=8", "probe.sequence_parallel=5"])).runs
    packed = ["data.cutoff_length=16384", "batch.pack_tokens_per_rank=4096"]
    assert load_sweep(write(common=packed)).runs
    with pytest.raises(RecipeError, match="batch.pack_tokens_per_rank: found"):
        load_sweep(write(common=[*packed, "batch.sequence_parallel=1"]), num_ranks=2)


PAGE = (SWEEPS[0].parents[2] / "docs" / "sweeps.md").read_text()


def test_the_sweep_that_the_documentation_writes_loads(folder: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    Path("mine.yaml").write_text(block)
    references = load_sweep("mine.yaml").references
    assert references["vcore,learning_rate=2e-05"] == "sft,learning_rate=2e-05" and references["dft"] is None
    assert all(f"`{name}`" in PAGE for name in references)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_shipped_sweep_is_documented_and_loads_from_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = load_sweep(path, num_ranks=4)
    assert re.search(rf"^\| `launch_scripts/sweeps/{path.stem}.yaml` \|.*\| {len(sweep.runs)} \|$", PAGE, re.MULTILINE)
    assert sweep.folder == Path("runs/sweeps") / path.stem
    assert {recipe.run.seed for recipe in sweep.runs.values()} == {42, 43, 44}
    compared = [reference for reference in sweep.references.values() if reference is not None]
    assert compared and all(sweep.references[reference] is None for reference in compared)


def test_the_papers_numbers_are_in_the_shipped_sweeps() -> None:
    recipes = {path.stem: load_sweep(path).runs.values() for path in SWEEPS}
    vcore = {name: [recipe for recipe in some if recipe.method.name == "vcore"] for name, some in recipes.items()}
    pairs = {(recipe.utility.epsilon, recipe.method.temperature) for recipe in vcore["tau_epsilon"]}
    assert pairs == {(1e-4, 5e3), (1e-4, 8e3), (1e-5, 5e4), (1e-5, 8e4)}
    assert {recipe.probe.batch_size for recipe in vcore["probe_batch"]} == {4, 8, 16, 32}
    settings = {(r.method.name, r.batch.global_size, r.optimizer.learning_rate) for r in recipes["batch_and_rate"]}
    changes = {(16, 2e-5), (64, 2e-5), (32, 1e-5), (32, 1e-4)}
    assert settings == {(method, *change) for method in ("sft", "dft", "vcore") for change in changes}
    assert len(recipes["set_size"]) == 8 * 3 and len(recipes["optimizers"]) == 6 * 3


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_a_sweep_can_be_resumed_and_extended(folder: Path) -> None:
    first = begin_sweep(load_changed())
    assert begin_sweep(load_changed()) == first == read_sweep_folder(Path("out"))
    begin_sweep(load_changed(common=["checkpoint.every_steps=7", "model.gradient_checkpointing=true"]))
    cells = {"dft": ["method.name=dft", "method.kl_budget=null"], "sft": SFT, "vcore": None}
    more = begin_sweep(load_changed(seeds=[0, 1, 2], cells=cells))
    # The numbers of tasks that may be in a queue stay.
    assert more.runs[:4] == first.runs and len(more.runs) == 9
    assert Path("out/runs.txt").read_text().splitlines() == more.runs
    assert set(more.references) == {"dft", "sft", "vcore"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"common": ["optimizer.learning_rate=0.2"]}, "sft/seed_1: optimizer.learning_rate: 0.1 there, 0.2 here"),
        ({"common": ["data.train_path=b.jsonl"]}, 'sft/seed_1: data.train_path: "train.jsonl" there, "b.jsonl" here'),
        ({"common": ["data.keep={scores: b, top: 0.5}"]}, 'sft/seed_1: data.keep.scores: "scores" there, "b" here'),
        ({"seeds": [1, 3]}, "sft/seed_2: found there, not in mine.yaml"),
        ({"cells": {"sft": SFT}}, "vcore/seed_1: found there, not in mine.yaml"),
    ],
)
def test_a_folder_with_other_runs_is_refused(folder: Path, changes: dict[str, Any], line: str) -> None:
    begin_sweep(load_changed(common=KEEP if "data.keep" in line else []))
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="out: holds a sweep with other runs") as error:
        begin_sweep(load_changed(**changes))
    assert f"\n  {line}\n" in str(error.value)
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


KEEP = ["data.keep.scores=scores", "data.keep.top=0.5"]


@pytest.fixture
def inputs(folder: Path) -> Path:
    """All that a run can read, in the working directory, and a sweep that has begun with them."""
    write_model(folder / "model")
    write_conversations(folder / "train.jsonl", sums(range(3)))
    write_conversations(folder / "probe.jsonl", sums(range(2)))
    (folder / "held_out").mkdir()
    write_conversations(folder / "held_out" / "a.jsonl", sums(range(1)))
    (folder / "scores").mkdir()
    (folder / "scores" / "scores.parquet").write_bytes(b"scores")
    return folder


READING = [
    *KEEP,
    "model.path=model",
    "data.train_path=train.jsonl",
    "data.probe_path=probe.jsonl",
    "data.validation_path={one: held_out, two: absent.jsonl}",
]


@pytest.mark.parametrize(
    ("key", "path", "file"),
    [
        ("data.keep.scores", "scores", "scores/scores.parquet"),
        ("data.train_path", "train.jsonl", "train.jsonl"),
        ("data.probe_path", "probe.jsonl", "probe.jsonl"),
        ("data.validation_path", "held_out", "held_out/b.jsonl"),
        ("model.path", "model", "model/config.json"),
    ],
)
def test_inputs_that_changed_since_the_sweep_began_are_refused(inputs: Path, key: str, path: str, file: str) -> None:
    sweep = begin_sweep(load_changed(common=READING))
    check_inputs(sweep)
    assert begin_sweep(load_changed(common=READING)) == sweep == read_sweep_folder(Path("out"))
    line = f"{key}: {path}: contents have changed since the sweep first read them"
    before = Path(file).read_bytes() if Path(file).exists() else None
    Path(file).write_bytes((before or b"") + b"\n")
    for again in (lambda: begin_sweep(load_changed(common=READING, seeds=[1, 2, 3])), lambda: run_here(sweep, 1)):
        with pytest.raises(UserError, match=f"out: holds a sweep with other runs:\n  {line}\n"):
            again()
    assert sweep.state(sweep.runs[0]) == State.WAITING and read_sweep_folder(Path("out")) == sweep
    if before is None:
        Path(file).unlink()
        Path(path).rename("moved")  # not here, as where a sweep is submitted from
    else:
        Path(file).write_bytes(before)
    assert begin_sweep(load_changed(common=READING)) == sweep


def test_inputs_that_appear_later_are_recorded_then(inputs: Path) -> None:
    """A run may download the weights of a hub id of which only the tokenizer is cached."""
    weights = Path("model/model.safetensors").rename("elsewhere")
    assert "model.path" not in begin_sweep(load_changed(common=READING)).inputs
    weights.rename("model/model.safetensors")
    write_conversations(Path("absent.jsonl"), sums(range(2)))
    later = begin_sweep(load_changed(common=READING)).inputs
    assert "model.path" in later and set(later["data.validation_path"]) == {"held_out", "absent.jsonl"}
    write_conversations(Path("absent.jsonl"), sums(range(4)))
    with pytest.raises(UserError, match=r"data.validation_path: absent.jsonl: "):
        begin_sweep(load_changed(common=READING))


def test_another_folder_is_left_alone(folder: Path) -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="out: is not a sweep's folder, and not empty"):
        begin_sweep(load_changed())
    with pytest.raises(UserError, match="out/sweep.yaml: cannot be read: No such file"):
        read_sweep_folder(Path("out"))
    for text in ("cells: [", "cells: {}\nruns: []"):  # the latter as up to 0.7, without inputs
        Path("out/sweep.yaml").write_text(text)
        with pytest.raises(UserError, match="out/sweep.yaml:"):
            read_sweep_folder(Path("out"))


def set_state(sweep: SweepFolder, run: str, log: str, code: int | None) -> None:
    path = sweep.log_path(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(log)
    if code is not None:
        sweep.exit_path(run).write_text(f"{code}\n")


def test_the_states_of_runs_are_read_from_their_logs(folder: Path) -> None:
    sweep = begin_sweep(load_changed(seeds=[1, 2, 3]))
    done, failed, crashed, stopped, running, _ = sweep.runs
    (sweep.run_folder(done) / "model").mkdir(parents=True)
    set_state(sweep, failed, f"vcore-ds: an older message\n{ATTEMPT} 2\nvcore-ds: no such file\n=====\n", 2)
    set_state(sweep, crashed, f"{ATTEMPT} 1\nTraceback:\n  line\nRuntimeError: out of memory\n\n", -9)
    set_state(sweep, stopped, f"{ATTEMPT} 1\n", 85)
    set_state(sweep, running, f"{ATTEMPT} 1\n", 1)
    with sweep.log_path(running).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        expected = [State.DONE, State.FAILED, State.FAILED, State.STOPPED, State.RUNNING, State.WAITING]
        assert [sweep.state(run) for run in sweep.runs] == expected
        with sweep.lock_log(running) as log:
            assert log is None
        lines = describe(sweep).splitlines()
    assert sweep.state(running) == State.FAILED  # its process is gone
    assert lines[1].endswith("exit code 2: vcore-ds: no such file")
    assert lines[2].endswith("exit code -9: RuntimeError: out of memory")
    assert lines[-1] == "6 runs in out: 1 done, 1 running, 2 failed, 1 stopped, 1 waiting"


def test_a_run_that_another_process_finishes_meanwhile_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, lock_log = begin_sweep(load_changed(seeds=[1])), SweepFolder.lock_log

    def finish_and_lock(self: SweepFolder, run: str) -> AbstractContextManager:
        (self.run_folder(run) / "model").mkdir(parents=True)  # by the process that had the lock
        return lock_log(self, run)

    monkeypatch.setattr(SweepFolder, "lock_log", finish_and_lock)
    run_here(sweep, num_ranks=1)
    assert f"{sweep.runs[0]}: done already" in capsys.readouterr().out
    assert sweep.exit_code(sweep.runs[0]) is None and sweep.state(sweep.runs[0]) == State.DONE


def test_misuse_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--gpu=H100"], "--gpu: found without --dry-run"),
        (["--sbatch=--nodes=2"], "--sbatch: found without --slurm"),
        (["run.seed=3"], "found run.seed=3 after the sweep file"),
    ):
        assert main(["sweep", str(write()), *words]) == 2
        assert message in capsys.readouterr().err


# ---- a plan ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_the_hours_of_the_plan_and_what_is_refused(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = ["model.path=Qwen/Qwen3-4B", "lora={rank: 8, alpha: 16}", "schedule.num_steps=50"]
    large.append("model.gradient_checkpointing=true")
    cells = {
        "small": ["model.path=model"],
        "large": large,
        "too_large": [*large, "lora=null", "model.path=Qwen/Qwen3-32B"],
        "no_data": ["model.path=model", "data.probe_path=absent.jsonl"],
        "no_rows": ["model.path=model", "data.validation_path=broken.jsonl"],
        "no_model": ["model.path=models/absent"],
    }
    Path("broken.jsonl").write_text("{}\n")
    assert main(["plan", "base.yaml", *large, "--gpus", "2", "--gpu", "H100", "--json"]) == 0
    (plan,) = (one for one in json.loads(capsys.readouterr().out) if one["title"] == "vcore")
    hours = 50 * plan["gpu_hours_per_100_steps"] / 100
    path, before = write(cells=cells), sorted(inputs.rglob("*"))
    assert main(["sweep", str(path), "--dry-run", "--ranks", "2"]) == 2
    (text, error), refused = capsys.readouterr(), ("too_large", "no_data", "no_rows", "no_model")
    *lines, last = text.splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert "2 runs  Plan on 2 H100: fits, " in rows["large"] and f"{hours:,.1f} GPU hours for 50 steps" in rows["large"]
    assert {name for name, row in rows.items() if row.endswith("refused")} == {*refused}
    total = re.match(r"12 runs, ([0-9.]+) GPU hours in all", last)
    assert total is not None and float(total[1]) == pytest.approx(2 * hours, rel=0.01)  # the tiny model's cost little
    assert "4 of 6 cells would be refused" in error
    for cell, named in zip(refused, ("memory", "absent.jsonl", "broken.jsonl", "models/absent"), strict=True):
        assert any(f"  {cell}: " in line and named in line for line in error.splitlines()), cell
    assert sorted(inputs.rglob("*")) == before
    # Finished runs cost nothing more, and what the sweep itself would refuse is refused.
    begun = begin_sweep(load_changed(cells={"small": cells["small"]}))
    (begun.run_folder("small/seed_2") / "model").mkdir(parents=True)
    assert main(["sweep", str(write(cells={"small": cells["small"]})), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("small  1 run  Plan on 1 H100: fits, ")
    assert main(["sweep", str(write(cells={"other": cells["small"]})), "--dry-run"]) == 2
    assert "small/seed_1: found there" in capsys.readouterr().err


# ---- tables ----------------------------------------------------------------------------------------------------------


def read_rows(text: str) -> list[list[str]]:
    """Rows of the tables in a Markdown text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_report_writes_the_tables_of_a_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = begin_sweep(load_changed(seeds=[1, 2, 3], reference="sft"))
    assert main(["report", "out"]) == 2
    assert "out: found no finished run of this sweep" in capsys.readouterr().err
    losses = {"sft": [1.0, 2.0, 3.0], "vcore": [0.9, 1.8, 2.9]}
    finish_runs(sweep, sweep.runs[:-1], lambda recipe: losses[recipe.method.name][recipe.run.seed - 1])
    assert main(["report", "out"]) == 0
    text, page = Path("out/report.md").read_text(), Path("out/report.html").read_text()
    shown = capsys.readouterr().out
    assert "5 of 6 runs are done; " in text and "5 of 6 runs are done; " in shown
    rows = read_rows(text)
    lines = shown[shown.index(title := "All cells, losses in nats\n") :].splitlines()[1:4]
    assert [line.split() for line in lines] == [" ".join(row).split() for row in (rows[0], *rows[2:])]
    assert f"**{title.strip()}**\n\n| method" in text
    losses = ["held-out loss", "spread", "difference", "training loss", "spread", "difference"]
    assert rows[0] == ["method", "seeds", *losses, "s a step", "hours x ranks", "verdict"] and len(rows) == 4
    half, costs = stats.t.ppf(0.975, 2) / math.sqrt(3), ["4", f"{20 * 4 * 2 / 3600:.3g}"]
    assert rows[2] == [
        "sft",
        "3",
        f"2.0000 ± {half:.4f}",
        "2.0000",
        "",
        f"2.5000 ± {half:.4f}",
        "2.0000",
        "",
        *costs,
        "",
    ]
    # Two seeds support no interval, and their difference of 0.9 is larger than the distance of 0.65 to sft.
    assert rows[3] == ["vcore", "2", "1.3500", "0.9000", "-0.1500", "1.8500", "0.9000", "-0.1500", *costs, OVERLAPS]
    for part in ("<h2>Sweep</h2>", "5 of 6 runs are done", '"groups":["sft (3 runs)","vcore (2 runs)"]'):
        assert part in page

    Path("README.md").write_text("the user's")
    assert main(["report", "out", "--output", "README.html"]) == 0
    assert shown.partition("\n\nout/")[0] in capsys.readouterr().out and Path("README.html").read_text() == page
    assert Path("README.md").read_text() == "the user's"
    assert main(["report", "out", "out/runs/sft/seed_1"]) == 2
    assert "found a sweep among 2 folders" in capsys.readouterr().err

    token = sweep.run_folder("vcore/seed_1") / "held_out.json"  # a mean over tokens is not compared with the others
    token.write_text('{"before": {}, "after": {"": 7}, "normalization": "token"}')
    assert main(["report", "out"]) == 0
    head, _, _, row, *_ = read_rows(Path("out/report.md").read_text())
    assert row[:5] == ["vcore", "2", "1.8000", "", "-0.2000"]
    assert row[head.index("held-out loss, mean over tokens")] == "7.0000"


@pytest.mark.parametrize(
    ("losses", "verdicts"),
    [
        ({"a": [1.0, 1.1], "b": [1.2, 1.5], "c": [1.5]}, {"a": "best", "b": OVERLAPS}),  # 0.1 < 0.3, 0.3 > 0.15
        ({"a": [1.0, 1.3], "b": [1.2, 1.3]}, {"a": OVERLAPS}),  # 0.3 > 0.1: no cell is best
        ({"a": [1.0], "b": [1.2], "c": [9.5]}, {"a": "best", "c": ROSE}),
        ({"a": [9.2, 9.1], "b": [9.0, 9.5]}, {"a": ROSE, "b": ROSE}),  # all above the 9 of the start
        ({"a": [1.0, 2.0]}, {}),
    ],
)
def test_a_cell_is_best_if_its_seeds_agree_and_it_has_learnt(losses: dict, verdicts: dict) -> None:
    cells = [
        SettingRuns(name, [], {}, "", {}, {"loss": dict(enumerate(some))}, {"loss": [loss - 9 for loss in some]})
        for name, some in losses.items()
    ]
    assert judge_cells(cells, "loss", by_line=True) == verdicts
    assert [one.name for one in find_best(cells, "loss")] == [
        min(losses, key=lambda name: sum(losses[name]) / len(losses[name]))
    ]
