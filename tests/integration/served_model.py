"""`hotbatch serve` as a process of its own, with the real model, and what tests ask of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

MODEL = "smollm2-135m-instruct"
# Generous, for machines that do much else at the same time; every wait ends on a condition.
START_SECONDS = 300.0
WAIT_SECONDS = 120.0


@dataclass
class ServedModel:
    """A server process that takes requests at `url`; `said` are its lines on stderr."""

    process: subprocess.Popen[str]
    url: str = ""
    said: list[str] = field(default_factory=list)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_SECONDS, trust_env=False)

    def client(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_SECONDS
        )

    def async_client(self) -> openai.AsyncOpenAI:
        """The official client, without its limit of connections."""
        limits = httpx.Limits(max_connections=None)
        transport = httpx.AsyncClient(limits=limits, timeout=WAIT_SECONDS, trust_env=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=transport
        )

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, by its name without the prefix."""
        with self.http() as http:
            text = http.get("/metrics").raise_for_status().text
        samples = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"hotbatch:{name}"
        ]
        assert samples, f"there is no metric {name}"
        return sum(samples)

    def wait_idle(self) -> None:
        """Until no request is left and no block is in use."""
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            wait_until(lambda name=name: self.metric(name) == 0.0, f"{name} did not become 0")

    def end(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_SECONDS)


@contextmanager
def serve_model(*options: str) -> Iterator[ServedModel]:
    """Run `hotbatch serve` on a free port until the block ends."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "HOTBATCH_API_KEY" and not name.lower().endswith("_proxy")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "hotbatch.cli", "serve", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    server = ServedModel(process)
    reader = threading.Thread(target=_read, args=(server,), daemon=True)
    reader.start()
    try:
        wait_until(
            lambda: bool(server.url) or process.poll() is not None, "no address", START_SECONDS
        )
        assert server.url, f"the server did not start: {server.said}"
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join(WAIT_SECONDS)


def _read(server: ServedModel) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.said.append(line)
        found = re.search(r"Serving on (http://\S+)", line)
        if found:
            server.url = found[1]


def wait_until(condition: Callable[[], bool], says: str, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, says
        time.sleep(0.02)
