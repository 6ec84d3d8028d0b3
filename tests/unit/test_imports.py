"""Imports of packages of which a part is used, and imports that last."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vcore_ds.common.imports import SWITCH, without_compiler
from vcore_ds.config.load import dump_recipe, load_recipe

CODE = """
import gc
from vcore_ds.common.imports import lasting_imports

try:
    with lasting_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        raise ImportError
except ImportError:
    pass
assert gc.isenabled() and gc.get_freeze_count() > 1000
assert not any(kept is made for kept in gc.get_objects())
frozen = gc.get_freeze_count()
with lasting_imports():
    assert gc.isenabled()
    later = [[] for _ in range(1000)]
assert gc.get_freeze_count() <= frozen and any(kept is later for kept in gc.get_objects())
"""

REFUSED = """
import contextlib, io, sys
from vcore_ds.commands.cli import main

for line in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = main(line.split())
    heavy = [name for name in ("torch", "transformers", "peft", "deepspeed", "datasets") if name in sys.modules]
    assert code == 2 and not heavy, (line, code, heavy, errors.getvalue())
    print(errors.getvalue().splitlines()[0])
"""


@pytest.mark.parametrize("before", [None, "0"])
def test_a_module_that_is_imported_without_the_compiler_keeps_its_functions(tmp_path, monkeypatch, before):
    monkeypatch.delenv(SWITCH, raising=False)
    if before is not None:
        monkeypatch.setenv(SWITCH, before)
    name = f"compiles_on_import_{before}"
    (tmp_path / f"{name}.py").write_text("import torch\n\n\n@torch.compile\ndef double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    with without_compiler():
        module = importlib.import_module(name)
    assert not hasattr(module.double, "_torchdynamo_orig_callable") and module.double(3) == 6
    assert os.environ.get(SWITCH) == before
    assert hasattr(torch.compile(module.double), "_torchdynamo_orig_callable")


def test_lasting_imports_are_excluded_from_garbage_collection_once() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_is_missing_or_there_already_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    """The import takes ten seconds: one process tries everything, which would show what an earlier command imported."""
    recipe = tmp_path / "recipe.yaml"
    run, model, there, gone, data = (tmp_path / name for name in ("run", "model", "there", "gone", "data.jsonl"))
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    words = [f"model.path={model}", f"data.train_path={data}", f"run.output_dir={run}", "lora.rank=8", "lora.alpha=8"]
    words += [
        "optimizer.learning_rate=0.1",
        "schedule.num_steps=2",
        "engine.deepspeed_config=ds_configs/zero3_bf16.json",
    ]
    recipe.write_text(dump_recipe(load_recipe("methods/sft", words)))
    for folder in (model, run / "adapter", run / "checkpoints" / "step_00000002", there):
        folder.mkdir(parents=True)
    (run / "recipe.yaml").write_text(recipe.read_text())
    (there / "evaluation.json").touch()
    new = f"run.output_dir={tmp_path / 'new'}"
    cases = {
        f"train {recipe}": f"{run}: holds a run that has finished",
        f"train {recipe} {new} data.train_path={gone}.jsonl": f"{gone}.jsonl: there is no such file",
        f"train {recipe} {new} model.path={gone}": f"model.path: {gone}: no such folder",
        f"train {recipe} {new} checkpoint.branch_from={gone}": f"checkpoint.branch_from: {gone}",
        f"train {recipe} {new} data.keep.scores={gone} data.keep.top=0.5": "data.keep.scores",
        f"reference {recipe} lora=null data.train_path={gone}.jsonl --output {tmp_path}/r.npz": f"{gone}.jsonl",
        f"fidelity {recipe} model.path={gone}": f"model.path: {gone}",
        f"chat {gone}": f"{gone}: no such folder",
        f"chat {there}": f"{there}: found no run, adapter or model",
        f"eval {gone} --output {tmp_path}/e": f"{gone}: no such folder",
        f"eval {gone} --output {there}": f"{there}/evaluation.json: is there already",
        f"eval {run} --output {tmp_path}/e --tasks mine={gone}.jsonl": f"{gone}.jsonl",
        f"score {gone} --data {data} --set a={data} --output {tmp_path}/s": f"model.path: {gone}",
        f"score {model} --data {gone}.jsonl --set a={data} --output {tmp_path}/s": f"{gone}.jsonl",
        f"score {model} --data {data} --set a={gone}.jsonl --output {tmp_path}/s": f"{gone}.jsonl",
        f"score {run} --set a={data} --checkpoint none --output {tmp_path}/s": "--checkpoint",
        f"export {gone}": f"{gone}: found no recipe.yaml",
        f"export {run} --output {there}": f"{there}: is there already",
        f"export {run} --checkpoint none": "expected none",
        f"keep {gone} --top 0.5 --output {tmp_path}/k.jsonl": f"{gone}: ",
        f"keep {gone} --weights kl_budget=0.1 --output {tmp_path}/k.parquet": f"{gone}: ",
        f"prepare {gone}.jsonl --tokenizer {model} --output {tmp_path}/p": f"{gone}.jsonl",
        f"prepare {data} --tokenizer {gone} --output {tmp_path}/p": f"--tokenizer: {gone}",
        f"prepare {data} --tokenizer {gone} --output {there}": f"{there}: is there already",
        f"prepare {gone}.jsonl --tokenizer {gone} --show 1": f"{gone}.jsonl",
    }
    done = subprocess.run([sys.executable, "-c", REFUSED, *cases], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for said, expected in zip(done.stdout.splitlines(), cases.values(), strict=True):
        assert expected in said
