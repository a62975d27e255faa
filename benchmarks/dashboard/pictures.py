"""The pictures of docs/dashboard.md, from a real server in real Chromium.

    python benchmarks/dashboard/pictures.py [night noon eviction speculation phone dark]
        [--to docs/images]

night        a trickle of batch work on an otherwise idle server
noon         a hundred clients of all classes at once
eviction     a cache that is too small for those who want to run
speculation  texts that repeat what was written before, with guesses
phone, dark  noon once more, at a phone's width, and in the dark theme

The browser draws in software on the cores that the model computes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser import open_browser

from hotbatch.bench.server_process import serving

_CODE = (
    "def area(width, height):\n    return width * height\n\n"
    "def volume(width, height, depth):\n    return width * height * depth\n\n"
) * 3


@dataclass(frozen=True, slots=True)
class Scene:
    """A server with these options, and what is sent to it: (class, requests, tokens, prompt,
    seconds to wait after it). The picture is taken after the last wait."""

    sends: Sequence[tuple[str, int, int, str, float]]
    options: Sequence[str] = ()
    width: int = 1440
    height: int = 1000
    scheme: str = "light"
    scale: float = 1.0


_NOON = [("mixed", 100, 160, "Write a story about a lighthouse keeper.", 3.5)]
SCENES = {
    "night": Scene(
        [("batch", 1, 90, f"Summarise report {number}.", 1.6) for number in range(4)],
    ),
    "noon": Scene(_NOON, ("--max-num-seqs", "64")),
    "eviction": Scene(
        [
            ("batch", 32, 250, "Write a long story about a lighthouse keeper.", 1.5),
            ("interactive", 8, 200, "Write a long letter to a lighthouse keeper.", 1.5),
        ],
        ("--kv-cache-memory-bytes", "60M", "--max-num-seqs", "24", "--no-speculate"),
    ),
    "speculation": Scene(
        [("interactive", 8, 200, f"Repeat this code exactly:\n{_CODE}", 1.2)],
        ("--speculate",),
    ),
    "phone": Scene(_NOON, ("--max-num-seqs", "64"), width=390, height=844, scale=2.0),
    "dark": Scene(_NOON, ("--max-num-seqs", "64"), scheme="dark"),
}


def send(page: Any, kind: str, count: int, max_tokens: int, prompt: str) -> None:
    """As a hand would do it in the playground."""
    page.locator("#prompt").fill(prompt)
    page.locator(f"input[name=class][value={kind}]").check()
    page.locator(f"input[name=count][value='{count}']").check()
    page.locator("#max-tokens").fill(str(max_tokens))
    page.locator("#send").click()


def take(name: str, scene: Scene, folder: Path) -> None:
    with (
        serving(scene.options) as url,
        open_browser(
            url, width=scene.width, height=scene.height, scheme=scene.scheme, scale=scene.scale
        ) as page,
    ):
        page.wait_for_function("() => document.getElementById('status').dataset.state === 'live'")
        time.sleep(1.0)
        for kind, count, max_tokens, prompt, wait in scene.sends:
            send(page, kind, count, max_tokens, prompt)
            time.sleep(wait)
        page.locator("#prompt").blur()
        page.evaluate("() => scrollTo(0, 0)")
        path = folder / f"dashboard-{name}.png"
        page.screenshot(path=str(path))
        print(f"{path}  ({page.locator('#v-running').inner_text()} in the batch)", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenes", nargs="*", help=", ".join(SCENES))
    parser.add_argument("--to", type=Path, default=Path("docs/images"))
    options = parser.parse_args(argv)
    for name in options.scenes or SCENES:
        take(name, SCENES[name], options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
