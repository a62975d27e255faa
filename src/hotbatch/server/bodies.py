"""Reading a request's body: never more than the limit, and stopped when the client goes."""

from __future__ import annotations

from starlette.requests import Request

from hotbatch.server.errors import BodyTooLargeError, ClientGoneError


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLargeError: more than `limit` bytes, by its header or as it comes.
        ClientGoneError: the client closed the connection meanwhile.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"The request body exceeds {limit} bytes; send less, or raise --max-body-bytes."
    )
