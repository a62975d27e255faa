"""Many clients at once, clients that leave, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_parts import MAX_MODEL_LEN, MODEL, WAIT_SECONDS, Rig, make_rig, serving

NUM_CLIENTS = 64
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": MODEL, "max_tokens": 200, **fields}
    if path == COMPLETION:
        return {"prompt": "hello", **base}
    return {"messages": [{"role": "user", "content": "hello"}], **base}


async def stream_text(client: openai.AsyncOpenAI, number: int, leaves_after: int | None) -> str:
    """The text of one stream; or what came until the client left it."""
    messages: Any = [{"role": "user", "content": f"client {number}"}]
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, seed=number, max_tokens=40 + number, stream=True
    )
    text, chunks = "", 0
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        chunks += 1
        if chunks == leaves_after:
            await stream.close()
            break
    return text


def solo_text(rig: Rig, number: int) -> str:
    prompt = rig.chat_prompt(f"client {number}")
    return rig.text(rig.continuation(prompt, seed=number, max_tokens=40 + number))


@pytest.mark.parametrize("half_leaves", [False, True])
def test_64_clients(half_leaves: bool) -> None:
    async def all_clients(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        transport = httpx.AsyncClient(limits=limits, timeout=120, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", http_client=transport
        ) as client:
            return await asyncio.gather(
                *[
                    stream_text(client, i, 5 if half_leaves and i % 2 else None)
                    for i in range(NUM_CLIENTS)
                ]
            )

    with serving(make_rig()) as rig:
        texts = asyncio.run(all_clients(rig.url))
        for number, text in enumerate(texts):
            if half_leaves and number % 2:
                assert solo_text(rig, number).startswith(text)
            else:
                assert text == solo_text(rig, number)
        rig.wait_idle()
        rig.scheduler.check_integrity()


def open_raw(rig: Rig, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket, whose reading and closing the test controls."""
    host, _, port = rig.url.removeprefix("http://").partition(":")
    raw = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_requests_within_a_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, path: str, n: int, stream: bool
) -> None:
    executor, engine = rig.executor, rig.engine
    cancelled: set[str] = set()
    cancel = engine.cancel
    monkeypatch.setattr(engine, "cancel", lambda name: (cancelled.add(name), cancel(name)))
    finished: list[Any] = []
    engine.request_observers.append(finished.append)

    executor.gate.clear()  # no step runs: the client leaves in the middle, for certain
    connection = open_raw(rig, path, body_for(path, n=n, stream=stream))
    rig.wait_until(lambda: engine.num_outstanding == n)
    connection.close()
    rig.wait_until(lambda: len(cancelled) == n)
    steps = executor.steps_run
    executor.gate.set()
    rig.wait_idle()
    rig.wait_until(lambda: len(finished) == n)
    engine.request_observers.remove(finished.append)
    assert executor.steps_run - steps <= 1  # the one that was about to run
    assert {timings.finish_reason.value for timings in finished} == {"abort"}


def test_leaving_before_the_body_is_sent(rig: Rig, http: httpx.Client) -> None:
    host, _, port = rig.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
    assert http.get("/health").status_code == 200


def test_a_client_that_does_not_read_stalls_nobody(rig: Rig, http: httpx.Client) -> None:
    """Its socket's buffers fill up with logprobs; others are served meanwhile, and its own
    request comes to its end in the engine."""
    heavy = {"stream": True, "max_tokens": MAX_MODEL_LEN - 50, "logprobs": 20, "n": 8}
    deaf = open_raw(rig, COMPLETION, body_for(COMPLETION, **heavy))
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
    for _ in range(5):
        answer = http.post(COMPLETION, json=body_for(COMPLETION, seed=1, max_tokens=20))
        assert answer.json()["usage"]["completion_tokens"] == 20
    rig.wait_idle()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
    received = _read_all(deaf)
    assert b"data: [DONE]" in received
    assert received.count(b'"finish_reason":"length"') == 8
    deaf.close()


def _read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        piece = connection.recv(2**20)
        assert piece, "the connection ended early"
        received += piece
    return bytes(received)


def test_one_connection_serves_many_requests(rig: Rig, http: httpx.Client) -> None:
    for stream in (True, False, True, False):
        answer = http.post(COMPLETION, json=body_for(COMPLETION, stream=stream, max_tokens=5))
        assert answer.status_code == 200


@pytest.fixture
def held(rig: Rig) -> Iterator[Rig]:
    rig.executor.gate.clear()
    yield rig
    rig.executor.gate.set()
    rig.wait_idle()


def test_the_loop_answers_while_a_step_runs(held: Rig) -> None:
    connection = open_raw(held, COMPLETION, body_for(COMPLETION, stream=True))
    held.wait_until(lambda: held.engine.num_outstanding == 1)
    with httpx.Client(base_url=held.url, timeout=30, trust_env=False) as http:
        assert http.get("/health").status_code == 200
        assert http.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        assert b"hotbatch:num_requests_running" in http.get("/metrics").content
    connection.close()
