"""Chromium, driven against a server with the demonstration model."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright import sync_api as driver

from tests.server.page.driving import expect, opened
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


@pytest.fixture
def page(browser: Any, smol: Running) -> Iterator[Any]:
    with opened(browser, smol.url) as page:
        expect(page.locator("#set-temperature")).to_be_attached()
        yield page
