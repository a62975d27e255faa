"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hotbatch.core.errors import InvalidRequestError
from hotbatch.server.bodies import read_body
from hotbatch.server.chat import asked_turn
from hotbatch.server.errors import json_response
from hotbatch.server.schemas import DetokenizeBody, TokenizeBody, parse_body
from hotbatch.server.service import Service


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """A prompt's token ids, or those of a conversation rendered by the chat template."""
    body = parse_body(TokenizeBody, await read_body(http, service.config.max_body_bytes))
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        ids = list((await asked_turn(service, body)).token_ids)
    elif isinstance(body.prompt, str):
        ids = await service.tokenize(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, param="prompt"
        )
    else:
        raise InvalidRequestError("prompt must be a string.", param="prompt")
    strings = [service.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return json_response(
        {
            "count": len(ids),
            "max_model_len": service.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """The text of token ids, special tokens included."""
    body = parse_body(DetokenizeBody, await read_body(http, service.config.max_body_bytes))
    service.check_model(body.model)
    tokenizer = service.tokenizer
    for token in body.tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise InvalidRequestError(
                f"tokens holds {token}; this model's token ids run from 0 to "
                f"{tokenizer.vocab_size - 1}.",
                param="tokens",
            )
    text = await service.off_loop(
        len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return json_response({"prompt": text})
