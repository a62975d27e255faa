"""A real process: its port, its signals, its exit code."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_parts import MODEL, WAIT_SECONDS, Rig, make_rig

from hotbatch.core.errors import OptionError
from hotbatch.server.run import ServerConfig, address_of, listen, serve

SCRIPT = Path(__file__).with_name("serve_simulated.py")


@contextmanager
def process(step_seconds: float, grace: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(step_seconds), str(grace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        yield server, server.stdout.readline().strip()
    finally:
        server.kill()
        server.communicate()


class Stream:
    """A streaming request read in a thread; `begun` is set with its first chunk."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.begun = threading.Event()
        self.lines: list[str] = []
        self._url, self._max_tokens = url, max_tokens
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": self._max_tokens}
        body["logprobs"] = 0  # a chunk for every token
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=body, timeout=60, trust_env=False
            ) as answer:
                for line in answer.iter_lines():
                    self.lines.append(line)
                    self.begun.set()
        except httpx.HTTPError as error:
            self.lines.append(repr(error))

    def end(self) -> str:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        return "\n".join(self.lines)


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish_and_new_ones_are_refused(number: signal.Signals) -> None:
    with process(0.02, 60) as (server, url):
        stream = Stream(url, 60)
        assert stream.begun.wait(WAIT_SECONDS)
        server.send_signal(number)
        Rig.wait_until(lambda: httpx.get(f"{url}/health", trust_env=False).status_code == 503)
        answer = post(url, prompt="y")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in answer.headers
        text = stream.end()
        assert text.count('"finish_reason":"length"') == 1
        assert text.rstrip().endswith("data: [DONE]")
        assert server.wait(WAIT_SECONDS) == 0


@pytest.mark.parametrize(("grace", "signals"), [(0.0, 1), (1000.0, 2)])
def test_what_does_not_finish_is_cut(grace: float, signals: int) -> None:
    """After the grace period, or at once with the second signal."""
    with process(0.2, grace) as (server, url):
        stream = Stream(url, 500)
        assert stream.begun.wait(WAIT_SECONDS)
        server.send_signal(signal.SIGTERM)
        if signals == 2:
            Rig.wait_until(lambda: httpx.get(f"{url}/health", trust_env=False).status_code == 503)
            server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT_SECONDS) == 0
        text = stream.end()
        assert '"finish_reason":"abort"' in text
        assert text.rstrip().endswith("data: [DONE]")


def test_idle_server_stops() -> None:
    with process(0.0, 60) as (server, url):
        assert url.startswith("http://127.0.0.1:")
        assert not url.endswith(":0")
        assert post(url, prompt="x").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT_SECONDS) == 0


def test_a_body_that_never_comes_does_not_hold_up_the_end() -> None:
    with process(0.0, 60) as (server, url):
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port), WAIT_SECONDS) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            )
            post(url, prompt="x")  # by now the server waits for the rest of the other
            server.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 503"), answer
        assert server.wait(WAIT_SECONDS) == 0
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()


def test_serving_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, hotbatch.server.run, hotbatch.text, hotbatch.engine.async_engine\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_busy_port_is_said() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"{port}.*in use") as caught:
            serve(ServerConfig(port=port), make_rig().service)
    assert caught.value.param == "--port"


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_a_host_that_is_not_ours_is_said(host: str) -> None:
    with pytest.raises(OptionError) as caught:
        listen(host, 0)
    assert caught.value.param == "--host"


@pytest.mark.parametrize(
    ("name", "url"),
    [(("127.0.0.1", 80), "http://127.0.0.1:80"), (("::1", 80, 0, 0), "http://[::1]:80")],
)
def test_address(name: tuple[Any, ...], url: str) -> None:
    class Listener(socket.socket):
        def getsockname(self) -> tuple[Any, ...]:
            return name

    with Listener() as listener:
        assert address_of(listener) == url


@pytest.mark.slow
def test_an_idle_connection_is_kept_longer_than_clients_keep_it() -> None:
    """uvicorn's own limit is five seconds, after which a client's next request may meet a
    connection that is just being closed."""
    with process(0.0, 0.0) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.connect()
        first = connection.sock
        for pause in (0.0, 6.0):
            time.sleep(pause)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            assert connection.sock is first
        connection.close()
