"""The engine as asyncio sees it: submit a request, iterate over its events.

The engine's thread hands a whole step over with one `call_soon_threadsafe` for each event
loop, however many streams that loop has: waking a loop costs a system call, and 64 of them a
step would be felt. A consumer that is slower than the engine finds the events that piled up
merged into one, so it catches up with one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from hotbatch.core.admission import Load
from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.plan import TokenEvent
from hotbatch.core.request import Request
from hotbatch.core.stats import SchedulerStats
from hotbatch.engine.engine import Engine
from hotbatch.engine.protocol import ExecutorInfo

# Events kept apart for a slow consumer before they are merged into one.
_MAX_PENDING = 32


class EventStream:
    """The events of one request: an async iterator for one consumer.

    It ends after the event with a `finish_reason`. Leaving it early must be said, with
    `cancel()` or by using the stream as a context manager (`with stream: ...`), else the
    engine computes on for nobody.
    """

    def __init__(
        self, engine: AsyncEngine, request_id: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request_id = request_id
        self.loop = loop
        self._engine = engine
        self._pending: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False  # the last event has arrived, though maybe not been read

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._pending and self._has_ended:
            raise StopAsyncIteration
        event = await self.peek()
        self._pending.clear()
        return event

    async def peek(self) -> TokenEvent:
        """The next event, which stays the next one; not to be asked after the last."""
        while not self._pending:
            assert not self._has_ended, "the stream has ended"
            assert self._waiter is None, "an EventStream has one consumer"
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return merge_events(self._pending)

    def cancel(self) -> None:
        """Ends the request if it has not ended. Idempotent, from any thread."""
        self._engine._cancel(self)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def _push(self, event: TokenEvent) -> None:
        """On the stream's loop only."""
        self._pending.append(event)
        if len(self._pending) > _MAX_PENDING:
            self._pending[:] = [merge_events(self._pending)]
        if event.finish_reason is not None:
            self._has_ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """Connects an Engine with any number of event loops. Takes the engine's `deliver`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._streams: dict[str, EventStream] = {}
        engine.connect(self._deliver)

    @property
    def info(self) -> ExecutorInfo:
        return self.engine.info

    @property
    def is_healthy(self) -> bool:
        return self.engine.is_healthy

    @property
    def is_accepting(self) -> bool:
        return self.engine.is_accepting

    def now(self) -> float:
        return self.engine.now()

    def stats(self) -> SchedulerStats:
        return self.engine.stats()

    def load(self) -> Load:
        return self.engine.load()

    def start(self) -> None:
        self.engine.start()

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """See `Engine.stop`; the event loop goes on meanwhile, so streams can be served."""
        await asyncio.to_thread(self.engine.stop, grace_seconds)

    def submit(self, request: Request) -> EventStream:
        """Must be called on the event loop that will read the stream.

        Raises what `Engine.submit` raises, at once.
        """
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(
                f"request_id {request_id!r} is in use by a request that has not ended; "
                "choose another id.",
                param="request_id",
            )
        stream = EventStream(self, request_id, asyncio.get_running_loop())
        self._streams[request_id] = stream  # before the engine can deliver anything for it
        try:
            self.engine.submit(request)
        except BaseException:
            del self._streams[request_id]
            raise
        return stream

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """`submit` as an async generator: closing it, or an exception, cancels the request."""
        with self.submit(request) as stream:
            async for event in stream:
                yield event

    def _cancel(self, stream: EventStream) -> None:
        # By identity: the id of a stream that has ended may belong to another request by now.
        if self._streams.get(stream.request_id) is stream:
            self.engine.cancel(stream.request_id)

    def _deliver(self, events: list[TokenEvent]) -> None:
        """On the engine's thread, once a step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EventStream, TokenEvent]]] = {}
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                del self._streams[event.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, event))
        for loop, handed in by_loop.items():
            try:
                loop.call_soon_threadsafe(_push_all, handed)
            except RuntimeError:  # the loop is closed: nobody can hear these requests any more
                for stream, _ in handed:
                    self._streams.pop(stream.request_id, None)
                    self.engine.cancel(stream.request_id)


def _push_all(handed: list[tuple[EventStream, TokenEvent]]) -> None:
    for stream, event in handed:
        stream._push(event)


def merge_events(events: list[TokenEvent]) -> TokenEvent:
    """One event that says all that these (of one request, in order, at least one) said."""
    if len(events) == 1:
        return events[0]
    return events[-1]._replace(
        token_ids=tuple(token for event in events for token in event.token_ids),
        logprobs=tuple(logprob for event in events for logprob in event.logprobs),
        prompt_logprobs=tuple(entry for event in events for entry in event.prompt_logprobs),
    )
