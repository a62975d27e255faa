"""A server of one's own: what it says, whom it refuses, and how it ends."""

from __future__ import annotations

import json
import threading

import httpx
from served_model import MODEL, WAIT_SECONDS, ServedModel, serve_model

BODY = {"model": MODEL, "prompt": "Once upon a time", "stream": True, "ignore_eos": True}


def test_keys_limits_and_an_open_stream_at_the_end() -> None:
    options = ("--api-key", "sesame", "--max-body-bytes", "20K", "--shutdown-grace", "0.5")
    with serve_model(*options, "--served-model-name", "tiny", "--threads", "1") as server:
        said = "".join(server.said)
        assert "KV blocks" in said and "int8" in said and "sesame" not in said
        with server.http() as http:
            refused = http.get("/v1/models")
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/health").status_code == 200
            http.headers["Authorization"] = "Bearer sesame"
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny"]
            large = http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 30_000})
            assert large.status_code == 413
            assert large.json()["error"]["code"] == "request_too_large"
        lines, exit_code = _end_with_open_stream(server)
        assert exit_code == 0, server.said
    # 7000 tokens do not fit into half a second: the stream was cut, and told so.
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "abort"


def test_a_running_answer_may_finish() -> None:
    with serve_model("--api-key", "sesame", "--shutdown-grace", "100") as server:
        lines, exit_code = _end_with_open_stream(server, MODEL, max_tokens=40)
        assert exit_code == 0, server.said
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def _end_with_open_stream(
    server: ServedModel, model: str = "tiny", max_tokens: int = 7000
) -> tuple[list[str], int]:
    """SIGTERM once a stream has begun; the lines of the stream, and the exit code."""
    lines: list[str] = []
    has_begun = threading.Event()

    def read() -> None:
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json=BODY | {"model": model, "max_tokens": max_tokens},
            headers={"Authorization": "Bearer sesame"},
            timeout=WAIT_SECONDS,
            trust_env=False,
        ) as answer:
            for line in answer.iter_lines():
                if line:
                    lines.append(line)
                    has_begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_begun.wait(WAIT_SECONDS)
    exit_code = server.end()
    reader.join(WAIT_SECONDS)
    assert not reader.is_alive()
    return lines, exit_code
