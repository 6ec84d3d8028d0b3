"""Every recipe and DeepSpeed JSON that is shipped loads, plans and merges."""

import json
import re
from pathlib import Path

import pytest
import yaml

from vcore_ds.config import Recipe, RecipeError, deepspeed_config, dump_recipe, load_recipe, plan_batch
from vcore_ds.quickstart import RECIPE as QUICKSTART
from vcore_ds.quickstart import fit_batch

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "launch_scripts" / "recipes").glob("*.yaml"))
DEEPSPEED_CONFIGS = sorted((REPOSITORY / "ds_configs").glob("*.json"))
NUM_RANKS = (1, 2, 4, 8, 16, 32)


def test_the_recipes_that_the_documentation_names_are_there() -> None:
    assert {path.stem for path in RECIPES} >= {"quickstart", "qwen3_32b_full", "qwen3_32b_lora"}
    names = {path.stem for path in DEEPSPEED_CONFIGS}
    assert names >= {"zero3_bf16", "zero3_fp32", "zero3_bf16_offload_optimizer"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_from_any_working_directory(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(path)
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_plans_and_merges(path: Path, num_ranks: int) -> None:
    recipe = load_recipe(path)
    unit = num_ranks * recipe.batch.micro_batch_size_per_rank
    if recipe.batch.global_size % unit != 0:
        with pytest.raises(RecipeError, match="nearest that work"):
            plan_batch(recipe, num_ranks)
        return
    plan = plan_batch(recipe, num_ranks)
    config = deepspeed_config(recipe, plan)
    assert config["train_batch_size"] == recipe.batch.global_size
    assert config["train_batch_size"] == (
        num_ranks * config["gradient_accumulation_steps"] * config["train_micro_batch_size_per_gpu"]
    )
    assert config["bf16"]["enabled"] is (recipe.model.precision == "bf16")
    assert plan.probe_batch_size_global % num_ranks == 0


def test_the_32b_recipes_run_on_every_number_of_ranks() -> None:
    for path in RECIPES:
        if "32b" in path.stem:
            for num_ranks in NUM_RANKS:
                plan_batch(load_recipe(path), num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 16])
def test_the_quickstart_fits_any_number_of_ranks(num_ranks: int) -> None:
    recipe = load_recipe(QUICKSTART)
    batch = fit_batch(recipe, num_ranks)
    plan = plan_batch(load_recipe(QUICKSTART, [f"{key}={value}" for key, value in batch.items()]), num_ranks)
    assert plan.global_batch_size >= recipe.batch.global_size
    if num_ranks in (1, 2):
        assert batch == {"batch.global_size": 8, "batch.micro_batch_size_per_rank": 4}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_papers_training_hyperparameters(kind: str) -> None:
    """Table "Hyperparameter settings", column Qwen3, and |B'| = 32 of the training details."""
    recipe = load_recipe(REPOSITORY / "launch_scripts" / "recipes" / f"qwen3_32b_{kind}.yaml")
    assert recipe.model.path == "Qwen/Qwen3-32B" and recipe.model.precision == "bf16"
    assert (recipe.batch.global_size, recipe.probe.batch_size, recipe.run.seed) == (32, 32, 42)
    assert (recipe.optimizer.name, recipe.optimizer.learning_rate) == ("adamw", 2e-5)
    assert (recipe.schedule.num_steps, recipe.schedule.kind, recipe.schedule.warmup_ratio) == (100, "cosine", 0.1)
    assert recipe.data.cutoff_length == 16384
    if kind == "full":
        assert recipe.lora is None
    else:
        assert recipe.lora is not None and recipe.lora.target_modules == "all-linear"
        assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.dropout) == (8, 16, 0.1)


@pytest.mark.parametrize("path", DEEPSPEED_CONFIGS, ids=lambda path: path.stem)
def test_deepspeed_json_leaves_the_recipes_keys_alone_and_fits_its_precision(path: Path) -> None:
    text = path.read_text()
    for word in ("batch_size", "accumulation_steps", "lr", "learning_rate", "clipping", "auto"):
        assert not re.search(rf'"[^"]*{word}"', text), f"{word} belongs to the recipe"
    values = {
        "method": {"kl_budget": 0.05},
        "model": {"path": "m", "precision": "fp32" if "fp32" in path.stem else "bf16"},
        "data": {"train_path": "t"},
        "optimizer": {"learning_rate": 1.0},
        "schedule": {"num_steps": 1},
        "run": {"output_dir": "o"},
        "engine": {"deepspeed_config": str(path)},
    }
    recipe = Recipe.model_validate(values)
    config = deepspeed_config(recipe, plan_batch(recipe, 2))
    assert config["zero_optimization"] == json.loads(text)["zero_optimization"]
    other = {"bf16": "fp32", "fp32": "bf16"}[recipe.model.precision]
    contradiction = Recipe.model_validate(values | {"model": {"path": "m", "precision": other}})
    with pytest.raises(RecipeError, match=r"bf16.enabled: found .* the recipe's model.precision gives"):
        deepspeed_config(contradiction, plan_batch(contradiction, 2))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_commented(path: Path) -> None:
    """A number without a source helps nobody: each recipe starts with what it is."""
    assert path.read_text().startswith("# ")
    assert list(yaml.safe_load(path.read_text()))[0] == "method"
