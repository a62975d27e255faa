"""What watchers may ask the engine, and that traces show each step as it was."""

from __future__ import annotations

import pytest
from engine_parts import STEP_SECONDS, Rig, make_request, make_scheduler

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.policies import full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.engine.step_trace import StepTrace

BATCH, STANDARD, INTERACTIVE = ServiceClass


def test_a_trace_is_the_step():
    rig = Rig()
    traces: list[StepTrace] = []
    rig.engine.tracers.append(traces.append)
    rig.engine.submit(make_request("a", tokens=3))
    rig.run_until_idle()
    assert [trace.plan for trace in traces] == rig.executor.plans
    sampled = [trace.result.requests[0].token_ids for trace in traces if trace.result]
    assert [token for ids in sampled for token in ids] == rig.heard.tokens("a")
    assert [trace.stats.step_id for trace in traces] == [0, 1, 2]


def test_a_failed_step_is_traced_without_a_result():
    rig = Rig()
    traces: list[StepTrace] = []
    rig.engine.tracers.append(traces.append)

    def fail(plan: object) -> None:
        raise ValueError("no")

    rig.executor.before_step = fail
    rig.engine.submit(make_request("a"))
    rig.engine.tick()
    assert traces[0].result is None
    assert traces[0].stats.failed


def test_a_tracer_that_raises_is_dropped():
    rig = Rig()

    def tracer(trace: StepTrace) -> None:
        raise RuntimeError("our bug")

    rig.engine.tracers.append(tracer)
    rig.engine.submit(make_request("a"))
    rig.run_until_idle()
    assert rig.engine.tracers == []
    assert rig.heard.ends("a")


def test_promises_are_known_until_the_end():
    rig = Rig()
    request = make_request("a", tokens=2)
    request.service_class = INTERACTIVE
    rig.engine.submit(request)
    promise = rig.engine.view.promise_of("a")
    assert promise is not None
    assert promise.service_class is INTERACTIVE
    assert (promise.arrival, promise.num_prompt) == (request.arrival, request.num_prompt)
    rig.run_until_idle()
    assert rig.engine.view.promise_of("a") is None


def test_the_longest_wait_of_each_class():
    rig = Rig(scheduler=make_scheduler(max_num_seqs=1))
    for name, service_class in (("a", STANDARD), ("b", STANDARD), ("c", INTERACTIVE)):
        request = make_request(name, tokens=2)
        request.service_class = service_class
        rig.engine.submit(request)
    assert rig.engine.view.longest_waits() == [0.0, 0.0, 0.0]
    rig.engine.tick()
    late = make_request("d", tokens=2)
    late.service_class = STANDARD
    rig.engine.submit(late)
    waits = rig.engine.view.longest_waits()
    assert waits == [0.0, STEP_SECONDS, STEP_SECONDS], "the oldest of each, not the newest"
    rig.run_until_idle()
    assert rig.engine.view.longest_waits() == [0.0, 0.0, 0.0]


def test_targets_and_seats():
    targets = {BATCH: LatencyTargets(9.0, None)}
    rig = Rig(scheduler=make_scheduler(max_num_seqs=5, targets=targets))
    assert rig.engine.view.num_seats == 5
    assert rig.engine.view.targets_of(BATCH) == LatencyTargets(9.0, None)
    assert rig.engine.view.targets_of(STANDARD) == LatencyTargets()


def test_the_curve_is_told_as_soon_as_it_is_known():
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=256)
    rig = Rig(scheduler=Scheduler(config, full_policies()))
    assert rig.engine.view.predicted_curve(8, (1, 2)) == []
    for number in range(8):
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        rig.engine.submit(Request(str(number), [number] * 9, params, seed=1))
        rig.run_until_idle()
    one, two = rig.engine.view.predicted_curve(8, (1, 2))
    assert one == pytest.approx(STEP_SECONDS, rel=0.1)
    assert two == pytest.approx(STEP_SECONDS, rel=0.1)
