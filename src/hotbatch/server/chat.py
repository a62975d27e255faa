"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.owner import Owner
from hotbatch.server import generation
from hotbatch.server.bodies import check_connected, read_body
from hotbatch.server.entrance import estimated_tokens
from hotbatch.server.errors import json_response
from hotbatch.server.generation import ChunkFrame
from hotbatch.server.logprobs import LogprobFormatter
from hotbatch.server.next_turn import AskedTurn
from hotbatch.server.output import Delta
from hotbatch.server.parameters import chat_names, chat_params, refuse_unsupported
from hotbatch.server.prompts import truncated
from hotbatch.server.schemas import ChatBody, TokenizeBody, parse_body
from hotbatch.server.service import Job, PromptText, Service
from hotbatch.server.urgency import Urgency, echoed_tier, urgency_of
from hotbatch.text.chat_template import check_variables


async def create_chat_completion(service: Service, http: HttpRequest) -> Response:
    service.check_accepting()
    body = parse_body(ChatBody, await read_body(http, service.config.max_body_bytes))
    service.check_model(body.model)
    refuse_unsupported(body)
    params = chat_params(body, service.generation_defaults)
    service.check_count(1, params.n)
    request_id = service.new_id("chatcmpl", body.request_id)
    urgency = urgency_of(http, body)
    with service.entrance.place(urgency, params.n, estimated_tokens(body.messages)):
        follows = body.speculate is not False and service.turns.is_active
        owner = Owner(urgency.tenant, body.cache_salt) if follows else None
        asked = await asked_turn(service, body, owner)
        num_output = max(params.max_tokens or 1, params.min_tokens)
        prompt = list(asked.token_ids)
        prompt = truncated(service, prompt, body.truncate_prompt_tokens, num_output)
        await check_connected(http)
        with chat_names(body):
            jobs = service.submit(
                [prompt],
                params,
                request_id=request_id,
                urgency=urgency,
                cache_salt=body.cache_salt,
                speculate=body.speculate is not False,
                source=_source(body, params.n, asked.text),
            )
    if follows and len(prompt) == len(asked.token_ids):
        for job in jobs:
            job.output.followers.append(service.turns.follow(asked))
    chat = _Chat(service, body, jobs, request_id, urgency)
    if body.stream:
        return await generation.stream(service, http, jobs, chat)
    return json_response(chat.whole(await generation.gather(service, http, jobs)))


def _source(body: ChatBody, n: int, text: str) -> PromptText | None:
    if n > 1 or body.truncate_prompt_tokens is not None:
        return None
    return PromptText(text, bool(body.add_special_tokens))


async def asked_turn(
    service: Service, body: ChatBody | TokenizeBody, owner: Owner | None = None
) -> AskedTurn:
    """The conversation as text and token ids, through the model's chat template.

    Args:
        owner: who may be given the ids of what he was answered before; None: nobody.

    Raises:
        InvalidRequestError: bad messages, tools or template variables.
        ContextLengthError: longer than the model can take in any case.
    """
    variables = body.chat_template_kwargs or {}
    check_variables(variables)
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    opens = body.add_generation_prompt
    options = {
        "tools": _tools(body),
        "add_generation_prompt": not continues if opens is None else opens,
        "continue_final_message": continues,
        **variables,
    }
    text = await service.render_chat(body.messages, **options)
    # The template writes the special tokens itself.
    token_ids = await service.tokenize(
        text, add_special_tokens=bool(body.add_special_tokens), param="messages", owner=owner
    )
    return AskedTurn(owner or Owner("", None), body.messages or (), options, text, token_ids)


def _tools(body: ChatBody | TokenizeBody) -> list[dict[str, Any]] | None:
    """Tools reach the template; the answer is plain text, calls in it are not parsed."""
    choice = body.tool_choice if isinstance(body, ChatBody) else None
    if choice not in (None, "none", "auto"):
        raise InvalidRequestError(
            "tool_choice must be 'auto' or 'none'; a call cannot be forced.", param="tool_choice"
        )
    return None if choice == "none" else body.tools


class _Chat:
    """One request's answer, whole or in chunks (a ChunkWriter)."""

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        jobs: Sequence[Job],
        request_id: str,
        urgency: Urgency,
    ) -> None:
        self._jobs = jobs
        self._role = "assistant"
        self._return_ids = bool(body.return_token_ids)
        self._wants_logprobs = bool(body.logprobs)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._logprobs = LogprobFormatter(
            service.tokenizer,
            num_top=body.top_logprobs or 0,
            as_ids=bool(body.return_tokens_as_token_ids),
        )
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or service.model_name,
            **echoed_tier(body, urgency),
        }
        self._frame = ChunkFrame(
            self._head,
            len(jobs) if body.stream else 0,
            before='"delta":{"content":',
            after='},"logprobs":null,"finish_reason":null',
            usage=self._usage_at_end,
        )
        self._is_plain = not (self._wants_logprobs or self._return_ids or self._usage_always)

    # --- chunks -------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """The role of every choice, before any token."""
        return b"".join(
            self._event(
                {
                    "index": job.index,
                    "delta": {"role": self._role, "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                    **({"prompt_token_ids": job.prompt_ids} if self._return_ids else {}),
                }
            )
            for job in self._jobs
        )

    def chunk(self, job: Job, delta: Delta) -> bytes:
        if delta.finish_reason is None and self._is_plain:
            return self._frame.text(job.index, delta.text) if delta.text else b""
        if delta.error is not None:
            return generation.failure_event(delta)
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return b""
        choice: dict[str, Any] = {
            "index": job.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs.chat(delta.logprobs) if self._wants_logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._return_ids:
            choice["token_ids"] = delta.token_ids
        return self._event(choice)

    def _event(self, choice: dict[str, Any]) -> bytes:
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
        content: dict[str, Any] = {
            **self._head,
            "choices": [
                self._choice(job, deltas) for job, deltas in zip(self._jobs, choices, strict=True)
            ],
            "usage": self._usage(),
        }
        if self._wants_prompt_logprobs:
            entries = [entry for delta in choices[0] for entry in delta.prompt_logprobs]
            content["prompt_logprobs"] = self._logprobs.prompt(entries)
        if self._return_ids:
            content["prompt_token_ids"] = self._jobs[0].prompt_ids
        return content

    def _usage(self) -> dict[str, Any]:
        return generation.usage(self._jobs, len(self._jobs))

    def _choice(self, job: Job, deltas: Sequence[Delta]) -> dict[str, Any]:
        last = deltas[-1]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        choice = {
            "index": job.index,
            "message": {
                "role": self._role,
                "content": "".join([delta.text for delta in deltas]),
                "refusal": None,
            },
            "logprobs": self._logprobs.chat(entries) if self._wants_logprobs else None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        if self._return_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.token_ids]
        return choice
