"""The page of a sweep of models, learning rates and methods in a real browser; the runs are written for it."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import yaml
from scipy import stats

from tests.helpers.browser import open_page
from tests.helpers.recipes import smallest_recipe
from tests.helpers.sweeps import finish_runs
from vcore_ds.commands.report import write_report
from vcore_ds.commands.sweep import begin_sweep
from vcore_ds.commands.sweep.folder import load_sweep
from vcore_ds.config.schema import Recipe

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.e2e

SIZES = {"Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-1.7B": 1.7, "Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2}
RATES, SEEDS = (1e-5, 3e-5, 1e-4), (1, 2, 3)
METHODS = {"sft": ["method.name=sft", "method.kl_budget=null"], "vcore": None}


def make_loss(model: str, rate: float, method: str, seed: int) -> float:
    """A power law in the model's size, with the best rate in the middle."""
    noise = float(np.random.default_rng([seed, len(method), len(model)]).normal())
    return 0.5 * SIZES[model] ** -0.3 + 1 + math.log10(rate / 3e-5) ** 2 - 0.02 * (method == "vcore") + 0.01 * noise


def loss_of(recipe: Recipe) -> float:
    return make_loss(recipe.model.path, recipe.optimizer.learning_rate, recipe.method.name, recipe.run.seed)


@pytest.fixture(scope="module")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a sweep")
    (folder / "base.yaml").write_text(
        yaml.safe_dump(smallest_recipe() | {"engine": {"deepspeed_config": "ds_configs/zero3_bf16.json"}})
    )
    grid = {"model.path": [*SIZES], "optimizer.learning_rate": [*RATES], "method": METHODS}
    values = {"recipe": str(folder / "base.yaml"), "output_dir": str(folder / "out"), "seeds": [*SEEDS]}
    (folder / "mine.yaml").write_text(yaml.safe_dump(values | {"grid": grid, "reference": "sft"}, sort_keys=False))
    sweep = begin_sweep(load_sweep(folder / "mine.yaml"))
    finish_runs(sweep, sweep.runs, loss_of)
    path, _ = write_report([sweep.folder])
    return path


def test_pictures_come_first_and_tell_their_numbers(browser: "Browser", sweep_page: Path) -> None:
    with open_page(browser, sweep_page, viewport={"width": 1400, "height": 1200}) as page:
        section = page.locator("#sweep")
        headings = ["Held-out loss against learning_rate", "Held-out loss against model parameters"]
        assert section.locator("h3").all_inner_texts() == headings
        assert section.locator(".legend span").all_inner_texts() == ["sft", "vcore"]
        figures = section.locator("figure")
        titles = [text.partition(" ")[0] for text in section.locator("figcaption").all_inner_texts()]
        assert titles == [*(model.partition("/")[2] for model in SIZES), "held-out"]
        last, table = figures.nth(4).bounding_box(), section.locator("table").first.bounding_box()
        assert last["y"] + last["height"] < table["y"] and last["y"] < 1200
        ticks = figures.first.locator("text.step").all_text_contents()
        assert ticks == ["1e-05", "3e-05", "0.0001"]
        assert figures.nth(4).locator("text.step").all_text_contents()[0] == "596M"  # Qwen3-0.6B has 0.596B
        model, text = next(iter(SIZES)), figures.first.locator("svg").get_attribute("aria-label")
        for method in METHODS:
            for rate in RATES:
                mean = np.mean([make_loss(model, rate, method, seed) for seed in SEEDS])
                assert f"{float(f'{mean:.4g}')} at learning_rate {rate:g}" in text, (method, rate, text)
        # A mark for each cell. Against four sizes the line is a power law, below and above some of them.
        for figure, num_points, num_places in ((figures.first, 3, 3), (figures.nth(4), 4, 30)):
            assert figure.locator("circle").count() == 2 * num_points
            lines = figure.locator("polyline").evaluate_all("some => some.map((one) => one.points.numberOfItems)")
            assert lines == [num_places] * 2
        svg = figures.first.locator("svg")
        svg.focus()
        page.keyboard.press("ArrowLeft")
        assert figures.first.locator(".readout").inner_text().startswith("learning_rate 3e-05: ")


def test_tables_have_a_column_for_each_key_that_varies(browser: "Browser", sweep_page: Path) -> None:
    with open_page(browser, sweep_page) as page:
        tables = page.locator("#sweep table")
        best, laws, _, cells = (table.locator("tr").all() for table in tables.all())
        heads = [[cell.inner_text() for cell in rows[0].locator("th").all()] for rows in (best, cells)]
        assert heads[0] == heads[1][:8] + heads[1][-3:] and heads[0][-1] == "verdict"
        assert heads[0][:8] == [
            "model",
            "method",
            "learning_rate",
            "seeds",
            "held-out loss",
            "spread",
            "difference",
            "p",
        ]
        assert len(best) == 1 + 2 * len(SIZES) and len(cells) == 1 + 24
        rows = [[cell.inner_text() for cell in row.locator("th, td").all()] for row in best[1:]]
        assert {row[-1] for row in rows} == {"best"}  # rates are apart by 100 times the seeds' noise
        assert rows[0][:4] == ["Qwen3-0.6B (596M)", "sft", "3e-05", "3"] and laws[1].inner_text().startswith("A N^-n")
        differences, p_values = [], []
        for model in SIZES:
            losses = [[make_loss(model, 3e-5, method, seed) for seed in SEEDS] for method in ("vcore", "sft")]
            differences.append(f"{np.mean(losses[0]) - np.mean(losses[1]):+.4f}")
            p_values.append(stats.ttest_rel(*losses).pvalue)
        assert [row[6].partition(" ")[0] for row in rows[1::2]] == differences
        adjusted, largest = [0.0] * len(p_values), 0.0
        for rank, i in enumerate(np.argsort(p_values)):
            adjusted[i] = largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        assert [row[7] for row in rows[1::2]] == [f"{p:.3f}" for p in adjusted]
        # The numbers of the 72 runs are folded.
        assert not page.locator("#learnt table").is_visible() and not page.locator("#cost table").is_visible()


def test_it_can_be_used_on_a_phone_and_in_the_dark(browser: "Browser", sweep_page: Path) -> None:
    with open_page(browser, sweep_page, viewport={"width": 390, "height": 844}, color_scheme="dark") as page:
        for width in (320, 390, 1400):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") == width
            boxes = [svg.bounding_box() for svg in page.locator("#sweep figure svg").all()]
            assert all(box["width"] >= 280 and box["x"] + box["width"] <= width for box in boxes)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
