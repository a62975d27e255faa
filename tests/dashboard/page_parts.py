"""The page in a browser, and whatever went wrong in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hotbatch.simulator import ConstantStepTime

SLOW = {"step_time": ConstantStepTime(0.01), "sleep": time.sleep}


@dataclass
class Opened:
    page: Any
    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def until(self, condition: str) -> None:
        """Until an expression in the page is true."""
        self.page.wait_for_function(f"() => {condition}")

    def text(self, name: str) -> str:
        text: str = self.page.locator(f"#{name}").inner_text()
        return text

    def send(self, *, kind: str = "interactive", count: int = 1, max_tokens: int = 50) -> None:
        page = self.page
        page.locator(f"input[name=class][value={kind}]").check()
        page.locator(f"input[name=count][value='{count}']").check()
        page.locator("#max-tokens").fill(str(max_tokens))
        page.locator("#send").click()

    def inked(self) -> int:
        """Pixels of the lanes' picture, right of the names, that wear the colour of a class."""
        count: int = self.page.evaluate(INKED)
        return count

    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.urls if not url.startswith("data:")}


# Grey has three channels alike; the classes' hues have not.
INKED = """() => {
  const canvas = document.getElementById("lanes");
  const { data } = canvas.getContext("2d").getImageData(100, 0, canvas.width - 100, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    const low = Math.min(data[i], data[i + 1], data[i + 2]);
    if (Math.max(data[i], data[i + 1], data[i + 2]) - low > 40) count += 1;
  }
  return count;
}"""


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Opened]:
    """The page, live; in the end nothing may have gone wrong in it."""
    context = browser.new_context(**options)
    context.set_default_timeout(30_000)
    page = context.new_page()
    seen = Opened(page)
    page.on(
        "console",
        lambda message: seen.errors.append(message.text) if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.urls.append(request.url))
    page.goto(url)
    try:
        yield seen
    finally:
        context.close()
    assert seen.errors == []


def is_live(seen: Opened) -> None:
    seen.until("document.getElementById('status').dataset.state === 'live'")
