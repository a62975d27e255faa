"""POST /v1/completions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hotbatch.core.sampling_params import SamplingParams
from hotbatch.server import generation
from hotbatch.server.bodies import check_connected, read_body
from hotbatch.server.entrance import estimated_tokens
from hotbatch.server.errors import json_response
from hotbatch.server.generation import ChunkFrame
from hotbatch.server.logprobs import LogprobFormatter
from hotbatch.server.output import Delta
from hotbatch.server.parameters import (
    COMPLETION_MAX_TOKENS,
    completion_params,
    refuse_unsupported,
)
from hotbatch.server.prompts import listed_prompts, tokenized_prompts
from hotbatch.server.schemas import CompletionBody, parse_body
from hotbatch.server.service import Job, PromptText, Service
from hotbatch.server.urgency import Urgency, echoed_tier, urgency_of


async def create_completion(service: Service, http: HttpRequest) -> Response:
    service.check_accepting()
    body = parse_body(CompletionBody, await read_body(http, service.config.max_body_bytes))
    service.check_model(body.model)
    refuse_unsupported(body)
    params = completion_params(body, service.generation_defaults)
    request_id = service.new_id("cmpl", body.request_id)
    num_output = max(params.max_tokens or COMPLETION_MAX_TOKENS, params.min_tokens)
    listed = listed_prompts(body.prompt)
    service.check_count(len(listed), params.n)
    urgency = urgency_of(http, body)
    with service.entrance.place(urgency, len(listed) * params.n, estimated_tokens(listed)):
        prompts = await tokenized_prompts(service, body, listed, num_output)
        await check_connected(http)
        jobs = service.submit(
            prompts,
            _fitted(service, body, params, prompts),
            request_id=request_id,
            urgency=urgency,
            cache_salt=body.cache_salt,
            speculate=body.speculate is not False,
            source=_source(body, params.n, listed),
        )
    completion = _Completion(service, body, params, jobs, request_id, urgency)
    if body.stream:
        return await generation.stream(service, http, jobs, completion)
    return json_response(completion.whole(await generation.gather(service, http, jobs)))


def _source(body: CompletionBody, n: int, listed: Sequence[str | list[int]]) -> PromptText | None:
    if n > 1 or len(listed) > 1 or body.truncate_prompt_tokens is not None:
        return None
    prompt = listed[0]
    return PromptText(
        prompt if isinstance(prompt, str) else None, body.add_special_tokens is not False
    )


def _fitted(
    service: Service, body: CompletionBody, params: SamplingParams, prompts: list[list[int]]
) -> SamplingParams:
    """What the engine is asked for: the default max_tokens gives way to a long prompt, and
    echo with logprobs needs those of the prompt."""
    changes: dict[str, Any] = {}
    if body.max_tokens is None:
        room = service.max_model_len - max(map(len, prompts))
        changes["max_tokens"] = max(1, params.min_tokens, min(COMPLETION_MAX_TOKENS, room))
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        changes["prompt_logprobs"] = body.logprobs
    return dataclasses.replace(params, **changes) if changes else params


class _Completion:
    """One request's answer, whole or in chunks (a ChunkWriter)."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        params: SamplingParams,
        jobs: Sequence[Job],
        request_id: str,
        urgency: Urgency,
    ) -> None:
        self._service = service
        self._jobs = jobs
        self._n = params.n
        self._echo = bool(body.echo)
        self._drop_output = body.max_tokens == 0  # echo alone was asked for
        self._return_ids = bool(body.return_token_ids)
        self._wants_logprobs = body.logprobs is not None
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._logprobs = LogprobFormatter(
            service.tokenizer,
            num_top=body.logprobs or 0,
            as_ids=bool(body.return_tokens_as_token_ids),
        )
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.model_name,
            **echoed_tier(body, urgency),
        }
        self._frame = ChunkFrame(
            self._head,
            len(jobs) if body.stream else 0,
            before='"text":',
            after=',"logprobs":null,"finish_reason":null,"stop_reason":null',
            usage=self._usage_at_end,
        )
        # Plain chunks hold text only and are written from the frame.
        self._is_plain = not (self._wants_logprobs or self._return_ids or self._usage_always)
        self._begun: set[int] = set()  # choices whose first chunk is out
        self._offsets = [0] * len(jobs)

    # --- chunks -------------------------------------------------------------------------------

    def opening(self) -> bytes:
        return b""

    def chunk(self, job: Job, delta: Delta) -> bytes:
        prompt_is_due = self._echo and job.index not in self._begun
        if delta.finish_reason is None and self._is_plain and not prompt_is_due:
            return self._frame.text(job.index, delta.text) if delta.text else b""
        if delta.error is not None:
            return generation.failure_event(delta)
        first = job.index not in self._begun
        self._begun.add(job.index)
        if not (first or delta.text or delta.token_ids or delta.finish_reason):
            return b""
        choice = self._choice(job, [delta], is_first=first)
        fields: dict[str, Any] = {"choices": [choice]}
        if self._usage_always:
            fields["usage"] = self._usage()
        elif self._usage_at_end:
            fields["usage"] = None
        return self._frame.event(fields)

    def closing(self) -> bytes:
        if not self._usage_at_end:
            return b""
        return self._frame.event({"choices": [], "usage": self._usage()})

    # --- whole --------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                self._choice(job, deltas, is_first=True)
                for job, deltas in zip(self._jobs, choices, strict=True)
            ],
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        return generation.usage(self._jobs, self._n, drop_output=self._drop_output)

    def _choice(self, job: Job, deltas: Sequence[Delta], *, is_first: bool) -> dict[str, Any]:
        """A choice as these deltas make it; the first ones bring the prompt along."""
        last = deltas[-1]
        text = "" if self._drop_output else "".join([delta.text for delta in deltas])
        if self._echo and is_first:
            text = self._service.tokenizer.decode(job.prompt_ids) + text
        choice: dict[str, Any] = {
            "index": job.index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._drop_output else last.finish_reason,
            "stop_reason": None if self._drop_output else last.stop_reason,
        }
        if self._wants_logprobs:
            choice["logprobs"] = self._choice_logprobs(job, deltas, is_first=is_first)
        if self._wants_prompt_logprobs and is_first:
            entries = [entry for delta in deltas for entry in delta.prompt_logprobs]
            choice["prompt_logprobs"] = self._logprobs.prompt(entries)
        if self._return_ids:
            ids = [] if self._drop_output else [i for delta in deltas for i in delta.token_ids]
            choice["token_ids"] = ids
            choice["prompt_token_ids"] = job.prompt_ids if is_first else None
        return choice

    def _choice_logprobs(
        self, job: Job, deltas: Sequence[Delta], *, is_first: bool
    ) -> dict[str, list[Any]]:
        entries: list[Any] = []
        if self._echo and is_first:
            entries = [job.prompt_ids[0]]
            entries += [entry for delta in deltas for entry in delta.prompt_logprobs]
        if not self._drop_output:
            entries += [entry for delta in deltas for entry in delta.logprobs]
        # A stream's next chunk goes on where this one ends.
        shown, end = self._logprobs.completion(entries, self._offsets[job.index])
        self._offsets[job.index] = end
        return shown
