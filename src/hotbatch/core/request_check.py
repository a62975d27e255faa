"""What is refused at the door: everything that could never finish.

These checks look at the request and the configuration only, so the thread that submits a
request can run them; behind them the scheduler may rely on every request fitting the pool
when it is alone.
"""

from __future__ import annotations

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.errors import ContextLengthError, InvalidRequestError
from hotbatch.core.request import Request


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Refuse what can never be served.

    Raises:
        ContextLengthError: prompt plus output exceed the model's context or the KV pool.
        InvalidRequestError: the prompt is empty, or a token id is outside the vocabulary.
    """
    if request.num_prompt == 0:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", param="prompt")
    _check_vocabulary(request, config.vocab_size)
    _check_length(request, config)


def max_output(request: Request, config: SchedulerConfig) -> int:
    """Tokens the request may generate: what it asks for, else what the context leaves."""
    if request.params.max_tokens is not None:
        return request.params.max_tokens
    return config.context_len - request.num_prompt


def _check_length(request: Request, config: SchedulerConfig) -> None:
    limit = config.context_len
    num_prompt = request.num_prompt
    if limit == config.max_model_len:
        bound = f"This model's maximum context length is {limit} tokens."
    else:
        bound = f"The KV cache of this server holds {limit} tokens."
    if num_prompt >= limit:
        raise ContextLengthError(
            f"{bound} The prompt has {num_prompt} tokens, which leaves no room for output. "
            "Please shorten the prompt.",
            param="prompt",
        )
    for name in ("max_tokens", "min_tokens"):
        asked = getattr(request.params, name)
        if asked is not None and num_prompt + asked > limit:
            raise ContextLengthError(
                f"{bound} You asked for {num_prompt + asked} tokens ({num_prompt} in the prompt, "
                f"{name} {asked}). Please shorten the prompt or lower {name}.",
                param=name,
            )


def _check_vocabulary(request: Request, vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    fields = (
        ("prompt", request.tokens[: request.num_prompt]),
        ("stop_token_ids", request.params.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in request.params.logit_bias]),
    )
    for name, token_ids in fields:
        if not token_ids:
            continue
        worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
        if not 0 <= worst < vocab_size:
            raise InvalidRequestError(
                f"{name} holds token id {worst}; this model's token ids run from 0 to "
                f"{vocab_size - 1}.",
                param=name,
            )
