"""Headless Chromium, driven by Playwright."""

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
"""Playwright's defaults are 30 s, and a browser on a slow disk takes that long to start."""


def find_missing_requirement() -> str | None:
    """The program or package that this machine lacks for a browser, and how to install it; None if there is none."""
    if find_spec("playwright") is None:
        return "playwright not found; pip install -e '.[test]' -c constraints.txt"
    if not any(map(shutil.which, PROGRAMS)):
        return "chromium not found; apt-get install chromium"
    return None


@contextmanager
def started_browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    program = next(path for name in PROGRAMS if (path := shutil.which(name)) is not None)
    with sync_playwright() as playwright:
        # In a container, Chromium's sandbox lacks privileges (and the pages are ours), and /dev/shm may be small.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments, timeout=HANG_MILLISECONDS)
        yield browser
        browser.close()


@contextmanager
def open_page(browser: "Browser", path: Path, **options: Any) -> "Iterator[Page]":
    """Open a report and wait until it is drawn. At the end, the page must have logged nothing and requested only its
    file. `options`: of the browser context, such as `color_scheme` and `viewport`."""
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
        # Not `wait_for_function`: the page's content security policy forbids evaluating text as code.
        page.locator("html[data-ready=true]").wait_for(state="attached")
    except Exception:
        assert not complaints, complaints
        raise
    yield page
    assert complaints == [] and requests == [address]
    context.close()
