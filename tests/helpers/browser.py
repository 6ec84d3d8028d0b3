"""Debian's Chromium, without a window, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.commands import HANG_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
HANG_MILLISECONDS = 1000 * HANG_SECONDS
"""Playwright's own limits are 30 s, which a browser that is read from a slow disk takes to start."""


def why_not() -> str | None:
    """What this machine lacks for a browser; None where it has everything."""
    if find_spec("playwright") is None:
        return "playwright not found; pip install -e '.[test]' -c constraints.txt"
    if not any(map(shutil.which, PROGRAMS)):
        return "chromium not found; apt-get install chromium"
    return None


@contextmanager
def started_browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    program = next(found for name in PROGRAMS if (found := shutil.which(name)) is not None)
    with sync_playwright() as playwright:
        # Its own sandbox needs what a container does not have; the pages are ours. /dev/shm may be small there.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments, timeout=HANG_MILLISECONDS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: "Browser", path: Path, **options: Any) -> "Iterator[Page]":
    """A report, drawn. In the end the page must have logged nothing, and asked for nothing but its file.

    Args:
        options: of the context, such as `color_scheme` and `viewport`.
    """
    context = browser.new_context(**options)
    context.set_default_timeout(HANG_MILLISECONDS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    address = path.resolve().as_uri()
    page.goto(address)
    try:
        # Not a function to wait for: the page's policy lets no text become code.
        page.locator("html[data-ready=true]").wait_for(state="attached")
    except Exception:
        assert not complaints, complaints
        raise
    yield page
    assert complaints == [] and requests == [address]
    context.close()
