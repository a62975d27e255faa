"""Watching a server over HTTP: a scrape a second, and a load of our own if asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random

import httpx

from hotbatch.core.errors import InvalidRequestError
from hotbatch.doctor.scrape import Scrape, read_scrape

_INTERVAL = 1.0
_TIMEOUT = 10.0
_LOAD_PROMPT = "{number} is the number of a ship. Write a long story about its storms."
_LOAD_TOKENS = 128


def watch(
    url: str,
    seconds: float,
    *,
    api_key: str | None = None,
    num_clients: int = 0,
    on_scrape: Callable[[float], None] = lambda left: None,
) -> list[Scrape]:
    """Scrape a server's /metrics for so many seconds, the first time at once.

    Args:
        url: the server's address.
        num_clients: clients of our own that ask for completions meanwhile.
        on_scrape: told after each scrape how many seconds are left.

    Raises:
        InvalidRequestError: the server cannot be reached, or says nothing that is understood.
    """
    base = url.rstrip("/").removesuffix("/metrics")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(
        base_url=base,
        headers=headers,
        timeout=_TIMEOUT,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),  # each client of ours holds one
    ) as http:
        started = time.monotonic()
        scrapes = [_scrape(http, started)]
        with _Load(http, num_clients):
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0.0:
                on_scrape(left)
                time.sleep(min(_INTERVAL, left))
                scrapes.append(_scrape(http, started))
    return scrapes


def _scrape(http: httpx.Client, started: float) -> Scrape:
    try:
        response = http.get("/metrics")
    except httpx.HTTPError as error:
        raise InvalidRequestError(
            f"No server answers at {http.base_url}: {error}. Is it running, and is this its "
            "address?"
        ) from error
    if response.status_code in (401, 403):
        raise InvalidRequestError(f"{http.base_url}metrics wants a key: give --api-key.")
    if response.status_code != 200:
        raise InvalidRequestError(
            f"{http.base_url}metrics answers {response.status_code}; does the server publish "
            "metrics?"
        )
    return read_scrape(response.text, time.monotonic() - started)


class _Load:
    """Clients that ask one after the other, each in a thread, until the block is left."""

    def __init__(self, http: httpx.Client, num_clients: int) -> None:
        self._http = http
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(num_clients)
        ]

    def __enter__(self) -> None:
        if self._threads:
            models = self._http.get("/v1/models").json()["data"]
            self._model = models[0]["id"]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(_TIMEOUT)

    def _ask(self, client: int) -> None:
        # No prompt is sent twice, nor begins as another: what a server remembers is no load.
        numbers = Random(time.time_ns() + client)
        while not self._stopped.is_set():
            number = numbers.randrange(10**9, 10**10)
            body = {
                "model": self._model,
                "prompt": _LOAD_PROMPT.format(number=number),
                "max_tokens": _LOAD_TOKENS,
                "ignore_eos": True,
                "seed": number,
            }
            try:
                self._http.post("/v1/completions", json=body, timeout=60.0)
            except httpx.HTTPError:
                return
