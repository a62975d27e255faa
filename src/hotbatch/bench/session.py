"""One measurement from the outside: is the server ready, then the load, then what it met."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hotbatch.bench.client import Record, Target, open_session, parse, send
from hotbatch.bench.conversations import Conversation
from hotbatch.bench.load import (
    LoadResult,
    OnEnd,
    Phase,
    run_conversations,
    run_load,
    run_phases,
)
from hotbatch.bench.server_metrics import Sample, sampling
from hotbatch.bench.workload import BenchRequest


class NotReadyError(Exception):
    """The server does not answer as it should; `is_final` if no waiting will change that."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Work:
    """What is sent: requests at their arrivals, or by clients in phases, or conversations."""

    requests: Sequence[BenchRequest] = ()
    arrivals: Sequence[float] | None = None
    max_concurrency: int | None = None
    phases: Sequence[Phase] = ()
    conversations: Sequence[Conversation] = ()

    @property
    def total(self) -> int | None:
        """How many requests it will be, where that is known."""
        if self.phases:
            return None
        if self.conversations:
            return sum(len(conversation.turns) for conversation in self.conversations)
        return len(self.requests)

    async def run(self, target: Target, on_end: OnEnd | None = None) -> LoadResult:
        if self.conversations:
            return await run_conversations(target, self.conversations, on_end=on_end)
        if self.phases:
            return await run_phases(target, self.requests, self.phases, on_end=on_end)
        return await run_load(
            target,
            self.requests,
            arrivals=self.arrivals,
            max_concurrency=self.max_concurrency,
            on_end=on_end,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """The load, and the server's own figures meanwhile if they were asked for."""

    load: LoadResult
    samples: list[Sample] = field(default_factory=list)


async def wait_until_ready(target: Target, trial: BenchRequest, patience: float) -> Target:
    """The target with its model named, once it has answered the trial request.

    Raises:
        NotReadyError: it has not within `patience` seconds, or says that it never will.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            if not target.model:
                target = await _with_first_model(target)
            await _try_out(target, trial)
            return target
        except NotReadyError as error:
            if error.is_final or time.monotonic() >= deadline:
                raise
            await asyncio.sleep(0.5)


async def measure(
    target: Target, work: Work, *, with_samples: bool = False, is_quiet: bool = True
) -> Measured:
    progress = _Progress(work.total, is_quiet)
    try:
        if not with_samples:
            return Measured(await work.run(target, progress.advance))
        async with (
            open_session(target) as session,
            sampling(session, target.base_url) as samples,
        ):
            return Measured(await work.run(target, progress.advance), samples)
    finally:
        progress.close()


async def _with_first_model(target: Target) -> Target:
    import aiohttp

    url = target.base_url.rstrip("/") + "/v1/models"
    try:
        async with open_session(target) as session, session.get(url) as response:
            if response.status in (401, 403):
                raise NotReadyError(f"{url} says {response.status}; give --api-key", is_final=True)
            listed = await response.json()
            name = str(listed["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise NotReadyError(f"no model list at {url}: {error}") from None
    return replace(target, model=name)


async def _try_out(target: Target, trial: BenchRequest) -> None:
    record = Record(trial)
    async with open_session(target) as session:
        await send(session, target, record)
    parse(record)
    if record.error is not None:
        raise NotReadyError(
            f"the trial request to {target.url} failed: {record.error}", is_final=record.is_refused
        )


class _Progress:
    """A line on stderr, redrawn at most twice a second so that it costs nothing."""

    def __init__(self, total: int | None, is_quiet: bool) -> None:
        self._total = "" if total is None else f" of {total}"
        self._is_quiet = is_quiet
        self._done = 0
        self._drawn = 0.0

    def advance(self, _: Record) -> None:
        self._done += 1
        now = time.monotonic()
        if not self._is_quiet and now - self._drawn > 0.5:
            self._drawn = now
            print(f"\r{self._done}{self._total} done", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if not self._is_quiet:
            print(f"\r{self._done}{self._total} done", file=sys.stderr, flush=True)
