"""The scheduler's own cost and the cache's waste: that they measure what they say."""

from __future__ import annotations

import json
import pstats
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "policies"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "overhead"))


import fragmentation
import plan_commit
from policy_workload import Ask

from hotbatch.bench.traces import TraceRow
from hotbatch.core import PlannedRequest, StepPlan, StepResult
from hotbatch.core.service_class import ServiceClass
from hotbatch.simulator import Outcome


@pytest.mark.parametrize("policies", ["first-come", "full"])
def test_all_running_requests_decode_while_others_wait(policies: str):
    bed = plan_commit.Bed(policies, num_running=5, num_waiting=12, prompt_len=40, steps=8)
    for _ in range(8):
        plan = bed.plan()
        assert len(plan.requests) == plan.num_tokens == 5
        bed.commit(plan, plan_commit.made_up_result(plan))
        stats = bed.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (5, 12)
    bed.scheduler.check_integrity()


def test_time_is_booked_on_the_part_that_spent_it():
    stats = pstats.Stats()
    queue = ("/x/core/class_queue.py", 1, "first")
    booking = ("/x/core/scheduler.py", 1, "_book")
    stats.stats = {
        queue: (1, 1, 1.0, 1.0, {}),
        booking: (1, 1, 2.0, 2.0, {}),
        ("~", 0, "<method 'pop'>"): (2, 2, 1.0, 1.0, {queue: (1, 1, 1.0, 1.0)}),
        ("~", 0, "<method 'disable' of '_lsprof.Profiler' objects>"): (1, 1, 9.0, 9.0, {}),
    }
    assert plan_commit.parts_of(stats) == {"queue": 0.5, "commit": 0.5}


def test_the_command_prints_each_point_and_judges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ["--running", "2,3", "--waiting", "4", "--steps", "3", "--prompt", "20", "--parts"]
    out = tmp_path / "out.json"
    assert plan_commit.main([*options, "--json", str(out), "--require", "2:4:1e9"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["policies"], row["running"]) for row in rows] == [
        ("first-come", 2), ("first-come", 3), ("full", 2), ("full", 3),
    ]  # fmt: skip
    assert sum(rows[0]["parts"].values()) == pytest.approx(1.0)
    assert plan_commit.main([*options, "--require", "2:4:0"]) == 1
    assert plan_commit.main([*options, "--require", "9:9:1"]) == 1
    assert "too slow" in capsys.readouterr().out


class Moment:
    """What the observer reads of a simulation."""

    def __init__(self, outcomes: dict[str, Outcome]) -> None:
        self.outcomes = outcomes
        self.clock = self

    def now(self) -> float:
        return 1.0


def test_slots_are_told_apart():
    asked = [Ask(TraceRow(0.0, 40, 9), ServiceClass.STANDARD, "t", None, None)] * 2
    slots = fragmentation.Slots(asked, block_size=16, every=1)
    moment = Moment({"r0": Outcome(0.0), "r1": Outcome(0.0)})
    # The first has computed 32 of its 40 prompt tokens, the second all and two of its output.
    plan = StepPlan(
        0,
        (
            PlannedRequest("r0", 0, (1,) * 32, (0, 1, 2)),
            PlannedRequest("r1", 41, (1,), (3, 4, 5)),
        ),
    )
    slots(moment, plan, StepResult(0, (), 0.1))
    assert (slots.allocated, slots.ahead, slots.tail) == ([96], [8], [8 + 6])
    moment.outcomes["r0"].finish_reason = object()
    slots(moment, StepPlan(1, plan.requests[1:]), StepResult(1, (), 0.1))
    assert slots.allocated[-1] == 48


def test_larger_blocks_waste_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    image = tmp_path / "frag.png"
    code = fragmentation.main(
        ["--workloads", "conversation", "--block-sizes", "16,64", "--shrink", "8",
         "--plot", str(image), "--json", str(tmp_path / "out.json")]
    )  # fmt: skip
    assert code == 0
    small, large = json.loads((tmp_path / "out.json").read_text())
    assert 0.0 < small["tail_share"] < large["tail_share"] < 0.5
    assert image.read_bytes().startswith(b"\x89PNG")
