"""Fair shares among the tenants of a class, and what admission expects everybody to write."""

from __future__ import annotations

import random

import pytest
from core_factories import (
    LinearCost,
    full_scheduler,
    make_request,
    must_plan,
    run_step,
    run_to_end,
    sizes,
)

from hotbatch.core import InvalidRequestError, LatencyTargets, SchedulerConfig, ServiceClass
from hotbatch.core.rank import Rank


def test_the_tenant_that_was_served_least_is_seated_next() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    for index in range(4):
        scheduler.add(make_request(f"big{index}", 8, max_tokens=2, tenant="big"))
    scheduler.add(make_request("small", 8, max_tokens=2, tenant="small"))
    order = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert order == ["big0", "small", "big1", "big2", "big3"]


def test_a_prompt_is_charged_at_once_so_that_one_step_is_shared_too() -> None:
    scheduler = full_scheduler(max_num_seqs=4)
    for index in range(6):
        scheduler.add(make_request(f"big{index}", 4, tenant="big"))
    for index in range(2):
        scheduler.add(make_request(f"small{index}", 4, tenant="small"))
    assert set(sizes(must_plan(scheduler))) == {"big0", "small0", "big1", "small1"}


def test_without_fairness_it_is_the_order_of_arrival() -> None:
    scheduler = full_scheduler(max_num_seqs=1, without="fairness")
    for name, tenant in (("a", "big"), ("b", "big"), ("c", "small")):
        scheduler.add(make_request(name, 4, max_tokens=1, tenant=tenant))
    assert [event.request_id for event in run_to_end(scheduler)] == ["a", "b", "c"]


@pytest.mark.parametrize(("weights", "share"), [({}, 0.5), ({"big": 3.0}, 0.75)])
def test_busy_tenants_get_service_by_weight_within_the_bound(
    weights: dict[str, float], share: float
) -> None:
    """The bound of arXiv 2401.00588: twice the larger of a prompt and a batch's outputs."""
    seats, prompt, output = 4, 8, 6
    scheduler = full_scheduler(max_num_seqs=seats, tenant_weights=weights, num_blocks=64)
    served = {"big": 0.0, "small": 0.0}
    bound = 2.0 * max(prompt, 2.0 * seats * output)
    for step in range(300):
        for count in range(10 if step % 5 == 0 else 0):
            scheduler.add(make_request(f"big{step}.{count}", prompt, max_tokens=6, tenant="big"))
        if step % 2 == 0:
            scheduler.add(make_request(f"small{step}", prompt, max_tokens=output, tenant="small"))
        plan, events = run_step(scheduler)
        for planned in plan.requests:
            tenant = "big" if planned.request_id.startswith("big") else "small"
            served[tenant] += max(0, min(prompt, planned.context_len) - planned.start)
            served[tenant] += 2.0 * (planned.request_id in events)
        if step > 20:
            gap = served["big"] * (1 - share) - served["small"] * share
            assert abs(gap) <= bound, f"step {step}: {served}"


def promised(seconds: float) -> LatencyTargets:
    return LatencyTargets(ttft=seconds)


@pytest.mark.parametrize(
    ("served", "targets", "first"),
    [
        (20, promised(9.0), "urgent"),  # 28 weighted tokens ahead, of the 32 of a step
        (40, promised(9.0), "patient"),  # too far ahead
        (20, LatencyTargets(), "patient"),  # who named no deadline is passed for nobody's
    ],
)
def test_a_deadline_bends_the_turns_by_the_tokens_of_a_step_at_most(
    served: int, targets: LatencyTargets, first: str
) -> None:
    scheduler = full_scheduler(cost_model=LinearCost(), max_num_seqs=1)
    scheduler.add(make_request("before", served, max_tokens=4, tenant="a"))
    scheduler.add(make_request("patient", 4, tenant="b", targets=targets))
    run_step(scheduler)
    scheduler.add(make_request("urgent", 4, tenant="a", targets=promised(1.0)))
    order = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert order[:2] == ["before", first]


@pytest.mark.parametrize("seed", range(4))
def test_however_deadlines_bend_the_turns_service_stays_within_the_bound(seed: int) -> None:
    """That of turns alone, and twice the tokens of a step."""
    rng = random.Random(seed)
    seats, prompt, output, most = 4, 8, 6, 16
    scheduler = full_scheduler(
        cost_model=LinearCost(), max_num_seqs=seats, max_num_batched_tokens=most, num_blocks=64
    )
    served = {"hurried": 0.0, "calm": 0.0}
    low = high = 0.0
    for step in range(400):
        for tenant, seconds in (("hurried", 1e3), ("calm", 1e6)):
            for count in range(3 if step % 4 == 0 else 0):
                due = promised(seconds + rng.random())
                name = f"{tenant}{step}.{count}"
                scheduler.add(make_request(name, prompt, max_tokens=6, tenant=tenant, targets=due))
        plan, events = run_step(scheduler)
        for planned in plan.requests:
            tenant = "hurried" if planned.request_id.startswith("hurried") else "calm"
            served[tenant] += max(0, min(prompt, planned.context_len) - planned.start)
            served[tenant] += 2.0 * (planned.request_id in events)
        gap = served["hurried"] - served["calm"]
        low, high = min(low, gap), max(high, gap)
    assert high >= most, "deadlines did bend them"
    assert high - low <= 2.0 * max(prompt, 2.0 * seats * output) + 2.0 * most


def test_a_newcomer_is_not_owed_what_it_never_asked_for() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    for index in range(10):
        scheduler.add(make_request(f"old{index}", 8, max_tokens=2, tenant="old"))
    for _ in range(10):
        run_step(scheduler)
    for index in range(4):
        scheduler.add(make_request(f"new{index}", 8, max_tokens=2, tenant="new"))
    order = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert order.index("old7") < order.index("new2"), "they take turns from now on"


def test_tenants_are_told_apart_inside_a_class_only() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    scheduler.add(make_request("low", tenant="idle", service_class=ServiceClass.BATCH))
    for index in range(3):
        scheduler.add(make_request(f"high{index}", 8, max_tokens=2, tenant="busy"))
    order = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert order == ["high0", "high1", "high2", "low"]


def test_a_weight_must_be_positive() -> None:
    with pytest.raises(InvalidRequestError, match="the weight of 'a' must be above 0"):
        SchedulerConfig(num_blocks=8, max_model_len=64, tenant_weights={"a": 0.0})


def test_memory_follows_the_tenants_that_wait() -> None:
    scheduler = full_scheduler()
    for index in range(3000):
        scheduler.add(make_request(f"r{index}", 2, max_tokens=1, tenant=f"t{index}"))
        run_step(scheduler)
    assert scheduler._counters is not None
    assert len(scheduler._counters[Rank.STANDARD]) <= 1025
    assert not scheduler._roster.queues[ServiceClass.STANDARD]._newcomers


# Admission by forecast


def learnt(num_output: int, **overrides: object):  # type: ignore[no-untyped-def]
    scheduler = full_scheduler(
        num_blocks=24, max_num_seqs=16, max_num_batched_tokens=64, **overrides
    )  # type: ignore[arg-type]
    for index in range(16):
        scheduler.add(make_request(f"past{index}", 4, max_tokens=num_output))
    run_to_end(scheduler)
    return scheduler


def num_seated(scheduler) -> int:  # type: ignore[no-untyped-def]
    for index in range(12):
        scheduler.add(make_request(f"r{index}", 4, max_tokens=60))
    return len(must_plan(scheduler).requests)


def test_admission_expects_what_recent_requests_wrote() -> None:
    # 96 tokens: seven of 12 at their end, or three of 28; `max_tokens` would allow one.
    assert num_seated(learnt(8)) == 8
    assert num_seated(learnt(24)) == 3
    assert num_seated(learnt(24, without="forecast")) == 12


def test_admission_by_forecast_never_stops_a_lone_request() -> None:
    scheduler = full_scheduler(num_blocks=8)
    scheduler.add(make_request("a", 4, max_tokens=28))
    assert set(sizes(must_plan(scheduler))) == {"a"}


def test_what_lower_classes_hold_does_not_stop_a_higher_one() -> None:
    scheduler = full_scheduler(num_blocks=16, enable_prefix_caching=False)
    scheduler.add(make_request("low", 40, max_tokens=20, service_class=ServiceClass.BATCH))
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(make_request("peer", 8, max_tokens=20, service_class=ServiceClass.BATCH))
    assert set(sizes(run_step(scheduler)[0])) == {"low"}
    high = make_request("high", 8, max_tokens=20, service_class=ServiceClass.INTERACTIVE)
    scheduler.add(high)
    assert set(sizes(run_step(scheduler)[0])) == {"high", "low"}
