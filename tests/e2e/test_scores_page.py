"""The page of scores in a real browser: hostile names and tokens, two sets side by side, statistics of the scores."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers import tiny
from tests.helpers.browser import open_page
from tests.helpers.scores import write_scores_folder
from tests.helpers.tokenizer import SPECIAL_TOKENS, make_tokenizer
from vcore_ds.commands.score.output import write_page
from vcore_ds.data.store import TokenStore, write_store
from vcore_ds.data.tokenization import TokenizedSequence

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.e2e

HOSTILE = "</script><script>document.title='hacked'</script>"
NUM_TRACES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 traces of two sources, one with a hostile name, of which the first 40 have a positive mean for `right`."""
    path = tmp_path_factory.mktemp("scores")
    tokenizer = make_tokenizer(special_tokens=(*SPECIAL_TOKENS, HOSTILE))
    tiny.qwen3(vocab_size=len(tokenizer)).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    prompt = tokenizer("what 日? ", add_special_tokens=False)["input_ids"]
    sequences = []
    for i in range(NUM_TRACES):
        answer = tokenizer(f"{HOSTILE} so {i} 😀 " * (1 + i % 4), add_special_tokens=False)["input_ids"]
        ids = np.array(prompt + answer, np.int32)
        supervised = np.arange(len(ids)) >= len(prompt)
        sequences.append(TokenizedSequence(i, ids, supervised, np.zeros(len(ids), np.bool_)))
    counts = {"rows": NUM_TRACES + 3, "malformed": 1, "dropped": {"longer than the cutoff": 2}}
    write_store(path / "store", sequences, tokenizer, counts=counts)
    means = {"right": [40.0 - i - 0.5 for i in range(NUM_TRACES)], HOSTILE: [float(i % 3) for i in range(NUM_TRACES)]}
    sources = ["a.jsonl"] * 45 + [HOSTILE] * 15
    write_scores_folder(path / "scores", TokenStore(path / "store"), path / "model", means, sources)
    write_page(path / "scores")
    return path / "scores"


def test_the_page_shows_statistics_by_set_and_source(browser: "Browser", folder: Path) -> None:
    with open_page(browser, folder / "scores.html", viewport={"width": 320, "height": 900}) as page:
        for width in (320, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width
        assert "hacked" not in page.title() and page.locator("script").count() == 4  # JSON, two sets, code
        assert "left out: 1 malformed, 2 longer than the cutoff." in page.locator("body").inner_text()
        sections = page.evaluate("[...document.querySelectorAll('main > section')].map(section => section.id)")
        assert sections == ["sets", "distribution", "sources", "ends", "traces"]
        ends = page.locator("#ends table").first.locator("tbody tr").all_inner_texts()
        assert [int(row.split("\t")[0]) for row in ends] == [1, 2, 3, 58, 59, 60]
        rows = page.locator("#sources table").first.locator("tbody tr").all_inner_texts()
        assert [row.split("\t")[:3] for row in rows] == [
            ["all", "60", "67%"], ["a.jsonl", "45", "89%"], [HOSTILE, "15", "0%"]
        ]  # fmt: skip
        assert rows[2].split("\t")[4] == "-12.5"  # the median of -5.5 to -19.5
        assert page.locator("#sources table").count() == 2
        assert page.locator("#histograms h3").all_inner_texts() == ["Mean over the tokens", "Sum over the tokens"]
        assert page.locator("#histograms figcaption").all_inner_texts() == ["right", HOSTILE] * 2
        readout = page.locator("#histograms .readout").first
        assert readout.inner_text() == "40 of 60 traces have a positive utility"
        assert page.locator("#histograms .readout").nth(1).inner_text().startswith("40 of 60")  # and 20 of exactly 0
        bars = page.locator("#histograms svg").first
        assert bars.locator(".bar").count() in (40, 41, 42)
        bars.focus()
        page.keyboard.press("End")
        assert " traces from 3" in readout.inner_text()
        assert "+0.50" in page.locator("#sets tbody tr").first.inner_text()


def test_the_viewer_shows_the_best_and_the_worst_traces(browser: "Browser", folder: Path) -> None:
    with open_page(browser, folder / "scores.html") as page:
        viewer = page.locator("#viewer")
        heading, tokens = viewer.locator("h4"), viewer.locator(".tokens").first
        assert heading.first.inner_text().startswith("a.jsonl, row 0 · rank 1 of 60, mean 39.5, sum ")
        assert viewer.locator("article").count() == 20
        assert HOSTILE in tokens.inner_text() and "😀" in tokens.inner_text()
        spans = tokens.locator("span")
        assert spans.first.get_attribute("class") == "prompt" and spans.last.get_attribute("class").startswith("c")
        spans.first.hover()
        assert "not trained on" in page.locator("#tip").inner_text()
        # The utilities of a trace rise from its mean - 1 to its mean + 1, between levels that are a hundredth apart.
        spans.last.hover()
        facts = dict(zip(*(page.locator(f"#tip {name}").all_inner_texts() for name in ("dt", "dd")), strict=True))
        assert float(facts["utility"]) == pytest.approx(40.5, rel=0.03)
        colour = "span => getComputedStyle(span).backgroundColor"
        best = spans.last.evaluate(colour)
        viewer.get_by_role("combobox", name="Traces with").select_option("the lowest mean utility")
        assert heading.first.inner_text().startswith(f"{HOSTILE}, row 59 · rank 60 of 60, mean -19.5")
        assert tokens.locator("span").last.evaluate(colour) != best
        viewer.get_by_role("combobox", name="Colour by").select_option("loss")
        assert "more purple" in viewer.locator("p").first.inner_text()
        viewer.get_by_role("combobox", name="Trusted set").select_option(label=HOSTILE)
        viewer.get_by_role("combobox", name="Traces with").select_option("the highest mean utility")
        viewer.locator("h4", has_text="a.jsonl, row 2 · rank 1 of 60, mean 2").wait_for()
        tokens.locator("[tabindex='0']").focus()
        page.keyboard.press("ArrowRight")
        assert "place" in page.locator("#tip").inner_text()
