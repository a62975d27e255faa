"""A peer's process for the time of its measurements: start, wait until it answers, end.

Unlike `hotbatch.bench.server_process` it ends whole process groups (vLLM's engine is a child
of its server), keeps the log for whoever wants to know why a peer failed, reads the memory of
all its processes, and speaks to the peers that have no server over their pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from peer_catalog import Peer

_END_SECONDS = 20.0
_TAIL_CHARS = 1500
_LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PeerFailedError(RuntimeError):
    """The peer is not installed, ended, or did not answer in time; the message says which."""


class PeerProcess:
    """A context: the process runs inside, and nothing of it is left outside."""

    def __init__(self, peer: Peer, model: str, threads: int, log: Path) -> None:
        self.peer = peer
        self._command = peer.command(model, threads)
        self._log_path = log
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        self._unread = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> PeerProcess:
        command = list(self._command)
        pipe = subprocess.PIPE if self.peer.is_in_process else None
        if not self.peer.is_in_process:
            command += ["--host", "127.0.0.1", "--port", str(self._port)]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=pipe or subprocess.DEVNULL,
                    stdout=pipe or log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerFailedError(
                    f"cannot start {command[0]} ({error.strerror}): is it installed? "
                    "python benchmarks/peers/install.py"
                ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._running
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        self._signal(signal.SIGKILL)  # the children too, which may outlive their parent
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._running.pid, number)

    def wait_until_ready(self, patience: float) -> None:
        """Raises PeerFailedError if it ended, or is not ready after `patience` seconds."""
        deadline = time.monotonic() + patience
        if self.peer.is_in_process:
            self._answer(deadline)
            return
        while not self._is_healthy():
            self._check_running()
            if time.monotonic() > deadline:
                raise PeerFailedError(f"not ready after {patience:.0f} s. {self._last_words()}")
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            with _LOOPBACK.open(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _check_running(self) -> None:
        code = self._running.poll()
        if code is not None:
            raise PeerFailedError(f"ended with exit code {code}. {self._last_words()}")

    def _last_words(self) -> str:
        text = self._log_path.read_text(errors="replace") if self._log_path.exists() else ""
        return f"Its last words ({self._log_path}):\n{text[-_TAIL_CHARS:].strip()}"

    def served_name(self) -> str:
        """The first model that the server lists."""
        try:
            with _LOOPBACK.open(f"{self.url}/v1/models", timeout=30) as response:
                name: str = json.load(response)["data"][0]["id"]
                return name
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise PeerFailedError(f"does not list its model: {error!r}") from error

    # ---- peers without a server

    def ask(self, job: dict[str, Any], limit: float) -> dict[str, Any]:
        """Sends a line of JSON and returns the line that answers it.

        Raises:
            PeerFailedError: there is none within `limit` seconds.
        """
        stdin = self._running.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()
        except OSError:
            self._check_running()
            raise PeerFailedError("does not read. " + self._last_words()) from None
        return self._answer(time.monotonic() + limit)

    def _answer(self, deadline: float) -> dict[str, Any]:
        stdout = self._running.stdout
        assert stdout is not None
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise PeerFailedError(f"no answer in time. {self._last_words()}")
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                self._running.wait()
                self._check_running()
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    # ---- memory

    def peak_memory_mb(self) -> float:
        """The sum of the peaks of its processes' resident memory; shared pages count twice."""
        return (
            sum(peak_kb(folder) for folder in Path("/proc").glob("[0-9]*") if self._owns(folder))
            / 1024
        )

    def _owns(self, folder: Path) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return os.getsid(int(folder.name)) == self._running.pid
        return False


def peak_kb(folder: Path) -> int:
    """VmHWM of the process whose folder in /proc this is; 0 if it is gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+)", (folder / "status").read_text())
        return int(found.group(1)) if found else 0
    return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
