"""Reading a server's /live: hello and frames, over whatever ends the connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

_SILENCE_SECONDS = 8.0  # the server says something every second
_RETRY_SECONDS = 1.0


class LiveError(Exception):
    """The server cannot be watched, and trying again would not help."""


def parse_events(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, data) of server-sent events; the name is empty for a frame."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])
            name = ""


def watch(
    url: str,
    api_key: str | None = None,
    *,
    on_lost: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Events for ever: comes again when the server restarts, and tells `on_lost` why it has to.

    Raises:
        LiveError: the key is wrong, or there is no hotbatch server at the address.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    address = url.rstrip("/").removesuffix("/v1") + "/live"
    with httpx.Client(timeout=_SILENCE_SECONDS, trust_env=False) as client:
        while True:
            try:
                with client.stream("GET", address, headers=headers) as answer:
                    _check(answer, address)
                    yield from parse_events(answer.iter_lines())
                on_lost("the server has closed the stream")
            except httpx.UnsupportedProtocol as error:
                raise LiveError(f"{url} is no address; write http://HOST:PORT.") from error
            except (httpx.TransportError, _NotNowError) as error:
                on_lost(str(error) or type(error).__name__)
            sleep(_RETRY_SECONDS)


class _NotNowError(Exception):
    """It answered, and may say something else later."""


def _check(answer: httpx.Response, address: str) -> None:
    status = answer.status_code
    if status == httpx.codes.OK and "event-stream" in answer.headers.get("content-type", ""):
        return
    if status == httpx.codes.UNAUTHORIZED:
        raise LiveError("The server wants a key; give --api-key, or set HOTBATCH_API_KEY.")
    if status == httpx.codes.TOO_MANY_REQUESTS or status >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise _NotNowError(f"the server answered {status}")
    raise LiveError(f"{address} answered {status}; is a hotbatch server there?")
