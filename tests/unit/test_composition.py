"""Recipes from several files: what wins, where a value comes from, and what cannot be read."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch_scripts import quickstart
from launch_scripts.quickstart import RECIPE as QUICKSTART
from launch_scripts.quickstart import load_with_additions, prepare_files
from tests.helpers.recipes import find_problem, find_problems, smallest_recipe
from tests.helpers.recipes import write_yaml as write
from vcore_ds.commands.cli import launch, main
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import SHIPPED_RECIPES, dump_recipe, load_recipe, merge_files
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import LoraConfig
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.settings import derive_plan_settings

Sections = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe that loads in `whole.yaml`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    write(tmp_path / "whole.yaml", smallest_recipe())
    return tmp_path


# ---------------------------------------------------------------- what wins


def test_bases_merge_key_by_key_and_the_file_itself_comes_last(folder: Path) -> None:
    assert merge_files("whole.yaml").values == smallest_recipe()
    write(folder / "common.yaml", {"run": {"seed": 0, "validate_every": 3}})
    write(folder / "a.yaml", {"base": "common.yaml", "run": {"seed": 1, "log_every": 1}, "model": {"path": "a"}})
    write(folder / "b.yaml", {"base": "common.yaml", "run": {"log_every": 2}, "data": {"train_path": "b"}})
    write(folder / "c.yaml", {"base": ["a.yaml", "b.yaml"], "run": {"output_dir": "c"}})
    assert merge_files("c.yaml").values == {
        "run": {"seed": 0, "validate_every": 3, "log_every": 2, "output_dir": "c"},  # b.yaml's own base wins over a
        "model": {"path": "a"},
        "data": {"train_path": "b"},
    }
    write(folder / "d.yaml", {"base": []} | smallest_recipe())
    assert load_recipe("d.yaml") == load_recipe("whole.yaml")


def test_lists_and_null_replace_what_was_there(folder: Path) -> None:
    lora = {"rank": 8, "alpha": 16, "dropout": 0.1, "target_modules": ["q", "k"]}
    write(folder / "lora.yaml", {"base": "whole.yaml", "lora": lora})
    write(folder / "list.yaml", {"base": "lora.yaml", "lora": {"target_modules": ["v"]}})
    assert load_recipe("list.yaml").lora == LoraConfig(rank=8, alpha=16, dropout=0.1, target_modules=("v",))
    write(folder / "full.yaml", {"base": "lora.yaml", "lora": None})
    assert load_recipe("full.yaml").lora is None
    write(folder / "again.yaml", {"base": "full.yaml", "lora": {"rank": 4, "alpha": 4}})
    assert load_recipe("again.yaml").lora == LoraConfig(rank=4, alpha=4)  # nothing is left of the first adapters
    write(folder / "half.yaml", {"base": "full.yaml", "lora": {"rank": 4}})
    assert find_problem("half.yaml").startswith("half.yaml:2: lora.alpha: found nothing")


def test_a_nested_section_merges_key_by_key(folder: Path) -> None:
    write(folder / "keep.yaml", {"base": "whole.yaml", "data": {"keep": {"scores": "s", "top": 0.5}}})
    write(folder / "by.yaml", {"data": {"keep": {"by": "sum"}}})
    keep = load_recipe("keep.yaml", ["by.yaml", "data.keep.top=0.25"]).data.keep
    assert keep is not None and (keep.scores, keep.by, keep.top) == ("s", "sum", 0.25)


def test_sections_of_one_alias_stay_apart(folder: Path) -> None:
    write(folder / "mine.yaml", "base: whole.yaml\nprobe: &same {micro_batch_size_per_rank: 2}\nutility: *same\n")
    write(folder / "more.yaml", {"probe": {"every": 3}})
    words = ["batch.micro_batch_size_per_rank=2", "more.yaml", "probe.micro_batch_size_per_rank=4"]
    recipe = load_recipe("mine.yaml", words)
    assert (recipe.probe.micro_batch_size_per_rank, recipe.probe.every) == (4, 3)
    assert recipe.utility.micro_batch_size_per_rank == 2


def test_fragments_come_after_the_recipe_in_order_and_overrides_after_them(folder: Path) -> None:
    write(folder / "deep" / "base.yaml", {"run": {"validate_every": None, "log_every": 7}})
    write(folder / "deep" / "one.yaml", {"base": "base.yaml", "run": {"seed": 1}})
    write(folder / "two.yaml", {"run": {"seed": 2, "output_dir": "two"}})
    run = load_recipe("whole.yaml", ["run.output_dir=mine", "deep/one.yaml", "two.yaml"]).run
    assert (run.seed, run.log_every, run.output_dir) == (2, 7, "mine")
    assert load_recipe("whole.yaml", ["two.yaml", "deep/one.yaml"]).run.seed == 1


def test_a_dumped_recipe_is_one_file(folder: Path) -> None:
    recipe = load_recipe("whole.yaml", ["methods/random.yaml"])
    dumped = write(folder / "elsewhere" / "recipe.yaml", dump_recipe(recipe))
    assert "base" not in yaml.safe_load(dumped.read_text())
    assert load_recipe(dumped) == recipe


SECTION_VALUES = st.none() | st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9), max_size=3)
FILES = st.lists(st.dictionaries(st.sampled_from(["run", "lora", "data"]), SECTION_VALUES), min_size=1, max_size=5)


def merge_by_hand(files: list[Sections]) -> Sections:
    """Merge a chain of files: each section has the keys given since it was null last."""
    expected: Sections = {}
    for section in {section for file in files for section in file}:
        mentions = [file[section] for file in files if section in file]
        num_until_null = max((i + 1 for i, value in enumerate(mentions) if value is None), default=0)
        since = mentions[num_until_null:]
        expected[section] = {key: value for mapping in since for key, value in mapping.items()} if since else None
    return expected


@settings(deadline=None, max_examples=40)
@given(FILES, st.data())
def test_merging_is_associative(files: list[Sections], data: st.DataObject) -> None:
    """Files named one by one, and the same files grouped into bases in any way, are the same recipe."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [write(folder / f"{i}.yaml", content) for i, content in enumerate(files)]
        groups = iter(range(len(files)))

        def group_files(group: Sequence[Path]) -> Path:
            """A file that stands for the group, split at random places into smaller groups."""
            if len(group) == 1:
                return group[0]
            cut = data.draw(st.integers(1, len(group) - 1))
            bases = [group_files(group[:cut]), group_files(group[cut:])]
            return write(folder / f"group_{next(groups)}.yaml", {"base": [path.name for path in bases]})

        assert merge_files(group_files(paths)).values == merge_by_hand(files)
        assert merge_files(paths[0], [str(path) for path in paths[1:]]).values == merge_by_hand(files)


# ---------------------------------------------------------------- where files are found


def test_files_are_looked_up_beside_the_file_that_names_them_then_among_shipped_recipes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = SHIPPED_RECIPES / "paper" / "qwen3_4b_math_lora.yaml"
    assert load_recipe("paper/qwen3_4b_math_lora.yaml") == load_recipe(shipped)
    write(folder / "paper" / shipped.name, {"base": "../whole.yaml", "engine": {"deepspeed_config": "../ds.json"}})
    assert load_recipe("paper/qwen3_4b_math_lora.yaml").model.path == "some/model"
    mine = write(folder / "recipes" / "mine.yaml", {"base": ["../whole.yaml", "methods/dft.yaml"]})
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert load_recipe(mine).method.name == "dft"
    assert load_recipe(folder / "whole.yaml", ["methods/dft.yaml"]).method.name == "dft"
    for place in (folder / "recipes", folder / "elsewhere"):
        write(place / "methods" / "dft.yaml", {"method": {"kl_budget": 0.5}})  # comes first
    assert load_recipe(mine).method.kl_budget == 0.5
    assert load_recipe(folder / "whole.yaml", ["methods/dft.yaml"]).method.kl_budget == 0.5
    monkeypatch.setenv("HOME", str(folder / "home"))
    write(folder / "home" / "lab.yaml", {"run": {"seed": 9}})
    write(folder / "mine.yaml", {"base": ["whole.yaml", "~/lab.yaml"]})
    assert load_recipe(folder / "mine.yaml").run.seed == 9
    assert load_recipe(folder / "whole.yaml", ["~/lab.yaml"]).run.seed == 9


def test_the_deepspeed_json_of_a_resolved_recipe_is_found_on_another_machine(folder: Path) -> None:
    dumped = dump_recipe(load_recipe("qwen3_4b_math_lora.yaml"))
    assert str(SHIPPED_RECIPES.parents[1]) not in dumped and str(folder) not in dumped
    written = write(folder / "run" / "recipe.yaml", dumped)
    recipe = load_recipe(written)
    assert recipe.engine.deepspeed_config == "ds_configs/zero3_bf16_large.json"
    settings = derive_plan_settings(recipe)
    assert deepspeed_config(settings, plan_batch(settings, 8, QWEN3_32B))["zero_optimization"]["stage"] == 3
    mine = write(folder / "ds_configs" / "zero3_bf16_large.json", "{}")  # the user's file comes first, and stays
    assert load_recipe(written).engine.deepspeed_config == str(mine)


def test_a_deepspeed_json_is_looked_up_from_the_file_that_names_it(folder: Path) -> None:
    write(folder / "lab" / "engine.yaml", {"engine": {"deepspeed_config": "lab.json"}})
    lab = write(folder / "lab" / "lab.json", "{}")
    write(folder / "mine.yaml", {"base": ["whole.yaml", "lab/engine.yaml"]})
    assert load_recipe("mine.yaml").engine.deepspeed_config == str(lab)
    problem = find_problem("mine.yaml", "engine.deepspeed_config=lab.json")  # an override's is the recipe's folder
    assert str(lab) not in problem and str(folder / "lab.json") in problem
    assert "expected a DeepSpeed JSON" in find_problem(
        SHIPPED_RECIPES / "qwen3_4b_math_lora.yaml", "engine.deepspeed_config=lab.json"
    )


# ---------------------------------------------------------------- problems


def test_every_problem_names_the_file_and_line_where_the_value_stands(folder: Path) -> None:
    write(folder / "parts" / "a.yaml", "# comment\nrun:\n  seed: -1\n  log_every: 0\n  lgo_every: 1\n")
    write(folder / "parts" / "b.yaml", "base: a.yaml\nrun:\n  log_every: -2\nmethod:\n  temperature: 1\n")
    write(folder / "mine.yaml", "base:\n  - whole.yaml\n  - parts/b.yaml\nutility: {epsilon: 1}\nlora: {rank: 8}\n")
    write(folder / "fragment.yaml", "data:\n  cutoff_length: 1\nlora: null\n")
    write(folder / "last.yaml", "\n\nlora: {rank: 8}\n")
    problems = find_problems("mine.yaml", "fragment.yaml", "last.yaml", "batch.global_size=0")
    assert sorted(problem.split(": found")[0] for problem in problems) == [
        "fragment.yaml:2: data.cutoff_length",
        "last.yaml:3: lora.alpha",  # the lines of the section that null replaced are forgotten
        "mine.yaml:4: utility.epsilon",
        "override batch.global_size=0: batch.global_size",
        "parts/a.yaml:3: run.seed",
        "parts/a.yaml:5: run.lgo_every",
        "parts/b.yaml:3: run.log_every",  # the value that a.yaml gave is gone, and its line with it
        "whole.yaml:2: method.kl_budget",
    ]
    iw_sft = SHIPPED_RECIPES / "methods" / "iw_sft.yaml"  # a shipped file is named in full
    line = iw_sft.read_text().splitlines().index("  name: iw_sft") + 1
    assert find_problem("whole.yaml", "methods/iw_sft.yaml").startswith(f"{iw_sft}:{line}: data.reference_log_prob")


def test_a_base_that_cannot_be_read_is_refused_at_its_place(folder: Path) -> None:
    write(folder / "no_yaml.yaml", "run: [\n")
    write(folder / "empty.yaml", "")
    write(folder / "itself.yaml", {"base": "../mine.yaml"})
    (folder / "link.yaml").symlink_to("mine.yaml")
    for base, place in {
        "3": "mine.yaml:2: base: found 3; expected a file name",
        "null": "mine.yaml:2: base: found null",
        "[whole.yaml, 3]": "mine.yaml:2: base: found [",
        "['']": "mine.yaml:2: base: found [",
        "gone.yaml": "mine.yaml:2: base: gone.yaml: found no such file",
        "no_yaml.yaml": "no_yaml.yaml:2:1: found no YAML",
        "empty.yaml": "empty.yaml: found null; expected a recipe",
        "./mine.yaml": "mine.yaml:2: base: ./mine.yaml: found a cycle of bases (mine.yaml -> mine.yaml)",
        "link.yaml": "mine.yaml:2: base: link.yaml: found a cycle of bases (mine.yaml -> link.yaml)",
    }.items():
        write(folder / "mine.yaml", f"run: {{seed: 1}}\nbase: {base}\n")
        assert find_problem("mine.yaml").startswith(place)
    write(folder / "deep" / "b.yaml", {"base": ["nowhere.yaml", "../mine.yaml"]})
    write(folder / "mine.yaml", {"base": ["deep/b.yaml", "deep/b.yaml", "gone"]})
    assert [problem.partition(" found ")[0] for problem in find_problems("mine.yaml", "no_yaml.yaml", "run.seed")] == [
        "deep/b.yaml:1: base: nowhere.yaml:",  # each file is reported once
        "deep/b.yaml:1: base: ../mine.yaml:",
        "mine.yaml:1: base: gone:",
        "no_yaml.yaml:2:1:",
        "override run.seed:",  # but not the keys that the files would set
    ]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("methods/dtf.yaml", "methods/dft.yaml"),
        ("dft.yaml", "methods/dft.yaml"),  # the right name, without its folder
        ("preset/paper.yaml", "presets/paper.yaml"),
        ("hwole.yaml", "whole.yaml"),  # in the working directory
        ("launch_scripts/recipes/qwen3_4b_code_fulll.yaml", "qwen3_4b_code_full.yaml"),
        ("methods/dtf", "methods/dft"),
        ("dft", "methods/dft"),
        ("seed", "run.seed=VALUE"),
        ("zzzzzzzz", ""),
    ],
)
def test_a_misspelt_word_gets_the_nearest_name(folder: Path, word: str, hint: str) -> None:
    ending = f'; did you mean "{hint}"?' if hint else ""
    problem = find_problem("whole.yaml", word)
    if not word.endswith(".yaml"):
        assert problem == f'override {word}: found "{word}"; expected section.key=value or FILE.yaml{ending}'
        return
    write(folder / "mine.yaml", {"base": ["whole.yaml", word]})
    for place, found in (("", problem), ("", find_problem(word)), ("mine.yaml:1: base: ", find_problem("mine.yaml"))):
        assert found.startswith(f"{place}{word}: found no such file; expected ") and found.endswith(ending)


def test_the_ending_yaml_may_be_left_out(folder: Path) -> None:
    write(folder / "mine.yaml", {"base": ["presets/recommended", "whole"], "method": {"kl_budget": None}})
    (folder / "qwen3_4b_math_lora").mkdir()  # a folder, such as a run's, is no recipe
    for short, full in (
        (["qwen3_4b_math_lora"], ["qwen3_4b_math_lora.yaml"]),
        (["paper/qwen3_1.7b_math_lora", "presets/paper"], ["paper/qwen3_1.7b_math_lora.yaml", "presets/paper.yaml"]),
        (["mine", "methods/dft", "run.seed=1"], ["mine.yaml", "methods/dft.yaml", "run.seed=1"]),
    ):
        assert load_recipe(short[0], short[1:]) == load_recipe(full[0], full[1:])


# ---------------------------------------------------------------- the commands


def test_check_takes_fragments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["methods/dft.yaml", "run.seed=7", "--ranks", "2", "methods/random.yaml", "run.log_every=3"]
    assert main(["check", "whole.yaml", *words, "--recipe"]) == 0
    recipe = Recipe.model_validate(yaml.safe_load(capsys.readouterr().out), strict=False)
    assert recipe == load_recipe("whole.yaml", ["methods/random.yaml", "run.seed=7", "run.log_every=3"])
    assert main(["check", "whole.yaml", "methods/dtf.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("vcore-ds: methods/dtf.yaml: found no such file") and captured.out == ""


def test_a_launch_script_passes_fragments_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Called as the launchers do; the run ends at the recipe's contradiction, before anything is built."""
    seen = []

    def before(words: Sequence[str]) -> list[str]:
        seen.extend(words)
        return ["method.temperature=1"]

    assert launch("whole.yaml", ["--local_rank=0", "methods/sft.yaml", "run.seed=3"], before=before) == 2
    assert seen == ["methods/sft.yaml", "run.seed=3"]
    assert "method.temperature: found 1.0 together with method.name sft" in capsys.readouterr().err


@pytest.mark.parametrize("checkout", ["/src/vcore_ds", "/my #1 repo", "/a: b", "/[x]"])
def test_the_quickstart_runs_in_any_checkout(checkout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "DATA", data := Path(checkout, "runs", "quickstart_data"))
    recipe, pool = load_with_additions(["presets/trusted.yaml", "data.trusted_share=0.25"])
    assert recipe.data.probe_path == str(data / "trusted.jsonl") and len(pool) == 1
    for words in ([], ["presets/trusted.yaml", "data.probe_path=mine.jsonl"]):
        assert load_with_additions(words)[1] == []
    with pytest.raises(RecipeError, match="run.seeed"):
        load_with_additions(["run.seeed=1", "presets/trusted.yaml"])
    assert load_with_additions(["schedule.num_epochs=2"])[0].schedule.num_epochs == 2  # alone, instead of the steps


def test_the_quickstart_trains_on_a_users_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An epoch of it, a tenth of its rows held out."""
    monkeypatch.setattr(quickstart, "DATA", folder / "data")
    monkeypatch.setattr(quickstart, "REPOSITORY", folder)
    rows = [json.dumps({"messages": [{"role": "user", "content": str(i)}]}) for i in range(40)]
    mine = folder / "mine.json"
    write(folder / "mine.yaml", {"data": {"train_path": str(mine)}})

    def load(*given: str) -> Recipe:
        words = ["model.path=m", *given]
        recipe, added = load_with_additions(words)
        return load_recipe(QUICKSTART, [*words, *added, *prepare_files(recipe, words)])

    jsonl = "\n".join([rows[0], "", *rows[1:]]) + "\n"
    for path, text in {mine.with_suffix(".jsonl"): jsonl, mine: json.dumps([json.loads(row) for row in rows])}.items():
        path.write_text(text)
        made = load("mine.yaml") if path == mine else load(f"data.train_path={path}")
        assert (made.schedule.num_steps, made.schedule.num_epochs) == (None, 1)
        assert made.data.cutoff_length == quickstart.OWN_CUTOFF_LENGTH > load_recipe(QUICKSTART).data.cutoff_length
        assert (made.data.train_path, made.data.validation_path, made.data.validation_share) == (str(path), None, 0.1)
        assert "40 rows, 0.1 of them held out" in capsys.readouterr().out and made.run.validate_every == "auto"
    chosen = load("mine.yaml", "schedule.num_steps=8", "data.cutoff_length=99", "data.validation_share=0.5")
    assert (chosen.data.validation_path, chosen.data.validation_share) == (None, 0.5)
    assert (chosen.schedule.num_steps, chosen.data.cutoff_length) == (8, 99)
    epochs = load("mine.yaml", "data.validation_path=null", "schedule.num_epochs=3")
    assert (epochs.schedule.num_steps, epochs.schedule.num_epochs) == (None, 3)
    assert epochs.data.has_held_out is load(f"data.train_path={folder}").data.has_held_out is False
    mine.write_text(json.dumps([{"prompt": "a", "completion": str(i)} for i in range(800)]))
    assert load("mine.yaml").data.validation_share == quickstart.MOST_HELD_OUT / 800
    mine.write_text('[{"prompt": "a", "completion": "b"}]')
    assert load("mine.yaml").data.has_held_out is False
    with pytest.raises(UserError, match=r"typo\.jsonl: there is no such file"):
        load(f"data.train_path={folder / 'typo.jsonl'}")
