"""Does it leak? Thousands of short requests, some cancelled anywhere, then a look at what is left.

    python benchmarks/serving/soak.py [--requests 2000] [--concurrency 64] [--cancel 0.25]
        [--max-growth-mb 32] [-- SERVE OPTIONS]

Requests of every kind (streamed or not, chat or completion, greedy or sampled, n > 1, with
log-probabilities, prompts with a common beginning) against a server that this script starts.
A share of the clients hangs up at a random moment: before the first byte, or after some
chunks. The KV cache is made small, so that evictions happen and all of it is touched early.

Fails (exit code 1) if a request that was not cancelled does not end as it should, if a step
fails, if a request or a KV block is left at the end, or if the server's resident memory grows
by more than `--max-growth-mb` after the first fifth of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe

from hotbatch.bench.demo import read_metrics
from hotbatch.bench.server_process import Server, ServerFailedError, server_process

KV_CACHE = "32M"
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
COMMON = tuple(range(2000, 2048))  # how a third of the prompts begins
PHASES = 5  # memory is read after each; the first one warms up
IDLE_SECONDS = 60.0


@dataclass(frozen=True)
class Ask:
    """One request: where to, what, and when its client hangs up: after so many chunks, or after
    so many seconds wherever the server is then; None: never."""

    path: str
    body: dict[str, Any]
    max_chunks: int | None = None
    patience: float | None = None


@dataclass
class Tally:
    """What came of the requests so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def fail(self, why: str) -> None:
        self.outcomes["failed"] += 1
        self.errors.append(why)


def make_requests(count: int, cancel: float, seed: int) -> list[Ask]:
    """The same requests for the same arguments."""
    rng = random.Random(seed)
    return [_make_request(rng, cancel) for _ in range(count)]


def _make_request(rng: random.Random, cancel: float) -> Ask:
    body: dict[str, Any] = {
        "max_tokens": rng.randint(4, 32),
        "temperature": rng.choice([0.0, 0.8]),
        "seed": rng.getrandbits(32),
        "n": rng.choice([1] * 9 + [2]),
        "stream": rng.random() < 0.7,
    }
    if rng.random() < 0.2:
        body["frequency_penalty"] = 0.5
    if rng.random() < 0.3:
        words = " ".join(rng.choices(("sea", "salt", "and", "wind", "bread", "trắng"), k=20))
        body["messages"] = [{"role": "user", "content": f"Say something about {words}."}]
        path = CHAT
    else:
        own = tuple(rng.randrange(1000, 20000) for _ in range(rng.randint(1, 64)))
        body["prompt"] = (COMMON if rng.random() < 0.33 else ()) + own
        path = COMPLETION
        if rng.random() < 0.1:
            body["logprobs"] = 3
    if rng.random() >= cancel:
        return Ask(path, body)
    if body["stream"] and rng.random() < 0.5:
        return Ask(path, body, max_chunks=rng.randint(1, 6))
    return Ask(path, body, patience=rng.choice([0.0, 0.01, 0.1, 0.5]))


async def send(session: aiohttp.ClientSession, url: str, ask: Ask, tally: Tally) -> None:
    """Asks, then reads or leaves, and books the outcome."""
    try:
        async with asyncio.timeout(ask.patience):
            async with session.post(url + ask.path, json=ask.body) as response:
                if response.status != 200:
                    tally.fail(f"HTTP {response.status}: {(await response.text())[:300]}")
                elif ask.body["stream"]:
                    await _read_stream(response, ask, tally)
                else:
                    _book_end((await response.json())["choices"], ask, tally)
    except TimeoutError:
        tally.outcomes["hung up in time"] += 1
    except aiohttp.ClientError as error:
        tally.fail(f"{type(error).__name__}: {error}")


async def _read_stream(response: aiohttp.ClientResponse, ask: Ask, tally: Tally) -> None:
    ends: list[dict[str, Any]] = []
    chunks = 0
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            tally.fail(f"error in the stream: {chunk['error']}")
            return
        ends += [choice for choice in chunk["choices"] if choice["finish_reason"]]
        chunks += 1
        if chunks == ask.max_chunks:
            response.close()
            tally.outcomes["hung up after some chunks"] += 1
            return
    _book_end(ends, ask, tally)


def _book_end(choices: list[dict[str, Any]], ask: Ask, tally: Tally) -> None:
    reasons = [choice["finish_reason"] for choice in choices]
    if len(reasons) == ask.body["n"] and set(reasons) <= {"stop", "length"}:
        tally.outcomes["finished"] += 1
    else:
        tally.fail(f"{ask.path} with n = {ask.body['n']} ended with {reasons}")


async def run_phase(
    session: aiohttp.ClientSession, url: str, asks: Sequence[Ask], concurrency: int, tally: Tally
) -> None:
    """So many clients, each of which takes the next request when its last one is over."""
    left = iter(asks)

    async def client() -> None:
        for ask in left:
            await send(session, url, ask, tally)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(client())


async def soak(server: Server, arguments: argparse.Namespace) -> list[str]:
    """Runs all phases, printing a row for each; returns what is wrong."""
    asks = make_requests(arguments.requests, arguments.cancel, arguments.seed)
    tally = Tally()
    memory = [resident_megabytes(server.pid)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        print(f"{'requests':>9}{'seconds':>9}{'RSS MB':>9}{'evictions':>11}  outcomes so far")
        print(f"{0:>9}{0.0:>9.1f}{memory[0]:>9.1f}", flush=True)
        started = time.perf_counter()
        for phase in range(PHASES):
            first, last = (len(asks) * part // PHASES for part in (phase, phase + 1))
            await run_phase(session, server.url, asks[first:last], arguments.concurrency, tally)
            metrics = await _idle_metrics(session, server.url)
            memory.append(resident_megabytes(server.pid))
            print(
                f"{last:>9}{time.perf_counter() - started:>9.1f}{memory[-1]:>9.1f}"
                f"{metrics['num_preemptions_total']:>11.0f}  {dict(tally.outcomes)}",
                flush=True,
            )
    return _complaints(tally, metrics, memory, arguments.max_growth_mb)


async def _idle_metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The metrics once nothing runs any more, or as they are after a minute."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        metrics = await read_metrics(session, url)
        is_idle = not (metrics["num_requests_running"] or metrics["num_requests_waiting"])
        if is_idle or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(0.05)


def _complaints(
    tally: Tally, metrics: dict[str, float], memory: list[float], max_growth_mb: float
) -> list[str]:
    wrong = [f"a request failed: {why}" for why in tally.errors[:5]]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if metrics[name] != 0.0:
            wrong.append(f"{name} is {metrics[name]} at the end")
    if metrics["iterations_failed_total"]:
        wrong.append(f"{metrics['iterations_failed_total']:.0f} steps failed")
    growth = memory[-1] - memory[1]
    print(f"memory after the warm-up {memory[1]:.1f} MB, at the end {memory[-1]:.1f} MB")
    if growth > max_growth_mb:
        wrong.append(f"memory grew by {growth:.1f} MB")
    return wrong


def resident_megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/{pid}/status has no VmRSS")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--cancel", type=float, default=0.25, help="share of clients that hang up")
    parser.add_argument("--max-growth-mb", type=float, default=32.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve_options", nargs="*", metavar="-- SERVE OPTIONS")
    arguments = parser.parse_args(argv)
    print(describe(**vars(arguments), kv_cache=KV_CACHE), flush=True)
    options = ["--kv-cache-memory-bytes", KV_CACHE, "--log-level", "warning"]
    try:
        with server_process([*options, *arguments.serve_options]) as server:
            wrong = asyncio.run(soak(server, arguments))
    except ServerFailedError as error:
        wrong = [str(error)]
    for complaint in wrong:
        print(f"WRONG: {complaint}")
    print("no leak, no error" if not wrong else f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
