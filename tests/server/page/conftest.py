"""Chromium, driven against a server with the demonstration model."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright import sync_api as driver

from tests.server.page.driving import FORGET, expect, watched
from tests.server.running import Running

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Ends with the package: its event loop would be in the way of others."""
    if BROWSER is None:
        pytest.skip("needs Chromium, such as apt-get install chromium gives")
    with driver.sync_playwright() as it:
        started = it.chromium.launch(executable_path=BROWSER)
        yield started
        started.close()


@pytest.fixture(scope="package")
def window(browser: Any, smol: Running) -> Iterator[tuple[Any, list[str]]]:
    """A window for all tests, and what it complains of."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(20_000)
    page = context.new_page()
    yield page, watched(page, smol.url)
    context.close()


@pytest.fixture
def page(window: tuple[Any, list[str]], smol: Running) -> Iterator[Any]:
    """The page as somebody finds it who opens it for the first time."""
    page, complaints = window
    complaints.clear()
    page.goto(smol.url)
    expect(page.locator("#set-temperature")).to_be_attached()
    yield page
    page.evaluate(FORGET)
    page.unroute_all()
    page.goto(f"{smol.url}/page/icon.svg")  # whatever runs ends here
    assert complaints == []
