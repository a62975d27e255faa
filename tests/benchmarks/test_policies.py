"""The comparison of policies: its machines, workloads, figures, tables; all in virtual time."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "policies"))


import run as policy_run
from policy_machine import BATCH, INTERACTIVE, STANDARD, cpu, fit, h200
from policy_point import Heard, figures_of, hear, saturation, simulate
from policy_report import best_of, places, table
from policy_variant import variants
from policy_workload import TENANTS, Ask, arrival_times, asks, load_trace, requests

from hotbatch.bench.traces import TraceRow
from hotbatch.simulator import MeasuredStepTime, Outcome


def small_cpu(count: int = 30):
    return replace(cpu(), num_requests=count)


def make_asks(count: int = 30, *, mix: str = "mixed", seed: int = 1, name: str = "code"):
    return asks(load_trace(name, None), small_cpu(), count=count, mix=mix, seed=seed)


def variant(name: str):
    (found,) = [one for one in variants(cpu()) if one.name == name]
    return found


def measured_points(truth: MeasuredStepTime) -> list[dict[str, float]]:
    """What benchmarks/step/step_time.py would write on a machine with this curve."""
    points = []
    for rows in (1, 8, 64):
        for context in (128, 1024):
            seconds = truth.curve(rows) + rows * (
                truth.per_sample + truth.per_context_token * context
            )
            points.append(
                {"rows": rows, "context": context, "chunk": 1, "median_ms": 1e3 * seconds}
            )
    for size in (128, 512, 2048):
        pairs = size * (size + 1) / 2
        seconds = truth.curve(size) + truth.per_sample + truth.per_pair * pairs
        points.append({"rows": 1, "context": size, "chunk": size, "median_ms": 1e3 * seconds})
    return points


def test_a_measured_table_gives_the_machine_back():
    tokens = (1, 8, 64, 128, 512, 2048)
    truth = MeasuredStepTime(tokens, tuple(3e-4 * max(n, 16) for n in tokens), 7e-7, 2e-7, 8e-5)
    found = fit(measured_points(truth))
    assert found.per_context_token == pytest.approx(7e-7, rel=1e-3)
    assert found.per_pair == pytest.approx(2e-7, rel=0.1)
    assert found.per_sample == pytest.approx(8e-5, rel=0.1)
    for tokens in (1, 8, 64, 300, 2048, 4000):
        assert found.curve(tokens) == pytest.approx(truth.curve(tokens), rel=0.05)


def test_too_few_points_are_told():
    with pytest.raises(ValueError, match="numbers of rows"):
        fit([{"rows": 1, "context": 128, "chunk": 1, "median_ms": 5.0}])
    points = [{"rows": rows, "context": 128, "chunk": 1, "median_ms": 5.0} for rows in (1, 2)]
    with pytest.raises(ValueError, match="contexts"):
        fit(points)


def test_the_described_cpu_is_near_its_measurements():
    machine = cpu()
    assert machine.alone(512) == pytest.approx(0.184, rel=0.03)
    assert machine.alone(2048) == pytest.approx(1.09, rel=0.03)


def test_promises_have_a_floor_and_grow_with_the_prompt():
    machine = cpu()
    assert machine.targets(INTERACTIVE, 10).ttft == 2.0
    assert machine.targets(INTERACTIVE, 4000).ttft == pytest.approx(4 * machine.alone(4000))
    assert machine.targets(BATCH, 10).tpot is None
    for one in (cpu(), h200()):
        assert one.targets(INTERACTIVE, 500).ttft < one.targets(STANDARD, 500).ttft


def test_workloads_repeat_and_have_their_shares():
    asked = make_asks(3000)
    assert asked == make_asks(3000) != make_asks(3000, seed=2)
    assert sum(ask.service_class is INTERACTIVE for ask in asked) / 3000 == pytest.approx(
        0.5, abs=0.03
    )
    assert sum(ask.tenant == "large" for ask in asked) / 3000 == pytest.approx(
        TENANTS["large"], abs=0.03
    )
    assert {ask.service_class for ask in make_asks(mix="one")} == {STANDARD}


def test_arrivals_keep_the_pattern_at_the_rate_asked_for():
    asked = make_asks()
    times = arrival_times(asked, 2.0)
    assert times[-1] == pytest.approx(15.0)
    assert times[7] / times[20] == pytest.approx(asked[7].row.time / asked[20].row.time)
    assert set(arrival_times(asked, float("inf"))) == {0.0}


def test_prompts_share_what_the_trace_shares():
    first = Ask(TraceRow(0.0, 700, 3, (1, 2)), STANDARD, "t", 1.0, 1.0)
    second = Ask(TraceRow(1.0, 600, 3, (1, 3)), STANDARD, "t", 1.0, 1.0)
    one, two = requests([first, second], [0.0, 1.0])
    assert one.tokens[:512] == two.tokens[:512]
    assert not set(one.tokens[512:]) & set(two.tokens[512:])
    plain = [replace(ask, row=replace(ask.row, prefix=())) for ask in (first, second)]
    one, two = requests(plain, [0.0, 1.0])
    assert not set(one.tokens) & set(two.tokens)


def outcome(*times: float) -> Outcome:
    return Outcome(10.0, token_ids=[1] * len(times), token_times=list(times))


@pytest.mark.parametrize(
    ("times", "is_good"),
    [
        ((11.0, 11.5, 12.0), True),
        ((12.1, 12.2, 12.3), False),  # late
        ((11.0, 11.5, 12.2), False),  # slow
        ((11.0, 11.5), False),  # cut short
        ((), False),
    ],
)
def test_good_is_whole_and_within_both_targets(times: tuple[float, ...], is_good: bool):
    ask = Ask(TraceRow(0.0, 10, 3), STANDARD, "t", 2.0, 0.5)
    assert hear(ask, outcome(*times)).is_good is is_good


def test_goodput_counts_the_good_ones_per_second_offered():
    heard = [
        Heard("batch", "a", 1.0, 0.1, None, True),
        Heard("batch", "a", None, None, "queue_wait", False),
        Heard("interactive", "b", 1.0, 0.1, None, True),
    ]
    figures = figures_of(heard, 4.0)
    assert figures["goodput"] == 0.5
    assert figures["attainment_by_class"] == {"batch": 0.5, "interactive": 1.0}
    assert figures["unanswered"] == {"queue_wait": 1}


def test_a_point_is_the_same_every_time_and_ends_whole():
    asked = make_asks()
    rate = saturation(small_cpu(), variant("first-come 512"), asked)
    first = simulate(small_cpu(), variant("full"), asked, rate, seed=1)
    assert first == simulate(small_cpu(), variant("full"), asked, rate, seed=1)
    assert first != simulate(small_cpu(), variant("full"), asked, rate, seed=2)
    assert first["requests"] == 30 and first["unanswered"] == {}


def test_names_of_variants_are_unique():
    names = [one.name for one in variants(cpu())]
    assert len(set(names)) == len(names)
    assert {"request-level", "full", "+ classes", "full - fairness"} <= set(names)


def row(name: str, family: str, fraction: float, goodput: float, seed: int = 1) -> dict:
    return {
        "machine": "cpu", "trace": "code", "mix": "mixed", "variant": name, "family": family,
        "fraction": fraction, "goodput": goodput, "saturation": 2.0, "seed": seed,
        "attainment_by_class": {"batch": 1.0},
    }  # fmt: skip


def test_the_best_of_a_family_is_chosen_at_each_rate():
    rows = [
        row("first-come 64", "first-come", 0.5, 1.0), row("first-come 64", "first-come", 1.1, 0.4),
        row("first-come 512", "first-come", 0.5, 0.8),
        row("first-come 512", "first-come", 1.1, 0.4, seed=1),
        row("first-come 512", "first-come", 1.1, 0.8, seed=2),
        row("static 8", "static", 0.5, 0.5), row("static 8", "static", 1.1, 0.0),
        row("full", "full", 0.5, 1.0), row("full", "full", 1.1, 1.2),
    ]  # fmt: skip
    assert best_of(rows, "first-come") == {
        0.5: (0.5, "first-come 64"),
        1.1: (pytest.approx(0.3), "first-come 512"),
    }
    assert list(places(rows)) == [("cpu", "code", "mixed")]
    lines = {line[:30].strip(): line[30:].split() for line in table(rows).splitlines()}
    assert lines["full / best first-come"] == ["1.00", "2.00"]
    assert lines["full / best static"] == ["2.00", "inf"]


def test_the_command_writes_figures_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = policy_run.main(
        ["--machines", "cpu", "--workloads", "conversation", "--rates", "0.5,1.1", "--seeds", "1",
         "--shrink", "8", "--processes", "1", "--only", "static 8,first-come 512,full",
         "--json", str(tmp_path / "out.json"), "--plot-dir", str(tmp_path)]
    )  # fmt: skip
    assert code == 0
    assert "full / best first-come" in capsys.readouterr().out
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert {one["variant"] for one in runs} >= {"static 8", "first-come 512", "full"}
    assert (tmp_path / "cpu-conversation-mixed.png").read_bytes().startswith(b"\x89PNG")


def test_the_full_scheduler_beats_first_come_under_overload():
    machine = replace(cpu(), num_requests=150)
    asked = asks(load_trace("conversation", None), machine, count=150, mix="mixed", seed=1)
    rate = 1.3 * saturation(machine, variant("first-come 2048"), asked)
    goods = {
        name: simulate(machine, variant(name), asked, rate, seed=1)["goodput"]
        for name in ("static 8", "first-come 512", "full")
    }
    assert goods["full"] > 1.05 * goods["first-come 512"] > goods["static 8"]
