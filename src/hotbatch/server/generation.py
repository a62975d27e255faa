"""What completions and chat completions share: usage, chunks of a stream, one answer's frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hotbatch.core.errors import EngineStoppedError
from hotbatch.core.plan import FinishReason
from hotbatch.server.errors import StepFailedError, error_object
from hotbatch.server.output import Delta
from hotbatch.server.service import Job, Service
from hotbatch.server.streaming import ChunkWriter, StreamingCompletion, collect, first_events


def usage(jobs: Sequence[Job], n: int, *, drop_output: bool = False) -> dict[str, Any]:
    """OpenAI's usage: a prompt counts once, however many choices continue it."""
    num_prompt = sum(len(job.prompt_ids) for job in jobs[::n])
    num_output = 0 if drop_output else sum(job.output.num_output for job in jobs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(job.output.num_cached for job in jobs[::n])},
    }


class ChunkFrame:
    """The parts of a stream's chunks that stay the same, as bytes.

    A token's chunk is the frame of its choice with the text in between; nothing but the text
    is encoded anew. `head` holds the fields all chunks have; `before` and `after` enclose the
    text inside of the choice.
    """

    def __init__(
        self, head: dict[str, Any], num_choices: int, *, before: str, after: str, usage: bool
    ) -> None:
        opened = orjson.dumps(head).decode().removesuffix("}")
        self._open = f"data: {opened},".encode()
        self._prefixes = [
            f'data: {opened},"choices":[{{"index":{index},{before}'.encode()
            for index in range(num_choices)
        ]
        nothing_used = ',"usage":null' if usage else ""
        self._suffix = f"{after}}}]{nothing_used}}}\n\n".encode()

    def text(self, index: int, text: str) -> bytes:
        """The chunk of a choice that only adds text."""
        return self._prefixes[index] + orjson.dumps(text) + self._suffix

    def event(self, fields: dict[str, Any]) -> bytes:
        """A chunk with these fields beside the common ones."""
        return self._open + orjson.dumps(fields)[1:] + b"\n\n"


def failure_event(delta: Delta) -> bytes:
    """An error inside of a stream, where the status line is long gone."""
    content = error_object(StepFailedError(delta.error or "The request failed."))[1]
    return b"data: " + orjson.dumps(content) + b"\n\n"


def raise_failures(service: Service, choices: Sequence[Sequence[Delta]]) -> None:
    """Raises what ended a choice without an answer, for a response in one piece.

    Raises:
        QueueExpiredError: it waited too long for its first step.
        StepFailedError: its step failed.
        EngineStoppedError: it was cut at shutdown.
    """
    for deltas in choices:
        last = deltas[-1]
        if last.error_reason is not None:
            raise service.entrance.expired(last.error, last.error_reason)
        if last.error is not None:
            raise StepFailedError(last.error)
        if last.finish_reason == "abort":
            raise EngineStoppedError("The request was cut because the server shuts down.")


async def stream(
    service: Service, http: HttpRequest, jobs: Sequence[Job], writer: ChunkWriter
) -> Response:
    """The response in chunks. Where requests can expire in the queue, its status line waits for
    the first event, so that one that did gets a status of its own.

    Raises:
        QueueExpiredError: a choice waited too long for its first step.
    """
    if service.config.limits.time_to_live is not None:
        for event in await first_events(jobs, http.receive):
            if event.error_reason is not None:
                for job in jobs:
                    job.stream.cancel()
                    service.metrics.on_finished(FinishReason.ERROR.value)
                raise service.entrance.expired(event.error, event.error_reason)
    return StreamingCompletion(
        jobs, writer, lambda delta: service.metrics.on_finished(delta.finish_reason or "")
    )


async def gather(service: Service, http: HttpRequest, jobs: Sequence[Job]) -> list[list[Delta]]:
    choices = await collect(
        jobs,
        http.receive,
        lambda delta: service.metrics.on_finished(delta.finish_reason or ""),
    )
    raise_failures(service, choices)
    return choices
