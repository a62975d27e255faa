"""Cancelling, failing and evicting: whoever ends gives everything back, nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_factories import (
    make_request,
    make_scheduler,
    must_plan,
    result_of,
    run_step,
    run_to_end,
    sizes,
)

from hotbatch.core import FinishReason, RequestState, Scheduler, TokenLogprob


def assert_empty(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)
    assert not scheduler.has_work


def test_cancelling_a_waiting_request_takes_it_out_of_the_queue() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, max_tokens=1))
    event = scheduler.cancel("b")
    assert event is not None
    assert (event.finish_reason, event.num_output) == (FinishReason.ABORT, 0)
    assert [event.request_id for event in run_to_end(scheduler)] == ["a", "c"]
    assert_empty(scheduler)


def test_cancelling_twice_or_an_unknown_id_is_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    assert scheduler.cancel("a") is not None
    assert scheduler.cancel("a") is None
    assert scheduler.cancel("never seen") is None
    assert_empty(scheduler)


def test_a_stop_string_is_a_cancellation_with_its_own_reason() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    run_step(scheduler)
    event = scheduler.cancel("a", FinishReason.STOP)
    assert event is not None
    assert (event.finish_reason, event.num_output) == (FinishReason.STOP, 1)
    assert_empty(scheduler)


def test_blocks_of_a_request_cancelled_in_flight_come_back_with_the_commit() -> None:
    scheduler = make_scheduler(num_blocks=2)
    scheduler.add(make_request("a", 6, max_tokens=2))
    plan = must_plan(scheduler)
    assert scheduler.cancel("a") is not None
    assert scheduler.stats().blocks_used == 2
    assert scheduler.has_work, "a step is in flight"
    scheduler.add(make_request("b", 6, max_tokens=2))
    assert scheduler.plan(0.0) is None
    assert scheduler.commit(plan, result_of(plan), 0.0) == []
    scheduler.check_integrity()
    assert sizes(must_plan(scheduler)) == {"b": 6}


def test_an_id_can_be_used_again_while_its_cancelled_bearer_is_in_flight() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, max_tokens=2))
    old = must_plan(scheduler)
    scheduler.cancel("a")
    scheduler.add(make_request("a", 3, max_tokens=1))
    new = must_plan(scheduler)
    assert scheduler.commit(old, result_of(old, {"a": 55}), 0.0) == []
    (event,) = scheduler.commit(new, result_of(new, {"a": 66}), 0.0)
    assert (event.token_ids, event.num_prompt) == ((66,), 3)
    assert_empty(scheduler)


def test_an_error_of_one_request_ends_only_that_one() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name, max_tokens=2))
    plan = must_plan(scheduler)
    events = scheduler.commit(plan, result_of(plan, errors={"a": "NaN in the logits"}), 0.0)
    ends = {event.request_id: (event.finish_reason, event.error) for event in events}
    assert ends == {"a": (FinishReason.ERROR, "NaN in the logits"), "b": (None, None)}
    scheduler.check_integrity()
    assert sizes(must_plan(scheduler)) == {"b": 1}


def test_a_failed_step_ends_its_requests_and_nobody_else() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, max_tokens=1))
    plan = must_plan(scheduler)
    scheduler.cancel("b")
    (event,) = scheduler.fail(plan, "out of memory")
    assert (event.request_id, event.finish_reason, event.error) == (
        "a",
        FinishReason.ERROR,
        "out of memory",
    )
    scheduler.check_integrity()
    assert [event.request_id for event in run_to_end(scheduler)] == ["c"]
    assert_empty(scheduler)


def test_what_a_failed_step_computed_is_never_found() -> None:
    scheduler = make_scheduler()
    prompt = list(range(9))
    scheduler.add(make_request("a", prompt))
    scheduler.fail(must_plan(scheduler), "lost")
    scheduler.add(make_request("b", prompt))
    assert must_plan(scheduler).requests[0].start == 0


def test_steps_are_committed_once_and_in_order() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 12))
    first, second = must_plan(scheduler), must_plan(scheduler)
    with pytest.raises(AssertionError, match="in order"):
        scheduler.commit(second, result_of(second), 0.0)
    scheduler.commit(first, result_of(first), 0.0)
    with pytest.raises(AssertionError, match="not in flight"):
        scheduler.commit(first, result_of(first), 0.0)


def crowded() -> Scheduler:
    """Three requests of two blocks each in a pool of six, all about to need a third."""
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    for name in ("old", "mid", "new"):
        scheduler.add(make_request(name, 8, max_tokens=6))
    run_step(scheduler)
    return scheduler


def test_the_newest_is_evicted_when_blocks_run_out() -> None:
    scheduler = crowded()
    plan, _ = run_step(scheduler)
    assert [(victim.request_id, victim.reason) for victim in plan.preempted] == [
        ("new", "out of KV blocks")
    ]
    assert sizes(plan) == {"old": 1, "mid": 1}
    assert scheduler.stats().preemptions == 1


def test_nobody_is_admitted_in_a_step_that_evicted() -> None:
    scheduler = crowded()
    scheduler.add(make_request("tiny", 1, max_tokens=1))
    plan, _ = run_step(scheduler)
    assert plan.preempted
    assert "tiny" not in sizes(plan)


def test_an_evicted_request_returns_before_all_others_and_repeats_nothing() -> None:
    scheduler = crowded()
    scheduler.add(make_request("behind", 2, max_tokens=1))
    first_seen: dict[str, int] = {}
    told: list[int] = []
    step = 0
    while scheduler.has_work:
        plan, events = run_step(scheduler)
        for name in sizes(plan):
            first_seen.setdefault(name, step)
        if "new" in events:
            told += events["new"].token_ids
        step += 1
    assert len(told) == 5, "six tokens in all, one before the eviction"
    assert first_seen["new"] <= first_seen["behind"]
    assert_empty(scheduler)


def test_an_evicted_request_recomputes_its_output_like_a_prompt() -> None:
    scheduler = crowded()
    while "new" not in sizes(plan := run_step(scheduler)[0]):
        pass
    planned = next(planned for planned in plan.requests if planned.request_id == "new")
    assert planned.start == 0
    assert len(planned.tokens) == 9 and planned.tokens[8] == 7
    assert planned.sample is not None and planned.sample.position == 9


def test_two_evicted_in_one_step_keep_their_order() -> None:
    scheduler = make_scheduler(num_blocks=8, enable_prefix_caching=False)
    for name in ("a", "b", "c", "d"):
        scheduler.add(make_request(name, 8, max_tokens=20))
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert [victim.request_id for victim in plan.preempted] == ["d", "c"]
    ends = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert ends == ["a", "b", "c", "d"]
    assert_empty(scheduler)


def test_the_oldest_is_never_evicted() -> None:
    scheduler = make_scheduler(num_blocks=10)
    requests = [make_request(f"r{index}", 4, max_tokens=30) for index in range(8)]
    for request in requests:
        scheduler.add(request)
    ends = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert ends == [request.request_id for request in requests]
    assert requests[0].num_evictions == 0
    assert scheduler.stats().preemptions > 0


def test_an_evicted_request_can_be_cancelled() -> None:
    scheduler = crowded()
    run_step(scheduler)
    event = scheduler.cancel("new")
    assert event is not None and event.num_output == 1
    run_to_end(scheduler)
    assert_empty(scheduler)


def test_prompt_logprobs_gathered_before_an_eviction_are_not_told_twice() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8)
    scheduler.add(make_request("old", 7, max_tokens=8))
    run_step(scheduler)
    scheduler.add(make_request("new", 15, max_tokens=1, prompt_logprobs=0))
    told = 0
    while scheduler.has_work:
        plan = must_plan(scheduler)
        result = result_of(plan)
        outcomes = tuple(
            outcome._replace(
                prompt_logprobs=tuple(
                    TokenLogprob(token, -1.0, 1) for token in planned.next_tokens
                ),
            )
            for outcome, planned in zip(result.requests, plan.requests, strict=True)
        )
        for event in scheduler.commit(plan, replace(result, requests=outcomes), 0.0):
            told += len(event.prompt_logprobs)
    assert scheduler.stats().preemptions == 1
    assert told == 14


def test_a_request_in_flight_is_not_evicted() -> None:
    scheduler = make_scheduler(num_blocks=3, enable_prefix_caching=False, max_num_batched_tokens=8)
    old, new = make_request("old", 4, max_tokens=4), make_request("new", 8, max_tokens=2)
    scheduler.add(old)
    first = must_plan(scheduler)
    scheduler.add(new)
    second = must_plan(scheduler)
    scheduler.commit(first, result_of(first), 0.0)
    # `old` needs a second block; `new`, which has them all, is being computed.
    assert scheduler.plan(0.0) is None
    assert (old.state, new.state) == (RequestState.RUNNING, RequestState.RUNNING)
    scheduler.commit(second, result_of(second), 0.0)
    plan, _ = run_step(scheduler)
    assert sizes(plan) == {"old": 1}
    assert new.state is RequestState.EVICTED
    run_to_end(scheduler)
    assert_empty(scheduler)
