"""A real Chromium on one page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def open_browser(
    url: str, *, width: int, height: int, scheme: str = "light", scale: float = 1.0
) -> Iterator[Any]:
    """A page of that size, in CSS pixels.

    Raises:
        RuntimeError: there is no Chromium.
    """
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        raise RuntimeError("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # Without a sandbox, as this may run as root in a container.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            device_scale_factor=scale,
        )
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        yield page
        browser.close()
