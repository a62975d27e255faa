"""Reading a request's body: never more than the limit, and stopped when the client goes."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from hotbatch.core.errors import EngineStoppedError
from hotbatch.server.errors import BodyTooLargeError, ClientGoneError


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLargeError: more than `limit` bytes, by its header or as it comes.
        ClientGoneError: the client closed the connection meanwhile.
        EngineStoppedError: the server shut down before the body was here.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            message = await request.receive()
        except asyncio.CancelledError:
            # Only the end of the server cancels a request; its client can still be told.
            raise EngineStoppedError(
                "The server shut down before the request was here; try again later."
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def check_connected(request: Request) -> None:
    """Raises ClientGoneError if the client has closed the connection while its prompt was at
    work elsewhere: nothing need be computed for it."""
    if await request.is_disconnected():
        raise ClientGoneError


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"The request body exceeds {limit} bytes; send less, or raise --max-body-bytes."
    )
