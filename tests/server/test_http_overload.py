"""Overload: refused at once and before any work, with a reason and a time to come again; and
whatever happens on the way in, no place is lost."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from server_parts import MODEL, WAIT_SECONDS, Rig, make_rig, serving
from test_http_metrics import samples

from hotbatch.core.admission import QueueLimits
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.server.entrance import estimated_tokens
from hotbatch.simulator import ConstantStepTime

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
SLOW = {"step_time": ConstantStepTime(0.01), "sleep": time.sleep}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": [7, 8, 9]} if path == COMPLETION else {"messages": USER}
    return {"max_tokens": 4, **prompt, **fields}


@contextmanager
def limited(*, seats: int = 1, rig: dict[str, Any] | None = None, **limits: Any) -> Iterator[Rig]:
    """A server with few seats and a bounded queue; in the end nothing may be left in it."""
    with serving(make_rig(max_num_seqs=seats, limits=QueueLimits(**limits), **(rig or {}))) as made:
        yield made
        made.executor.gate.set()
        made.wait_idle()
        made.wait_until(lambda: made.service.entrance.num_entering == 0)
        made.scheduler.check_integrity()


@contextmanager
def client_of(rig: Rig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.url, timeout=WAIT_SECONDS, trust_env=False) as http:
        yield http


@contextmanager
def occupied(rig: Rig, count: int = 1, **fields: Any) -> Iterator[list[socket.socket]]:
    """So many requests of others are in the engine."""
    before = rig.engine.num_outstanding
    held = [open_raw(rig, COMPLETION, body_for(COMPLETION, **fields)) for _ in range(count)]
    rig.wait_until(lambda: rig.engine.num_outstanding == before + count)
    try:
        yield held
    finally:
        for connection in held:
            connection.close()


def open_raw(rig: Rig, path: str, body: dict[str, Any]) -> socket.socket:
    host, _, port = rig.url.removeprefix("http://").partition(":")
    raw = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def check_refusal(answer: httpx.Response, says: str, status: int = 429) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert says in error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    if status == 429:
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_a_burst_of_hundreds_against_a_cap_of_eight(path: str) -> None:
    """Four run, eight wait, and not one more gets in, however they arrive."""

    async def burst(rig: Rig) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=rig.url, timeout=None, trust_env=False, limits=limits
        ) as http:
            posts = [
                asyncio.create_task(http.post(path, json=body_for(path, max_tokens=3)))
                for _ in range(300)
            ]
            while sum(post.done() for post in posts) < 300 - 12:
                await asyncio.sleep(0.01)
            # Refusals can be out before the twelve have got from the door to the engine.
            deadline = time.monotonic() + WAIT_SECONDS
            while rig.engine.num_outstanding < 12 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert rig.engine.num_outstanding == 12
            rig.executor.gate.set()
            return await asyncio.gather(*posts)

    with limited(seats=4, max_requests=8) as rig:
        rig.executor.gate.clear()
        answers = asyncio.run(burst(rig))
        assert Counter(answer.status_code for answer in answers) == {200: 12, 429: 288}
        for answer in answers:
            if answer.status_code == 429:
                check_refusal(answer, "8 requests may wait (--max-queue-requests)")
        rig.wait_idle()
        with client_of(rig) as http:
            assert http.post(path, json=body_for(path)).status_code == 200
            found = samples(http.get("/metrics").text)
        assert found["requests_refused_total", "queue_requests"] == 288
        assert found["requests_refused_total", "queue_tokens"] == 0


@pytest.mark.parametrize(("prompts", "n"), [(1, 4), (4, 1), (2, 2)])
def test_every_choice_of_a_request_takes_a_place(prompts: int, n: int) -> None:
    with limited(max_requests=3) as rig, client_of(rig) as http:
        rig.executor.gate.clear()
        many = body_for(COMPLETION, prompt=[[5, 6]] * prompts, n=n)
        with occupied(rig):
            check_refusal(http.post(COMPLETION, json=many), "make it 4")
            rig.executor.gate.set()
        rig.wait_idle()
        assert http.post(COMPLETION, json=many).status_code == 200, "one runs, three wait"


def test_tokens_are_estimated_and_bounded() -> None:
    with limited(max_tokens=100) as rig, client_of(rig) as http:
        rig.executor.gate.clear()
        with occupied(rig):
            for body in (body_for(COMPLETION, prompt=[7] * 101), {"prompt": "word " * 81}):
                answer = http.post(COMPLETION, json=body)
                check_refusal(answer, "100 prompt tokens may wait (--max-queue-tokens)")
            long = [{"role": "user", "content": "word " * 100}]
            check_refusal(http.post(CHAT, json={"messages": long}), "--max-queue-tokens")
            rig.executor.gate.set()
        rig.wait_idle()
        assert http.post(COMPLETION, json=body_for(COMPLETION, prompt=[7] * 101)).is_success


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        ([[1, 2, 3], [4]], 4),
        (["12345678", "1"], 3),
        ([{"role": "user", "content": "1234"}], 2),
        ([{"role": "user", "content": [{"type": "text", "text": "12345678"}]}], 4),
        (None, 0),
        (17, 0),
        ([None, {"content": None}, 2.5], 0),
    ],
)
def test_estimates_look_at_lengths_only(prompts: Any, tokens: int) -> None:
    assert estimated_tokens(prompts) == tokens


def test_a_refusal_comes_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with limited(max_requests=0) as rig, client_of(rig) as http:
        rig.executor.gate.clear()
        with occupied(rig):
            for name in ("render_chat", "tokenize", "submit"):
                monkeypatch.setattr(rig.service, name, None)
            check_refusal(http.post(CHAT, json=body_for(CHAT)), "0 requests may wait")
            monkeypatch.undo()
            rig.executor.gate.set()


def test_what_can_never_be_served_is_still_told_so() -> None:
    """A retry would not help: 400 comes first where it costs nothing to know."""
    with limited(max_requests=0) as rig, client_of(rig) as http:
        rig.executor.gate.clear()
        with occupied(rig):
            for path, fields in ((COMPLETION, {"n": 0}), (CHAT, {"tool_choice": 3, "stop": 5})):
                assert http.post(path, json=body_for(path, **fields)).status_code == 400
            rig.executor.gate.set()


def test_lower_classes_shut_nobody_out() -> None:
    with limited(max_requests=2) as rig, client_of(rig) as http:
        rig.executor.gate.clear()
        with occupied(rig, 3, service_tier="flex"):
            flex = http.post(COMPLETION, json=body_for(COMPLETION, service_tier="flex"))
            check_refusal(flex, "2 requests may wait")
            with ThreadPoolExecutor(1) as pool:
                urgent = body_for(COMPLETION, service_tier="priority")
                answer = pool.submit(http.post, COMPLETION, json=urgent)
                rig.wait_until(lambda: rig.engine.num_outstanding == 4)
                rig.executor.gate.set()
                assert answer.result().status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (CHAT, {"messages": [{"role": "user"}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}, 400),
        (CHAT, {"truncate_prompt_tokens": 0}, 400),
        (CHAT, {"chat_template_kwargs": {"messages": 1}}, 400),
        (COMPLETION, {"prompt": ""}, 400),
        (COMPLETION, {"prompt": [10**6]}, 400),
        (COMPLETION, {"prompt": ["fine", "x" * 100_000]}, 400),
        (COMPLETION, {"prompt": "\ud800"}, 400),
        (COMPLETION, {"logit_bias": {"999999": 1}}, 400),
        (COMPLETION, {"max_tokens": 10_000}, 400),
    ],
)
def test_whoever_fails_on_the_way_in_gives_its_place_back(
    path: str, fields: dict[str, Any], status: int
) -> None:
    with limited(seats=2, max_requests=0) as rig, client_of(rig) as http:
        for _ in range(3):
            answer = http.post(path, content=json.dumps(body_for(path, **fields)))
            assert answer.status_code == status
        assert rig.service.entrance.num_entering == 0
        assert http.post(path, json=body_for(path)).status_code == 200


def test_a_fault_of_ours_gives_the_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with limited(max_requests=0) as rig:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(rig.tokenizer, "encode", fail)
        with client_of(rig) as http:
            assert http.post(CHAT, json=body_for(CHAT)).status_code == 500
        monkeypatch.undo()
        with client_of(rig) as http:
            assert http.post(CHAT, json=body_for(CHAT)).status_code == 200


def test_more_than_there_are_places_is_refused_for_good() -> None:
    with limited(seats=3, max_requests=2) as rig, client_of(rig) as http:
        answer = http.post(COMPLETION, json=body_for(COMPLETION, n=6))
        assert answer.status_code == 400
        assert "runs 3 of them and lets 2 more wait" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "n"
        assert http.post(COMPLETION, json=body_for(COMPLETION, n=5)).status_code == 200


def test_a_half_refused_request_leaves_nothing_behind() -> None:
    """The id of its second choice is taken: the first, in the engine already, is cancelled."""
    with limited(seats=4, max_requests=4) as rig, client_of(rig) as http:
        rig.executor.gate.clear()
        twin = open_raw(rig, COMPLETION, body_for(COMPLETION, request_id="a"))
        rig.wait_until(lambda: rig.engine.num_outstanding == 1)
        answer = http.post(COMPLETION, json=body_for(COMPLETION, request_id="a", n=2))
        assert answer.status_code == 400
        rig.executor.gate.set()
        twin.close()


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_leaving_while_the_prompt_is_tokenized(path: str) -> None:
    """The place is held as long as the work goes on, and no longer; nothing is generated."""
    text = "word " * 1200  # long enough for the text thread, which is busy
    prompt = {"prompt": text, "messages": [dict(USER[0], content=text)]}
    with limited(max_requests=2) as rig:
        blocked = threading.Event()
        rig.service._text_thread.submit(lambda: blocked.wait(WAIT_SECONDS))
        connection = open_raw(rig, path, body_for(path, **prompt, truncate_prompt_tokens=50))
        rig.wait_until(lambda: rig.service.entrance.num_entering == 1)
        connection.close()
        with client_of(rig) as http:
            assert http.get("/health").status_code == 200  # by now the loop has seen it leave
        blocked.set()
        rig.wait_until(lambda: rig.service.entrance.num_entering == 0)
        rig.wait_idle()
        assert rig.executor.steps_run == 0


def test_leaving_while_queued_ends_nobody_else() -> None:
    with limited(max_requests=4) as rig, client_of(rig) as http, ThreadPoolExecutor(2) as pool:
        rig.executor.gate.clear()
        kept = []
        for seed in range(2):
            body = body_for(COMPLETION, seed=seed, max_tokens=20)
            kept.append(pool.submit(http.post, COMPLETION, json=body))
            rig.wait_until(lambda wanted=seed: rig.engine.num_outstanding > wanted)
        with occupied(rig, 3, stream=True):
            assert rig.engine.num_outstanding == 5
        rig.executor.gate.set()
        for seed, answer in enumerate(kept):
            tokens = rig.continuation([7, 8, 9], seed=seed, max_tokens=20)
            assert answer.result().json()["choices"][0]["text"] == rig.text(tokens)


def test_a_slow_reader_holds_no_place_once_the_engine_is_done() -> None:
    with limited(max_requests=0) as rig, client_of(rig) as http:
        deaf = open_raw(rig, COMPLETION, body_for(COMPLETION, stream=True, max_tokens=400))
        rig.wait_until(lambda: rig.engine.stats().generated_tokens >= 400)
        rig.wait_idle()
        assert http.post(COMPLETION, json=body_for(COMPLETION)).status_code == 200
        deaf.close()


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_expiry_in_the_queue_has_a_status_of_its_own(path: str, n: int, stream: bool) -> None:
    options = {"executor": SLOW, "scheduler": {"queue_time_to_live": 0.1}}
    with limited(time_to_live=0.1, rig=options) as rig, client_of(rig) as http:
        with occupied(rig, max_tokens=400):
            rig.wait_until(lambda: rig.engine.stats().num_running == 1)
            answer = http.post(path, json=body_for(path, n=n, stream=stream))
            check_refusal(answer, "0.1 seconds in the queue", status=503)
            assert answer.json()["error"]["code"] == "queue_expired"
        rig.wait_idle()
        answer = http.post(path, json=body_for(path, n=1, stream=stream))
        assert answer.status_code == 200
        if stream:
            assert answer.text.endswith("data: [DONE]\n\n")
        found = samples(http.get("/metrics").text)
        assert found["requests_refused_total", "queue_ttl"] == 1


def test_leaving_before_the_first_token_where_requests_can_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The status line waits for the first token there; the client's leaving is seen anyway."""
    options = {"scheduler": {"queue_time_to_live": 20.0}}
    with limited(time_to_live=20.0, max_requests=4, rig=options) as rig:
        cancelled: set[str] = set()
        cancel = rig.engine.cancel
        monkeypatch.setattr(rig.engine, "cancel", lambda name: (cancelled.add(name), cancel(name)))
        rig.executor.gate.clear()
        with occupied(rig), occupied(rig, 2, stream=True):
            pass
        rig.wait_until(lambda: len(cancelled) == 3)
        rig.executor.gate.set()
        rig.wait_idle()
        assert rig.executor.steps_run <= 1


@pytest.mark.parametrize("own", [True, False])
def test_a_predicted_wait_beyond_the_target_is_refused(own: bool) -> None:
    """Once it is known how long a request takes; who brings no target waits."""
    options: dict[str, Any] = {"executor": SLOW}
    if not own:
        options["promised"] = {ServiceClass.INTERACTIVE: LatencyTargets(ttft=0.02)}
    with limited(rig=options) as rig, client_of(rig) as http:
        urgent = body_for(COMPLETION, service_tier="priority")
        if own:
            urgent["slo"] = {"ttft_ms": 20}
        for _ in range(2):
            assert http.post(COMPLETION, json=body_for(COMPLETION, max_tokens=30)).is_success
        with occupied(rig, max_tokens=300, service_tier="priority"):
            rig.wait_until(lambda: rig.engine.stats().num_running == 1)
            check_refusal(http.post(COMPLETION, json=urgent), "the target for the first token")
            with occupied(rig):
                assert rig.engine.load().waiting == [0, 1, 0]
        rig.wait_idle()
        assert http.post(COMPLETION, json=urgent).status_code == 200
        found = samples(http.get("/metrics").text)
        assert found["requests_refused_total", "queue_wait"] == 1


def test_the_official_client_waits_as_it_is_told_and_succeeds() -> None:
    with limited(max_requests=0) as rig:
        rig.executor.gate.clear()
        with occupied(rig):
            with (
                openai.OpenAI(base_url=f"{rig.url}/v1", api_key="x", max_retries=0) as client,
                pytest.raises(openai.RateLimitError) as caught,
            ):
                client.completions.create(model=MODEL, prompt="hi", max_tokens=2)
            assert caught.value.code == "overloaded"
            assert caught.value.response.headers["retry-after"] == "1"
            with (
                openai.OpenAI(base_url=f"{rig.url}/v1", api_key="x", max_retries=3) as client,
                ThreadPoolExecutor(1) as pool,
            ):
                answer = pool.submit(
                    client.chat.completions.create, model=MODEL, messages=USER, max_tokens=2
                )
                rig.wait_until(lambda: rig.service.entrance.refused["queue_requests"] == 2)
                rig.executor.gate.set()
                usage = answer.result().usage
                assert usage is not None and usage.completion_tokens == 2


def test_metrics_tell_service_by_class() -> None:
    targets = {ServiceClass.INTERACTIVE: LatencyTargets(100.0, 1e-9)}
    options = {"scheduler": {"targets": targets}}
    with limited(max_requests=5, rig=options) as rig, client_of(rig) as http:
        assert http.post(COMPLETION, json=body_for(COMPLETION, service_tier="priority")).is_success
        rig.wait_idle()
        rig.executor.gate.clear()
        with occupied(rig), occupied(rig, 2, service_tier="flex"):
            found = samples(http.get("/metrics").text)
            rig.executor.gate.set()
        assert found["requests_waiting", "batch"] == 2
        assert found["requests_waiting", "standard"] == 0
        assert found["requests_paused", ""] == 0
        assert found["preemptions_total", "pause"] == 0
        assert found["queue_wait_seconds_count", "interactive"] == 1
        assert found["targets_total", "interactive,met,ttft"] == 1
        assert found["targets_total", "interactive,missed,tpot"] == 1
        assert ("targets_total", "standard,met,ttft") not in found
        assert found["step_prediction_error_ratio", "0.5"] >= 0.0
