"""Loading of recipes: kinds of values, rules over several keys, overrides, files and paths."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.helpers.recipes import find_problem, find_problems, smallest_recipe, write_yaml
from vcore_ds.config.data_section import KeepConfig
from vcore_ds.config.load import (
    SHIPPED_RECIPES,
    dump_recipe,
    dump_yaml,
    list_overrides,
    load_recipe,
    make_override,
    parse_yaml,
    read_resolved_recipe,
)
from vcore_ds.config.problems import RecipeError, names_elsewhere, recipe_keys
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS, Recipe
from vcore_ds.config.sections import LoraConfig

RESOLVED = dump_recipe(load_recipe("qwen3_4b_math_lora.yaml"))
LORA = "lora={rank: 8, alpha: 16}"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """A recipe that loads."""
    return write(tmp_path, smallest_recipe())


def write(folder: Path, content: dict[str, Any] | str) -> Path:
    (folder / "ds.json").write_text("{}")
    return write_yaml(folder / "recipe.yaml", content)


# ---------------------------------------------------------------- what loads


def test_defaults_numbers_and_dates_load_with_their_types(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.method.name == "vcore" and recipe.lora is None and recipe.optimizer.betas == (0.9, 0.999)
    words = ["schedule.num_steps=null", "schedule.num_epochs=2", "run.output_dir=2026-01-31"]
    loaded = load_recipe(recipe_file, words)
    assert loaded.schedule.num_epochs == 2.0 and isinstance(loaded.schedule.num_epochs, float)
    assert loaded.run.output_dir == "2026-01-31"
    with pytest.raises(ValidationError, match="frozen"):
        recipe.run.seed = 1  # type: ignore[misc]


def test_scientific_notation_is_a_number_in_file_and_override(recipe_file: Path) -> None:
    text = recipe_file.read_text()
    for number in ("1e-4", "1E-4", "+1e-4", "1.0e-4", "1.e-4", ".1e-3", "0.0001", "100e-6"):
        write(recipe_file.parent, text)
        assert load_recipe(recipe_file, [f"optimizer.learning_rate={number}"]).optimizer.learning_rate == 1e-4
        write(recipe_file.parent, text.replace("learning_rate: 0.1", f"learning_rate: {number}"))
        assert load_recipe(recipe_file).optimizer.learning_rate == 1e-4


def test_a_recipe_built_in_python_keeps_the_rules() -> None:
    with pytest.raises(ValidationError, match="method.kl_budget: found null together with method.temperature null"):
        Recipe.model_validate(smallest_recipe() | {"method": {}})


def test_dump_loads_to_the_same_recipe(recipe_file: Path, tmp_path: Path) -> None:
    for overrides in (
        [],
        ["method.name=random", "method.kl_budget=null", "method.keep_share=0.5"],
        ["utility.estimator=finite_difference", "utility.epsilon=1e-4"],
        ["optimizer.name=sgd"],
        ["optimizer.name=muon", "optimizer.momentum=0.9"],
        ["lora={rank: 8, alpha: 16.0, target_modules: [q_proj, v_proj]}", "data.keep={scores: s, top: 0.5}"],
    ):
        recipe = load_recipe(recipe_file, overrides)
        again = write_yaml(tmp_path / "deeper" / "again.yaml", dump_recipe(recipe))
        assert load_recipe(again) == recipe == read_resolved_recipe(again)
        assert load_recipe(again, ["run.seed=43"]) != recipe  # so that the equality above can fail


@settings(deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.text(min_size=1)
    | st.sampled_from(["1e-4", "null", "~", "yes", "2026-01-31", "1_0", "12:30", ": #", "-1.e3", "\x85", "a\u2028b"])
    | st.sampled_from(["/my #1 repo/runs", "/a: b/runs", "[1]/runs", "/😀, {x}", "it's", "a=b"])
)
def test_any_text_and_number_survive_yaml_and_an_override(value: str | float) -> None:
    assert parse_yaml(dump_yaml({"key": value}))[0] == {"key": value}
    key, _, word = make_override("model.path", value).partition("=")
    assert (key, parse_yaml(word)[0]) == ("model.path", value)


def test_an_override_has_quotes_only_where_it_needs_them() -> None:
    assert make_override("run.output_dir", Path("runs/my run_2")) == "run.output_dir=runs/my run_2"
    assert make_override("run.seed", 3) == "run.seed=3"


def test_sections_of_the_python_api_are_read_back_whole(recipe_file: Path) -> None:
    """A mapping below a section is a value, unless it is a nested section; a Path may be anywhere."""
    paths = {"math": Path("held out.jsonl"), "code": "it's # 2.jsonl"}
    files = [{"path": Path("a: b.jsonl"), "weight": 3}, {"path": "c.jsonl", "weight": 0.5}]
    keep = {"scores": Path("scores/mine"), "top": 0.5}
    sections: dict[str, Any] = {
        "data": {"validation_path": paths, "train_path": files, "keep": keep},
        "optimizer": {"betas": (0.8, 0.9)},
        "lora": None,
    }
    recipe = load_recipe(recipe_file, list(list_overrides(sections)))
    assert recipe.data.validation_path == {"math": "held out.jsonl", "code": "it's # 2.jsonl"}
    assert [(file.path, file.weight) for file in recipe.data.train_files()] == [("a: b.jsonl", 3), ("c.jsonl", 0.5)]
    assert recipe.data.keep is not None and (recipe.data.keep.scores, recipe.data.keep.top) == ("scores/mine", 0.5)
    assert recipe.optimizer.betas == (0.8, 0.9) and recipe.lora is None
    with pytest.raises(RecipeError, match=r"data\.math"):  # still refused, and named, beside a section's keys
        load_recipe(recipe_file, list(list_overrides({"data": {"math": paths}})))


# ---------------------------------------------------------------- single keys


def test_every_key_says_what_it_expects_in_the_words_of_the_command_keys(recipe_file: Path) -> None:
    for dotted, key in recipe_keys().items():
        override = f"{dotted}=[{{}}]"  # which no key takes
        problems = find_problems(recipe_file, override, *(["data.keep.scores=s"] if dotted == "data.keep.top" else []))
        prefix = f"override {override}: {dotted}: found [{{}}]; expected "
        expected = f"{key.values} ({key.meaning.partition('. ')[0].rstrip('.')})"
        if (nested := SUBSECTIONS.get(tuple(dotted.split(".")))) is not None:
            expected = f"a section with keys {', '.join(nested.key_names())}, or null"
        assert f"{prefix}{expected}" in problems, dotted


FIELD_PROBLEMS = [
    (
        "method.name=vcor",
        'found "vcor"; expected vcore, sft, dft, asft, eaft, deft, profit, iw_sft, random, stored or custom (`vcore`',
    ),
    ("method.name=vcor", 'did you mean "vcore"?'),
    ("utility.epsilon=Auto", 'found "Auto"; expected a number above 0, auto or null (Step eps'),
    ("utility.epsilon=Auto", 'did you mean "auto"?'),
    ("method.temperature=-1", "found -1; expected a number of at least 0 or null"),
    ("method.keep_share=1.1", "found 1.1; expected a number above 0 and at most 1 ("),
    ("method.kl_budget=.inf", "found Infinity; expected a number above 0 or null"),
    ("method.kl_budget=.nan", "found NaN; expected a number above 0 or null"),
    ("run.seed=4294967296", "found 4294967296; expected a whole number of at least 0 and below 4294967296 ("),
    ("run.seed=-1", "found -1; expected a whole number of at least 0 and"),
    ("run.seed=true", "found true; expected a whole number"),
    ("run.seed='7'", 'found "7"; expected a whole number'),
    ("data.cutoff_length=16384.0", "found 16384.0; expected a whole number of at least 2"),
    ("parallel.tensor=3", "found 3; expected 1, 2, 4 or 8"),
    ("engine.coalesce_gradient_reduction=2", "found 2; expected auto or true or false ("),
    ("model.path=", "found null; expected text ("),
    ("model.path=''", 'found ""; expected text, not empty ('),
    ("optimizer.betas=[0.9, 1]", "found [0.9, 1]; expected [a number of at least 0 and below 1, a number of"),
    ("optimizer.betas=[0.9]", "found [0.9]; expected [a number"),
    ("data.validation_path={a/b: c.jsonl}", 'found {"a/b": "c.jsonl"}; expected text, {NAME: text, ...} or null'),
    ("data.validation_path={}", "found {}; expected text, {NAME: text, ...} or null, not empty"),
    ("run.wandb_project=mine", 'run.wandb_project: found "mine" under an unknown name'),
    ("run.wandb_project=mine", 'did you mean "track.project"?'),
    ("model.path=my #1 model", 'found a comment in "my #1 model"; expected quotes'),
    ("model.path=my #1 model", 'model.path="my #1 model"'),
]


def test_a_wrong_value_is_refused_with_what_the_key_expects(recipe_file: Path) -> None:
    for override, words in FIELD_PROBLEMS:
        problem = find_problem(recipe_file, override)
        assert problem.startswith(f"override {override}: {override.partition('=')[0]}: found "), problem
        assert words in problem, problem


def test_malformed_sections_and_missing_keys_are_refused(recipe_file: Path) -> None:
    for section in SECTIONS:
        for value in ["8"] if section == "lora" else ["8", "null"]:
            problem = find_problem(recipe_file, f"{section}={value}")
            assert f"{section}={value}: {section}: found {value}; expected a section with keys " in problem
    assert find_problem(recipe_file, "lora={alpha: 16}").startswith(
        "override lora={alpha: 16}: lora.rank: found nothing; expected a whole number of at least 1 (Rank r"
    )
    assert find_problem(recipe_file, "lora.rank=8").startswith("override lora.rank=8: lora.alpha: found nothing")
    for key in (
        "model.path",
        "data.train_path",
        "optimizer.learning_rate",
        "run.output_dir",
        "engine.deepspeed_config",
    ):
        section = key.partition(".")[0]
        path = write(recipe_file.parent, smallest_recipe() | {section: {}})
        line = path.read_text().splitlines().index(f"{section}: {{}}") + 1
        assert find_problem(path).startswith(f"{path}:{line}: {key}: found nothing; expected ")
        without = {name: keys for name, keys in smallest_recipe().items() if name != section}
        assert find_problem(write(recipe_file.parent, without)).startswith(f"{path}: {key}: found nothing; expected ")


def test_unknown_keys_name_the_nearest(recipe_file: Path) -> None:
    for override, nearest in {
        "method.kl_bugdet=1": '"method.kl_budget"',
        "optimizer.kl_budget=1": '"method.kl_budget"',  # right name, wrong section
        "model.sequence_parallel=1": '"probe.sequence_parallel" or "batch.sequence_parallel"',
        "run.batch_size=1": '"probe.batch_size"',
        "run.lerning_rate=1": '"optimizer.learning_rate"',  # misspelt and in the wrong section
        "utillity={}": '"utility"',
        "metod.name=sft": '"method"',
        "learning_rate=1": '"optimizer.learning_rate"',  # no section
    }.items():
        problem = find_problem(recipe_file, override)
        assert "under an unknown name; expected a " in problem and problem.endswith(f"; did you mean {nearest}?")
    assert "expected a section among method, utility, " in find_problem(recipe_file, "utillity={}")
    assert "expected a key among name, normalization, " in find_problem(recipe_file, "method.zzzzzz=1")
    # Not near enough, though difflib's usual threshold has temperature, fused, tags, batch_size, num_token_records.
    for override in ("method.zzzzzz", "templat", "utility.use_doras", "data.tests_size", "num_worker"):
        assert "did you mean" not in find_problem(recipe_file, f"{override}=1")


def test_names_of_other_trainers_and_versions_are_understood(recipe_file: Path) -> None:
    keys = recipe_keys()
    for name, dotted in names_elsewhere().items():
        assert dotted in keys or (SHIPPED_RECIPES / dotted).is_file(), name
        assert name not in keys and name not in {key.rpartition(".")[2] for key in keys}, name
    for word, nearest in {
        "optimizer.lr=1e-4": "optimizer.learning_rate",
        "gradient_accumulation_steps=4": "batch.global_size",
        "lora_r": "lora.rank=VALUE",
        "batch.packed_row_tokens=16384": "batch.pack_tokens_per_rank",
        "method.tau=5e3": "method.temperature",
        "run.name=mine": "run.output_dir",
        "data.path=mine.jsonl": "data.train_path",
        "method=sft": "method.name",
        "probe=null": "methods/sft.yaml",
        "probe.enabled=false": "methods/sft.yaml",
        "probe.enabled": "methods/sft.yaml",
    }.items():
        assert find_problem(recipe_file, word).endswith(f'; did you mean "{nearest}"?')
    for word, instead in {
        "model.load_in_4bit=true": "not supported.*engine.deepspeed_config",
        "early_stopping_patience=3": "not supported.*checkpoint.keep_best",
        "run.push_to_hub=true": "not supported.*vcore-ds export",
        "use_liger_kernel": "not needed",
        "data.streaming=true": "not needed.*vcore-ds prepare",
    }.items():
        assert re.search(instead, find_problem(recipe_file, word)), word


def test_keys_are_text_as_written(recipe_file: Path) -> None:
    assert "run.1: found 2 under an unknown name" in find_problem(recipe_file, "run={output_dir: out, 1: 2}")
    path = write(recipe_file.parent, recipe_file.read_text() + "null: 1e-4\n")
    assert find_problem(path).startswith(f"{path}:15: null: found 0.0001 under an unknown name")


# ---------------------------------------------------------------- rules over several keys

SHORT = {
    "BATCH_WIDE": "method.scope=sequence_and_batch method.batch_kl_budget=0.1",
    "NO_BUDGET": "method.kl_budget=null",
    "DIFFERENCE": "utility.estimator=finite_difference utility.epsilon=auto",
    "POOL": "data.probe_path=p.jsonl",
    "HELD_OUT": "data.validation_path=v.jsonl",
    "LORA": "lora.rank=8 lora.alpha=16",
    "BEST": "checkpoint.keep_best=2",
    "REFERENCE": "data.reference_log_probabilities",
}
"""Words of broken_rules.txt that stand for others."""

# Overrides that break a rule | the key that is named | overrides each of which is a remedy
RULES = (Path(__file__).parents[1] / "data" / "broken_rules.txt").read_text()


def expand(words: str) -> list[str]:
    for short, full in SHORT.items():
        words = words.replace(short, full)
    return words.split()


@pytest.mark.parametrize("line", RULES.splitlines())
def test_every_rule_names_the_users_key_and_a_remedy_that_helps(recipe_file: Path, line: str) -> None:
    overrides, (key,), remedies = map(expand, line.split("|"))
    source, named, problem = find_problem(recipe_file, *overrides).split(": ", 2)
    assert named == key and problem.startswith("found ") and "; expected " in problem
    assert source in {f"override {override}" for override in overrides}
    for remedy in remedies:
        load_recipe(recipe_file, [*overrides, remedy])


@pytest.mark.parametrize(
    "overrides",
    [
        # Keys of vcore say nothing about a method that does not read them, so that a method is exchanged in one word.
        "method.name=sft NO_BUDGET probe.direction=adam optimizer.name=sgd",
        "method.name=dft NO_BUDGET method.alpha_scope=micro_batch method.alpha=none",
        "method.name=random NO_BUDGET method.alpha=variance batch.global_size=1",
        "BATCH_WIDE method.name=sft NO_BUDGET",
        "BATCH_WIDE method.base_measure=dft DIFFERENCE",
    ],
)
def test_keys_that_do_not_contradict_each_other_load(recipe_file: Path, overrides: str) -> None:
    load_recipe(recipe_file, expand(overrides))


def test_all_problems_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
    broken = smallest_recipe()
    broken["model"]["precision"] = "fp16"  # a key
    broken["model"]["attention"] = "flash_attention_2"  # its rule reads precision, which is wrong: not judged
    broken["method"]["temperature"] = 1.0  # a rule
    broken["utility"] = {"epsilon": 1e-4, "micro_batch": 3}  # a rule in a section with an unknown key
    del broken["run"]  # missing
    path = write(tmp_path, broken | {"lora": {"rnk": 3}})

    def at(word: str) -> str:
        lines = path.read_text().splitlines()
        return f"{path}:{next(i for i, line in enumerate(lines, 1) if line.strip().startswith(word))}"

    words = ["optimizer.lr", "run.seed=[1", "optimizer.learning_rate=fast", "engine.deepspeed_config=none.json"]
    assert places(find_problems(path, *words)) == sorted(
        [
            "override optimizer.lr",
            "override run.seed=[1: run.seed",
            "override optimizer.learning_rate=fast: optimizer.learning_rate",
            "override engine.deepspeed_config=none.json: engine.deepspeed_config",
            f"{at('lora')}: lora.alpha",
            f"{at('lora')}: lora.rank",
            f"{at('rnk')}: lora.rnk",
            f"{path}: run.output_dir",
            f"{at('precision')}: model.precision",
            f"{at('micro_batch')}: utility.micro_batch",
            f"{at('kl_')}: method.kl_budget",
            f"{at('epsilon')}: utility.epsilon",
        ]
    )


def places(problems: Sequence[str]) -> list[str]:
    """Where problems were found, and their keys."""
    return sorted(problem.partition(": found ")[0] for problem in problems)


# ---------------------------------------------------------------- the file


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    for content, place in (
        ("method:\n  name: [vcore\nmodel: {}\n", ":3:6: found no YAML: "),
        ("method:\n\tname: vcore\n", ":2:1: found no YAML: "),
        ("a: !python/object:os.system x\n", ":1:4: found no YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", ":2:1: found no YAML: but found another document"),
        ("a: !!int x\n", ": found no YAML: "),
        ("method:\n  kl_budget: 1\n  kl_budget: 2\n", ":3:3: found no YAML: the key method.kl_budget a second time"),
        ("just text\n", ': found "just text"; expected a recipe'),
        ("# only a comment\n", ": found null; expected a recipe"),
    ):
        path.write_text(content)
        assert find_problem(path).startswith(f"{path}{place}")
    path.write_bytes("a: ä".encode("latin-1"))
    assert "bytes that are not UTF-8" in find_problem(path)
    assert "cannot be read: Is a directory; expected a recipe" in find_problem(tmp_path)
    assert find_problem(tmp_path / "recip.yaml").endswith(f'; did you mean "{path}"?')


VALUES = "null true -1 2 1.5 1e400 .nan [] {} [[1]] auto {a:{b:[1]}} [ *x ''".split()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0), st.sampled_from(["double", "delete", "indent", "cut", *VALUES])), max_size=4))
def test_any_mistake_in_a_file_is_a_problem_or_loads(mistakes: list[tuple[int, str]]) -> None:
    lines = RESOLVED.splitlines()
    for place, mistake in mistakes:
        i = place % len(lines)
        key = lines[i].partition(":")[0]
        lines[i : i + 1] = {
            "double": [lines[i], lines[i]],
            "delete": [],
            "indent": [f"  {lines[i]}"],
            "cut": [lines[i][: len(lines[i]) // 2]],
        }.get(mistake, [f"{key}: {mistake}"])
    with tempfile.TemporaryDirectory() as folder:
        path = write_yaml(Path(folder, "recipe.yaml"), "\n".join(lines))
        try:
            recipe = load_recipe(path)
        except RecipeError as error:
            assert all(problem.startswith(str(path)) for problem in error.problems)
        else:
            path.write_text(dump_recipe(recipe))
            assert load_recipe(path) == recipe


# ---------------------------------------------------------------- overrides


def test_overrides_apply_in_order_and_open_sections(recipe_file: Path) -> None:
    words = ["run.seed=1", "lora.rank=16", "lora.alpha=32", "run.seed=2"]
    recipe = load_recipe(recipe_file, words)
    assert (recipe.lora, recipe.run.seed) == (LoraConfig(rank=16, alpha=32), 2)
    assert load_recipe(recipe_file, [LORA, "lora.rank=2"]).lora == LoraConfig(rank=2, alpha=16)
    assert load_recipe(recipe_file, [*words, LORA]).lora == LoraConfig(rank=8, alpha=16)  # nothing of before is left
    assert load_recipe(recipe_file, [LORA, "lora=null"]).lora is None
    section = "lora={rank: -1, alpha: 1}"
    assert find_problem(recipe_file, "lora.rank=0", section).startswith(f"override {section}: lora.rank: found -1")
    for section, words in (("run", ["run.output_dir=o"]), ("lora", ["lora.rank=8", "lora.alpha=16"])):
        load_recipe(write(recipe_file.parent, smallest_recipe() | {section: 5}), words)
    keep = write(recipe_file.parent, smallest_recipe() | {"data": {"train_path": "t", "keep": 3}})
    assert load_recipe(keep, ["data.keep.scores=s", "data.keep.top=0.5"]).data.keep == KeepConfig(scores="s", top=0.5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed", 'found "run.seed"; expected section.key=value or FILE.yaml; did you mean "run.seed=VALUE"?'),
        ("kl_budget", 'did you mean "method.kl_budget=VALUE"?'),
        ("--run.seed=1", 'did you mean "run.seed=VALUE"?'),
        ("=1", 'found "=1"; expected section.key=value'),
        ("run.seed =1", 'found "run.seed =1"; expected section.key=value'),
        ("", 'found ""; expected section.key=value'),
        ("run.seed.deep=1", 'run.seed: found {"deep": 1}; expected a whole number'),
        ("base=methods/dft.yaml", "base: found "),
        ("run.seed=[1", "run.seed: found no YAML: "),
        ("lora={rank: 8, rank: 9, alpha: 1}", "lora: found no YAML: the key rank a second time"),
    ],
)
def test_a_malformed_override_is_refused(recipe_file: Path, override: str, words: str) -> None:
    problem = find_problem(recipe_file, override)
    assert problem.startswith(f"override {override}: ") and words in problem


# ---------------------------------------------------------------- paths


def test_paths_expand_the_home_folder(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    words = ["model.path=~/m", "data.train_path=a/t.jsonl", "run.output_dir=~no_such_user_here/o"]
    recipe = load_recipe(recipe_file, [*words, "data.validation_path=~/v.jsonl"])
    assert (recipe.model.path, recipe.run.output_dir) == ("/home/someone/m", "~no_such_user_here/o")
    assert recipe.data.train_path == "a/t.jsonl"
    assert recipe.data.validation_paths() == {"": "/home/someone/v.jsonl"}
    several = load_recipe(recipe_file, ["data.validation_path={right: ~/r.jsonl, 1: w.jsonl, no: n.jsonl}"])
    assert several.data.validation_paths() == {"right": "/home/someone/r.jsonl", "1": "w.jsonl", "no": "n.jsonl"}
    assert load_recipe(recipe_file).data.validation_paths() == {}


def test_deepspeed_config_is_looked_up_in_three_places(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, repository = recipe_file.parent, Path(__file__).resolve().parents[2]
    cwd = folder / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    for name in ("here.json", "ds.json"):
        (cwd / name).write_text("{}")
    for written, resolved in {
        "ds.json": str(folder / "ds.json"),  # the recipe's folder comes first
        "here.json": str(cwd / "here.json"),
        "ds_configs/zero3_fp32.json": "ds_configs/zero3_fp32.json",
        str(repository / "ds_configs" / "zero3_fp32.json"): "ds_configs/zero3_fp32.json",
    }.items():
        assert load_recipe(recipe_file, [f"engine.deepspeed_config={written}"]).engine.deepspeed_config == resolved
    problem = find_problem(recipe_file, "engine.deepspeed_config=nowhere.json")
    assert all(str(place / "nowhere.json") in problem for place in (folder, cwd, repository))
    assert '"ds_configs/zero3_bf16.json"' in problem
