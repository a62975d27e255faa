"""The staged scenarios: their arithmetic, and one of them on a server without a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "policies"))


import scenarios
from scenario_parts import (
    Check,
    Report,
    UsualGap,
    longest_gap,
    must,
    percentile,
    rate_between,
    requests,
    talkers,
)

from hotbatch.bench.client import Record
from hotbatch.bench.workload import BenchRequest

SERVE = (sys.executable, str(Path(__file__).parents[1] / "bench" / "simulated_serve.py"))


def test_gaps_include_both_ends():
    assert longest_gap([1.0, 2.0, 5.0], 0.0, 6.0) == 3.0
    assert longest_gap([1.0], 0.0, 9.0) == 8.0
    assert longest_gap([], 2.0, 9.0) == 7.0
    assert longest_gap([20.0], 2.0, 9.0) == 7.0


def test_rates_and_percentiles():
    assert rate_between([0.5, 1.0, 1.5, 2.0], 1.0, 2.0) == 2.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([], 50) == float("inf")


def test_a_report_passes_if_all_its_checks_do():
    report = Report("x", {"a": 1.0}, [Check("one", 2.0, 3.0), Check("two", 3.0, 3.0)])
    assert report.is_passed
    assert "pass  one: 2 (at most 3)" in report.text()
    report.checks.append(Check("three", 3.1, 3.0, " s"))
    assert not report.is_passed
    assert "FAIL  three: 3.1 s (at most 3 s)" in report.text()
    assert report.record()["checks"][2]["is_kept"] is False


def test_requests_carry_their_class_and_tenant():
    (request,) = requests(1, 9, 3, seed=1, service_class="interactive", tenant="small")
    assert request.fields == {"service_tier": "priority", "user": "small"}
    assert (request.service_class, request.tenant) == ("interactive", "small")


def test_a_usual_gap_grows_from_one_side_to_the_other():
    usual = UsualGap((10.0, 0.004), (12.0, 0.008))
    assert usual.times(0.012, 11.0) == pytest.approx(2.0)
    assert usual.times(0.012, 9.0) == pytest.approx(3.0)
    assert usual.times(0.012, 13.0) == pytest.approx(1.5)


def test_talkers_are_heard_at_every_token():
    (request,) = talkers(1, 9, 3, seed=1)
    assert request.fields == {"return_token_ids": True}


def test_a_failure_makes_figures_void():
    with pytest.raises(RuntimeError, match="oh no"):
        must([Record(BenchRequest((1,), 1, 1), error="oh no")])


def test_a_scenario_runs_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    code = scenarios.main(["--only", "long", "--brief", "--json", str(out)], command=SERVE)
    (report,) = json.loads(out.read_text())["scenarios"]
    assert code == (0 if report["is_passed"] else 1)
    assert len(report["checks"]) == 2
    assert all(check["measured"] > 0.0 for check in report["checks"])
    assert "first token of the prompt" in capsys.readouterr().out


def test_a_server_that_fails_is_told(capsys: pytest.CaptureFixture[str]):
    code = scenarios.main(["--only", "long", "--brief", "--", "--fail"], command=SERVE)
    assert code == 1
    assert "cannot start" in capsys.readouterr().err
