"""Make the pictures of a report for docs/pictures: a followed trace with coloured tokens, and curves.

    python -m tests.helpers.report_pictures RUN [--output docs/pictures]

They are screenshots of the page that `vcore-ds report RUN` writes.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.browser import find_missing_requirement, open_page, started_browser
from vcore_ds.commands.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

MARGIN = 12
"""Space around the elements of a picture, in pixels of the page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, default=Path("docs/pictures"), metavar="FOLDER")
    arguments = parser.parse_args()
    missing = find_missing_requirement()
    if missing:
        raise SystemExit(missing)
    (report,) = write_report([arguments.run])
    with started_browser() as browser:
        with open_page(browser, report, viewport={"width": 800, "height": 1600}, device_scale_factor=2) as page:
            _shoot(page, "#movement h2", "#movement .tokens", arguments.output / "report_tokens.png")
        with open_page(browser, report, viewport={"width": 1000, "height": 1600}, device_scale_factor=1.5) as page:
            page.locator("figure[data-chart=loss] svg").hover()  # the cursor
            _shoot(page, "#curves h2", "figure[data-chart=alpha]", arguments.output / "report_curves.png")


def _shoot(page: "Page", first: str, last: str, path: Path) -> None:
    """Save a screenshot as wide as the window, from one element to another."""
    start, box = page.locator(first).first.bounding_box(), page.locator(last).first.bounding_box()
    top = start["y"] + page.evaluate("scrollY") - MARGIN
    height, width = box["y"] + box["height"] - start["y"] + 2 * MARGIN, page.viewport_size["width"]
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": top, "width": width, "height": height})


if __name__ == "__main__":
    main()
