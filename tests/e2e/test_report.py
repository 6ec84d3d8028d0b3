"""The page of `vcore-ds report` in a real browser: numbers, tokens and curves are those of the runs, two seeds of VCORE
and one of plain fine-tuning."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.browser import open_page
from tests.helpers.report_runs import random_sequence, random_trace, step_line, write_run
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main
from vcore_ds.training.token_records import SequenceTokens, read_records

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.e2e

NUM_STEPS = 3
TOKENIZER = make_tokenizer()
QUESTION, TEXT = "user\nHow many are 7 and 35?\nassistant\n", "7 + 35 = 42, so \\boxed{42} is right."


def lines_of(seed: int, **values: float) -> list[dict[str, float | None]]:
    return [step_line(step, loss=(1 + seed) / step, **values) for step in range(1, NUM_STEPS + 1)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ids, prompt = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in (TEXT, QUESTION))

    def record(seed: int) -> dict[int, list[SequenceTokens]]:
        """Two sequences at each step; the first is the same at all."""
        return {
            step: [random_sequence(ids, i, seed=100 * seed + 10 * step + i, share=0.5) for i in (0, step)]
            for step in range(1, NUM_STEPS + 1)
        }

    traces = {
        step: [
            replace(random_trace(ids, i, step + i, source), prompt_ids=np.array(prompt, dtype=np.int32))
            for i, source in ((7, "held out, correct"), (3, "training data"))
        ]
        for step in range(1, NUM_STEPS + 1)
    }
    write_run(folder / "vcore_1", TOKENIZER, lines_of(1), record(1), followed=traces, run={"seed": 1})
    write_run(folder / "vcore_2", TOKENIZER, lines_of(2), record(2), run={"seed": 2})
    uniform = np.full(len(ids), 1 / len(ids), np.float32)
    plain = {
        step: [replace(one, weights=uniform, utilities=None) for one in sequences]
        for step, sequences in record(3).items()
    }
    write_run(folder / "sft", TOKENIZER, lines_of(3), plain, method={"name": "sft", "kl_budget": None})
    assert main(["report", f"{folder}/vcore_1"]) == 0
    names = [f"{folder}/{name}" for name in ("vcore_1", "vcore_2", "sft")]
    assert main(["report", *names, "--output", f"{folder}/all.html", "--png", f"{folder}/pictures"]) == 0
    return folder


@pytest.fixture(scope="module")
def shown(browser: "Browser", runs: Path) -> "Iterator[Page]":
    """The report of one run, for tests of different parts of it."""
    with open_page(browser, runs / "vcore_1" / "report.html") as page:
        yield page


def test_the_report_is_one_file_without_links(runs: Path) -> None:
    text = (runs / "vcore_1" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""\b(src|href)\s*=\s*["']?[^"'#\s]|@import|url\(""", text)
    assert "What gained and lost weight" in text and "By kind of token" in text and "kl_budget" in text


def test_curves_are_also_written_as_pictures(runs: Path) -> None:
    heads = {path.name: path.read_bytes()[:5] for path in (runs / "pictures").iterdir()}
    assert {"loss.png", "loss.pdf", "grad_norm.png", "quantiles.png", "negative.pdf"} <= heads.keys()
    assert set(heads.values()) == {b"\x89PNG\r", b"%PDF-"}


def test_curves_show_the_metrics(shown: "Page", runs: Path) -> None:
    metrics = lines_of(1)
    for key in ("loss", "weighted_loss", "grad_norm", "effective_sample_size"):
        assert read_curve(shown, key) == (NUM_STEPS, pytest.approx(metrics[-1][key], rel=1e-3)), key
    utilities = [one.utilities for one in read_records(runs / "vcore_1")[-1].sequences]
    negative = 100 * (np.concatenate(utilities) < 0).mean()
    assert read_curve(shown, "negative")[1] == pytest.approx(negative, rel=1e-3, abs=1e-3)
    assert "KL from uniform weights 0.05 nats" in shown.locator("#curves").inner_text()
    # All curves share a cursor, moved by keyboard or pointer.
    shown.locator("figure[data-chart=loss] svg").focus()
    shown.keyboard.press("ArrowLeft")
    for key in ("loss", "grad_norm"):
        assert read_curve(shown, key) == (NUM_STEPS - 1, pytest.approx(metrics[-2][key], rel=1e-3))
    shown.keyboard.press("Home")
    assert read_curve(shown, "loss") == (1, pytest.approx(metrics[0]["loss"], rel=1e-3))
    curve = shown.locator("figure[data-chart=grad_norm] svg")
    curve.hover(position={"x": curve.bounding_box()["width"] / 2 + 20, "y": 30})
    assert read_curve(shown, "loss")[0] == 2


def read_curve(page: "Page", key: str) -> tuple[int, float]:
    """Step and value below the curve of a single run."""
    text = page.locator(f"figure[data-chart={key}] .readout").inner_text()
    step, value = re.match(r"step ([\d,]+): (-?[\d.,e-]+)", text).groups()
    return int(step.replace(",", "")), float(value.replace(",", ""))


def test_a_token_shows_what_was_recorded(browser: "Browser", runs: Path) -> None:
    """By pointer and by keyboard, for tokens with the most, the least and the median weight, and the first ones."""
    sequence = read_records(runs / "vcore_1")[0].sequences[0]
    order = np.argsort(-sequence.relative_weights, kind="stable").tolist()
    with open_page(browser, runs / "vcore_1" / "report.html") as page:
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


def read_tip(page: "Page") -> dict[str, str]:
    names, values = (page.locator(f"#tip {name}").all_inner_texts() for name in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def check_tip(page: "Page", sequence: SequenceTokens, i: int, order: list[int]) -> None:
    facts = read_tip(page)
    relative = sequence.relative_weights
    spread = np.log(relative.max() / relative.min())
    assert float(facts["weight"].rstrip("×")) == pytest.approx(relative[i], rel=0.005 * spread + 1e-3)
    assert facts["rank"] == f"{order.index(i) + 1} of {len(sequence)}"
    assert float(facts["loss"].split()[0]) == pytest.approx(float(sequence.losses[i]), rel=0.02, abs=0.02)
    assert float(facts["probability"]) == pytest.approx(np.exp(-sequence.losses[i]), abs=0.02)
    largest = float(np.abs(sequence.utilities).max())
    assert float(facts["utility"]) == pytest.approx(float(sequence.utilities[i]), rel=0.06, abs=0.02 * largest)


def test_filters_show_the_tokens_that_they_name(browser: "Browser", runs: Path) -> None:
    length = len(read_records(runs / "vcore_1")[0].sequences[0])
    with open_page(browser, runs / "vcore_1" / "report.html") as page:
        assert page.locator("#viewer .trace h4").inner_text().startswith(f"Step {NUM_STEPS}, training data")
        show_all(page)
        assert count_shown(page) == (2 * NUM_STEPS * length, 2 * NUM_STEPS)
        find_control(page, "Step").select_option("2")
        assert count_shown(page) == (2 * length, 2)
        assert page.locator("#viewer .trace h4").all_inner_texts()[0].startswith("Step 2, training data")
        few = 2 * int(np.ceil(0.05 * length))
        for extreme in ("most", "least"):
            find_control(page, "Weights").select_option(extreme)
            assert count_shown(page)[0] == few == page.locator("#viewer .tokens span:not(.dim)").count()
        find_control(page, "Weights").select_option("all")
        find_control(page, "Answer").select_option("inside")
        answer = page.locator("#viewer .tokens span:not(.dim)").all_inner_texts()
        assert "42" in "".join(answer) and "right" not in "".join(answer)
        find_control(page, "Answer").select_option("all")
        find_control(page, "Step").select_option("")
        for kind in page.locator("#viewer fieldset label").all_inner_texts():
            if kind.strip() != "digit":
                page.locator("#viewer").get_by_label(kind.strip(), exact=True).uncheck()
        digits = page.locator("#viewer .tokens span:not(.dim)").all_inner_texts()
        assert digits and all(text.isdigit() for text in digits)
        # A trace that is repeated in a later step shows how its weights moved.
        find_control(page, "Trace").select_option("training data, 0")
        assert count_shown(page)[1] == NUM_STEPS


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


def test_followed_traces_are_shown_with_prompt_and_entropies(shown: "Page", runs: Path) -> None:
    trace = read_records(runs / "vcore_1", "followed")[-1].sequences[0]
    place = shown.locator("#followed")
    options = place.get_by_role("combobox", name="Trace").locator("option")
    values = options.evaluate_all("options => options.map((one) => one.value)")
    assert values == ["held out, correct, 7", "training data, 3"]
    # The prompt stands above a trace, and its beginning names the trace in the selection.
    assert place.locator(".prompt").inner_text() == "user\nHow many are 7 and 35?"
    assert options.first.inner_text() == "How many are 7 and 35? (held out, correct, 7)"
    assert place.locator(".rows div").count() == NUM_STEPS
    assert place.locator(".tokens span").count() == len(trace)
    place.locator(".tokens span").nth(2).hover()
    entropy = float(read_tip(shown)["entropy"].split()[0])
    assert entropy == pytest.approx(float(trace.entropies[2]), rel=0.02, abs=0.02)


def test_each_measure_has_different_colours(browser: "Browser", runs: Path) -> None:
    with open_page(browser, runs / "vcore_1" / "report.html") as page:
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
        readout = page.locator("#density .readout").inner_text()
        assert re.search(r"loss .* to .*, utility .*: \d+ tokens, mean weight", readout)


def test_several_runs_are_shown_side_by_side(browser: "Browser", runs: Path) -> None:
    with open_page(browser, runs / "all.html") as page:
        assert page.locator("#curves .legend > span").all_inner_texts() == ["vcore (2 runs)", "sft"]
        text = page.locator("figure[data-chart=loss] .readout").inner_text().replace(",", "")
        values = [float(value) for value in re.findall(r"-?[\d.]+", text.split(":", 1)[1])]
        assert values == pytest.approx([2.5 / 3, 2 / 3, 1, 4 / 3], rel=1e-3)  # mean, lowest, highest; the other run
        assert page.locator("figure[data-chart=loss] polygon.band").count() == 1
        differing = page.locator("#differences tbody th").all_inner_texts()
        assert "run.seed" in differing and "method.name" in differing and "run.output_dir" not in differing
        assert page.locator("#cost tbody th").all_inner_texts() == ["vcore_1", "vcore_2", "sft"]
        measure, run = find_control(page, "Colour by"), find_control(page, "Run")
        assert (measure.input_value(), run.locator("option:checked").inner_text()) == ("weight", "vcore_1")
        run.select_option(label="sft")
        page.locator("#viewer option[value=utility]").wait_for(state="detached")  # plain fine-tuning has none
        assert measure.input_value() == "loss"
        # A measure that the reader has chosen stays, where the run has it.
        measure.select_option("probability")
        run.select_option(label="vcore_1")
        page.locator("#viewer option[value=utility]").wait_for(state="attached")
        assert measure.input_value() == "probability"
