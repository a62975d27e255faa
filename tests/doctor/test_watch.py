"""The doctor over HTTP: a real server over a simulated model, and addresses that are wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_parts import make_rig, serving
from typer.testing import CliRunner

from hotbatch.cli import app
from hotbatch.core.errors import InvalidRequestError
from hotbatch.doctor import judge, make_window
from hotbatch.doctor.report import as_text
from hotbatch.doctor.watch import watch
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
