"""A real Chromium against a real server with a simulated model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


# Of a module, as it keeps an event loop running while it is open.
@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="there is no playwright")
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox, as tests may run as root in a container.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
