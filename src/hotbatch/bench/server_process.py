"""A server of our own for the time of a measurement: start, wait until it answers, end."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

SERVE = (sys.executable, "-m", "hotbatch.cli", "serve")
_END_SECONDS = 20.0
_TAIL_CHARS = 2000


class ServerFailedError(RuntimeError):
    """The server ended, or did not answer in time; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Server:
    """A healthy server: its address, and its process for whoever measures that."""

    url: str
    pid: int


@contextmanager
def serving(
    options: Sequence[str], *, command: Sequence[str] = SERVE, patience: float = 300.0
) -> Iterator[str]:
    """`server_process`, for whoever needs the address alone."""
    with server_process(options, command=command, patience=patience) as server:
        yield server.url


@contextmanager
def server_process(
    options: Sequence[str], *, command: Sequence[str] = SERVE, patience: float = 300.0
) -> Iterator[Server]:
    """Runs `command` with `options` and a free port; yields the server once it is healthy.

    `patience` (seconds) includes the fetching of a model on the first run.

    Raises:
        ServerFailedError: see there.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, *options, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            try:
                _wait_until_healthy(url, process, time.monotonic() + patience)
            except ServerFailedError as error:
                log.seek(0)
                words = log.read().decode(errors="replace")[-_TAIL_CHARS:].strip()
                raise ServerFailedError(f"{error}. Its last words:\n{words}") from None
            yield Server(url, process.pid)
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
    while process.poll() is None:
        try:
            with opener.open(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise ServerFailedError("the server did not become healthy in time") from None
            time.sleep(0.1)
    raise ServerFailedError(f"the server ended with exit code {process.returncode}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
