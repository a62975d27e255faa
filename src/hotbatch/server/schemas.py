"""The bodies that the endpoints accept, with OpenAI's and vLLM's names.

Types are strict: "5" is not a number, and true is not 1. Fields whose shape has several forms
(prompt, messages, stop) are checked where they are read, which gives better messages. Fields
that nobody here knows are ignored, as vLLM does, with a line in the debug log; fields that
are known and would change the answer, but are not supported, are refused by
`parameters.refuse_unsupported`.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal, TypeVar

import orjson
import pydantic
from pydantic import BaseModel, ConfigDict

from hotbatch.core.errors import InvalidRequestError

logger = logging.getLogger(__name__)

# Deeper than any tool's schema, and far from Python's recursion limit, which checking, printing
# and rendering a body would run into one after the other.
MAX_DEPTH = 100


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SloBody(Body):
    """What this request is promised, in milliseconds; ours."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class GenerationBody(Body):
    """What completions and chat completions share. None means "not given"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's sampling fields
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Any = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    slo: SloBody | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Known, not supported (see parameters.py)
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logits_processors: Any = None


class CompletionBody(GenerationBody):
    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class ChatBody(GenerationBody):
    messages: list[Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Any = None
    echo: bool | None = None  # vLLM's; in completions it is supported
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    # Sent by clients, without a meaning here.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"parallel_tool_calls", "store", "metadata"})


class TokenizeBody(Body):
    model: str | None = None
    prompt: Any = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], raw: bytes) -> B:
    """JSON bytes as a body of this kind.

    Raises:
        InvalidRequestError: not JSON, not an object, or a field of a wrong type or nested too
            deeply; `param` names the field.
    """
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    _check_depth(raw, values)
    if logger.isEnabledFor(logging.DEBUG):
        unknown = values.keys() - kind.model_fields.keys()
        if unknown:
            logger.debug("fields ignored: %s", ", ".join(sorted(unknown)))
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise _invalid_field(error) from None


def _check_depth(raw: bytes, values: dict[str, Any]) -> None:
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return  # nearly always, and much faster than looking at every value
    for name, value in values.items():
        if _is_too_deep(value):
            raise InvalidRequestError(
                f"{name} is nested more than {MAX_DEPTH} levels deep.", param=name
            )


def _is_too_deep(value: Any) -> bool:
    """Level by level, as recursion is what has to be avoided."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)
        ]
    return bool(level)


def _invalid_field(error: pydantic.ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    message = first["msg"]
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required.", param=param)
    shown = repr(first["input"])
    if len(shown) > 60:
        shown = shown[:60] + "..."
    return InvalidRequestError(f"{param}: {message}, got {shown}.", param=param)
