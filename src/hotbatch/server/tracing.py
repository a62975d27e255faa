"""A trace for each request, sent to an OpenTelemetry collector: queue, prefill, decode, pauses.

Spans are made when a request has ended, from the moments that the engine noted anyway, so
tracing costs nothing while the request runs. A thread of its own sends them in batches as OTLP
over HTTP in JSON (opentelemetry.io/docs/specs/otlp), for which no library is needed. A collector
that does not answer costs spans, never requests: they are dropped and counted.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.plan import FinishReason
from hotbatch.engine.step_stats import RequestTimings

logger = logging.getLogger(__name__)

_MOST_PENDING = 4096  # requests; more are dropped
_BATCH = 256
_INTERVAL = 1.0  # seconds between two batches
_TIMEOUT = 5.0
_SILENCE = 60.0  # seconds between two lines about a collector that stays away
_ERROR = 2  # OTLP's status code

Send = Callable[[Mapping[str, Any]], None]


class RequestTracer:
    """Observes requests and sends their spans.

    Args:
        endpoint: of the collector, such as http://localhost:4318; /v1/traces is appended where
            it has no path of its own.
        model_name: an attribute of every trace.
        now: the engine's clock, which the timings are on.
        send: replaces HTTP, for tests.

    Raises:
        InvalidRequestError: the endpoint is no address.
    """

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        now: Callable[[], float] = time.monotonic,
        send: Send | None = None,
    ) -> None:
        self._url = _traces_url(endpoint)
        self._model_name = model_name
        self._send = send or self._post
        # Engine times are relative; spans want the time of day.
        self._offset = time.time() - now()
        self._pending: queue.Queue[RequestTimings] = queue.Queue(_MOST_PENDING)
        self._stopping = threading.Event()
        self.num_dropped = 0
        self._complained_at = -math.inf
        self._thread = threading.Thread(target=self._run, name="hotbatch-traces", daemon=True)
        self._thread.start()

    def on_request(self, request: RequestTimings) -> None:
        """An engine request observer."""
        try:
            self._pending.put_nowait(request)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Send what is left, within the time of one attempt."""
        self._stopping.set()
        self._thread.join(2.0 * _TIMEOUT)

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        while requests := self._take():
            try:
                self._send(self._message(requests))
            except httpx.HTTPError as error:
                self.num_dropped += len(requests)
                self._complain(error)
                return
            self._complained_at = -math.inf  # the next loss is news

    def _complain(self, error: httpx.HTTPError) -> None:
        """Once a minute while the collector stays away."""
        now = time.monotonic()
        if now - self._complained_at >= _SILENCE:
            self._complained_at = now
            logger.warning("traces are lost, %d requests so far: %s", self.num_dropped, error)

    def _take(self) -> list[RequestTimings]:
        requests: list[RequestTimings] = []
        while len(requests) < _BATCH:
            try:
                requests.append(self._pending.get_nowait())
            except queue.Empty:
                break
        return requests

    def _post(self, message: Mapping[str, Any]) -> None:
        httpx.post(self._url, json=message, timeout=_TIMEOUT).raise_for_status()

    def _message(self, requests: list[RequestTimings]) -> dict[str, Any]:
        spans = [span for request in requests for span in self._spans(request)]
        resource = {"attributes": _attributes({"service.name": "hotbatch"})}
        scope = {"scope": {"name": "hotbatch.engine"}, "spans": spans}
        return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}

    def _spans(self, request: RequestTimings) -> Iterator[dict[str, Any]]:
        trace_id, root = os.urandom(16).hex(), os.urandom(8).hex()
        facts: dict[str, str | int] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.usage.input_tokens": request.num_prompt,
            "gen_ai.usage.output_tokens": request.num_output,
            "gen_ai.response.finish_reasons": request.finish_reason.value,
            "hotbatch.request_id": request.request_id,
            "hotbatch.service_class": request.service_class.label,
            "hotbatch.cached_tokens": request.num_cached,
            "hotbatch.evictions": request.num_preemptions,
        }
        whole = self._span(trace_id, root, None, "request", request.arrival, request.finished)
        whole["attributes"] = _attributes(facts)
        if request.finish_reason is FinishReason.ERROR:
            whole["status"] = {"code": _ERROR}
        yield whole
        for name, start, end in phases(request):
            yield self._span(trace_id, os.urandom(8).hex(), root, name, start, end)

    def _span(
        self, trace_id: str, span_id: str, parent: str | None, name: str, start: float, end: float
    ) -> dict[str, Any]:
        span: dict[str, Any] = {
            "traceId": trace_id,
            "spanId": span_id,
            "name": name,
            "kind": 2 if parent is None else 1,  # server, internal
            "startTimeUnixNano": self._nanoseconds(start),
            "endTimeUnixNano": self._nanoseconds(end),
        }
        if parent is not None:
            span["parentSpanId"] = parent
        return span

    def _nanoseconds(self, moment: float) -> str:
        return str(int((moment + self._offset) * 1e9))


def phases(request: RequestTimings) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of what happened to a request, in seconds on the engine's clock."""
    scheduled, first = request.first_scheduled, request.first_token
    yield "queue", request.arrival, request.finished if scheduled is None else scheduled
    if scheduled is not None:
        yield "prefill", scheduled, request.finished if first is None else first
    if first is not None:
        yield "decode", first, request.finished
    for start, end in request.pauses:
        yield "pause", start, end


def _traces_url(endpoint: str) -> str:
    try:
        url = httpx.URL(endpoint)
    except httpx.InvalidURL as error:
        raise InvalidRequestError(f"{endpoint!r} is no address: {error}.") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidRequestError(
            f"{endpoint!r} is no address of a collector; write one like http://localhost:4318."
        )
    return str(url) if url.path.strip("/") else str(url).rstrip("/") + "/v1/traces"


def _attributes(facts: Mapping[str, str | int]) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in facts.items()
    ]
