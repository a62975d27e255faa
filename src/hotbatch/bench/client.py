"""One streaming request to an OpenAI-compatible server, timed chunk by chunk.

The client runs on the machine it measures, so its hot path does as little as possible: note
the time, keep the bytes. JSON is parsed when the load is over (or earlier, should the bytes
kept grow large). A chunk's time is when the client's loop got it from the socket.
"""

from __future__ import annotations

import itertools
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotbatch.bench.workload import BenchRequest, Message, Prompt

# Imported where it is used: every `hotbatch` command loads this module, few of them need it.
if TYPE_CHECKING:
    import aiohttp

_MAX_ERROR_CHARS = 500
_CONNECT_SECONDS = 60
_READ_SECONDS = 600  # between two chunks


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to ask. `endpoint` is a path such as /v1/completions."""

    base_url: str
    model: str
    endpoint: str = "/v1/completions"
    api_key: str | None = None
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + self.endpoint

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("/chat/completions")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            body["messages"] = _messages(request.prompt)
            body["max_completion_tokens"] = request.output_len
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.output_len
        if self.ignore_eos:
            body["ignore_eos"] = True
        body.update(self.extra_body)
        body.update(request.fields)
        return body


def _messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = [part for part in prompt if isinstance(part, dict)]
    if not messages or len(messages) != len(prompt):
        raise ValueError("the chat endpoint takes text prompts only; use --prompt-kind text")
    return messages


@dataclass(slots=True)
class Record:
    """What happened to one request. Times are `time.perf_counter` seconds.

    `chunk_times` has one entry for each chunk that brought text; `ended` is the time of the
    last chunk that told of a choice. `error` is None on success; `error_code` is the code or
    type of OpenAI's error object, where there was one; `retry_after` is the header's seconds.
    `is_refused` says that asking again would be of no use.
    """

    request: BenchRequest
    due: float = 0.0  # when it was to be sent
    started: float = 0.0  # when it was sent
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    retry_after: float | None = None
    status: int | None = None  # of HTTP, where it was not 200
    raw: list[tuple[float, bytes]] = field(default_factory=list)
    is_parsed: bool = False

    @property
    def is_success(self) -> bool:
        return self.error is None

    @property
    def is_refused(self) -> bool:
        return (
            self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)
        )

    @property
    def failure_kind(self) -> str | None:
        """A short name to count failures by, such as "429 queue_full"; None on success."""
        if self.error is None:
            return None
        if self.status is not None:
            return f"{self.status} {self.error_code}" if self.error_code else str(self.status)
        if self.error_code:
            return f"stream {self.error_code}"
        return self.error.partition(":")[0]

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.started

    @property
    def latency(self) -> float:
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None where there is none."""
        if self.output_tokens < 2 or not self.chunk_times:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        times = self.chunk_times
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def open_session(target: Target) -> aiohttp.ClientSession:
    """A session that keeps its connections and opens as many as there are requests."""
    import aiohttp

    return aiohttp.ClientSession(
        # Shorter than any server keeps them (uvicorn's default is 5 s): a connection that the
        # server is just closing would fail the request that reuses it.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
        timeout=aiohttp.ClientTimeout(
            total=None, connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
        ),
        headers=target.headers,
    )


async def send(session: aiohttp.ClientSession, target: Target, record: Record) -> None:
    """Sends the record's request and keeps what comes back; never raises for the server's
    faults, they go into `record.error`. `parse` makes sense of the bytes later."""
    import aiohttp

    body = json.dumps(target.body(record.request)).encode()
    headers = {"Content-Type": "application/json"}
    if record.request.api_key is not None:
        headers["Authorization"] = f"Bearer {record.request.api_key}"
    clock = time.perf_counter
    keep = record.raw.append
    record.started = clock()
    try:
        async with session.post(target.url, data=body, headers=headers) as response:
            if response.status != 200:
                _take_refusal(
                    record,
                    response.status,
                    await response.text(),
                    response.headers.get("Retry-After"),
                )
                return
            read = response.content.readany
            while chunk := await read():
                keep((clock(), chunk))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        record.error = f"{type(error).__name__}: {error}"
    finally:
        if record.error is not None:
            record.ended = clock()


def _take_refusal(record: Record, status: int, text: str, retry_after: str | None) -> None:
    record.status = status
    record.error = f"HTTP {status}: {text[:_MAX_ERROR_CHARS]}"
    with suppress(ValueError, AttributeError):
        record.error_code = _code_of(json.loads(text).get("error"))
    if retry_after is not None:
        with suppress(ValueError):  # it may be a date, which nobody here sends
            record.retry_after = float(retry_after)


def _code_of(error: Any) -> str | None:
    """OpenAI's `code`, else its `type`; some servers repeat the status as a number there."""
    if not isinstance(error, dict):
        return None
    for key in ("code", "type"):
        if isinstance(error.get(key), str):
            return str(error[key])
    return None


def parse(record: Record) -> None:
    """Turns the bytes kept by `send` into times, counts and text, and lets them go.

    Idempotent. What is not a stream of OpenAI's form that came to its end is an error.
    """
    raw, record.raw = record.raw, []
    if record.is_parsed or record.error is not None:
        return
    record.is_parsed = True
    texts: list[str] = []
    is_done = False
    rest = b""
    for moment, chunk in raw:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                is_done = True
                continue
            try:
                _take_chunk(record, json.loads(payload), moment, texts)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                record.error = f"not a chunk of OpenAI's form ({error!r}): {payload[:200]!r}"
    record.text = "".join(texts)
    record.output_tokens = record.output_tokens or len(record.chunk_times)
    record.prompt_tokens = record.prompt_tokens or record.request.prompt_len
    if record.error is None and not (is_done or record.finish_reason):
        record.error = "the stream ended before [DONE] and without a finish_reason"
    if record.error is None and not record.chunk_times:
        record.error = "the stream ended without any text"


def _take_chunk(record: Record, chunk: dict[str, Any], moment: float, texts: list[str]) -> None:
    if "error" in chunk:
        record.error = f"error in the stream: {json.dumps(chunk['error'])[:_MAX_ERROR_CHARS]}"
        record.error_code = _code_of(chunk["error"])
        return
    usage = chunk.get("usage")
    if usage:
        record.prompt_tokens = int(usage["prompt_tokens"])
        record.output_tokens = int(usage["completion_tokens"])
    for choice in chunk.get("choices") or ():
        record.ended = moment
        delta = choice.get("delta")
        text = choice["text"] if delta is None else delta.get("content")
        if not text and delta is not None:
            text = delta.get("reasoning_content") or delta.get("reasoning")
        if text:
            record.chunk_times.append(moment)
            texts.append(text)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
