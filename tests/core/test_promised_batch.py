"""Batch work that was promised a first token, beside those that are late already."""

from __future__ import annotations

import pytest
from core_factories import LinearCost, full_scheduler, make_request, run_step, run_to_end

from hotbatch.core import LatencyTargets, Request, Scheduler, ServiceClass
from hotbatch.core.rank import Rank

BATCH, STANDARD, INTERACTIVE = ServiceClass
_PROMISED = LatencyTargets(ttft=10.0)


def beside_a_late_one(
    targets: LatencyTargets = _PROMISED, prompt: int = 8, **overrides: object
) -> tuple[Scheduler, Request, Request]:
    """The only seat is taken; a standard request that is late and one of the batch class wait."""
    scheduler = full_scheduler(
        cost_model=LinearCost(),
        max_num_seqs=1,
        max_model_len=1000,
        num_blocks=300,
        late_share=0.0,
        ageing=None,
        **overrides,
    )
    scheduler.add(make_request("busy", max_tokens=20))
    run_step(scheduler)
    late = make_request("late", 8, max_tokens=2, targets=LatencyTargets(ttft=0.001))
    batch = make_request("batch", prompt, max_tokens=3, service_class=BATCH, targets=targets)
    scheduler.add(late)
    scheduler.add(batch)
    run_step(scheduler, now=1.0)
    assert (late.rank, batch.rank) == (Rank.LATE, Rank.BATCH)
    return scheduler, late, batch


def order_of(scheduler: Scheduler) -> list[str]:
    return [event.request_id for event in run_to_end(scheduler) if event.finish_reason]


def test_at_first_it_lets_those_pass_that_are_late() -> None:
    scheduler, _, batch = beside_a_late_one()
    run_step(scheduler, now=4.9)
    assert batch.rank == Rank.BATCH
    assert order_of(scheduler) == ["busy", "late", "batch"]


def test_once_half_of_its_time_is_over_it_goes_before_them() -> None:
    scheduler, _, batch = beside_a_late_one()
    run_step(scheduler, now=5.1)
    assert batch.rank == Rank.PROMISED
    assert order_of(scheduler) == ["busy", "batch", "late"]


def test_without_a_promise_it_waits() -> None:
    scheduler, _, batch = beside_a_late_one(LatencyTargets())
    for now in (5.1, 100.0, 1000.0):
        run_step(scheduler, now=now)
        assert batch.rank == Rank.BATCH
    assert order_of(scheduler) == ["busy", "late", "batch"]


def test_it_displaces_nobody_of_a_class_above() -> None:
    scheduler, late, batch = beside_a_late_one()
    standard = make_request("standard", 4, max_tokens=2, arrival=5.0)
    scheduler.add(standard)
    run_step(scheduler, now=5.1)
    assert late.rank < batch.rank < standard.rank
    assert order_of(scheduler) == ["busy", "standard", "batch", "late"]


def test_a_running_one_is_not_displaced_by_the_late() -> None:
    scheduler = full_scheduler(
        cost_model=LinearCost(), max_num_seqs=1, max_num_batched_tokens=16, num_blocks=300
    )
    batch = make_request("batch", 100, max_tokens=3, service_class=BATCH, targets=_PROMISED)
    scheduler.add(batch)
    run_step(scheduler)
    scheduler.add(make_request("late", 4, max_tokens=1, targets=LatencyTargets(ttft=0.001)))
    run_step(scheduler, now=6.0)
    assert batch.rank == Rank.PROMISED
    events = run_to_end(scheduler)
    assert next(event.request_id for event in events) == "batch"


def test_it_goes_on_before_them_to_its_end() -> None:
    scheduler, late, batch = beside_a_late_one()
    now = 5.1
    while batch.finish_reason is None:
        run_step(scheduler, now=now)
        now += 0.01
    assert late.num_computed == 0 and batch.num_output == 3


def test_when_it_cannot_be_kept_any_more_it_is_as_if_nothing_was_promised() -> None:
    scheduler, _, batch = beside_a_late_one(prompt=100)
    run_step(scheduler, now=5.1)
    assert batch.rank == Rank.PROMISED
    for now in (9.95, 9.96, 9.97, 11.0):  # 0.1 s of work
        run_step(scheduler, now=now)
        assert batch.rank == Rank.BATCH, "and it does not press again"
    assert order_of(scheduler) == ["busy", "late", "batch"]


def test_the_share_of_the_batch_class_goes_to_those_first_that_can_still_be_in_time() -> None:
    scheduler, _, batch = beside_a_late_one(batch_share=0.5)
    other = make_request("other", 8, service_class=BATCH, arrival=0.0)
    scheduler._shares.batch.note(0, 0, False)
    scheduler.add(other)
    run_step(scheduler, now=5.1)
    chosen = {}
    for step in range(40):
        run_step(scheduler, now=5.2 + 0.001 * step)
        chosen |= scheduler._shares.batch.chosen
        if batch.num_output:
            break
    assert next(iter(chosen)) is batch


@pytest.mark.parametrize("ingredient", ["classes", "deadlines"])
def test_it_takes_classes_and_deadlines(ingredient: str) -> None:
    scheduler = full_scheduler(cost_model=LinearCost(), max_num_seqs=1, without=ingredient)
    batch = make_request("batch", 8, service_class=BATCH, targets=_PROMISED)
    scheduler.add(make_request("busy", service_class=INTERACTIVE, max_tokens=9))
    scheduler.add(batch)
    for now in (0.0, 6.0, 7.0):
        run_step(scheduler, now=now)
        assert batch.rank != Rank.PROMISED


def test_tenants_take_turns_there_too() -> None:
    scheduler, _, first = beside_a_late_one()
    for index in range(3):
        for tenant in ("big", "small")[: 2 if index == 0 else 1]:
            request = make_request(
                f"{tenant}{index}",
                8,
                max_tokens=1,
                tenant=tenant,
                service_class=BATCH,
                arrival=0.0,
                targets=_PROMISED,
            )
            scheduler.add(request)
    run_step(scheduler, now=5.1)
    assert first.rank == Rank.PROMISED
    order = order_of(scheduler)
    assert order.index("small0") < order.index("big1")
