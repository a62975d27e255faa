"""The ASGI application: paths to endpoints, exceptions to OpenAI's error objects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hotbatch.core.errors import HotbatchError
from hotbatch.server import errors
from hotbatch.server.auth import BearerAuth
from hotbatch.server.chat import create_chat_completion
from hotbatch.server.completions import create_completion
from hotbatch.server.errors import ModelNotFoundError, json_response
from hotbatch.server.metrics import CONTENT_TYPE
from hotbatch.server.page import add_page
from hotbatch.server.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from hotbatch.server.service import Service
from hotbatch.server.text_endpoints import detokenize, tokenize

_Endpoint = Callable[[Service, Request], Awaitable[Response]]


def create_app(service: Service) -> FastAPI:
    """All endpoints over a service. The engine behind it must be running to answer."""
    app = FastAPI(
        title="hotbatch",
        version=service.version,
        exception_handlers={
            HotbatchError: _counted(service),
            HTTPException: errors.on_http_exception,
            errors.ClientGoneError: errors.on_client_gone,
            Exception: errors.on_unexpected,
        },
    )
    posts: tuple[tuple[str, _Endpoint, type[Body]], ...] = (
        ("/v1/completions", create_completion, CompletionBody),
        ("/v1/chat/completions", create_chat_completion, ChatBody),
        ("/tokenize", tokenize, TokenizeBody),
        ("/detokenize", detokenize, DetokenizeBody),
    )
    for path, endpoint, body in posts:
        _add_post(app, service, path, endpoint, body)
    _add_reads(app, service)
    if service.config.api_keys:
        app.add_middleware(BearerAuth, keys=service.config.api_keys)
    return app


def _counted(
    service: Service,
) -> Callable[[Request, Exception], Coroutine[Any, Any, Response]]:
    """Answers with the error's object, and counts it."""

    async def handler(_: Request, error: Exception) -> Response:
        assert isinstance(error, HotbatchError)
        response = errors.error_response(error)
        code = errors.error_object(error)[1]["error"]["code"]
        service.metrics.on_refused(code or str(response.status_code))
        return response

    return handler


def _add_post(
    app: FastAPI, service: Service, path: str, endpoint: _Endpoint, body: type[Body]
) -> None:
    """The body is read and checked by the endpoint, within the size limit and with OpenAI's
    errors; FastAPI is told its schema for the API description only."""

    async def handler(request: Request) -> Response:
        return await endpoint(service, request)

    schema: dict[str, Any] = body.model_json_schema()
    # Nested models are put in line: references would point outside of this document.
    definitions = schema.pop("$defs", {})
    for field in schema.get("properties", {}).values():
        for option in field.get("anyOf", []):
            name = str(option.pop("$ref", "")).rpartition("/")[2]
            option.update(definitions.get(name, {}))
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        name=endpoint.__name__,
        response_class=Response,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
    )


def _add_reads(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        data = [_model(service, name) for name in service.config.served_names]
        return json_response({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        if name not in service.config.served_names:
            raise ModelNotFoundError(f"The model {name!r:.100} does not exist here.", param="model")
        return json_response(_model(service, name))

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine takes requests, else 503."""
        engine = service.engine
        good = service.is_accepting and engine.is_accepting and engine.is_healthy
        return json_response({"status": "ok" if good else "unavailable"}, 200 if good else 503)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": service.version})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    add_page(app, service, lambda: _index(service))


def _index(service: Service) -> dict[str, Any]:
    return {
        "name": "hotbatch",
        "version": service.version,
        "model": service.model_name,
        "endpoints": [
            "/v1/models",
            "/v1/completions",
            "/v1/chat/completions",
            "/tokenize",
            "/detokenize",
            "/health",
            "/metrics",
            "/live",
            "/docs",
        ],
    }


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "hotbatch",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.max_model_len,
    }
