"""The dashboard in docs/grafana asks for metrics that the server has."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from server_parts import make_rig, serving
from test_http_metrics import CEILING, WORK

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"


def test_every_panel_s_metrics_exist() -> None:
    with serving(make_rig(executor={"work": WORK}, ceiling=CEILING)) as rig:
        text = httpx.get(f"{rig.url}/metrics", trust_env=False).text
    names = set()
    for family in text_string_to_metric_families(text):
        names.add(family.name)
        names |= {sample.name for sample in family.samples}
        if family.type == "counter":  # one without a value yet shows its name only
            names.add(f"{family.name}_total")
    board = json.loads((FOLDER / "hotbatch.json").read_text())
    asked = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(r"hotbatch:\w+", target["expr"]))
    assert len(asked) > 15
    assert asked <= names


def test_the_file_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(FOLDER / "make_dashboard.py"))
    assert json.loads((FOLDER / "hotbatch.json").read_text()) == script["dashboard"]()
