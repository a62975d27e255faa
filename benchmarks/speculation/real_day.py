"""The mixed day on a real server: clients of the same kinds over HTTP, with real text."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from virtual_world import Asked
from workloads import DATA

from hotbatch.bench.server_process import serving

_STEPS = (
    "List what has to be done for it.",
    "Name the first thing that could go wrong.",
    "Say how that can be avoided.",
    "Name what it will cost.",
    "Write a note to a colleague about it.",
    "Summarise all of it in two sentences.",
)


class Site:
    """A server, and what was asked there so far. `begin` is the moment of the day's beginning."""

    def __init__(self, url: str, output_len: int) -> None:
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=limits)
        self.asked: list[Asked] = []
        self.begin = time.perf_counter()
        self._output_len = output_len

    @property
    def now(self) -> float:
        return time.perf_counter() - self.begin

    async def ask(self, kind: str, messages: list[dict[str, str]], **body: Any) -> str:
        asked = Asked(kind, self.now, 0)
        body = {
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self._output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        answer = []
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    asked.num_tokens = chunk["usage"]["completion_tokens"]
                text = (chunk.get("choices") or [{}])[0].get("delta", {}).get("content")
                if text:
                    asked.first = asked.first or self.now
                    answer.append(text)
        asked.end = self.now
        asked.first = asked.first or asked.end
        self.asked.append(asked)
        return "".join(answer)


async def talk(site: Site, number: int, end: float) -> None:
    draw = random.Random(f"talk {number}")
    questions = (DATA / "questions.txt").read_text(encoding="utf-8").splitlines()
    while True:
        history: list[dict[str, str]] = []
        for _ in range(draw.randint(1, 6)):
            await asyncio.sleep(draw.lognormvariate(0.9, 0.6))
            if site.now >= end:
                return
            history.append({"role": "user", "content": draw.choice(questions)})
            answer = await site.ask(
                "interactive", history, temperature=0.8, user=f"talk-{number // 10}"
            )
            history.append({"role": "assistant", "content": answer})


async def loop(site: Site, number: int, end: float) -> None:
    draw = random.Random(f"loop {number}")
    while True:
        task = f"move {draw.randrange(1000)} books into house {draw.randrange(1000)}"
        last = "nothing yet"
        for place, request in enumerate(_STEPS, start=1):
            await asyncio.sleep(draw.uniform(0.3, 2.0))
            if site.now >= end:
                return
            content = f"Your task is to {task}.\n\nSo far:\n{last}\n\nStep {place}: {request}"
            message = {"role": "user", "content": content}
            last = await site.ask("agent", [message], user=f"agent-{number // 10}")


async def job(site: Site, number: int, end: float) -> None:
    lines = (DATA / "prose.txt").read_text(encoding="utf-8").splitlines()
    versions = [0] * 16
    night = 0
    while True:
        for place in range(16):
            if place % 4 == 0:
                await asyncio.sleep(0.5)
            if site.now >= end:
                return
            versions[place] += (night + place) % 4 == 0
            content = (
                f"Entry {place} of list {number}, version {versions[place]}. "
                f"Say in one sentence: {lines[place % len(lines)]}"
            )
            await site.ask(
                "job", [{"role": "user", "content": content}], user=f"job-{number // 10}"
            )
        night += 1


CLIENTS: dict[str, Callable[[Site, int, float], Coroutine[Any, Any, None]]] = {
    "interactive": talk,
    "agent": loop,
    "job": job,
}


def real_day(
    arguments: argparse.Namespace,
    presence: Callable[[list[int]], list[tuple[str, int, int, int]]],
    options: list[str],
) -> list[list[Asked]]:
    """What was asked in each part of the day, on a server of its own.

    Args:
        presence: (clients by part) -> kind, number, first and last part of each client.
    """
    with serving(options) as url:
        return asyncio.run(_day(url, arguments, presence(arguments.clients)))


async def _day(
    url: str, arguments: argparse.Namespace, clients: list[tuple[str, int, int, int]]
) -> list[list[Asked]]:
    site = Site(url, arguments.output_len)
    await site.ask("warm-up", [{"role": "user", "content": "Hello"}])
    site.asked.clear()
    site.begin = time.perf_counter()
    seconds = arguments.seconds

    async def enter(kind: str, number: int, first: int, last: int) -> None:
        await asyncio.sleep(first * seconds)
        await CLIENTS[kind](site, number, (last + 1) * seconds)

    await asyncio.gather(*(enter(*client) for client in clients))
    await site.http.aclose()
    return [
        [one for one in site.asked if part * seconds <= one.arrival < (part + 1) * seconds]
        for part in range(len(arguments.clients))
    ]
