"""A server of OpenAI's form in this process, with exact counts and scripted faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """Answers each request with `max_tokens` chunks of one token; remembers what it saw."""

    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    current: int = 0
    peak: int = 0
    fail_every: int = 0  # every n-th request gets a 500
    fault_status: int = 500
    fault_code: str | None = None  # in the error object
    retry_after: str | None = None  # a header of the fault
    cut_after: int | None = None  # chunks after which the stream breaks off
    with_usage: bool = True
    empty_first_chunk: bool = False
    gather: int = 0  # nobody is answered before so many have asked at once
    gathered: asyncio.Event = field(default_factory=asyncio.Event)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=f"""vllm:num_requests_running{{model_name="m"}} {self.current}
vllm:num_requests_waiting{{model_name="m"}} 0
vllm:generation_tokens_total{{model_name="m"}} {len(self.bodies)}
"""
        )

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            error = {"message": "scripted fault", "type": "fault", "code": self.fault_code}
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return web.json_response({"error": error}, status=self.fault_status, headers=headers)
        self.current += 1
        self.peak = max(self.peak, self.current)
        if self.peak >= self.gather:
            self.gathered.set()
        try:
            await self.gathered.wait()
            return await self._stream(request, body)
        finally:
            self.current -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        count = body["max_completion_tokens" if is_chat else "max_tokens"]

        async def say(payload: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")

        if is_chat or self.empty_first_chunk:
            await say({"choices": [_choice(is_chat, "")], "usage": None})
        for index in range(count):
            if index == self.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            await asyncio.sleep(0)
            reason = "length" if index == count - 1 else None
            await say({"choices": [_choice(is_chat, f" t{index}", reason)]})
        if self.with_usage:
            prompt_tokens = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 7
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
            await say({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _choice(is_chat: bool, text: str, reason: str | None = None) -> dict[str, Any]:
    if is_chat:
        return {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return {"index": 0, "text": text, "finish_reason": reason}


@asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[FakeServer]:
    """Serves on a free loopback port for the time of the block."""
    app = web.Application(client_max_size=2**24)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    server.base_url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
