"""Streams of events to HTTP: one write a step a response, and an ear for the client leaving.

A response with one choice reads its stream directly, the common case and the fast one. With
several choices a small task a choice feeds one list, so that the tokens which a step yields
for all of them go out in one write.

While a response runs, a watcher waits for the client to close its connection and then
cancels the requests, which ends them within one step; the streams end by themselves after
that. A client that reads slowly makes `send` wait for it, in its own task: nobody else does,
and the events that pile up meanwhile are merged into one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotbatch.core.plan import TokenEvent
from hotbatch.server.errors import ClientGoneError
from hotbatch.server.output import Delta
from hotbatch.server.service import Job

SSE_DONE = b"data: [DONE]\n\n"
_SSE_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold tokens back
}


class ChunkWriter(Protocol):
    """The bytes of a stream in one endpoint's shape."""

    def opening(self) -> bytes:
        """What stands before all tokens; may be empty."""
        ...

    def chunk(self, job: Job, delta: Delta) -> bytes:
        """The events for one delta; empty if there is nothing to say."""
        ...

    def closing(self) -> bytes:
        """What stands after all tokens, `SSE_DONE` excluded; may be empty."""
        ...


class StreamingCompletion(Response):
    """Server-sent events of one or more choices."""

    def __init__(
        self, jobs: Sequence[Job], writer: ChunkWriter, on_finish: Callable[[Delta], None]
    ) -> None:
        super().__init__(headers=_SSE_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]  # of the empty body Starlette assumes
        self._jobs = jobs
        self._writer = writer
        self._on_finish = on_finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancelled_on_disconnect(self._jobs, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            opening = self._writer.opening()
            if opening:
                await send({"type": "http.response.body", "body": opening, "more_body": True})
            if len(self._jobs) == 1:
                await self._send_one(self._jobs[0], send)
            else:
                await self._send_many(send)

    async def _send_one(self, job: Job, send: Send) -> None:
        chunk, feed = self._writer.chunk, job.output.feed
        async for event in job.stream:
            delta = feed(event)
            body = chunk(job, delta)
            if delta.finish_reason is not None:
                job.stream.cancel()  # after a stop string the engine does not know yet
                self._on_finish(delta)
                await self._send_end(body, send)
                return
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_many(self, send: Send) -> None:
        async with _merged(self._jobs) as batches:
            async for batch in batches:
                parts = []
                for job, delta in batch:
                    parts.append(self._writer.chunk(job, delta))
                    if delta.finish_reason is not None:
                        self._on_finish(delta)
                body = b"".join(parts)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        await self._send_end(b"", send)

    async def _send_end(self, body: bytes, send: Send) -> None:
        body = body + self._writer.closing() + SSE_DONE
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def first_events(jobs: Sequence[Job], receive: Receive) -> list[TokenEvent]:
    """Waits until any of the jobs has events, and tells these without taking them.

    The client leaving meanwhile cancels the jobs, and they end with an event.
    """
    watcher = asyncio.create_task(_watch(jobs, receive))
    peeks = [asyncio.create_task(job.stream.peek()) for job in jobs]
    try:
        done, waiting = await asyncio.wait(peeks, return_when=asyncio.FIRST_COMPLETED)
        for peek in waiting:
            peek.cancel()
        if waiting:
            await asyncio.wait(waiting)  # a stream has one reader at a time
        return [peek.result() for peek in peeks if peek in done]
    except BaseException:
        for job in jobs:
            job.stream.cancel()
        raise
    finally:
        watcher.cancel()


async def collect(
    jobs: Sequence[Job], receive: Receive, on_finish: Callable[[Delta], None]
) -> list[list[Delta]]:
    """All deltas of all choices, for an answer in one piece; in the order of `jobs`.

    Raises:
        ClientGoneError: the client closed the connection; the requests are cancelled.
    """
    async with cancelled_on_disconnect(jobs, receive) as watcher:
        deltas = await asyncio.gather(*[_drain(job) for job in jobs])
        for choice in deltas:
            on_finish(choice[-1])
        if watcher.done() and any(choice[-1].finish_reason == "abort" for choice in deltas):
            raise ClientGoneError
    return deltas


async def _drain(job: Job) -> list[Delta]:
    deltas = []
    async for event in job.stream:
        delta = job.output.feed(event)
        deltas.append(delta)
        if delta.finish_reason is not None:
            job.stream.cancel()
            break
    return deltas


@asynccontextmanager
async def cancelled_on_disconnect(
    jobs: Sequence[Job], receive: Receive
) -> AsyncIterator[asyncio.Task[None]]:
    """Inside, a task waits for the client to leave and then cancels the jobs; however the
    block is left, the jobs are cancelled (those that ended do not notice)."""
    watcher = asyncio.create_task(_watch(jobs, receive))
    try:
        yield watcher
    finally:
        watcher.cancel()
        for job in jobs:
            job.stream.cancel()


async def _watch(jobs: Sequence[Job], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    for job in jobs:
        job.stream.cancel()


@asynccontextmanager
async def _merged(
    jobs: Sequence[Job],
) -> AsyncIterator[AsyncIterator[list[tuple[Job, Delta]]]]:
    """Batches of what the jobs yield: all that came since the last batch."""
    ready: list[tuple[Job, Delta]] = []
    wake = asyncio.Event()

    async def pump(job: Job) -> None:
        async for event in job.stream:
            delta = job.output.feed(event)
            ready.append((job, delta))
            wake.set()
            if delta.finish_reason is not None:
                job.stream.cancel()
                return

    async def batches() -> AsyncIterator[list[tuple[Job, Delta]]]:
        unfinished = len(jobs)
        while unfinished:
            await wake.wait()
            wake.clear()
            batch = ready.copy()
            ready.clear()
            unfinished -= sum(delta.finish_reason is not None for _, delta in batch)
            yield batch

    async with asyncio.TaskGroup() as pumps:
        tasks = [pumps.create_task(pump(job)) for job in jobs]
        try:
            yield batches()
        finally:
            for task in tasks:
                task.cancel()
