"""What the server says of itself meanwhile: its /metrics, read now and then."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

SAMPLE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment: seconds since the start, requests, tokens generated so far."""

    time: float
    running: float
    waiting: float
    generated: float


async def read_metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The server's metrics by name without prefix; series of one name are added up."""
    async with session.get(f"{url.rstrip('/')}/metrics") as response:
        response.raise_for_status()
        return parse_metrics((await response.text()).splitlines())


def parse_metrics(lines: Iterable[str]) -> dict[str, float]:
    """Prometheus' text format to sums by name; `hotbatch:` (or another engine's prefix) is cut
    off, histogram buckets are left out."""
    sums: dict[str, float] = {}
    for line in lines:
        match = re.match(r"(?:[a-z]+:)?(\w+)(?:\{.*\})? (\S+)", line)
        if match and not match[1].endswith("_bucket"):
            with suppress(ValueError):
                sums[match[1]] = sums.get(match[1], 0.0) + float(match[2])
    return sums


async def sample(
    session: aiohttp.ClientSession, url: str, before: Mapping[str, float], samples: list[Sample]
) -> None:
    """Adds a sample every `SAMPLE_SECONDS` until it is cancelled."""
    started = time.perf_counter()
    while True:
        now = time.perf_counter() - started
        metrics = await read_metrics(session, url)
        generated = metrics["generation_tokens_total"] - before["generation_tokens_total"]
        samples.append(
            Sample(now, metrics["num_requests_running"], metrics["num_requests_waiting"], generated)
        )
        await asyncio.sleep(SAMPLE_SECONDS)


@asynccontextmanager
async def sampling(session: aiohttp.ClientSession, url: str) -> AsyncIterator[list[Sample]]:
    """Samples for the time of the block; the list stays empty where the server has no such
    metrics."""
    import aiohttp

    samples: list[Sample] = []
    try:
        before = await read_metrics(session, url)
        task = asyncio.create_task(sample(session, url, before, samples))
    except (aiohttp.ClientError, OSError, TimeoutError):
        yield samples
        return
    try:
        yield samples
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, aiohttp.ClientError, OSError, KeyError):
            await task


def mean_batch_size(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Requests per step between two readings."""
    requests, steps = (
        after[name] - before[name]
        for name in ("iteration_requests_sum", "iteration_requests_count")
    )
    return requests / steps if steps else 0.0
