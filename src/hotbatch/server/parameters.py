"""From a body's fields to SamplingParams; what is known but not supported is refused here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.server.schemas import ChatBody, CompletionBody, GenerationBody

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; chat has none

_COPIED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value != []


def _is_not_text(value: Any) -> bool:
    return value is not None and not (isinstance(value, Mapping) and value.get("type") == "text")


_STRUCTURED = "this server does not constrain the form of its output yet; leave it out"
# Field -> (does the value ask for it?, what to say).
_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "response_format": (_is_not_text, "only {'type': 'text'} is supported"),
    "structured_outputs": (_is_given, _STRUCTURED),
    "guided_json": (_is_given, _STRUCTURED),
    "guided_regex": (_is_given, _STRUCTURED),
    "guided_choice": (_is_given, _STRUCTURED),
    "guided_grammar": (_is_given, _STRUCTURED),
    "use_beam_search": (_is_given, "beam search is not supported; use n for several answers"),
    "allowed_token_ids": (_is_given, "not supported; use logit_bias"),
    "bad_words": (_is_given, "not supported; use logit_bias"),
    "logits_processors": (_is_given, "not supported"),
    "suffix": (lambda value: bool(value), "insertion is not supported; leave it out"),
    "prompt_embeds": (_is_given, "not supported; send prompt"),
    "functions": (_is_given, "not supported; use tools"),
    "function_call": (_is_given, "not supported; use tools"),
    "audio": (_is_given, "this server answers in text only"),
    "modalities": (
        lambda value: value not in (None, [], ["text"]),
        "this server answers in text only",
    ),
    "documents": (_is_given, "not supported; put them into messages"),
    "length_penalty": (
        lambda value: value not in (None, 1.0),
        "it has a meaning for beam search only, which is not supported",
    ),
    "chat_template": (
        _is_given,
        "a template from the request is not accepted; start the server with --chat-template",
    ),
}


def refuse_unsupported(body: GenerationBody) -> None:
    """Raises InvalidRequestError for a field that asks for what this server does not do."""
    for name in body.model_fields_set & _UNSUPPORTED.keys():
        asks, message = _UNSUPPORTED[name]
        if asks(getattr(body, name)):
            raise InvalidRequestError(f"{name}: {message}.", param=name)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError(
            f"best_of must equal n ({body.n or 1}); choosing among more is not supported.",
            param="best_of",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")


def sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, float],
    logprobs: int | None,
    max_tokens: int | None,
) -> SamplingParams:
    """`defaults` hold what the model's makers recommend, for fields that were not given.

    Raises:
        InvalidRequestError: a field is out of range; `param` names it.
    """
    values: dict[str, Any] = dict(defaults)
    for name in _COPIED:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
    )


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list) and all(isinstance(text, str) for text in stop):
        return tuple(stop)
    raise InvalidRequestError("stop must be a string or a list of strings.", param="stop")


def _logit_bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in (bias or {}).items():
        try:
            pairs.append((int(key), value))
        except ValueError:
            raise InvalidRequestError(
                f"logit_bias: {key!r:.60} is not a token id.", param="logit_bias"
            ) from None
    return tuple(pairs)


def completion_params(body: CompletionBody, defaults: Mapping[str, float]) -> SamplingParams:
    """With echo, max_tokens 0 asks for the prompt alone; one token is computed and dropped."""
    max_tokens = body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1
    return sampling_params(body, defaults, body.logprobs, max_tokens)


def chat_params(body: ChatBody, defaults: Mapping[str, float]) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if body.echo:
        raise InvalidRequestError(
            "echo: not supported in chat; the last message is known to who sent it.", param="echo"
        )
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    with chat_names(body):
        return sampling_params(
            body, defaults, (body.top_logprobs or 0) if body.logprobs else None, max_tokens
        )


@contextmanager
def chat_names(body: ChatBody) -> Iterator[None]:
    """Errors raised inside name the field that the chat client sent: what the core knows as
    the prompt is messages there, and two more fields have other names than in completions."""
    try:
        yield
    except InvalidRequestError as error:
        renamed = {"logprobs": "top_logprobs", "prompt": "messages"}
        if body.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        old = error.param or ""
        if old not in renamed:
            raise
        new = renamed[old]
        told = error.message
        message = f"messages: {told}" if old == "prompt" else told.replace(old, new)
        raise type(error)(message, param=new) from None
