"""Power laws: known ones are recovered from noisy losses, and the right one predicts the largest point."""

import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.recipes import smallest_recipe
from vcore_ds.commands.report.sweep import D, Laws, N, find_best, fit_lines, group_cells
from vcore_ds.commands.sweep.scaling import Fit, fit_laws
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
    assert product.predict(np.array([[8e9, 64e6]])) == pytest.approx([product.predicted], rel=1e-9)
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


def find_laws(value_of: Callable[[int, Any], float] | None = None, **cells: dict[str, Any]) -> dict[str, Laws]:
    """Power laws of cells of three seeds, whose losses follow one in their tokens, or are `value_of(seed, recipe)`."""

    def make_run(name: str, seed: int, tokens: int, **sections: Mapping[str, Any]) -> SimpleNamespace:
        recipe = smallest_recipe()
        for section, values in {**sections, "run": {"seed": seed, "output_dir": name}}.items():
            recipe[section] = recipe.get(section, {}) | values
        loss = (0.8 * tokens**-0.2 + 0.3) * (1 + 0.001 * seed)
        read = Recipe.model_validate(recipe)
        after = {"": value_of(seed, read) if value_of else loss}
        held_out = SimpleNamespace(normalization="sequence", before={"": 9.0}, after=after)
        return SimpleNamespace(
            name=f"{name}/seed_{seed}", recipe=read, total=lambda key: tokens, held_out=held_out, metrics=[]
        )

    runs = [make_run(name, seed, **sections) for name, sections in cells.items() for seed in (1, 2, 3)]
    return fit_lines(find_best(group_cells(runs)[0], "held-out loss"), "held-out loss")


def test_cells_that_differ_in_size_only_are_fitted_together() -> None:
    methods = {"sft": {"method": {"name": "sft", "kl_budget": None}}, "vcore": {}}
    data = {
        f"{method}_{tokens}": {"tokens": tokens, "data": {"train_path": f"{tokens}.jsonl"}, **sections}
        for method, sections in methods.items()
        for tokens in (100, 400, 1600, 6400, 25600)
    }
    laws = find_laws(**data)
    assert list(laws) == ["sft", "vcore"]
    for axes, (law,) in laws.values():
        assert axes == [D] and law.law == "A D^-d + E" and law.names == ["d", "E"]
        assert law.values[0] == pytest.approx(0.2, abs=0.05) and abs(law.error) < 0.005


def test_the_best_rate_of_each_size_is_fitted() -> None:
    cells = {
        f"{tokens}_{rate}": {"tokens": tokens, "schedule": {"num_steps": tokens}, "optimizer": {"learning_rate": rate}}
        for tokens in (100, 400, 1600, 6400, 25600)
        for rate in (0.1, 0.2, 0.4)
    }

    def worsen(seed: int, recipe: Recipe) -> float:
        """The largest rate is the best at the two smallest sizes, the middle one at the others."""
        steps, rate = recipe.schedule.num_steps, recipe.optimizer.learning_rate
        distance = abs(np.log2(rate / (0.4 if steps < 1000 else 0.2)))
        return (0.8 * steps**-0.2 + 0.3) * (1 + 0.001 * seed) + distance

    ((axes, (law,)),) = find_laws(worsen, **cells).values()
    assert axes == [D] and law.values[0] == pytest.approx(0.2, abs=0.05) and abs(law.error) < 0.005


def test_branches_of_one_run_are_fitted_together() -> None:
    def make_branch(steps: int) -> dict[str, Any]:
        schedule = {"num_steps": steps, "kind": "wsd", "warmup_steps": 2}
        checkpoint = {"branch_from": f"long/checkpoints/step_{steps * 4 // 5:08d}"}
        return {"tokens": 20 * steps, "schedule": schedule, "checkpoint": checkpoint}

    ((_, (law,)),) = find_laws(**{f"length_{steps}": make_branch(steps) for steps in (5, 20, 80, 320, 1280)}).values()
    assert law.law == "A D^-d + E" and law.values[0] == pytest.approx(0.2, abs=0.05)


def test_models_are_counted_by_their_names() -> None:
    names = [f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")]
    models = {f"model_{i}": {"tokens": 100 * 2**i, "model": {"path": name}} for i, name in enumerate(names)}
    same_data = {name: sections | {"tokens": 100} for name, sections in models.items()}
    ((axes, (law,)),) = find_laws(lambda seed, _: 1 + seed / 100, **same_data).values()
    assert axes == [N] and law.names == ["n", "E"]
    ((axes, (law, *_)),) = find_laws(**models).values()
    assert axes == [N, D] and law.names == ["n", "d", "E"]


def test_a_sweep_over_other_keys_has_no_power_law() -> None:
    for change in ({"optimizer": {"learning_rate": 0.1}}, {"model": {"path": "unknown/"}}):
        (section, ((key, value),)) = next((section, tuple(values.items())) for section, values in change.items())
        cells = {f"_{i}": {"tokens": 100, section: {key: value + type(value)(i)}} for i in range(5)}
        assert [fits for _, fits in find_laws(**cells).values()] == [[]]
