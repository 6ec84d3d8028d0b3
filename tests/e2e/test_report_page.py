"""The page of a report in a real browser, on run folders written for it: hostile text, split characters, colours that
can be read, a phone, dark mode, print."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from matplotlib.image import imread

from tests.helpers.browser import open_page
from tests.helpers.report_runs import random_sequence, random_trace, step_line, write_run
from tests.helpers.tokenizer import SPECIAL_TOKENS, make_tokenizer
from vcore_ds.commands.report import write_report
from vcore_ds.training.token_records import SequenceTokens

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.e2e

HOSTILE = (
    "<img src=x onerror=\"document.title='hacked'\">",
    "</script><script>document.title='hacked'</script>",
    "--><svg onload=\"document.title='hacked'\">",
    "{{ 7 * 7 }}",
    "\u202egnp.exe",
)
TEXT = "日本 😀 so \\boxed{42} is\n\tright & <b>bold</b> — done"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokens, names and metric names are hostile; every token occurs often enough for the tables."""
    tokenizer = make_tokenizer(special_tokens=(*SPECIAL_TOKENS, *HOSTILE))
    ids = tokenizer("".join(HOSTILE) + TEXT, add_special_tokens=False)["input_ids"]
    records = {step: [random_sequence(ids * 3, i, seed=10 * step + i, share=0.5) for i in range(2)] for step in (1, 2)}
    folder = tmp_path_factory.mktemp("hostile") / f"run {HOSTILE[0].replace('/', '')}"
    lines = [step_line(step, **{HOSTILE[1]: 0.5 * step}) for step in (1, 2)]
    environment = {"host": HOSTILE[0], "command": [HOSTILE[1]], "devices": [HOSTILE[2]], "git_commit": "1-dirty"}
    origins = (f"held out, {HOSTILE[1]}", 7), ("training data", 3)
    followed = {
        step: [random_trace(ids, number, 10 * step + i, source) for i, (source, number) in enumerate(origins)]
        for step in (1, 2, 5)
    }
    run = write_run(
        folder, tokenizer, lines, records, followed=followed, environment=environment, model={"path": HOSTILE[1]}
    )
    (page,) = write_report([run], output=folder.parent / "report.html")
    return page


@pytest.fixture(scope="module")
def shown(browser: "Browser", report: Path) -> "Iterator[Page]":
    """The open report, for tests that do not change it."""
    with open_page(browser, report) as page:
        yield page


def test_hostile_text_of_a_run_is_shown_as_text(shown: "Page") -> None:
    assert "hacked" not in shown.title().replace("'hacked'", "")
    assert shown.locator("img, svg[onload], b:not(#tip b)").count() == 0
    assert shown.locator("script").count() == 4  # JSON, tokens, followed traces, code
    tokens = shown.locator("#viewer .tokens").first
    for text in HOSTILE[:4]:
        assert text in tokens.inner_text()
    assert "\u202e" not in tokens.inner_text()
    tokens.locator("span", has_text="onerror").first.hover()
    assert json.loads(shown.locator("#tip b").inner_text()) == HOSTILE[0]
    assert shown.locator("figcaption", has_text="script").count() == 1


def test_a_character_split_over_tokens_is_shown_once(shown: "Page") -> None:
    spans = shown.locator("#viewer .tokens").first.locator("span")
    texts = spans.evaluate_all("spans => spans.map(span => span.textContent)")
    place = texts.index("😀")
    assert texts[place : place + 5] == ["😀", "·", "·", "·", " "]
    assert texts.count("日") == 3 and "\ufffd" not in "".join(texts).replace("\ufffdgnp.exe", "")
    assert "⏎\n" in texts and "⇥\t" in texts
    spans.nth(place + 1).hover()
    assert shown.locator("#tip b").inner_text() == "(part of the character before)"


def test_the_page_begins_with_losses_and_warnings(browser: "Browser", report: Path) -> None:
    order = ["losses", "learnt", "warnings", "movement", "traces", "gained", "map", "curves", "cost", "recipe"]
    order.append("environment")
    with open_page(browser, report, viewport={"width": 1280, "height": 900}) as page:
        assert page.evaluate("[...document.querySelectorAll('main > section')].map(section => section.id)") == order
        links = page.evaluate("[...document.querySelectorAll('nav a')].map(link => link.hash.slice(1))")
        assert links == order[2:]
        assert page.locator("#losses figure").count() == 1 == page.locator("figure[data-chart=loss]").count()
        # All without scrolling: the curve, the result and the first warning.
        for name in ("#losses svg", "#learnt tbody tr", "#warnings li"):
            box = page.locator(name).first.bounding_box()
            assert box["y"] + box["height"] < 900, name
        meaning = page.locator("#viewer p").first
        assert "more weight" in meaning.inner_text() and "uniform" in meaning.inner_text()
        page.locator("#viewer").get_by_role("combobox", name="Colour by").select_option("loss")
        assert "loss" in meaning.inner_text() and "weight" not in meaning.inner_text()


def test_the_most_coloured_trace_of_the_last_step_is_selected(browser: "Browser", tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(TEXT * 4, add_special_tokens=False)["input_ids"]

    def flatten(sequence: SequenceTokens, share: float) -> SequenceTokens:
        """The sequence with weights nearer to uniform ones."""
        weights = share * sequence.weights + (1 - share) / len(sequence)
        return replace(sequence, weights=weights.astype(np.float32))

    def make_sequences(first_id: int, shares: tuple[float, ...]) -> list[SequenceTokens]:
        sequences = [random_sequence(ids, first_id + i, seed=0, share=1 / len(shares)) for i in range(len(shares))]
        return [flatten(sequence, share) for sequence, share in zip(sequences, shares, strict=True)]

    records = {3: make_sequences(10, (1.0, 0.5)), 7: make_sequences(20, (0.1, 0.6, 0.3)) + make_sequences(11, (0.2,))}
    run = write_run(tmp_path / "run", tokenizer, [step_line(3), step_line(7)], records)
    (path,) = write_report([run])
    with open_page(browser, path) as page:
        controls = {name: page.locator("#viewer").get_by_role("combobox", name=name) for name in ("Step", "Trace")}
        heading = page.locator("#viewer .trace h4")

        def options() -> list[str]:
            return controls["Trace"].locator("option").evaluate_all("options => options.map((one) => one.value)")

        assert heading.all_inner_texts()[0].startswith("Step 7, training data 21 ·") and heading.count() == 1
        assert options() == ["", *(f"training data, {i}" for i in (11, 20, 21, 22))]
        # A selected trace stays selected in steps that have it; other steps show their most coloured trace.
        controls["Trace"].select_option("training data, 11")
        controls["Step"].select_option("3")
        assert options() == ["", "training data, 10", "training data, 11"]
        assert heading.all_inner_texts()[0].startswith("Step 3, training data 11 ·") and heading.count() == 1
        controls["Step"].select_option("7")
        controls["Trace"].select_option("training data, 22")
        controls["Step"].select_option("3")
        assert controls["Trace"].input_value() == "training data, 10"
        assert heading.all_inner_texts()[0].startswith("Step 3, training data 10 ·") and heading.count() == 1
        controls["Step"].select_option("")
        assert len(options()) == 1 + 5 and heading.count() == 1
        controls["Trace"].select_option("")
        assert heading.count() == 6


HARD_AXES = {
    "kl": [0.005000001, 0.004999997, 0.005],
    "barely": [0.00500001, 0.0050006, 0.0050012],
    "close": [1234.5, 1234.7, 1235.0],
    "large": [1.2345e9, 1.2346e9, 1.2349e9],
    "small": [3.00e-7, 3.01e-7, 3.02e-7],
    "orders": [1e-9, 1.0, 1e9],
    "signs": [-1e-5, 0.0, 2e-5],
    "integers": [1000.0, 1001.0, 1003.0],
    "tiny_change_of_a_large_number": [-99999.7, -99999.0, -99988.0],
}


@pytest.mark.parametrize("steps", [(1, 2, 3), (1,), (999_999, 1_000_000, 1_000_001), (1_000_000, 2_000_000, 3_000_000)])
def test_no_label_of_an_axis_is_repeated(browser: "Browser", tmp_path: Path, steps: tuple[int, ...]) -> None:
    lines = [step_line(step, **{key: values[i] for key, values in HARD_AXES.items()}) for i, step in enumerate(steps)]
    run = write_run(tmp_path / "run", make_tokenizer(), lines, {})
    (path,) = write_report([run])
    with open_page(browser, path) as page:
        drawn = page.evaluate(AXES)
        assert {"barely", "close", "large", "small", "orders", "signs", "integers"} <= drawn.keys()
        assert ("kl" in drawn) == (len(steps) == 1)  # a constant has no curve
        for key, axes in drawn.items():
            values = [float(text.replace(",", "")) for text in axes["value"]]
            assert len(set(axes["value"])) == len(axes["value"]) >= 2, (key, axes)  # one label is no scale
            # Labels are evenly spaced.
            gaps = np.diff(values)
            assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=1e-6), (key, axes)
            assert len(set(axes["step"])) == len(axes["step"]) >= min(2, len(steps)), (key, axes)
            assert axes["outside"] == [], key
        if len(steps) > 1:
            assert "KL from uniform weights 0.005 nats" in page.locator("#curves").inner_text()


AXES = """() => Object.fromEntries([...document.querySelectorAll('figure[data-chart]')].map((figure) => {
  const texts = (name) => [...figure.querySelectorAll(`text.${name}`)];
  const box = figure.querySelector('svg').getBoundingClientRect();
  const outside = [...texts('value'), ...texts('step')].filter((text) => {
    const label = text.getBoundingClientRect();
    return label.left < box.left || label.right > box.right || label.top < box.top || label.bottom > box.bottom;
  });
  return [figure.dataset.chart, Object.fromEntries([
    ...['value', 'step'].map((name) => [name, texts(name).map((text) => text.textContent)]),
    ['outside', outside.map((text) => text.textContent)],
  ])];
}))"""
"""Chart -> labels of its axes, and labels that extend beyond the chart."""


def test_text_is_readable_on_every_colour(browser: "Browser", report: Path) -> None:
    """WCAG's contrast of 4.5 on all 256 shades of every measure and for the text of the page: opened in dark mode, and
    after the change to light."""
    with open_page(browser, report, color_scheme="dark") as page:
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
            for measure in ("weight", "loss", "utility", "probability"):
                page.locator("#viewer").get_by_role("combobox", name="Colour by").select_option(measure)
                assert min(page.evaluate(CONTRASTS)) >= 4.5, (scheme, measure)
            for name in ("p", "figcaption small", "nav a", ".notes li", "thead th", "svg text", "summary"):
                assert page.evaluate(CONTRASTS, name)[0] >= 4.5, (scheme, name)


CONTRASTS = """(name) => {
  // WCAG's contrast of text to what is behind it, in any CSS notation: of a node, or of all shades of a token.
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
  const context = canvas.getContext('2d', {willReadFrequently: true});
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const node = document.querySelector(name ?? '#viewer .tokens span'), before = node.className;
  const contrast = () => {
    let behind = node;
    while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
    const style = getComputedStyle(node), text = node instanceof SVGElement ? style.fill : style.color;
    const [dark, bright] = [text, getComputedStyle(behind).backgroundColor].map(luminance).sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  if (name) return [contrast()];
  const contrasts = [...Array(256).keys()].map((code) => ((node.className = 'c' + code), contrast()));
  node.className = before;
  return contrasts;
}"""


def test_a_followed_trace_is_shown_at_every_step(browser: "Browser", report: Path) -> None:
    with open_page(browser, report) as page:
        place = page.locator("#followed")
        rows = place.locator(".rows div")
        assert rows.locator("span").all_inner_texts() == ["step 1", "step 2", "step 5"]
        assert place.get_by_role("status").inner_text().startswith("Held out, not trained on: all of ")
        assert place.locator(".trace h4").inner_text().startswith(f"Step 5, held out, {HOSTILE[1]}")
        pixels = "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, 1).data].join()"
        drawn = [canvas.evaluate(pixels) for canvas in rows.locator("canvas").all()]
        assert len(set(drawn)) == 3  # one row of colours for each of the three steps
        rows.nth(1).click()
        assert place.get_by_role("combobox", name="Step").input_value() == "2"
        assert place.locator(".rows .shown").inner_text() == "step 2"
        assert place.locator(".trace h4").inner_text().startswith("Step 2, ")
        # Changing the measure recolours the rows, but not the other viewer.
        colour = "span => getComputedStyle(span).backgroundColor"
        before = page.locator("#viewer .tokens span").first.evaluate(colour)
        place.get_by_role("combobox", name="Colour by").select_option("entropy")
        assert rows.nth(1).locator("canvas").evaluate(pixels) != drawn[1]
        assert page.locator("#viewer .tokens span").first.evaluate(colour) == before
        place.get_by_role("combobox", name="Trace").select_option("training data, 3")
        assert place.get_by_role("status").inner_text().startswith("Training data: all of ")
        assert place.locator(".trace h4").inner_text().startswith("Step 2, training data 3")


def test_no_window_scrolls_sideways(browser: "Browser", report: Path) -> None:
    """From 320 px, the width that WCAG requires for reflow. Only wide tables scroll, with a shadow at the edge beyond
    which they go on. On a phone, a tap tells of a
    token, and controls are large enough for a finger."""
    with open_page(browser, report, viewport={"width": 320, "height": 844}, has_touch=True, is_mobile=True) as page:
        page.locator("#viewer .tokens span").nth(2).tap()
        box = page.locator("#tip").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 320
        heights = "[...document.querySelectorAll('select, button')].map((one) => one.getBoundingClientRect().height)"
        assert min(height for height in page.evaluate(heights) if height > 0) >= 32
        for summary in page.locator("summary").all():
            if not summary.evaluate("summary => summary.parentElement.open"):
                summary.click()
        wide = page.locator("#gained .scroll").first
        pixels = []  # of the right edge, where the table goes on and where it ends
        for left in (0, 10_000):
            wide.evaluate("(table, left) => { table.scrollLeft = left; }", left)
            pixels.append(imread(io.BytesIO(wide.screenshot()))[-4, -1, :3])  # colours from 0 to 1
        assert pixels[0].sum() < pixels[1].sum() - 0.12, pixels
        for width in (320, 390, 768, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_printed_page_is_light_and_has_no_controls(browser: "Browser", report: Path) -> None:
    with open_page(browser, report, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert not page.locator("nav").is_visible() and not page.locator(".controls").first.is_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert (
            page.locator("figure[data-chart=loss] svg").is_visible()
            and page.locator("#viewer .tokens").first.is_visible()
        )
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_every_control_can_be_reached_by_keyboard(browser: "Browser", report: Path) -> None:
    with open_page(browser, report) as page:
        reached = []
        for _ in range(200):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.matches('#viewer summary')"):
                page.keyboard.press("Enter")  # filters
            reached.append(
                page.evaluate("document.activeElement.closest('label')?.firstChild?.textContent.trim() ?? ''")
            )
            if page.evaluate("document.activeElement.parentElement?.matches('#viewer .tokens')"):
                break
        assert {"Colour by", "Step", "Trace", "Weights", "Answer"} <= set(reached)
        # Each trace, not each token, is a stop of the Tab key.
        page.locator("#viewer").get_by_role("combobox", name="Trace").select_option("")
        page.locator("#viewer .tokens [tabindex='0']").first.focus()
        page.keyboard.press("Tab")
        stops = "(trace) => trace.querySelectorAll('[tabindex=\"0\"]').length"
        stops = f"[...document.querySelectorAll('#viewer .tokens')].map({stops})"
        assert set(page.evaluate(stops)) == {1}
        place = "[...document.querySelectorAll('#viewer .tokens')].indexOf(document.activeElement.parentElement)"
        assert page.evaluate(place) == 1
        unnamed = page.evaluate(
            "[...document.querySelectorAll('svg[role=img], [role=listbox], [role=region], select, button')]"
            ".filter(e => !(e.getAttribute('aria-label') || e.closest('label') || e.textContent)).length"
        )
        assert unnamed == 0


def test_a_run_without_recorded_tokens_has_curves_only(browser: "Browser", tmp_path: Path) -> None:
    lines = [step_line(1, kl=None, tau=None)]
    run = write_run(tmp_path / "run", make_tokenizer(), lines, {}, run={"num_token_records": 0})
    (path,) = write_report([run])
    with open_page(browser, path) as page:
        assert "run.num_token_records is 0" in page.locator("#viewer").inner_text()
        assert page.locator("#viewer select").count() == 0
        assert page.locator("figure[data-chart=loss] circle").count() == 1  # one step: a point
        assert page.locator("figure[data-chart=kl]").count() == 0
