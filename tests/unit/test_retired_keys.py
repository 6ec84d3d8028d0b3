"""Runs of version 0.6 whose recipe has a key that was removed: every command reads them, and none trains by them."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers import exports
from tests.helpers.report_runs import random_sequence, step_line, write_run
from tests.helpers.setups import write_model
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main
from vcore_ds.commands.named_model import find_named_model
from vcore_ds.commands.plan.columns import calibrate
from vcore_ds.commands.report.read import group_runs, read_runs
from vcore_ds.commands.score.request import make_request
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.resume import read_resolved_recipe
from vcore_ds.train.run_folder import can_resume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RETIRED = {"probe.source": ("source: previous_step", "previous_step"), "probe.decay": ("decay: 0.9", 0.9)}


def add_old_key(run: Path, line: str, section: str = "probe") -> Path:
    recipe = run / "recipe.yaml"
    text = recipe.read_text()
    assert text.count(f"\n{section}:\n") == 1
    recipe.write_text(text.replace(f"\n{section}:\n", f"\n{section}:\n  {line}\n"))
    return run


def write_finished_run(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    ids = tokenizer("so \\boxed{42} is right", add_special_tokens=False)["input_ids"]
    records = {2: [random_sequence(ids, i, seed=i, share=0.5) for i in range(2)]}
    engine = {"deepspeed_config": "ds_configs/zero3_fp32.json"}
    return write_run(folder, tokenizer, [step_line(1), step_line(2)], records, engine=engine)


@pytest.fixture(params=RETIRED)
def key(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(tmp_path: Path, key: str) -> Path:
    return add_old_key(write_finished_run(tmp_path / "run"), RETIRED[key][0])


def test_the_recipe_keeps_the_value_of_the_key_separately(run: Path, key: str) -> None:
    recipe = read_resolved_recipe(run / "recipe.yaml", accept_retired=True)
    assert recipe.retired == {key: RETIRED[key][1]}
    assert recipe.with_retired({}) == load_recipe(write_finished_run(run.parent / "other") / "recipe.yaml").model_copy(
        update={"run": recipe.run}
    )


def test_report_notes_the_key_and_groups_the_run_apart(run: Path, key: str) -> None:
    assert main(["report", str(run)]) == 0
    assert RETIRED[key][0] in (run / "report.html").read_text()
    other_run = write_finished_run(run.parent / "other")
    runs = read_runs([run, other_run], top=5, tokenizer_path=None)
    assert f"{key}: {RETIRED[key][1]}" in runs[0].notes[0] and not runs[1].notes
    assert len(group_runs(runs)) == 2  # as two seeds of one recipe they would be one curve
    add_old_key(other_run, RETIRED[key][0])
    assert len(group_runs(read_runs([run, other_run], top=5, tokenizer_path=None))) == 1


def test_report_prints_the_tokens_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--text"]) == 0
    assert "digit" in capsys.readouterr().out


def test_score_reads_the_run_and_refuses_the_key_as_an_override(run: Path, key: str) -> None:
    checkpoint = run / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    output = run / "scores"
    request = make_request(str(run), ["data.probe_path=trusted.jsonl"], (), None, output)
    assert [checkpoint.step for checkpoint in request.checkpoints] == [2]
    with pytest.raises(UserError, match="ends with vcore_ds 0.6"):
        make_request(str(run), ["data.probe_path=trusted.jsonl", f"{key}={RETIRED[key][1]}"], (), None, output)


def test_the_exported_model_card_shows_the_key(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_model(tmp_path / "base")
    masters = {f"causal_lm.{n}": p for n, p in AutoModelForCausalLM.from_pretrained(base).named_parameters()}
    run = add_old_key(exports.write_run(tmp_path / "run", base, masters, lora=False), RETIRED[key][0])
    assert main(["export", str(run), "--base-model", "owner/base"]) == 0, capsys.readouterr().err
    card = (run / "export" / "step_00000020" / "model" / "README.md").read_text()
    assert f"\n  {RETIRED[key][0]}\n" in card


def test_evaluation_and_chat_load_the_result_of_the_run(run: Path) -> None:
    write_model(run / "model")
    assert find_named_model(str(run)).weights == str(run / "model")


def test_plan_is_not_calibrated_on_steps_of_another_cost(run: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"found {key}, keys of an earlier version"):
        calibrate(str(run))


def test_training_and_check_refuse_the_key(run: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(run / "recipe.yaml")]) == 2
    assert f"{key}: found" in (said := capsys.readouterr().err) and "ends with vcore_ds 0.6" in said
    recipe = load_recipe(write_finished_run(run.parent / "other") / "recipe.yaml", [f"run.output_dir={run}"])
    (run / "model").rename(run / "elsewhere")  # as a run that was stopped
    with pytest.raises(UserError, match="ends with vcore_ds 0.6"):
        can_resume(recipe)


def test_a_run_with_a_renamed_key_is_read_and_resumed(tmp_path: Path) -> None:
    run = write_finished_run(tmp_path / "run")
    path = run / "recipe.yaml"
    recipe = load_recipe(path, ["batch.pack_tokens_per_rank=4096"])
    path.write_text(dump_recipe(recipe).replace("pack_tokens_per_rank: 4096", "packed_row_tokens: 4096"))
    assert read_resolved_recipe(path) == read_resolved_recipe(path, accept_retired=True) == recipe
    assert load_recipe(path, accept_retired=True) == recipe
    (run / "model").rename(run / "elsewhere")  # as a run that was stopped
    assert can_resume(recipe)
    with pytest.raises(
        UserError, match=r'packed_row_tokens: found 4096 .* did you mean "batch.pack_tokens_per_rank"\?'
    ):
        load_recipe(path)


@pytest.mark.parametrize("value", ["null", "mine"])
def test_a_run_with_a_wandb_project_is_read_and_resumed(tmp_path: Path, value: str) -> None:
    """The key changed nothing that a run computes."""
    run = add_old_key(write_finished_run(tmp_path / "run"), f"wandb_project: {value}", "run")
    recipe = read_resolved_recipe(run / "recipe.yaml")
    assert recipe == read_resolved_recipe(run / "recipe.yaml", accept_retired=True) and recipe.retired == {}
    assert len(group_runs(read_runs([run, write_finished_run(tmp_path / "other")], top=5, tokenizer_path=None))) == 1
    (run / "model").rename(run / "elsewhere")  # as a run that was stopped; nothing after this looks for its tokenizer
    assert can_resume(recipe)
    if value == "mine":
        with pytest.raises(UserError, match="Write track.trackers="):
            load_recipe(run / "recipe.yaml")
    else:
        assert load_recipe(run / "recipe.yaml") == recipe
