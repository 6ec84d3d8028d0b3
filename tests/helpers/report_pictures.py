"""Make docs/pictures/*.png, screenshots of reports: python -m tests.helpers.report_pictures RUN SWEEP"""

import sys
from pathlib import Path

from tests.helpers.browser import open_page, started_browser
from vcore_ds.commands.report import write_report

PICTURES = (
    ("report_tokens.png", 800, 2.0, "#movement h2", "#movement .tokens"),
    ("report_curves.png", 1000, 1.5, "#curves h2", "figure[data-chart=alpha]"),
    ("sweep_wide.png", 1400, 1.0, "#sweep .legend", "#sweep .scroll"),
    ("sweep_narrow.png", 390, 1.0, "#sweep .legend", "#sweep .scroll"),
)
"""File, which begins with what it shows, width of the window, pixels of the picture for each of the page, the first and
the last element."""
MARGIN = 12  # pixels of the page above and below them


def main() -> None:
    folders = dict(zip(("report", "sweep"), map(Path, sys.argv[1:]), strict=True))
    reports = {kind: write_report([folder])[0] for kind, folder in folders.items()}
    with started_browser() as browser:
        for name, width, scale, *ends in PICTURES:
            window, kind = {"width": width, "height": 1600}, name.partition("_")[0]
            with open_page(browser, reports[kind], viewport=window, device_scale_factor=scale) as page:
                page.locator(
                    "figure[data-chart=loss] svg" if kind == "report" else "#sweep svg[role=img]"
                ).first.hover()
                first, last = (page.locator(end).first.bounding_box() for end in ends)
                top = first["y"] + page.evaluate("scrollY") - MARGIN
                height = last["y"] + last["height"] - first["y"] + 2 * MARGIN
                clip = {"x": 0, "y": top, "width": width, "height": height}
                page.screenshot(path=Path("docs/pictures", name), full_page=True, clip=clip)


if __name__ == "__main__":
    main()
