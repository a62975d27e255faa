"""/live over HTTP: who may watch, what is said, and that nobody pays while nobody does."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from server_parts import MODEL, WAIT_SECONDS, Rig, make_rig, serving

from hotbatch.core.errors import OverloadedError
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.server import live
from hotbatch.server.live_batch import LANE_FIELDS
from hotbatch.simulator import ConstantStepTime

SLOW = {"step_time": ConstantStepTime(0.004), "sleep": time.sleep}


@contextmanager
def watching(rig: Rig, **headers: str) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    with (
        httpx.Client(base_url=rig.url, timeout=WAIT_SECONDS, trust_env=False) as http,
        http.stream("GET", "/live", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events(answer.iter_lines())


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])
            name = ""


def complete(rig: Rig, **fields: Any) -> None:
    body = {"prompt": [7, 8, 9], "max_tokens": 20, **fields}
    with httpx.Client(base_url=rig.url, timeout=WAIT_SECONDS, trust_env=False) as http:
        assert http.post("/v1/completions", json=body).status_code == 200


def test_hello_then_frames() -> None:
    rig = make_rig(
        executor=SLOW,
        scheduler={"targets": {ServiceClass.INTERACTIVE: LatencyTargets(0.5, 0.1)}},
        max_num_seqs=8,
    )
    with serving(rig), watching(rig) as stream:
        name, hello = next(stream)
        assert name == "hello"
        assert (hello["model"], hello["seats"], hello["has_chat"]) == (MODEL, 8, True)
        assert hello["classes"] == ["batch", "standard", "interactive"]
        assert hello["targets_ms"] == [[None, None], [None, None], [500.0, 100.0]]
        assert hello["lane_fields"] == list(LANE_FIELDS)
        complete(rig, service_tier="priority", request_id="play-1")
        decoded, named, gauges = 0, [], {}
        while decoded < 19:  # the first token belongs to the prompt
            name, frame = next(stream)
            assert name == ""
            decoded += sum(frame["lanes"][4 :: len(LANE_FIELDS)])
            named += frame["named"]
            gauges |= frame.get("gauges", {})
        while "latency_ms" not in gauges or gauges["totals"]["steps"] < 20:
            gauges |= next(stream)[1].get("gauges", {})
        rig.service.close()
        assert list(stream) == []
    assert {tuple(pair) for pair in named} == {(0, "cmpl-play-1-0")}
    assert gauges["totals"]["prompt_tokens"] == 3
    assert gauges["latency_ms"][ServiceClass.INTERACTIVE][0] is not None
    assert sum(gauges["kv"]) == hello["blocks"]


def test_nothing_is_traced_while_nobody_watches() -> None:
    with serving(make_rig()) as rig:
        feed, engine = rig.service.live, rig.engine
        quiet = (list(engine.tracers), list(engine.request_observers))
        for _ in range(2):
            with watching(rig) as stream, watching(rig) as other:
                next(stream), next(other)
                assert feed.num_watchers == 2
                assert len(engine.tracers) == 1
            Rig.wait_until(lambda: feed.num_watchers == 0)
            assert (list(engine.tracers), list(engine.request_observers)) == quiet
            assert feed._pump is None


def test_at_most_twenty_frames_a_second() -> None:
    """By the engine's clock, which stamps them: a thousand steps are as many frames as ten."""
    fast = {"step_time": ConstantStepTime(0.001), "sleep": time.sleep}
    with serving(make_rig(executor=fast)) as rig, watching(rig) as stream:
        next(stream)
        worker = threading.Thread(target=complete, args=(rig,), kwargs={"max_tokens": 400})
        worker.start()
        times, steps = [], 0
        while steps < 400:
            _, frame = next(stream)
            times.append(frame["t"])
            steps = frame.get("gauges", {"totals": {"steps": 0}})["totals"]["steps"] or steps
        worker.join()
        rig.service.close()
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert all(gap >= live._FRAME_SECONDS - 0.002 for gap in gaps)


def test_a_slow_reader_gets_the_newest() -> None:
    async def check() -> None:
        watcher = live.Watcher(b"hello")
        watcher.offer(b"before the hello was read")
        assert await watcher.next() == b"hello"
        for number in range(1000):
            watcher.offer(b"%d" % number)
        assert await watcher.next() == b"999"
        reading = asyncio.create_task(watcher.next())
        await asyncio.sleep(0)
        assert not reading.done()
        watcher.close()
        assert await reading is None

    asyncio.run(check())


@pytest.mark.parametrize("key", [None, "k2"])
def test_the_key_is_asked_for(key: str | None) -> None:
    with (
        serving(make_rig(api_keys=("k1",))) as rig,
        httpx.Client(base_url=rig.url, trust_env=False) as http,
    ):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert http.get("/live", headers=headers).status_code == 401
        with watching(rig, authorization="Bearer k1") as stream:
            assert next(stream)[0] == "hello"


def test_watchers_are_bounded() -> None:
    rig = make_rig()

    async def check() -> None:
        feed = rig.service.live
        watchers = [feed.join() for _ in range(live._MAX_WATCHERS)]
        with pytest.raises(OverloadedError, match="close one"):
            feed.join()
        feed.leave(watchers.pop())
        watchers.append(feed.join())
        for watcher in watchers:
            feed.leave(watcher)

    asyncio.run(check())
    rig.service.close()


def test_after_the_end_a_stream_ends_at_once() -> None:
    with serving(make_rig()) as rig:
        rig.service.close()
        with watching(rig) as stream:
            assert list(stream) == []


def test_page_for_browsers_and_index_for_others() -> None:
    with (
        serving(make_rig(api_keys=("k1",))) as rig,
        httpx.Client(base_url=rig.url, trust_env=False) as http,
    ):
        assert http.get("/").json()["name"] == "hotbatch"
        page = http.get("/", headers={"accept": "text/html,*/*"})
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        again = http.get(
            "/", headers={"accept": "text/html", "if-none-match": page.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        script = http.get("/dashboard/main.js")
        assert script.headers["content-type"].startswith("text/javascript")
        for path in ("/dashboard/nothing.js", "/dashboard/../assets.py", "/dashboard/"):
            assert http.get(path).status_code == 404
