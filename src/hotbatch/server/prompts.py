"""The four forms of a completion's prompt, each checked and turned into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotbatch.core.errors import InvalidRequestError
from hotbatch.server.schemas import CompletionBody
from hotbatch.server.service import Service

_FORMS = "prompt must be a string, a list of strings, a list of token ids, or a list of those."


def listed_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request, one or many.

    Raises:
        InvalidRequestError: none, an empty one, or another form.
    """
    if prompt is None:
        raise InvalidRequestError("prompt is required.", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequestError(_FORMS, param="prompt")
    if not prompt:
        raise InvalidRequestError("prompt must not be an empty list.", param="prompt")
    if all(isinstance(part, str) for part in prompt):
        return list(prompt)
    if _are_ids(prompt):
        return [prompt]
    if all(isinstance(part, list) for part in prompt):
        for number, part in enumerate(prompt):
            if not part or not _are_ids(part):
                raise InvalidRequestError(
                    f"prompt[{number}] must be a list of token ids with at least one.",
                    param="prompt",
                )
        return list(prompt)
    raise InvalidRequestError(_FORMS, param="prompt")


def _are_ids(values: list[Any]) -> bool:
    # bool is an int to isinstance, but not to us.
    return all(type(value) is int for value in values)


async def tokenized_prompts(
    service: Service,
    body: CompletionBody,
    listed: Sequence[str | list[int]],
    num_output: int,
) -> list[list[int]]:
    """Token ids of every one of the `listed_prompts`; `num_output` as in `truncated`.

    Raises: InvalidRequestError, ContextLengthError.
    """
    add_special = body.add_special_tokens is not False
    tokenized = []
    for prompt in listed:
        if isinstance(prompt, str):
            prompt = await service.tokenize(prompt, add_special_tokens=add_special, param="prompt")
            if not prompt:
                raise InvalidRequestError(
                    "prompt must not be empty: this model has no token that starts a text.",
                    param="prompt",
                )
        tokenized.append(truncated(service, prompt, body.truncate_prompt_tokens, num_output))
    return tokenized


def truncated(service: Service, prompt: list[int], limit: int | None, num_output: int) -> list[int]:
    """The last `limit` tokens; -1 stands for as many as leave room for `num_output` more."""
    if limit is None:
        return prompt
    if limit == -1:
        limit = max(1, service.max_model_len - num_output)
    if not 1 <= limit <= service.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {service.max_model_len}, "
            f"got {limit}.",
            param="truncate_prompt_tokens",
        )
    return prompt[-limit:]
