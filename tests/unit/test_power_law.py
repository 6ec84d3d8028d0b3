"""Power laws: known ones are recovered from noisy losses, and the right one predicts the largest point."""

import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.recipes import smallest_recipe
from vcore_ds.commands.report.page import Table
from vcore_ds.commands.sweep.scaling import Fit, fit_laws, scaling_tables
from vcore_ds.config.schema import Recipe

SIZES = list(itertools.product((0.6e9, 1.7e9, 4e9, 8e9), (1e6, 4e6, 16e6, 64e6)))


def fit(law: str, seed: int) -> list[Fit]:
    """Fit losses of 4 x 4 sizes and 3 seeds with noise of 0.4%."""
    generator = np.random.default_rng(seed)
    points = [size for size in SIZES for _ in range(3)]
    n, d = np.array(points).T / [[1e9], [1e6]]
    losses = {"product": 0.8 * n**-0.1 * d**-0.1 + 0.3, "sum": 0.4 * n**-0.3 + 0.6 * d**-0.4 + 0.3}[law]
    return fit_laws(points, losses * np.exp(0.004 * generator.normal(size=len(points))), ["N", "D"])


def test_the_multiplicative_law_is_recovered() -> None:
    product, added = fit("product", seed=0)
    assert product.law == "A N^-n D^-d + E" and added.law == "A N^-n + B D^-d + E"
    assert product.names == ["n", "d", "E"]
    for value, (low, high), true, room in zip(
        product.values, product.intervals, (0.1, 0.1, 0.3), (0.02, 0.02, 0.08), strict=True
    ):
        assert low < value < high and value == pytest.approx(true, abs=room)
        assert high - low < 4 * room
    # The largest point, which no fit has seen, decides.
    assert abs(product.error) < 0.005 < 0.01 < abs(added.error)
    low, high = product.predicted_interval
    assert low < product.predicted < high and product.predicted == product.measured * (1 + product.error)


def test_the_additive_law_is_recovered_where_it_holds() -> None:
    added, product = fit("sum", seed=1)
    assert added.law == "A N^-n + B D^-d + E" and abs(added.error) < 0.005 < abs(product.error)
    assert added.values == pytest.approx([0.3, 0.4, 0.3], abs=0.12)
    for true, (low, high) in zip((0.3, 0.4, 0.3), added.intervals, strict=True):
        assert low < true < high


def test_too_few_points_are_not_fitted() -> None:
    points = [(10.0,), (20.0,), (40.0,)]
    assert fit_laws(points, [3.0, 2.0, 1.5], ["D"]) == []
    assert len(fit_laws([*points, (80.0,)], [3.0, 2.0, 1.5, 1.2], ["D"])) == 1


def find_tables(value_of: Callable[[Any], float] = lambda run: run.loss, **cells: dict[str, Any]) -> list[Table]:
    """Tables of cells of three seeds, whose losses follow a power law in their tokens."""

    def make_run(seed: int, tokens: int, **sections: Mapping[str, Any]) -> SimpleNamespace:
        recipe = smallest_recipe()
        for section, values in {**sections, "run": {"seed": seed}}.items():
            recipe[section] = recipe.get(section, {}) | values
        loss = (0.8 * tokens**-0.2 + 0.3) * (1 + 0.001 * seed)
        return SimpleNamespace(recipe=Recipe.model_validate(recipe), total=lambda key: tokens, loss=loss)

    runs = {name: {seed: make_run(seed, **sections) for seed in (1, 2, 3)} for name, sections in cells.items()}
    return scaling_tables(runs, "loss", value_of)


def test_cells_that_differ_in_size_only_are_fitted_together() -> None:
    methods = {"sft": {"method": {"name": "sft", "kl_budget": None}}, "vcore": {}}
    data = {
        f"{method}_{tokens}": {"tokens": tokens, "data": {"train_path": f"{tokens}.jsonl"}, **sections}
        for method, sections in methods.items()
        for tokens in (100, 400, 1600, 6400, 25600)
    }
    tables = find_tables(**data)
    assert len(tables) == 2 and "sft_100, sft_400, sft_1600, sft_6400, sft_25600" in tables[0].caption
    for table in tables:
        assert table.head == ["law", "d", "E", "largest, predicted", "largest, measured", "error"]
        (row,) = table.rows
        assert row[0] == "A D^-d + E" and row[1].startswith("0.2") and abs(float(row[-1].strip("%"))) < 0.5


def test_branches_of_one_run_are_fitted_together() -> None:
    def make_branch(steps: int) -> dict[str, Any]:
        schedule = {"num_steps": steps, "kind": "wsd", "warmup_steps": 2}
        checkpoint = {"branch_from": f"long/checkpoints/step_{steps * 4 // 5:08d}"}
        return {"tokens": 20 * steps, "schedule": schedule, "checkpoint": checkpoint}

    (table,) = find_tables(**{f"length_{steps}": make_branch(steps) for steps in (5, 20, 80, 320, 1280)})
    assert table.rows[0][0] == "A D^-d + E" and table.rows[0][1].startswith("0.2")


def test_models_are_counted_by_their_names() -> None:
    names = [f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")]
    models = {f"model_{i}": {"tokens": 100 * 2**i, "model": {"path": name}} for i, name in enumerate(names)}
    same_data = {name: sections | {"tokens": 100} for name, sections in models.items()}
    (table,) = find_tables(lambda run: 1 + run.recipe.run.seed / 100, **same_data)
    assert table.head[:3] == ["law", "n", "E"] and "N model parameters: model_0" in table.caption
    (table,) = find_tables(**models)
    assert table.head[:4] == ["law", "n", "d", "E"]


def test_a_sweep_over_other_keys_has_no_power_law() -> None:
    assert find_tables(**{f"_{i}": {"tokens": 100, "optimizer": {"learning_rate": 0.1 + i}} for i in range(5)}) == []
    assert find_tables(**{f"_{i}": {"tokens": 100, "model": {"path": f"unknown/{i}"}} for i in range(5)}) == []
