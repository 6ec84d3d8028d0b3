"""Runs, checkpoints and adapters from which a recipe goes on: what is taken, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.helpers.exports import write_checkpoint, write_run
from tests.helpers.recipes import find_problem, smallest_recipe, write_yaml
from tests.helpers.setups import write_model
from vcore_ds.commands.export.write import export_run
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import load_recipe
from vcore_ds.models.lora import build_empty_adapted_model, load_adapter
from vcore_ds.models.model_identity import check_adapter_base, compute_model_digest
from vcore_ds.training.run_folder import set_aside_result

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is_gradient_checkpointing")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    ds_config = write_yaml(tmp_path / "ds.json", "{}")
    return write_yaml(tmp_path / "mine.yaml", smallest_recipe() | {"engine": {"deepspeed_config": str(ds_config)}})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of plain peft."""
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "base"))
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "up_proj"])
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_run_and_a_checkpoint_stand_for_their_export(recipe: Path, tmp_path: Path) -> None:
    model = tiny.with_lora(AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "base")))
    masters = {f"causal_lm.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    run = write_run(tmp_path / "a run", tmp_path / "base", masters, lora=True)
    paths = {"": run, " --checkpoint step_00000020": run / "checkpoints" / "step_00000020"}
    for key, kind, option in (("model.path", "merged", " --merge"), ("lora.adapter", "adapter", "")):
        for checkpoint, named in paths.items():
            problem = find_problem(recipe, f"{key}={named}")
            assert f"{key}: {named}: " in problem and f"vcore-ds export '{run}'{option}{checkpoint}`" in problem
        exported = export_run(run, merge=kind == "merged")
        for named in paths.values():
            loaded = load_recipe(recipe, [f"{key}={named}"])
            assert str(exported) == (loaded.model.path if kind == "merged" else loaded.lora.adapter)
    assert (loaded.lora.rank, loaded.lora.alpha, loaded.lora.target_modules) == (4, 12.0, "all-linear")
    write_checkpoint(run, 20, {name: 2 * master for name, master in masters.items()})
    assert f"in {exported};" in find_problem(recipe, f"lora.adapter={run}"), "an export of earlier weights"
    export_run(run, checkpoint="step_00000020", output=tmp_path / "finished").rename(run / "adapter")
    shutil.rmtree(run / "checkpoints")
    assert f"lora.adapter: {named}: " in find_problem(recipe, f"lora.adapter={named}"), "no digest to compare"
    merged = export_run(run, merge=True)
    assert load_recipe(recipe, [f"model.path={run}"]).model.path == str(merged) == f"{run}/export/adapter/merged"
    weights = run / "adapter" / "adapter_model.safetensors"
    save_file({name: 2 * x for name, x in load_file(weights).items()}, weights)
    assert f"in {merged};" in find_problem(recipe, f"model.path={run}"), "a merged export of an earlier adapter"
    for text in ("lora: [", "lora: null", "lora: {rank: 1}\nmodel: 1", "[" * 9999):
        (run / "recipe.yaml").write_text(text)
        assert f"{run / 'recipe.yaml'}: is damaged" in find_problem(recipe, f"model.path={run}")


def test_results_that_are_set_aside_replace_none(tmp_path: Path) -> None:
    """The run has no checkpoints, whose steps could name them; the last has the same number of steps."""
    for number, step in enumerate((2, 5, 5), start=1):
        (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i + 1}}}\n' for i in range(step)))
        write_yaml(tmp_path / "model" / "number", str(number))
        write_yaml(tmp_path / "held_out.json", str(number))
        set_aside_result(tmp_path, 0, is_adapter=False)
    kept = {path.name: path.read_text() for path in tmp_path.glob("held_out*")}
    assert kept == {f"held_out_step_0000000{name}.json": text for name, text in (("2", "1"), ("5", "2"), ("5_2", "3"))}
    assert len({path.read_text() for path in tmp_path.glob("model_step_*/number")}) == 3


def test_what_has_no_adapter_is_none(recipe: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "full", tmp_path / "base", {}, lora=False)
    assert f"lora.adapter: {run}" in find_problem(recipe, f"lora.adapter={run}")
    assert "no_such" in find_problem(recipe, "lora.adapter=no_such")


CASES = [
    {"use_dora": True},
    {"rank_pattern": {"q_proj": 8}},
    {"modules_to_save": ["lm_head"]},
    {"bias": "all"},
    {"init_lora_weights": "pissa"},
    {"target_modules": ".*q_proj"},
    {"peft_type": "IA3"},
]


@pytest.mark.parametrize("fields", CASES)
def test_fields_of_other_adapters_are_named(fields: dict, adapter: Path, recipe: Path) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert f"adapter_config.json: {next(iter(fields))}: found" in find_problem(recipe, f"lora.adapter={adapter}")


def test_rank_alpha_and_layers_are_those_of_the_adapter(adapter: Path, recipe: Path, tmp_path: Path) -> None:
    words = [f"lora.adapter={adapter}", f"model.path={tmp_path}/base"]
    loaded = load_recipe(recipe, words)
    lora, path = loaded.lora, loaded.model.path
    assert (lora.rank, lora.alpha, set(lora.target_modules)) == (4, 6.0, {"q_proj", "up_proj"})
    load_adapter(build_empty_adapted_model(path, lora), adapter)
    assert "lora.alpha: found 8; expected 6" in find_problem(recipe, *words, "lora.alpha=8")
    others = build_empty_adapted_model(path, lora.model_copy(update={"target_modules": "all-linear"}))
    with pytest.raises(UserError, match="lora.target_modules"):
        load_adapter(others, adapter)
    shutil.rmtree(adapter)
    assert load_recipe(recipe, [*words, "lora.rank=4", "lora.alpha=6"]).lora.adapter == str(adapter)
    with pytest.raises(UserError, match=f"lora.adapter: {adapter}"):
        load_adapter(others, adapter)


def test_another_base_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert check_adapter_base(adapter, str(base)) is None
    with pytest.raises(UserError, match=f"model.path: found {tmp_path}/other"):
        check_adapter_base(adapter, f"{tmp_path}/other")
    copy, retrained = (Path(shutil.copytree(base, tmp_path / name / "base")) for name in "ab")
    assert check_adapter_base(adapter, str(copy)) is None
    weights = load_file(retrained / "model.safetensors")
    save_file({name: 2 * x for name, x in weights.items()}, retrained / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"model.path: found {retrained}"):
        check_adapter_base(adapter, str(retrained))
    moved = base.rename(tmp_path / "moved")
    assert f"{base} or its weights are not on this machine" in (check_adapter_base(adapter, str(copy)) or "")
    moved.rename(base)
    (adapter / "README.md").write_text(f"---\nbase_digest: {compute_model_digest(str(base))}\n---\n")
    check_adapter_base(adapter, str(base.rename(tmp_path / "moved")))
    write_model(base, tied=True)
    with pytest.raises(UserError, match=f"model.path: found {base}"):
        check_adapter_base(adapter, str(base))
