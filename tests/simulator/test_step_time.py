from __future__ import annotations

import statistics

import pytest

from hotbatch.core import (
    PlannedRequest,
    Request,
    SampleSpec,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)
from hotbatch.core.errors import OverloadedError
from hotbatch.core.plan import FinishReason
from hotbatch.simulator import (
    ConstantStepTime,
    MeasuredStepTime,
    RooflineStepTime,
    Simulation,
    TimeOnlyExecutor,
    UnsteadyStepTime,
)


def planned(start: int, count: int, *, samples: bool = False) -> PlannedRequest:
    spec = SampleSpec(SamplingParams(), 0, start + count, 1) if samples else None
    return PlannedRequest("a", start, (1,) * count, (), spec)


def plan_of(*requests: PlannedRequest, step_id: int = 0) -> StepPlan:
    return StepPlan(step_id, requests)


CURVE = MeasuredStepTime((1, 8, 16), (4.0, 5.0, 9.0), 0.01, 0.001, per_sample=0.5, overhead=0.25)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(1, 4.0), (8, 5.0), (12, 7.0), (16, 9.0), (32, 17.0)]
)
def test_the_curve_has_straight_lines_and_goes_on(tokens: int, seconds: float):
    assert CURVE.curve(tokens) == pytest.approx(seconds)


def test_attention_is_the_slower_of_reading_and_computing():
    decode = planned(99, 1, samples=True)
    assert CURVE(plan_of(decode)) == pytest.approx(0.25 + 0.5 + 4.0 + 100 * 0.01)
    chunk = planned(100, 16)  # 16 * 100 + 136 pairs, 116 tokens of context
    assert CURVE(plan_of(chunk)) == pytest.approx(0.25 + 9.0 + 1736 * 0.001)


@pytest.mark.parametrize(("tokens", "seconds"), [((1,), (1.0,)), ((2, 1), (1.0, 2.0))])
def test_a_curve_that_is_none_is_refused(tokens: tuple[int, ...], seconds: tuple[float, ...]):
    with pytest.raises(ValueError, match=r"curve|ascend"):
        MeasuredStepTime(tokens, seconds, 0.0, 0.0)


def test_the_roofline_counts_pairs_as_compute():
    roof = RooflineStepTime(
        overhead=1.0, weights=2.0, per_token=0.1, per_context_token=0.0, per_pair=0.01
    )
    assert roof(plan_of(planned(9, 1))) == pytest.approx(3.0)
    assert roof(plan_of(planned(0, 20))) == pytest.approx(1.0 + 2.0 + 2.1)


def test_unsteady_times_spread_around_the_model_and_repeat():
    unsteady = UnsteadyStepTime(ConstantStepTime(1.0), spread=0.1, seed=3)
    plans = [plan_of(planned(0, 1), step_id=step) for step in range(2000)]
    times = [unsteady(plan) for plan in plans]
    assert times == [unsteady(plan) for plan in plans]
    assert times != [UnsteadyStepTime(ConstantStepTime(1.0), 0.1, seed=4)(p) for p in plans]
    assert statistics.median(times) == pytest.approx(1.0, rel=0.02)
    assert statistics.pstdev(times) == pytest.approx(0.1, rel=0.1)


def test_hiccups_come_as_often_as_asked():
    unsteady = UnsteadyStepTime(ConstantStepTime(1.0), 0.0, hiccup=0.25, hiccup_seconds=5.0)
    times = [unsteady(plan_of(planned(0, 1), step_id=step)) for step in range(2000)]
    assert sum(time == 6.0 for time in times) / 2000 == pytest.approx(0.25, abs=0.03)


def make_simulation(scheduler_type: type[Scheduler] = Scheduler) -> Simulation:
    config = SchedulerConfig(num_blocks=64, max_model_len=512, max_num_seqs=8)
    executor = TimeOnlyExecutor(num_blocks=64, max_model_len=512, step_time=ConstantStepTime(0.5))
    return Simulation(scheduler_type(config), executor, check_integrity=True)


def make_request(name: str, arrival: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return Request(name, range(40), params, seed=0, arrival=arrival)


def test_time_only_requests_end_at_their_length():
    simulation = make_simulation()
    simulation.arrive(make_request("a"))
    simulation.arrive(make_request("b", arrival=1.2))
    outcomes = simulation.run()
    assert outcomes["a"].token_times == [0.5, 1.0, 1.5, 2.0]
    assert outcomes["b"].token_times == [2.0, 2.5, 3.0, 3.5]
    assert simulation.executor.steps_run == 7


class FullScheduler(Scheduler):
    def add(self, request: Request) -> None:
        if request.request_id == "b":
            raise OverloadedError("too many", reason="queue_requests", retry_after=1.0)
        super().add(request)


def test_a_refusal_at_arrival_is_an_outcome():
    simulation = make_simulation(FullScheduler)
    simulation.arrive(make_request("a"))
    simulation.arrive(make_request("b", arrival=0.7))
    outcomes = simulation.run()
    assert outcomes["a"].finish_reason is FinishReason.LENGTH
    assert outcomes["b"].finish_reason is FinishReason.ERROR
    assert outcomes["b"].error_reason == "queue_requests"
    assert outcomes["b"].finish_time == 1.0
