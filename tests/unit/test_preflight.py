"""Reports of nodes that differ; tests/slurm runs the preflight on two nodes."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.commands import REPOSITORY, command_environment
from tests.helpers.recipes import smallest_recipe
from vcore_ds.commands import preflight
from vcore_ds.commands.preflight import (
    KIND,
    Node,
    compute_output_bytes,
    find_differences,
    find_slow_gpus,
    find_unreadable,
)
from vcore_ds.common.paths import is_readable
from vcore_ds.config.schema import Recipe
from vcore_ds.models.architecture_check import count_parameters
from vcore_ds.planning.passes import ParameterCounts

FACTS = {"torch": "2.13.0", "deepspeed": "0.19.8", "commit": "a1", KIND: "NVIDIA B200"}


@pytest.mark.parametrize(
    ("bad", "start"),
    [
        ({"deepspeed": "0.18.0"}, "n1: deepspeed: found 0.18.0, expected 0.19.8 as on 3 of 4 nodes. "),
        ({"commit": None}, "n1: commit: found none, expected a1 as on 3 of 4 nodes. "),
        ({"extra": "1"}, "n1: extra: found 1, expected none as on 3 of 4 nodes. "),
        ({KIND: "NVIDIA H100"}, "n1: kind of GPU: found NVIDIA H100, expected NVIDIA B200 as on 3 of 4 nodes. "),
    ],
)
def test_one_bad_node_is_one_line_with_a_remedy(bad: dict, start: str) -> None:
    """The first of four nodes differs: most are right, not the first."""
    others = [Node(f"n{i}", FACTS, ()) for i in (2, 3, 4)]
    assert list(find_differences(others)) == []
    (problem,) = find_differences([Node("n1", FACTS | bad, ()), *others])
    assert problem.startswith(start), problem


def test_a_node_says_what_it_lacks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SHARED_FOLDER_SECONDS", 0.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    recipe, mark = make_recipe(model, tmp_path / "run"), tmp_path / "mark of rank 0"
    recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"tensor": 4})})
    monkeypatch.setattr(preflight, "TEMPORARY_BYTES", 2**60)
    monkeypatch.setattr(preflight, "compute_output_bytes", lambda _: 2**60)
    node = preflight.inspect(recipe, mark, 6)
    keys = Counter(problem.partition(": found ")[0] for problem in node.problems)
    expected = {"GPUs": 1, "parallel.tensor": 1, "run.output_dir": 1, "free disk": 2}
    assert {key: keys[key] for key in expected} == expected and node.facts["torch"] == torch.__version__
    monkeypatch.undo()
    monkeypatch.setenv("RANK", "1")
    mark.touch()
    assert not expected.keys() & {line.partition(": ")[0] for line in preflight.inspect(recipe, mark, 8).problems}


def test_a_mark_that_cannot_be_made_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert preflight.make_mark(tmp_path).exists()
    assert not preflight.make_mark(tmp_path / "missing").exists()


def test_a_slow_gpu_is_named() -> None:
    speeds = [("n1", 700.0), ("n1", 690.0), ("n2", 500.0), ("n2", 710.0)]
    (problem,) = find_slow_gpus(speeds)
    assert problem.startswith("n2: rank 2: found 500 TFLOP/s")
    assert find_slow_gpus(speeds[:2]) == find_slow_gpus([("n1", 1.0)]) == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.qwen3().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def make_recipe(model: Path, output: Path, **sections) -> Recipe:
    values = smallest_recipe() | sections
    values["model"] |= {"path": str(model), "precision": "fp32"}
    values["run"] |= {"output_dir": str(output)}
    return Recipe.model_validate(values)


def test_the_needed_space_counts_checkpoints_and_result(model: Path, tmp_path: Path) -> None:
    num_all = sum(parameter.numel() for parameter in tiny.qwen3().parameters())
    full = make_recipe(model, tmp_path / "run", checkpoint={"keep_last": 2})
    assert count_parameters(full.model.path, full.lora) == ParameterCounts(num_all, num_all)
    # Three checkpoints of master, two moments and direction, then the result.
    assert compute_output_bytes(full) == 3 * num_all * (12 + 4) + num_all * 4
    for step in (1, 2):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "COMPLETE").touch()
    assert compute_output_bytes(full) == num_all * (12 + 4) + num_all * 4

    assert compute_output_bytes(make_recipe(tmp_path / "none", tmp_path / "other")) is None

    adapters = make_recipe(model, tmp_path / "other", lora={"rank": 4, "alpha": 8})
    num_trained = sum(p.numel() for p in tiny.with_lora(tiny.qwen3()).parameters() if p.requires_grad)
    assert count_parameters(adapters.model.path, adapters.lora).trained == num_trained


def test_the_needed_space_counts_the_shards_of_all_tensor_parallel_ranks(model: Path, tmp_path: Path) -> None:
    unsharded = make_recipe(model, tmp_path / "run")
    needed = compute_output_bytes(unsharded)
    sharded = unsharded.model_copy(
        update={
            "model": unsharded.model.model_copy(update={"provider": "megatron"}),
            "parallel": unsharded.parallel.model_copy(update={"tensor": 2}),
        }
    )
    assert needed < compute_output_bytes(sharded) < 1.05 * needed  # each part has whole norms


@pytest.mark.parametrize(
    ("source", "is_missing"),
    [
        ("here/*.jsonl", False),
        ("here/*.parquet", True),
        ("set[1]/part.jsonl", False),
        ("set[2]/part.jsonl", True),
        ("here/typo", True),
        ("typo.jsonl", True),
        ("elsewhere/typo.jsonl", True),
        ("owner/name", False),
    ],
)
def test_missing_data_is_reported_unless_it_can_be_on_the_hub(
    source: str, is_missing: bool, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "set[1]"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.jsonl").touch()
    sections = {"model": {"path": "./none"}, "data": {"train_path": source}}  # a path that the hub is not asked for
    unreadable = [
        line.partition(":")[0] for line in find_unreadable(Recipe.model_validate(smallest_recipe() | sections))
    ]
    assert ("data.train_path" in unreadable) == is_missing, unreadable
    assert is_readable(source) != (is_missing or source == "owner/name")  # by which `vcore-ds check` says the same


def test_no_thread_of_the_network_outlives_the_check(model: Path, tmp_path: Path) -> None:
    """One that does can abort the interpreter at its end, although all nodes are fit."""
    code = """if True:
        import sys
        from pathlib import Path
        from vcore_ds.commands.cli import main
        assert main(["preflight", *sys.argv[1:]]) == 0
        names = {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
        print("threads:", *sorted(name for name in names if "gloo" in name or "store" in name))
    """
    changes = [f"model.path={model}", f"data.train_path={model / 'config.json'}", "data.validation_path=null"]
    words = [sys.executable, "-c", code, "qwen3_8b_math_full.yaml", *changes, f"run.output_dir={tmp_path / 'run'}"]
    done = subprocess.run(words, cwd=REPOSITORY, env=command_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "threads:"
