"""Bearer keys. A middleware in plain ASGI: it costs one look at the path, and per-token
sends do not pass through it."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from hotbatch.server.errors import json_response

# Everything that computes or tells about models and requests. Health, version and metrics stay
# open for load balancers and scrapers, and the page, which asks for the key itself.
_GUARDED = ("/v1", "/tokenize", "/detokenize", "/live")


class BearerAuth:
    """Lets requests to guarded paths pass only with `Authorization: Bearer KEY`.

    Puts the key's number into scope["tenant"], so that fairness among tenants needs no secret.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_GUARDED):
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(scope)
        if tenant is None:
            await _refusal(scope, receive, send)
            return
        scope["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
        found = None
        # All keys are compared, each in constant time: timing tells nothing about any.
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(key, given):
                found = f"key-{number}"
        return found


async def _refusal(scope: Scope, receive: Receive, send: Send) -> None:
    error = {
        "message": "Missing or wrong API key; send the header 'Authorization: Bearer KEY'.",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    response = json_response({"error": error}, 401, {"www-authenticate": "Bearer"})
    await response(scope, receive, send)
