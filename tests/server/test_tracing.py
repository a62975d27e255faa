"""Traces: spans that follow each other, sent in batches, dropped where nobody takes them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server_parts import make_rig

from hotbatch.core.errors import InvalidRequestError, OptionError
from hotbatch.core.plan import FinishReason
from hotbatch.engine.step_stats import RequestTimings
from hotbatch.server import tracing
from hotbatch.server.run import _traced
from hotbatch.server.tracing import RequestTracer, phases


def timings(**changes: Any) -> RequestTimings:
    fields: dict[str, Any] = {
        "request_id": "a",
        "arrival": 10.0,
        "first_scheduled": 11.0,
        "first_token": 12.5,
        "last_token": 20.0,
        "finished": 20.0,
        "num_prompt": 7,
        "num_output": 9,
        "num_cached": 0,
        "num_preemptions": 1,
        "finish_reason": FinishReason.LENGTH,
        "pauses": ((14.0, 15.0),),
    }
    return RequestTimings(**(fields | changes))


def test_a_request_s_life_is_queue_prefill_decode_and_pauses() -> None:
    assert list(phases(timings())) == [
        ("queue", 10.0, 11.0),
        ("prefill", 11.0, 12.5),
        ("decode", 12.5, 20.0),
        ("pause", 14.0, 15.0),
    ]


def test_one_that_never_began_only_waited() -> None:
    request = timings(first_scheduled=None, first_token=None, last_token=None, pauses=())
    assert list(phases(request)) == [("queue", 10.0, 20.0)]


def test_spans_belong_to_one_trace_and_lie_in_the_request() -> None:
    sent: list[Any] = []
    tracer = RequestTracer("http://collector:4318", "m", now=lambda: 0.0, send=sent.append)
    tracer.on_request(timings())
    tracer.on_request(timings(request_id="b", finish_reason=FinishReason.ERROR))
    tracer.close()
    [message] = sent
    json.dumps(message)
    [resource] = message["resourceSpans"]
    spans = resource["scopeSpans"][0]["spans"]
    assert len(spans) == 10
    first, second = spans[:5], spans[5:]
    assert len({span["traceId"] for span in first}) == 1
    assert first[0]["traceId"] != second[0]["traceId"]
    root = first[0]
    assert root["name"] == "request" and "parentSpanId" not in root
    for span in first[1:]:
        assert span["parentSpanId"] == root["spanId"]
        assert int(root["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
        assert int(span["endTimeUnixNano"]) <= int(root["endTimeUnixNano"])
    facts = {entry["key"]: entry["value"] for entry in root["attributes"]}
    assert facts["gen_ai.usage.output_tokens"] == {"intValue": "9"}
    assert facts["hotbatch.service_class"] == {"stringValue": "standard"}
    assert "status" not in root
    assert second[0]["status"] == {"code": 2}


def test_a_collector_gets_them_over_http() -> None:
    bodies: list[tuple[str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tracer = RequestTracer(f"http://127.0.0.1:{server.server_port}", "m")
    tracer.on_request(timings())
    tracer.close()
    server.shutdown()
    server.server_close()
    [(path, body)] = bodies
    assert path == "/v1/traces"
    assert body["resourceSpans"]


def test_nobody_there_costs_the_spans_only(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(message: Any) -> None:
        raise httpx.ConnectError("refused")

    tracer = RequestTracer("http://collector:4318", "m", send=refuse)
    tracer.on_request(timings())
    tracer.close()
    assert tracer.num_dropped == 1
    assert "lost" in caplog.text


def test_a_collector_that_stays_away_is_told_of_once_until_it_has_been_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_INTERVAL", 100.0)
    collector = SimpleNamespace(is_there=False)

    def send(message: Any) -> None:
        if not collector.is_there:
            raise httpx.ConnectError("refused")

    tracer = RequestTracer("http://collector:4318", "m", send=send)
    for is_there, told in ((False, 1), (False, 1), (True, 1), (False, 2)):
        collector.is_there = is_there
        tracer.on_request(timings())
        tracer._flush()
        assert caplog.text.count("lost") == told
    assert "3 requests so far" in caplog.text
    tracer.close()


def test_too_many_at_once_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_PENDING", 2)
    tracer = RequestTracer("http://collector:4318", "m", send=lambda message: None)
    for _ in range(5):
        tracer.on_request(timings())
    assert tracer.num_dropped == 3
    tracer.close()


@pytest.mark.parametrize("endpoint", ["localhost:4318", "", "ftp://host", "http://"])
def test_what_is_no_address(endpoint: str) -> None:
    with pytest.raises(InvalidRequestError, match="address"):
        RequestTracer(endpoint, "m")


def test_the_option_is_named_where_it_is_wrong() -> None:
    service = make_rig().service
    with pytest.raises(OptionError, match="--otlp-traces-endpoint"), _traced(service, "nowhere"):
        pass


def test_without_an_endpoint_nothing_observes() -> None:
    engine = SimpleNamespace(request_observers=[])
    with _traced(SimpleNamespace(engine=SimpleNamespace(engine=engine)), None):  # type: ignore[arg-type]
        assert engine.request_observers == []
