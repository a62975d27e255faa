"""The doctor over HTTP: a real server over a simulated model, and addresses that are wrong."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_parts import make_rig, serving
from typer.testing import CliRunner

from hotbatch.cli import app
from hotbatch.core.errors import InvalidRequestError
from hotbatch.doctor import judge, make_window
from hotbatch.doctor.report import as_text
from hotbatch.doctor.watch import _Load, watch
from hotbatch.engine import Ceiling, ModelWork

WORK = ModelWork(3e6, 1e6, 700.0, 2.5e8, 0.5e8, 1.0)
CEILING = Ceiling(1e9, 1e12, 1e12, "made up")


def test_a_running_server_under_our_own_load() -> None:
    with serving(make_rig(executor={"work": WORK}, ceiling=CEILING)) as rig:
        left: list[float] = []
        scrapes = watch(rig.url + "/metrics", 1.2, num_clients=2, on_scrape=left.append)
        rig.wait_idle()
    assert len(scrapes) >= 3 and len(left) >= 2
    window = make_window(scrapes)
    assert window.server == "hotbatch"
    assert window.generated_rate > 0.0
    assert sum(window.causes.values()) == pytest.approx(1.0)
    assert "of the time" in as_text(judge(window), window) or judge(window).cause == "healthy"


def test_no_prompt_of_our_load_is_sent_twice() -> None:
    """A server that guesses answers what it was asked before without computing anything."""

    prompts: list[str] = []
    enough = threading.Event()

    class Http:
        def get(self, url: str) -> httpx.Response:
            return httpx.Response(200, json={"data": [{"id": "m"}]})

        def post(self, url: str, json: dict[str, Any], timeout: float) -> None:
            prompts.append(json["prompt"])
            if len(prompts) >= 40:
                enough.set()

    for _ in range(2):  # and not in the next run either
        enough.clear()
        with _Load(Http(), 2):  # type: ignore[arg-type]
            assert enough.wait(10.0)
    beginnings = {prompt[:10] for prompt in prompts}
    assert len(beginnings) == len(prompts)


def test_more_clients_than_a_pool_has_connections_leave_room_for_the_scrapes() -> None:
    with serving(make_rig(executor={"work": WORK}, ceiling=CEILING)) as rig:
        scrapes = watch(rig.url, 0.5, num_clients=120)
        rig.wait_idle()
    assert len(scrapes) >= 2


def test_the_command_prints_text_or_json() -> None:
    with serving(make_rig(executor={"work": WORK}, ceiling=CEILING)) as rig:
        text = CliRunner().invoke(app, ["doctor", rig.url, "--seconds", "0.5"])
        as_json = CliRunner().invoke(app, ["doctor", rig.url, "--seconds", "0.5", "--json"])
    assert text.exit_code == 0, text.output
    assert "nothing to judge" in text.stdout
    assert json.loads(as_json.stdout)["cause"] == "idle"


def test_nobody_there() -> None:
    with pytest.raises(InvalidRequestError, match="No server answers"):
        watch("http://127.0.0.1:9", 0.5)
