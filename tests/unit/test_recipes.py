"""Every recipe, preset, method and DeepSpeed JSON that is shipped loads, plans, merges and composes, and says what the
paper says."""

import functools
import json
import os
import re
from itertools import product
from pathlib import Path

import pytest
import yaml

from launch_scripts.quickstart import RECIPE as QUICKSTART
from tests.helpers import weightings
from tests.helpers.recipes import find_problem, find_problems, smallest_recipe
from vcore_ds.commands.plan.prediction import find_model
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.settings import derive_plan_settings

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "launch_scripts" / "recipes"
WRONG_TRACES = FOLDER / "wrong_traces.yaml"
RECIPES = sorted([*FOLDER.glob("*.yaml"), *(FOLDER / "paper").glob("*.yaml")])
PRESETS = ("recommended", "trusted", "paper", "released_code")
METHODS = ("sft", "dft", "asft", "eaft", "deft", "profit", "iw_sft", "random", "stored", "custom")
FUNCTION = f"method.function={weightings.__file__}:focal"
DEEPSPEED_CONFIGS = sorted((REPOSITORY / "ds_configs").glob("*.json"))
QWEN3 = ("qwen3_1.7b", "qwen3_4b", "qwen3_8b", "qwen3_32b")
OTHERS = ("llama3.1_8b_instruct", "mistral_7b_instruct_v0.3")

load = functools.cache(load_recipe)


def find_shape(recipe: Recipe) -> ModelShape:
    """One shape for all models, except for the model's shape where experts are sharded."""
    return QWEN3_32B if recipe.parallel.expert == 1 else find_model(recipe.model.path)[0]


def make_preset_words(preset: str) -> list[str]:
    """Words that merge a preset over a recipe, with the settings that it requires."""
    return [f"presets/{preset}.yaml", *(["data.probe_path=trusted.jsonl"] if preset == "trusted" else [])]


def test_every_training_of_the_papers_tables_has_a_recipe() -> None:
    names = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in RECIPES}
    lora = {f"{model}_{task}_lora" for model, task in product(QWEN3 + OTHERS, ("math", "code"))}
    full = {f"{model}_{task}_full" for model, task in product(QWEN3, ("math", "code"))}
    moe_models = {"qwen3_30b_a3b_math_full", "qwen3_30b_a3b_math_lora", "qwen3_235b_a22b_math_full"}
    others = {"qwen3_32b_math_full_tensor8"} | moe_models
    assert names == {QUICKSTART.stem, WRONG_TRACES.stem} | lora | full | others | {f"paper/{name}" for name in lora}
    assert {path.stem for path in (FOLDER / "presets").glob("*")} == set(PRESETS)
    assert {path.stem for path in (FOLDER / "methods").glob("*")} == set(METHODS)
    names = {path.stem for path in DEEPSPEED_CONFIGS}
    assert names >= {"zero3_bf16", "zero3_fp32", "zero3_bf16_offload_optimizer"}


def test_every_recipe_loads_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in RECIPES:
        recipe = load(path)
        (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(tmp_path / "dumped.yaml") == recipe
    folders = [load(path).run.output_dir for path in RECIPES]
    assert len(set(folders)) == len(folders)


def test_every_recipe_plans_and_merges_on_1_to_32_ranks() -> None:
    for recipe in map(load, RECIPES):
        tensor, expert = recipe.parallel.tensor, recipe.parallel.expert
        for num_ranks in range(tensor * expert, 33, tensor * expert):
            plan = plan_batch(derive_plan_settings(recipe), num_ranks, find_shape(recipe))
            config = deepspeed_config(derive_plan_settings(recipe), plan)
            assert config["train_batch_size"] * tensor == (
                num_ranks * config["gradient_accumulation_steps"] * config["train_micro_batch_size_per_gpu"]
            )
            assert config["bf16"]["enabled"] is (recipe.model.precision == "bf16")
            assert plan.global_batch_size == recipe.batch.global_size
            assert plan.probe_batch_size_global == (recipe.probe.batch_size if recipe.method.name == "vcore" else 0)


# ---------------------------------------------------------------- presets and methods over recipes


def read_method(recipe: Recipe) -> dict[str, object]:
    """The keys that a preset sets: method, utility and probe, without the sizes of micro-batches."""
    return {
        f"{section}.{key}": value
        for section in ("method", "utility", "probe")
        for key, value in recipe.model_dump()[section].items()
        if key != "micro_batch_size_per_rank"
    }


def find_recipe_kinds() -> list[Path]:
    """A recipe of each kind: those of a kind agree in every section that presets and methods set, or that their rules
    read."""
    kinds: dict[str, Path] = {}
    for path in RECIPES:
        recipe = load(path)
        rest = recipe.lora is None, recipe.parallel, recipe.data.probe_path, recipe.batch.global_size
        kinds.setdefault(repr((read_method(recipe), rest)), path)
    return list(kinds.values())


def test_a_preset_means_the_same_over_every_recipe() -> None:
    for preset in PRESETS:
        words = make_preset_words(preset)
        expected = read_method(load_recipe(FOLDER / "qwen3_4b_math_lora.yaml", words))
        for path in find_recipe_kinds():
            for before in ([], ["methods/random.yaml"], make_preset_words("trusted")):
                assert read_method(load_recipe(path, [*before, *words])) == expected, (path, before)


def test_the_trusted_preset_asks_for_the_pool() -> None:
    for path in find_recipe_kinds():
        probe, share = find_problems(path, "presets/trusted.yaml")
        assert "probe.batch_size: found all together with data.probe_path null" in probe
        assert "data.trusted_share: found 0.2 together with data.probe_path null" in share
        recipe = load_recipe(path, make_preset_words("trusted"))
        plan = plan_batch(derive_plan_settings(recipe), max(8, recipe.parallel.expert), find_shape(recipe))
        assert plan.num_trusted_global == round(0.2 * recipe.batch.global_size) > 0


def remedy(path: Path, words: list[str], key: str, *remedies: str) -> None:
    """Add the remedies of a refused key, which problems name, to the words."""
    assert any(f": {key}: found " in problem for problem in find_problems(path, *words))
    words += remedies


@pytest.mark.parametrize("name", METHODS)
def test_a_method_composes_over_every_recipe_and_preset_or_is_refused_with_the_remedy(name: str) -> None:
    for path, presets in product(find_recipe_kinds(), ([], *map(make_preset_words, PRESETS))):
        words, shipped = [*presets, f"methods/{name}.yaml"], load(path)
        if "presets/trusted.yaml" in presets and name in ("random", "iw_sft", "stored"):
            remedy(path, words, "data.trusted_share", "data.trusted_share=0.0")
        if name == "iw_sft" and shipped.lora is None:
            remedy(path, words, "data.reference_log_probabilities", "data.reference_log_probabilities=reference.npz")
        if name == "asft" and shipped.lora is None:
            remedy(path, words, "lora", "lora.rank=4", "lora.alpha=8")
            if shipped.model.provider == "megatron":
                remedy(path, words, "model.provider", "model.provider=huggingface", "parallel.tensor=1")
        if name == "custom":
            remedy(path, words, "method.function", FUNCTION, "method.options={gamma: 2}")
        if name == "stored":
            remedy(path, words, "data.token_weights", "data.token_weights=weights.parquet")
        recipe = load_recipe(path, words)
        assert recipe.method.name == name
        plan_batch(derive_plan_settings(recipe), max(8, recipe.parallel.expert), find_shape(recipe))
        preset = load_recipe(path, presets) if presets else shipped
        assert recipe.method.normalization == preset.method.normalization
        changed = {"method", *(word.partition(".")[0] for word in words if "=" in word)}
        for section in Recipe.model_fields.keys() - changed:
            assert getattr(recipe, section) == getattr(preset, section)


def test_muon_is_merged_over_every_recipe_of_all_parameters_and_refused_with_adapters() -> None:
    for path in find_recipe_kinds():
        recipe, words = load(path), ["parts/training/muon.yaml"]
        if recipe.lora is not None:
            assert "muon.yaml:6: optimizer.name: found muon together with lora.rank" in find_problem(path, *words)
            continue
        if recipe.model.provider == "megatron":
            assert "found muon together with model.provider megatron" in find_problem(path, *words)
            continue
        muon = load_recipe(path, words)
        assert muon.optimizer.name == muon.probe.direction == "muon"
        assert muon.optimizer.learning_rate == recipe.optimizer.learning_rate


def test_a_method_removes_the_reference_of_iw_sft(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "base: [qwen3_4b_math_full.yaml, methods/iw_sft.yaml]\ndata: {reference_log_probabilities: reference.npz}\n"
    )
    assert load_recipe(mine).data.reference_log_probabilities == "reference.npz"
    for name in METHODS:
        kept = "reference.npz" if name == "iw_sft" else None
        remedy = {"stored": ["data.token_weights=weights.parquet"], "asft": ["lora.rank=4", "lora.alpha=8"]}
        remedy["custom"] = [FUNCTION, "method.options={gamma: 2}"]
        words = [f"methods/{name}.yaml", *remedy.get(name, [])]
        assert load_recipe(mine, words).data.reference_log_probabilities == kept
    problem = find_problem(mine, "presets/paper.yaml")
    assert "found reference.npz together with method.name vcore and lora null; expected null" in problem


def test_the_presets_have_the_two_readings_of_temperature() -> None:
    """Method, section 3: the paper multiplies by 5e3, the released code divides by 5e3."""
    paper = read_method(load_recipe(QUICKSTART, ["presets/paper.yaml"]))
    released = read_method(load_recipe(QUICKSTART, ["presets/released_code.yaml"]))
    assert paper["method.temperature"] == 5e3 and released["method.temperature"] == 1 / 5e3
    same = {
        "method.name": "vcore",
        "method.kl_budget": None,
        "method.alpha": "loss_ratio",
        "utility.estimator": "finite_difference",
        "utility.epsilon": 1e-4,
        "utility.rounding": "nearest",
        "probe.batch_size": 32,
        "probe.direction": "sgd",
        "probe.every": 1,
    }
    assert same.items() <= paper.items() and same.items() <= released.items()
    differing = ("method.normalization", "method.alpha_scope", "method.alpha_cap", "probe.clip")
    assert [paper[key] for key in differing] == ["sequence", "global_batch", None, None]
    assert [released[key] for key in differing] == ["token", "micro_batch", 1.0, 1.0]


def test_recommended_is_consistent_with_the_optimizer_of_the_recipes() -> None:
    for path in RECIPES:
        recipe = load_recipe(path, ["presets/recommended.yaml"])
        assert recipe.utility.estimator == "jvp" and recipe.method.temperature is None
        if recipe.probe.direction == "adam":  # its moments are those of clipped gradients
            assert recipe.optimizer.name == "adamw" and recipe.probe.clip == recipe.optimizer.gradient_clipping


# ---------------------------------------------------------------- the paper's numbers

SELECTION = {
    # Table "Selected hyperparameters", (epsilon, tau * epsilon); Qwen3-1.7B "using the Qwen3-4B training setup" and
    # Mistral "using the Llama-3.1-8B-Instruct setup" (Obs 2)
    "llama3.1_8b_instruct_math": (1e-5, 0.8),
    "llama3.1_8b_instruct_code": (1e-5, 0.8),
    "mistral_7b_instruct_v0.3_math": (1e-5, 0.8),
    "mistral_7b_instruct_v0.3_code": (1e-5, 0.8),
    "qwen3_1.7b_math": (1e-4, 0.5),
    "qwen3_1.7b_code": (1e-4, 0.8),
    "qwen3_4b_math": (1e-4, 0.5),
    "qwen3_4b_code": (1e-4, 0.8),
    "qwen3_8b_math": (1e-5, 0.5),
    "qwen3_8b_code": (1e-5, 0.5),
    "qwen3_32b_math": (1e-4, 0.8),
    "qwen3_32b_code": (1e-4, 0.8),
}
PATHS = {
    "qwen3_1.7b": "Qwen/Qwen3-1.7B",
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_32b": "Qwen/Qwen3-32B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3_235b_a22b": "Qwen/Qwen3-235B-A22B",
    "llama3.1_8b_instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral_7b_instruct_v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
}


def test_a_paper_recipe_is_the_recipe_with_the_paper_preset_and_the_papers_selection() -> None:
    for name, (epsilon, temperature_times_epsilon) in SELECTION.items():
        recipe = load(FOLDER / f"paper/{name}_lora.yaml")
        assert recipe.utility.epsilon == epsilon and recipe.method.temperature is not None
        assert recipe.method.temperature * epsilon == pytest.approx(temperature_times_epsilon, rel=1e-12)
        words = [
            "presets/paper.yaml",
            f"method.temperature={recipe.method.temperature}",
            f"utility.epsilon={recipe.utility.epsilon}",
            f"run.output_dir=runs/paper/{name}_lora",
        ]
        assert load_recipe(FOLDER / f"{name}_lora.yaml", words) == recipe


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if path not in (QUICKSTART, WRONG_TRACES)], ids=lambda path: path.stem
)
def test_recipes_have_the_papers_hyperparameters(path: Path) -> None:
    """Table "Hyperparameter settings", and |B'| = 32 of the implementation details."""
    recipe = load(path)
    name, _, tensor = path.stem.partition("_tensor")
    model, task, kind = name.rsplit("_", 2)
    is_qwen3 = model.startswith("qwen3")
    assert recipe.model.path == PATHS[model] and recipe.model.precision == "bf16"
    assert (recipe.batch.global_size, recipe.probe.batch_size, recipe.run.seed) == (32, 32, 42)
    assert (recipe.optimizer.name, recipe.optimizer.learning_rate) == ("adamw", 2e-5 if is_qwen3 else 2e-4)
    assert (recipe.schedule.num_steps, recipe.schedule.num_epochs) == (100 if is_qwen3 else 1000, None)
    assert (recipe.schedule.kind, recipe.schedule.warmup_ratio) == ("cosine", 0.1 if is_qwen3 else 0.05)
    assert recipe.data.cutoff_length == 16384
    assert recipe.data.train_path == f"data/{task}_{3200 if is_qwen3 else 32000}"
    assert recipe.parallel.tensor == int(tensor or 1)
    assert recipe.model.provider == ("megatron" if tensor else "huggingface")
    # A group of 8 GPUs has room for more than one of them.
    assert recipe.batch.pack_tokens_per_rank == recipe.data.cutoff_length * (4 if tensor else 1)
    if kind == "full":
        assert recipe.lora is None
    else:
        assert recipe.lora is not None and recipe.lora.target_modules == "all-linear"
        lora = (recipe.lora.rank, recipe.lora.alpha, recipe.lora.dropout)
        assert lora == ((8, 16, 0.1) if is_qwen3 else (64, 128, 0.05))
    assert recipe.run.output_dir == f"runs/{path.relative_to(FOLDER).with_suffix('')}"


@pytest.mark.parametrize("path", DEEPSPEED_CONFIGS, ids=lambda path: path.stem)
def test_deepspeed_json_leaves_the_recipes_keys_alone_and_fits_its_precision(path: Path) -> None:
    text = path.read_text()
    for word in ("batch_size", "accumulation_steps", "lr", "learning_rate", "clipping", "auto"):
        assert not re.search(rf'"[^"]*{word}"', text), f"{word} belongs to the recipe"
    fitting, contradicting = ("fp32", "bf16") if "fp32" in path.stem else ("bf16", "fp32")

    def merge(precision: str) -> dict[str, object]:
        sections = {"model": {"path": "m", "precision": precision}, "engine": {"deepspeed_config": str(path)}}
        settings = derive_plan_settings(Recipe.model_validate(smallest_recipe() | sections))
        return deepspeed_config(settings, plan_batch(settings, 2, QWEN3_32B))

    assert merge(fitting)["zero_optimization"] == json.loads(text)["zero_optimization"]
    with pytest.raises(RecipeError, match=r"bf16.enabled: found .* the recipe's model.precision gives"):
        merge(contradicting)


# ---------------------------------------------------------------- the files


def test_a_file_starts_with_a_description_and_ends_with_a_line_break() -> None:
    for path in FOLDER.rglob("*.yaml"):
        text = path.read_text()
        for_editors, first, *_ = text.splitlines()
        schema = os.path.relpath(FOLDER / "recipe.schema.json", path.parent)
        assert for_editors == f"# yaml-language-server: $schema={schema}" and first.startswith("# "), path
        assert text.endswith("\n") and max(map(len, text.splitlines())) <= 120, path


def test_a_recipe_copies_nothing() -> None:
    """No value of a part, a preset or another recipe is written a second time."""
    for path in RECIPES:
        written = yaml.safe_load(path.read_text())
        assert "base" in written
        if path not in (QUICKSTART, WRONG_TRACES):
            assert written.keys() <= {"base", "method", "utility", "run"}
            assert len(path.read_text().splitlines()) <= 1 + 13  # the line for editors
            for section in written.keys() & {"method", "utility", "run"}:
                assert len(written[section]) == 1, path  # temperature, epsilon, output_dir
