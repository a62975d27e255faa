"""The dashboard's page at `/`, its files under /dashboard/, and the live stream that it reads."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from hotbatch.dashboard.assets import CONTENT_SECURITY_POLICY, INDEX, Asset, assets
from hotbatch.server.errors import json_response
from hotbatch.server.live import LiveResponse
from hotbatch.server.service import Service

_HEADERS = {
    "cache-control": "no-cache",  # asked again each time, answered with 304 mostly
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "referrer-policy": "no-referrer",
    "vary": "accept",
    "x-content-type-options": "nosniff",
}


def add_page(app: FastAPI, service: Service, index: Callable[[], object]) -> None:
    """`index` is what `/` says to clients that do not ask for HTML."""

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return _answer(request, assets()[INDEX])
        return json_response(index(), headers={"vary": "accept"})

    @app.get("/dashboard/{name:path}", include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        found = assets().get(name)
        return Response(status_code=404) if found is None else _answer(request, found)

    @app.get("/live")
    async def live() -> Response:
        """Server-sent events: `hello`, then frames of what the batch does."""
        return LiveResponse(service.live)


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**_HEADERS, "etag": asset.tag}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers=headers, media_type=asset.media_type)
