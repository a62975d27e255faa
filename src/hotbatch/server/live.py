"""GET /live: the batch as it happens, as server-sent events for whoever watches.

First an event `hello` with what does not change, then frames: at most 20 a second, however many
steps the engine makes, and one a second while it rests. A frame is made once for all watchers; a
watcher that reads slowly gets the newest and never hears of those between, so nothing piles up.

While nobody watches, nothing is traced and nothing runs. While somebody does, the engine's
thread appends one reference a step; everything else happens here, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotbatch.core.errors import OverloadedError
from hotbatch.core.service_class import ServiceClass
from hotbatch.core.speculation import GuessNews
from hotbatch.engine.async_engine import AsyncEngine
from hotbatch.engine.step_stats import RequestTimings
from hotbatch.engine.step_trace import StepTrace
from hotbatch.server.entrance import Entrance
from hotbatch.server.live_ahead import AHEAD_FIELDS
from hotbatch.server.live_batch import LANE_FIELDS, LiveBatch

logger = logging.getLogger(__name__)

_FRAME_SECONDS = 0.05
_GAUGE_SECONDS = 0.5
_QUIET_SECONDS = 1.0
_CURVE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MAX_WATCHERS = 32
_MAX_TRACES = 4096  # kept while the event loop is busy elsewhere; older ones are dropped
# The page finds its own requests among the lanes by these; other ids are not published.
_SHOWN_IDS = ("cmpl-play-",)


class Watcher:
    """One open stream."""

    def __init__(self, hello: bytes) -> None:
        self._frame: bytes | None = hello
        self._is_greeted = False
        self._is_closed = False
        self._wake = asyncio.Event()
        self._wake.set()

    def offer(self, frame: bytes) -> None:
        """A frame; it takes the place of one that was not read yet, but not of the hello."""
        if self._is_greeted:
            self._frame = frame
            self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    async def next(self) -> bytes | None:
        """The newest frame that was not read yet, as soon as there is one; None at the end."""
        await self._wake.wait()
        self._wake.clear()
        if self._is_closed:
            return None
        self._is_greeted = True
        frame, self._frame = self._frame, None
        return frame


class LiveFeed:
    """Publishes the batch of one engine. On one event loop only.

    Args:
        engine: what is watched.
        entrance: counts who was refused at the door.
        facts: what the hello says beside what the engine knows.
    """

    def __init__(
        self, engine: AsyncEngine, entrance: Entrance, facts: Mapping[str, object]
    ) -> None:
        self._engine = engine.engine
        self._entrance = entrance
        self._facts = {**facts, "boot": uuid.uuid4().hex}
        self._watchers: list[Watcher] = []
        self._inbox: deque[StepTrace | RequestTimings | list[GuessNews]] = deque(maxlen=_MAX_TRACES)
        self._listen = self._inbox.append
        self._batch = self._new_batch()
        self._pump: asyncio.Task[None] | None = None
        self._is_closed = False
        self._last_frame = self._last_gauges = self._last_curve = 0.0

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def join(self) -> Watcher:
        """Raises OverloadedError if too many watch already."""
        if len(self._watchers) >= _MAX_WATCHERS:
            raise OverloadedError(
                f"{_MAX_WATCHERS} pages watch this server already; close one.",
                reason="watchers",
                retry_after=10.0,
            )
        watcher = Watcher(_event(self.hello(), "hello"))
        if self._is_closed:
            watcher.close()
        self._watchers.append(watcher)
        if self._pump is None:
            self._begin()
            self._pump = asyncio.get_running_loop().create_task(self._publish())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.remove(watcher)
        if not self._watchers and self._pump is not None:
            self._pump.cancel()
            self._pump = None
            self._end()

    def close(self) -> None:
        """Ends all streams; new ones end at once."""
        self._is_closed = True
        self._close_all()

    def _close_all(self) -> None:
        for watcher in self._watchers:
            watcher.close()

    # --- while somebody watches -------------------------------------------------------------

    def _new_batch(self) -> LiveBatch:
        return LiveBatch(self._engine.view.promise_of, _SHOWN_IDS)

    def _begin(self) -> None:
        self._batch = self._new_batch()
        self._inbox.clear()
        self._last_frame = self._engine.now()
        self._last_gauges = self._last_curve = self._last_frame - _QUIET_SECONDS
        self._engine.request_observers.append(self._listen)
        self._engine.tracers.append(self._listen)
        self._engine.guess_observers.append(self._listen)

    def _end(self) -> None:
        with suppress(ValueError):
            self._engine.guess_observers.remove(self._listen)
        with suppress(ValueError):
            self._engine.tracers.remove(self._listen)
        with suppress(ValueError):
            self._engine.request_observers.remove(self._listen)

    async def _publish(self) -> None:
        try:
            while True:
                await asyncio.sleep(_FRAME_SECONDS)
                frame = self.take_frame()
                if frame is not None:
                    body = _event(frame)
                    for watcher in self._watchers:
                        watcher.offer(body)
        except Exception:
            logger.exception("the live stream failed")
            self._close_all()  # the pages come again

    # --- what is said -----------------------------------------------------------------------

    def hello(self) -> dict[str, object]:
        engine, view = self._engine, self._engine.view
        info = engine.info
        targets = [view.targets_of(service_class) for service_class in ServiceClass]
        return {
            **self._facts,
            "precision": info.precision,
            "device": info.device,
            "description": info.description,
            "seats": view.num_seats,
            "blocks": info.num_blocks,
            "block_size": info.block_size,
            "context_len": info.context_len,
            "classes": [service_class.label for service_class in ServiceClass],
            "targets_ms": [(_ms(target.ttft), _ms(target.tpot)) for target in targets],
            "lane_fields": LANE_FIELDS,
            "ahead_fields": AHEAD_FIELDS,
            "t": engine.now(),
        }

    def take_frame(self) -> dict[str, object] | None:
        """All that came since the last frame; None if that is nothing and not long ago."""
        now = self._engine.now()
        seconds = now - self._last_frame
        if not self._inbox and seconds < _QUIET_SECONDS:
            return None
        inbox = self._inbox
        for _ in range(len(inbox)):  # what comes meanwhile is the next frame's
            said = inbox.popleft()
            if isinstance(said, StepTrace):
                self._batch.note_step(said)
            elif isinstance(said, list):
                self._batch.note_guesses(said)
            else:
                self._batch.note_end(said)
        self._last_frame = now
        frame = {"t": round(now, 4), "dt": round(seconds, 4), **self._batch.take_frame()}
        if now - self._last_gauges >= _GAUGE_SECONDS:
            self._last_gauges = now
            frame["gauges"] = self._gauges(now)
        return frame

    def _gauges(self, now: float) -> dict[str, Any]:
        engine = self._engine
        stats, load = engine.stats(), engine.load()
        gauges: dict[str, Any] = {
            "accepting": engine.is_accepting,
            "healthy": engine.is_healthy,
            "running": stats.num_running,
            "paused": stats.num_paused,
            "evicted": stats.num_evicted,
            "waiting": load.waiting,
            "waits": [round(seconds, 2) for seconds in engine.view.longest_waits()],
            "kv": (stats.blocks_used, stats.blocks_cached, stats.blocks_free),
            "prefix": (stats.prefix_query_tokens, stats.prefix_hit_tokens),
            "generated": stats.generated_tokens,
            "preemptions": stats.preemptions,
            "pauses": stats.pauses,
            "guesses": stats.num_guesses,
            "refused": sum(self._entrance.refused.values()),
            "totals": self._batch.totals(),
            "latency_ms": self._batch.latencies(now),
        }
        accounts = engine.totals()
        if accounts is not None:
            gauges["causes"] = {
                cause.value: round(seconds, 4) for cause, seconds in accounts.by_cause.items()
            }
            gauges["decode_utilisation"] = accounts.decode_utilisation
        if now - self._last_curve >= _QUIET_SECONDS:
            self._last_curve = now
            self._batch.forget_lost()
            gauges["curve"] = self._curve()
        return gauges

    def _curve(self) -> dict[str, object]:
        """Steps of decodes over their size: (tokens, predicted milliseconds, those at the
        machine's best or None), at the given context; and the best's knee, in tokens."""
        snapshot = self._engine.ceiling()
        if snapshot is not None:
            return {
                "context": round(snapshot.context),
                "knee": round(snapshot.knee, 1),
                "points": [
                    (point.num_tokens, _ms(point.predicted_seconds), _ms(point.ideal_seconds))
                    for point in snapshot.curve
                ],
            }
        context = max(1, self._batch.last_context)
        sizes = [size for size in _CURVE_SIZES if size <= max(64, self._engine.view.num_seats)]
        seconds = self._engine.view.predicted_curve(context, sizes)
        points = [(size, _ms(value), None) for size, value in zip(sizes, seconds, strict=False)]
        return {"context": context, "knee": None, "points": points}


class LiveResponse(Response):
    """The stream of one watcher, until it leaves or the server ends."""

    def __init__(self, feed: LiveFeed) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]  # of the empty body Starlette assumes
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = self._feed.join()
        ear = asyncio.create_task(_until_gone(receive, watcher))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (frame := await watcher.next()) is not None:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            ear.cancel()
            self._feed.leave(watcher)


async def _until_gone(receive: Receive, watcher: Watcher) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.close()


def _event(value: object, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
