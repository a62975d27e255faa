"""The pictures of docs/dashboard.md, from a real server in real Chromium.

    python benchmarks/dashboard/pictures.py [readme night noon eviction speculation ahead phone
        dark eviction-dark speculation-dark] [--to docs/images]

readme       a hundred clients of all classes with questions of all lengths
night        a trickle of batch work on an otherwise idle server
noon         the hundred with short questions: the batch when it has begun to refill itself
eviction     a cache that is too small for those who want to run
speculation  texts that repeat what was written before, with guesses
ahead        two agents whose next requests are computed while their tools work
phone, dark  noon once more, at a phone's width, and in the dark theme; the two others that end in
             -dark likewise

The browser draws in software on the cores that the model computes on.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

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
    seconds to wait after it), and by programs, each in a thread of its own, until the picture is
    taken after the last wait."""

    sends: Sequence[tuple[str, int, int, str, float]] = ()
    programs: Sequence[Callable[[httpx.Client, threading.Event], None]] = ()
    wait: float = 1.0
    zoom: int = 0  # times that the span is made shorter
    options: Sequence[str] = ()
    width: int = 1440
    height: int = 1000
    scheme: str = "light"
    scale: float = 1.0


_STEPS = (
    "List what has to be done for it.",
    "Name the first thing that could go wrong.",
    "Say how that can be avoided.",
    "Write a note to a colleague about it.",
)


def agent(name: str, task: str, tool: float) -> Callable[[httpx.Client, threading.Event], None]:
    """A loop of the same steps, again and again; `tool` is the seconds between two of them."""

    def loop(server: httpx.Client, stopped: threading.Event) -> None:
        case = 0
        while not stopped.is_set():
            case += 1
            last = "nothing yet"
            for number, step in enumerate(_STEPS, start=1):
                content = (
                    f"Your task is to {task} (case {case}).\n\nSo far:\n{last}\n\n"
                    f"Step {number}: {step}"
                )
                body = {
                    "messages": [{"role": "user", "content": content}],
                    "temperature": 0.0,
                    "max_tokens": 96,
                    "user": name,
                }
                answer = server.post("/v1/chat/completions", json=body).json()
                last = answer["choices"][0]["message"]["content"]
                if stopped.wait(tool):
                    return

    return loop


_NOON = [("mixed", 100, 160, "Write a story about a lighthouse keeper.", 5.5)]
_SEATS = ("--max-num-seqs", "64")
SCENES = {
    "readme": Scene([("mixed", 100, 200, "", 6.0)], options=_SEATS, height=1080, zoom=1),
    "night": Scene(
        [("batch", 1, 90, f"Summarise report {number}.", 1.6) for number in range(4)],
    ),
    "noon": Scene(_NOON, options=_SEATS, zoom=1),
    "eviction": Scene(
        [
            ("batch", 32, 250, "Write a long story about a lighthouse keeper.", 2.0),
            ("interactive", 8, 200, "Write a long letter to a lighthouse keeper.", 1.8),
        ],
        zoom=1,
        options=("--kv-cache-memory-bytes", "60M", "--max-num-seqs", "24", "--no-speculate"),
    ),
    "speculation": Scene(
        [("interactive", 8, 500, f"Repeat this code exactly:\n{_CODE}", 1.8)],
        zoom=1,
        options=("--speculate",),
    ),
    "ahead": Scene(
        programs=(
            agent("printer", "print a book of local recipes", 1.3),
            agent("baker", "open a bakery near the railway station", 1.7),
        ),
        wait=33.0,
    ),
    "phone": Scene(_NOON, options=_SEATS, width=390, height=844, scale=2.0),
    "dark": Scene(_NOON, options=_SEATS, zoom=1, scheme="dark"),
}
for _name in ("eviction", "speculation"):
    SCENES[f"{_name}-dark"] = replace(SCENES[_name], scheme="dark")


def send(page: Any, kind: str, count: int, max_tokens: int, prompt: str) -> None:
    """As a hand would do it in the playground."""
    page.locator("#prompt").fill(prompt)
    page.locator(f"input[name=class][value={kind}]").check()
    page.locator(f"input[name=count][value='{count}']").check()
    page.locator("#max-tokens").fill(str(max_tokens))
    page.locator("#send").click()


def take(name: str, scene: Scene, folder: Path) -> None:
    with (
        serving(("--precision", "int8", *scene.options)) as url,
        open_browser(
            url, width=scene.width, height=scene.height, scheme=scene.scheme, scale=scene.scale
        ) as page,
    ):
        page.wait_for_function("() => document.getElementById('status').dataset.state === 'live'")
        stopped = threading.Event()
        clients = httpx.Client(base_url=url, timeout=60.0, trust_env=False)
        threads = [
            threading.Thread(target=program, args=(clients, stopped), daemon=True)
            for program in scene.programs
        ]
        for thread in threads:
            thread.start()
        for _ in range(scene.zoom):
            page.locator("#closer").click()
        page.wait_for_timeout(1000 * scene.wait)
        for kind, count, max_tokens, prompt, wait in scene.sends:
            send(page, kind, count, max_tokens, prompt)
            time.sleep(wait)
        page.locator("#prompt").blur()
        page.evaluate("() => scrollTo(0, 0)")
        path = folder / ("dashboard.png" if name == "readme" else f"dashboard-{name}.png")
        page.screenshot(path=str(path))
        stopped.set()
        for thread in threads:
            thread.join()
        clients.close()
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
