"""Every failure as OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hotbatch.core.errors import (
    ContextLengthError,
    EngineStoppedError,
    HotbatchError,
    InvalidRequestError,
    OverloadedError,
)

_RETRY_AFTER_STOP = 10  # seconds; another instance may be up by then


class ModelNotFoundError(InvalidRequestError):
    """The model that was asked for is not served here (HTTP 404)."""


class BodyTooLargeError(InvalidRequestError):
    """The request body exceeds the server's limit (HTTP 413)."""


class QueueExpiredError(OverloadedError):
    """The request waited in the queue for longer than the server lets it (HTTP 503)."""


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


class StepFailedError(HotbatchError):
    """The model's step failed under this request (HTTP 500)."""


def error_object(error: HotbatchError) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the error object of an exception."""
    status, kind, code = 400, "invalid_request_error", None
    if isinstance(error, ModelNotFoundError):
        status, code = 404, "model_not_found"
    elif isinstance(error, BodyTooLargeError):
        status, code = 413, "request_too_large"
    elif isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    elif isinstance(error, QueueExpiredError):
        status, kind, code = 503, "service_unavailable_error", "queue_expired"
    elif isinstance(error, OverloadedError):
        status, kind, code = 429, "rate_limit_error", "overloaded"
    elif isinstance(error, EngineStoppedError):
        status, kind, code = 503, "service_unavailable_error", "shutting_down"
    elif not isinstance(error, InvalidRequestError):
        status, kind = 500, "server_error"
    return status, _object(error.message, kind, error.param, code)


def _object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: HotbatchError) -> Response:
    status, content = error_object(error)
    headers = {}
    if isinstance(error, OverloadedError) and error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, OverloadedError):
        headers["retry-after"] = "1"
    elif isinstance(error, EngineStoppedError):
        headers["retry-after"] = str(_RETRY_AFTER_STOP)
    return json_response(content, status, headers)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


# --- handlers, as Starlette calls them --------------------------------------------------------


async def on_hotbatch_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HotbatchError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException)
    # As it was sent: a URL would take the first part of `//v1/models` for a host.
    path, method = request.scope["path"], request.method
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"Unknown path: {method} {path}.", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message, code = f"{path} does not take {method}; use {allowed}.", "method_not_allowed"
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return json_response(
        _object(message, kind, None, code), error.status_code, dict(error.headers or {})
    )


async def on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's code for it; nobody reads it


async def on_unexpected(_: Request, __: Exception) -> Response:
    """Starlette raises the exception again afterwards, and uvicorn logs it."""
    message = "The server failed to process the request; the cause is in its log."
    return json_response(_object(message, "server_error", None, "internal_error"), 500)
