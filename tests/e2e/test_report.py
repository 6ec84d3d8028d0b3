"""`vcore-ds report` on real runs: two seeds of VCORE and one of plain fine-tuning, on a tiny model."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers import resumed_runs
from tests.helpers.browser import open_page
from tests.helpers.commands import read_metrics
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import TinySetup
from vcore_ds.commands.cli import main
from vcore_ds.config.load import load_recipe
from vcore_ds.training.token_records import TokenRecord, read_records

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.e2e

RECIPE = "launch_scripts/recipes/qwen3_32b_math_lora.yaml"
NUM_STEPS = 3


def train_all(overrides: list[str], folder: str) -> None:
    """Train all runs in this process, since a start costs more than a step."""
    for name, changes in {
        "vcore_1": ["run.seed=1"],
        "vcore_2": ["run.seed=2"],
        "sft": ["methods/sft.yaml", "run.seed=1"],
    }.items():
        resumed_runs.train(load_recipe(RECIPE, [*overrides, *changes, f"run.output_dir={folder}/{name}"]))


@pytest.fixture(scope="module")
def runs(setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    changes = (f"schedule.num_steps={NUM_STEPS}", "run.num_followed_traces=2")
    run_ranks(train_all, 1, setup.overrides(folder, *changes), str(folder))
    return folder


@pytest.fixture(scope="module")
def one(runs: Path) -> Path:
    """The report of one run."""
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(["report", f"{runs}/vcore_1"]) == 0
    assert output.getvalue().strip() == f"{runs}/vcore_1/report.html"
    return runs / "vcore_1" / "report.html"


@pytest.fixture(scope="module")
def several(runs: Path) -> tuple[Path, Path]:
    """The report of all runs, and the folder of its pictures."""
    page, pictures = runs / "reports" / "all.html", runs / "pictures"
    names = [f"{runs}/{name}" for name in ("vcore_1", "vcore_2", "sft")]
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(["report", *names, "--output", str(page), "--png", str(pictures)]) == 0
    first, *others = output.getvalue().split()
    assert first == str(page) and {Path(word) for word in others} == set(pictures.iterdir())
    return page, pictures


def test_the_report_is_one_file_without_links(one: Path, runs: Path) -> None:
    text = one.read_text(encoding="utf-8")
    assert not re.search(r"""\b(src|href)\s*=\s*["']?[^"'#\s]|@import|url\(""", text)
    assert "What gained and lost weight" in text and "By kind of token" in text
    environment = json.loads((runs / "vcore_1" / "environment.json").read_text())
    assert environment["packages"]["torch"] in text and "kl_budget" in text


def test_curves_are_also_written_as_pictures(several: tuple[Path, Path]) -> None:
    names = {path.name for path in several[1].iterdir()}
    assert {"loss.png", "loss.pdf", "alpha.png", "quantiles.png", "negative.pdf"} <= names
    for name in names:
        head = (several[1] / name).read_bytes()[:5]
        assert head == (b"\x89PNG\r" if name.endswith("png") else b"%PDF-")


@pytest.fixture(scope="module")
def shown(browser: "Browser", one: Path) -> "Iterator[Page]":
    """The report of one run, for tests of different parts of it."""
    with open_page(browser, one) as page:
        yield page


def test_curves_show_the_metrics(shown: "Page", runs: Path) -> None:
    metrics = read_metrics(runs / "vcore_1")
    for key in ("loss", "weighted_loss", "alpha", "grad_norm", "effective_sample_size", "utility_mean"):
        assert read_curve(shown, key) == (NUM_STEPS, pytest.approx(metrics[-1][key], rel=1e-3)), key
    negative = [read_utilities(record) < 0 for record in read_records(runs / "vcore_1")]
    assert read_curve(shown, "negative")[1] == pytest.approx(100 * negative[-1].mean(), rel=1e-3, abs=1e-3)
    assert f"KL from uniform weights {metrics[-1]['kl']:.4g} nats" in shown.locator("#curves").inner_text()
    # All curves share a cursor, moved by keyboard or pointer.
    shown.locator("figure[data-chart=loss] svg").focus()
    shown.keyboard.press("ArrowLeft")
    for key in ("loss", "grad_norm"):
        assert read_curve(shown, key) == (NUM_STEPS - 1, pytest.approx(metrics[-2][key], rel=1e-3))
    shown.keyboard.press("Home")
    assert read_curve(shown, "loss") == (1, pytest.approx(metrics[0]["loss"], rel=1e-3))
    curve = shown.locator("figure[data-chart=alpha] svg")
    box = curve.bounding_box()
    curve.hover(position={"x": box["width"] / 2 + 20, "y": 30})
    assert read_curve(shown, "loss")[0] == 2


def read_curve(page: "Page", key: str) -> tuple[int, float]:
    """Step and value below the curve of a single run."""
    text = page.locator(f"figure[data-chart={key}] .readout").inner_text()
    step, value = re.match(r"step ([\d,]+): (-?[\d.,e-]+)", text).groups()
    return int(step.replace(",", "")), float(value.replace(",", ""))


def read_utilities(record: TokenRecord) -> np.ndarray:
    return np.concatenate([sequence.utilities for sequence in record.sequences])


def test_a_token_shows_what_was_recorded(browser: "Browser", one: Path, runs: Path) -> None:
    """By pointer and by keyboard, for tokens with the most, the least and the median weight, and the first ones."""
    record = read_records(runs / "vcore_1")[0]
    sequence = record.sequences[0]
    order = np.argsort(-sequence.relative_weights, kind="stable").tolist()
    with open_page(browser, one) as page:
        show_all(page)
        tokens = page.locator("#viewer .tokens").first.locator("span")
        assert tokens.count() == len(sequence)
        for i in (order[0], order[-1], order[len(order) // 2]):
            tokens.nth(i).hover()
            check_tip(page, sequence, i, order)
        page.mouse.move(0, 0)
        assert page.locator("#tip").is_hidden()
        tokens.first.focus()
        for i in range(1, 4):
            page.keyboard.press("ArrowRight")
            check_tip(page, sequence, i, order)
            assert page.evaluate("document.activeElement.getAttribute('aria-label')").count("rank") == 1
        page.keyboard.press("End")
        check_tip(page, sequence, len(sequence) - 1, order)
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()


def check_tip(page: "Page", sequence, i: int, order: list[int]) -> None:
    names = page.locator("#tip dt").all_inner_texts()
    facts = dict(zip(names, page.locator("#tip dd").all_inner_texts(), strict=True))
    relative = sequence.relative_weights
    spread = np.log(relative.max() / relative.min())
    assert float(facts["weight"].rstrip("×")) == pytest.approx(relative[i], rel=0.005 * spread + 1e-3)
    assert facts["rank"] == f"{order.index(i) + 1} of {len(sequence)}"
    assert float(facts["loss"].split()[0]) == pytest.approx(float(sequence.losses[i]), rel=0.02, abs=0.02)
    assert float(facts["probability"]) == pytest.approx(np.exp(-sequence.losses[i]), abs=0.02)
    largest = float(np.abs(sequence.utilities).max())
    assert float(facts["utility"]) == pytest.approx(float(sequence.utilities[i]), rel=0.06, abs=0.02 * largest)


def test_filters_show_the_tokens_that_they_name(browser: "Browser", one: Path, runs: Path) -> None:
    records = read_records(runs / "vcore_1")
    num_tokens = sum(record.num_tokens for record in records)
    with open_page(browser, one) as page:
        assert page.locator("#viewer .trace h4").inner_text().startswith(f"Step {NUM_STEPS}, training data")
        show_all(page)
        assert count_shown(page) == (num_tokens, sum(len(record.sequences) for record in records))
        find_control(page, "Step").select_option("2")
        assert count_shown(page) == (records[1].num_tokens, len(records[1].sequences))
        assert page.locator("#viewer .trace h4").all_inner_texts()[0].startswith("Step 2, training data")
        few = sum(int(np.ceil(0.05 * len(sequence))) for sequence in records[1].sequences)
        for extreme in ("most", "least"):
            find_control(page, "Weights").select_option(extreme)
            assert count_shown(page)[0] == few == page.locator("#viewer .tokens span:not(.dim)").count()
        find_control(page, "Weights").select_option("all")
        find_control(page, "Step").select_option("")
        for kind in page.locator("#viewer fieldset label").all_inner_texts():
            if kind.strip() != "digit":
                page.locator("#viewer").get_by_label(kind.strip(), exact=True).uncheck()
        digits = page.locator("#viewer .tokens span:not(.dim)").all_inner_texts()
        assert digits and all(text.isdigit() for text in digits)
        # A trace that is repeated in a later step shows how its weights moved.
        seen = [sequence.sequence_id for record in records for sequence in record.sequences]
        again = max(seen, key=seen.count)
        find_control(page, "Trace").select_option(f"training data, {again}")
        assert count_shown(page)[1] == seen.count(again)
        find_control(page, "Answer").select_option("inside")
        assert count_shown(page) == (0, 0)


def test_followed_traces_are_shown_with_prompt_and_entropies(shown: "Page", runs: Path) -> None:
    records = read_records(runs / "vcore_1", "followed")
    assert [record.step for record in records] == [1, 2, 3]
    held_out, trained = (f"{origin.source}, {origin.sequence_id}" for origin in records[0].sequences)
    assert held_out.startswith("held out, ") and trained.startswith("training data, ")
    place = shown.locator("#followed")
    options = place.get_by_role("combobox", name="Trace").locator("option")
    assert options.evaluate_all("options => options.map((one) => one.value)") == [held_out, trained]
    # The prompt stands above a trace, and its beginning names the trace in the selection.
    prompt = place.locator(".prompt").inner_text()
    name = options.first.inner_text().removesuffix(f" ({held_out})")
    assert name.removesuffix(" …") in " ".join(prompt.split()) and len(name) > 5
    assert place.locator(".rows div").count() == 3
    assert place.locator(".tokens span").count() == len(records[-1].sequences[0])
    place.locator(".tokens span").nth(2).hover()
    facts = dict(
        zip(shown.locator("#tip dt").all_inner_texts(), shown.locator("#tip dd").all_inner_texts(), strict=True)
    )
    expected = float(records[-1].sequences[0].entropies[2])
    assert float(facts["entropy"].split()[0]) == pytest.approx(expected, rel=0.02, abs=0.02)


def find_control(page: "Page", label: str) -> "Locator":
    return page.locator("#viewer").get_by_role("combobox", name=label, exact=True)


def show_all(page: "Page") -> None:
    """Show all traces of all steps, and open the filters of tokens."""
    find_control(page, "Step").select_option("")
    find_control(page, "Trace").select_option("")
    page.locator("#viewer summary").click()


def count_shown(page: "Page") -> tuple[int, int]:
    """Number of tokens and traces that the filters leave."""
    text = page.locator("#viewer [role=status]").inner_text().replace(",", "")
    return tuple(map(int, re.match(r"(\d+) of \d+ tokens in (\d+) of", text).groups()))


def test_each_measure_has_different_colours(browser: "Browser", one: Path) -> None:
    with open_page(browser, one) as page:
        seen = set()
        for measure in ("weight", "loss", "utility", "probability"):
            find_control(page, "Colour by").select_option(measure)
            labels = page.locator("#viewer .scale span").all_inner_texts()
            shades = page.evaluate(
                "[...document.querySelectorAll('#viewer .tokens span')]"
                ".map(span => getComputedStyle(span).backgroundColor).join()"
            )
            seen.add((tuple(labels), shades))
        assert len(seen) == 4
        # The plot of utility against loss shows the same tokens.
        assert page.locator("#density rect[style]").count() > 3
        page.locator("#density svg").focus()
        page.keyboard.press("ArrowRight")
        assert re.search(
            r"loss .* to .*, utility .*: \d+ tokens, mean weight", page.locator("#density .readout").inner_text()
        )


def test_several_runs_are_shown_side_by_side(browser: "Browser", several: tuple[Path, Path], runs: Path) -> None:
    losses = [read_metrics(runs / name)[-1]["loss"] for name in ("vcore_1", "vcore_2", "sft")]
    with open_page(browser, several[0]) as page:
        assert page.locator("#legend > span").all_inner_texts() == [
            "vcore, kl_budget 0.005 (2 runs)",
            "sft",
        ]
        text = page.locator("figure[data-chart=loss] .readout").inner_text().replace(",", "")
        values = [float(value) for value in re.findall(r"-?[\d.]+", text.split(":", 1)[1])]
        assert values == pytest.approx([np.mean(losses[:2]), min(losses[:2]), max(losses[:2]), losses[2]], rel=1e-3)
        assert page.locator("figure[data-chart=loss] polygon.band").count() == 1
        differing = page.locator("#recipe tbody th").all_inner_texts()
        assert "run.seed" in differing and "method.name" in differing and "run.output_dir" not in differing
        assert page.locator("#cost tbody th").all_inner_texts() == ["vcore_1", "vcore_2", "sft"]
        find_control(page, "Run").select_option(label="sft")
        page.locator("#viewer option[value=utility]").wait_for(state="detached")  # plain fine-tuning has none
        assert "none gained or lost" in page.locator("#viewer").inner_text()
