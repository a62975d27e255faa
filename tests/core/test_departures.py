"""Whoever goes away takes nothing with it, leaves nothing behind, and disturbs nobody."""

from __future__ import annotations

import pytest
from core_factories import (
    full_scheduler,
    make_request,
    must_plan,
    result_of,
    run_step,
    run_to_end,
    sizes,
)

from hotbatch.core import ContextLengthError, RequestState, Scheduler, ServiceClass


def assert_empty(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_paused, stats.num_waiting) == (0, 0, 0)
    assert stats.blocks_used == 0 and not scheduler.has_work


def test_a_cancel_during_admission_leaves_nothing() -> None:  # vllm#57061
    scheduler = full_scheduler(max_num_batched_tokens=8)
    prompt = list(range(700, 720))
    for name in ("a", "b"):
        scheduler.add(make_request(name, prompt, group_id="g"))
    plan = must_plan(scheduler)  # `a` is being admitted, `b` waits for its prompt
    assert set(sizes(plan)) == {"a"}
    assert scheduler.cancel("a") is not None and scheduler.cancel("b") is not None
    scheduler.check_integrity()
    assert scheduler.commit(plan, result_of(plan), 0.0) == []
    assert_empty(scheduler)


def test_a_client_that_is_gone_is_computed_no_more() -> None:  # llama.cpp#24496
    scheduler = full_scheduler()
    for name in ("gone", "stays"):
        scheduler.add(make_request(name, max_tokens=3))
    run_step(scheduler)
    in_flight = must_plan(scheduler)
    scheduler.cancel("gone")
    assert [
        event.request_id for event in scheduler.commit(in_flight, result_of(in_flight), 0.0)
    ] == ["stays"]
    while scheduler.has_work:
        assert set(sizes(run_step(scheduler)[0])) == {"stays"}
    assert_empty(scheduler)


def test_the_cancel_of_one_that_waits_ends_nobody_else() -> None:  # ik_llama.cpp#1929
    scheduler = full_scheduler(max_num_seqs=1)
    for name in ("runs", "waits"):
        scheduler.add(make_request(name, max_tokens=4))
    run_step(scheduler)
    event = scheduler.cancel("waits")
    assert event is not None and event.request_id == "waits"
    tokens = [event.token_ids for event in run_to_end(scheduler)]
    assert tokens == [(7,)] * 3
    assert_empty(scheduler)


def test_a_paused_request_can_be_cancelled() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    low = make_request("low", service_class=ServiceClass.BATCH)
    scheduler.add(low)
    run_step(scheduler)
    scheduler.add(make_request("high", service_class=ServiceClass.INTERACTIVE, max_tokens=2))
    run_step(scheduler)
    assert low.state is RequestState.PAUSED
    scheduler.cancel("low")
    scheduler.check_integrity()
    run_to_end(scheduler)
    assert_empty(scheduler)


def test_one_that_was_paused_in_a_step_that_fails_ends_with_it() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    scheduler.add(make_request("low", service_class=ServiceClass.BATCH))
    first = must_plan(scheduler)
    scheduler.add(make_request("high", service_class=ServiceClass.INTERACTIVE))
    second = must_plan(scheduler)
    assert second.paused == ("low",)
    for plan, name in ((first, "low"), (second, "high")):
        (event,) = scheduler.fail(plan, "lost")
        assert event.request_id == name
    assert_empty(scheduler)


def test_the_one_that_gets_the_batch_share_can_be_cancelled() -> None:
    scheduler = full_scheduler(max_num_seqs=1, batch_share=0.3, ageing=None)
    scheduler.add(make_request("low", service_class=ServiceClass.BATCH, max_tokens=50))
    for step in range(40):
        scheduler.add(make_request(f"high{step}", service_class=ServiceClass.INTERACTIVE))
        run_step(scheduler)
    assert scheduler._shares.batch.chosen
    scheduler.cancel("low")
    scheduler.check_integrity()
    run_to_end(scheduler)
    assert_empty(scheduler)


def test_what_the_pool_can_never_hold_is_refused_at_the_door() -> None:  # vllm#52530
    scheduler = full_scheduler(num_blocks=4)
    with pytest.raises(ContextLengthError, match="holds 16 tokens"):
        scheduler.add(make_request("a", 10, max_tokens=7))
    assert_empty(scheduler)
    scheduler.add(make_request("b", 10, max_tokens=6))
    run_to_end(scheduler)
