"""What the page costs the server, and whether it draws smoothly.

    python benchmarks/dashboard/page_cost.py [--lanes 64] [--steps 20] [--seconds 8] [--rounds 3]

A server in a process of its own, with the real HTTP, scheduler and engine; its model is simulated
and only waits, so that all the CPU time it takes is the server's. So many clients stream answers
that never end, at so many steps a second. In turn, nobody watches and one reader watches /live:
the difference of the server's CPU time is what an open page costs. With the page closed nothing
is recorded, and its cost is that of a server that never had a reader.

Then Chromium opens the page: times between two frames that it drew, and how long its main thread
was busy, with what it costs the server in the same measure. It draws in software and shares the
machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser import open_browser
from machine import describe

SERVER = Path(__file__).resolve().parents[2] / "tests" / "server" / "serve_simulated.py"
MOST_COST = 0.01  # of one core
_TICKS = os.sysconf("SC_CLK_TCK")
_SETTLE = 1.5  # seconds before something is measured
_OUTPUT = 400  # tokens of an answer; a client asks again at once


@contextmanager
def server(step_seconds: float) -> Iterator[tuple[str, int]]:
    """The address and the process id of a server whose steps take so long."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(step_seconds), "1"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def cost(pid: int, seconds: float) -> float:
    """Share of one core that the process takes."""
    time.sleep(_SETTLE)
    before, began = cpu_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.perf_counter() - began)


@contextmanager
def clients(url: str, count: int) -> Iterator[None]:
    """So many streams, each asking again when it has ended, until the block ends."""
    stop = threading.Event()

    async def one(http: httpx.AsyncClient, index: int) -> None:
        tier = ("default", "priority", "flex")[index % 3]
        while not stop.is_set():
            body = {
                "prompt": f"client {index}", "max_tokens": _OUTPUT - index, "stream": True,
                "service_tier": tier,
            }  # fmt: skip
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    if stop.is_set():
                        return

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as http:
            await asyncio.gather(*(one(http, index) for index in range(count)))

    with _beside(lambda: asyncio.run(all_of_them()), stop):
        yield


@contextmanager
def reader(url: str, frames: list[int]) -> Iterator[None]:
    """Reads /live as a page does, until the block ends; notes the bytes of what came."""
    stop = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{url}/live", timeout=None, trust_env=False) as answer:
            for chunk in answer.iter_raw():
                frames.append(len(chunk))
                if stop.is_set():
                    return

    with _beside(read, stop):
        yield


@contextmanager
def _beside(work: Callable[[], None], stop: threading.Event) -> Iterator[None]:
    """Runs `work` in a thread until the block ends; `stop` tells it so."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10.0)


FRAMES = """(seconds) => new Promise((resolve) => {
  const times = [];
  let busy = 0;
  new PerformanceObserver((list) => {
    for (const task of list.getEntries()) busy += task.duration;
  }).observe({ type: "longtask" });
  const until = performance.now() + 1000 * seconds;
  const tick = (at) => {
    times.push(at);
    if (at < until) requestAnimationFrame(tick);
    else resolve([times, busy]);
  };
  requestAnimationFrame(tick);
})"""


def smoothness(url: str, pid: int, seconds: float) -> tuple[list[float], float, float]:
    """Milliseconds between frames, milliseconds of long tasks, and the server's CPU share."""
    with open_browser(url, width=1440, height=900) as page:
        page.wait_for_function("() => document.getElementById('status').dataset.state === 'live'")
        time.sleep(2.0)
        before, began = cpu_seconds(pid), time.perf_counter()
        times, busy = page.evaluate(FRAMES, seconds)
        share = (cpu_seconds(pid) - before) / (time.perf_counter() - began)
    gaps = [after - before for before, after in pairwise(times)]
    return gaps, busy, share


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--steps", type=float, default=20.0, help="a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    print(describe(lanes=options.lanes, steps=options.steps, seconds=options.seconds))
    closed, opened = [], []
    frames: list[int] = []
    with server(1.0 / options.steps) as (url, pid), clients(url, options.lanes):
        for _ in range(options.rounds):
            closed.append(cost(pid, options.seconds))
            with reader(url, frames):
                opened.append(cost(pid, options.seconds))
        print(f"server, nobody watches: {_shares(closed)} of a core")
        print(f"server, one reader:     {_shares(opened)} of a core")
        added = statistics.median(b - a for a, b in zip(closed, opened, strict=True))
        print(
            f"an open page costs {added:.2%} of a core (aim: below {MOST_COST:.0%}); "
            f"{len(frames) / (options.rounds * (options.seconds + _SETTLE)):.1f} frames a second "
            f"of {statistics.median(frames):.0f} bytes"
        )
        gaps, busy, share = smoothness(url, pid, options.seconds)
        gaps.sort()
        print(
            f"Chromium: {1e3 / statistics.mean(gaps):.0f} frames drawn a second; ms between two: "
            f"median {gaps[len(gaps) // 2]:.1f}, p95 {gaps[int(0.95 * len(gaps))]:.1f}, "
            f"longest {gaps[-1]:.1f}; {busy / 1e3 / options.seconds:.1%} of the time in tasks "
            f"longer than 50 ms; the server meanwhile {share:.1%} of a core"
        )
    return int(added > MOST_COST)


def _shares(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2%}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
