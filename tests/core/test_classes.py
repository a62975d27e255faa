"""Urgent first: a higher class takes seats, tokens and, only where they lack, blocks."""

from __future__ import annotations

import pytest
from core_factories import (
    LinearCost,
    full_scheduler,
    make_request,
    must_plan,
    result_of,
    run_step,
    run_to_end,
    sizes,
)

from hotbatch.core import (
    FinishReason,
    LatencyTargets,
    Request,
    RequestState,
    Scheduler,
    ServiceClass,
)
from hotbatch.core.rank import Rank

BATCH, STANDARD, INTERACTIVE = ServiceClass


def add(scheduler: Scheduler, name: str, prompt: int = 4, **fields: object) -> Request:
    request = make_request(name, prompt, **fields)  # type: ignore[arg-type]
    scheduler.add(request)
    return request


# Seats


@pytest.mark.parametrize("seats", [1, 2])
def test_high_priority_displaces_at_the_sequence_limit(seats: int) -> None:  # vllm#40004
    scheduler = full_scheduler(max_num_seqs=seats)
    low = [add(scheduler, f"low{index}", service_class=BATCH) for index in range(seats)]
    run_step(scheduler)
    blocks = low[-1].block_table
    add(scheduler, "high", service_class=INTERACTIVE, max_tokens=2)
    plan, events = run_step(scheduler)
    assert "high" in sizes(plan) and "high" in events
    assert plan.paused == (f"low{seats - 1}",), "the newest gives way"
    assert not plan.preempted, "blocks did not lack, so none were taken"
    assert low[-1].state is RequestState.PAUSED
    assert low[-1].block_table[: len(blocks)] == blocks and low[-1].num_computed == 4
    assert scheduler.stats().num_paused == 1


def test_a_paused_request_goes_on_in_place() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    low = add(scheduler, "low", service_class=BATCH, max_tokens=5)
    run_step(scheduler)
    run_step(scheduler)
    add(scheduler, "high", service_class=INTERACTIVE, max_tokens=1)
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    (planned,) = plan.requests
    assert (planned.request_id, planned.start, len(planned.tokens)) == ("low", 5, 1)
    assert low.num_evictions == 0
    assert scheduler.stats().pauses == 1


@pytest.mark.parametrize("service_class", ServiceClass)
def test_an_equal_displaces_nobody(service_class: ServiceClass) -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    add(scheduler, "first", service_class=service_class, max_tokens=4)
    run_step(scheduler)
    add(scheduler, "second", service_class=service_class, max_tokens=1, priority=-9)
    assert [set(sizes(run_step(scheduler)[0])) for _ in range(4)] == [{"first"}] * 3 + [{"second"}]


def test_without_classes_nobody_is_displaced() -> None:
    scheduler = full_scheduler(max_num_seqs=1, without="classes")
    add(scheduler, "low", service_class=BATCH, max_tokens=3)
    run_step(scheduler)
    add(scheduler, "high", service_class=INTERACTIVE)
    assert set(sizes(run_step(scheduler)[0])) == {"low"}


def test_a_displaced_request_with_a_step_in_flight_still_gets_its_token() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    add(scheduler, "low", service_class=BATCH, max_tokens=2)
    first = must_plan(scheduler)
    add(scheduler, "high", service_class=INTERACTIVE, max_tokens=1)
    second = must_plan(scheduler)
    assert second.paused == ("low",)
    (event,) = scheduler.commit(first, result_of(first), 0.0)
    assert (event.request_id, event.token_ids) == ("low", (7,))
    scheduler.commit(second, result_of(second), 0.0)
    scheduler.check_integrity()
    assert [event.request_id for event in run_to_end(scheduler)] == ["low"]


def test_a_request_may_end_while_it_is_paused() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    add(scheduler, "low", service_class=BATCH, max_tokens=1)
    first = must_plan(scheduler)
    add(scheduler, "high", service_class=INTERACTIVE, max_tokens=1)
    second = must_plan(scheduler)
    (event,) = scheduler.commit(first, result_of(first), 0.0)
    assert event.finish_reason is FinishReason.LENGTH
    scheduler.check_integrity()
    scheduler.commit(second, result_of(second), 0.0)
    assert not scheduler.has_work and scheduler.stats().blocks_used == 0


def test_preempted_work_keeps_its_place() -> None:  # vllm#41951
    scheduler = full_scheduler(max_num_seqs=1)
    add(scheduler, "mine", service_class=STANDARD, max_tokens=4)
    run_step(scheduler)
    for index in range(3):
        add(scheduler, f"later{index}", service_class=STANDARD, max_tokens=1, priority=-1)
    add(scheduler, "urgent", service_class=INTERACTIVE, max_tokens=1)
    order = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert order == ["urgent", "mine", "later0", "later1", "later2"]


def test_inside_a_class_the_priority_orders_those_that_wait() -> None:
    scheduler = full_scheduler(max_num_seqs=1)
    for name, priority in (("b", 3), ("c", 3), ("a", 1)):
        add(scheduler, name, service_class=BATCH, priority=priority, max_tokens=1)
    assert [event.request_id for event in run_to_end(scheduler)] == ["a", "b", "c"]


# Tokens


def test_a_higher_class_gets_the_budget_first() -> None:
    scheduler = full_scheduler(max_num_batched_tokens=12, max_num_seqs=4)
    for name in ("d0", "d1"):
        add(scheduler, name, 3, service_class=BATCH)
    run_step(scheduler)
    add(scheduler, "bulk", 40, service_class=BATCH)
    run_step(scheduler)
    add(scheduler, "chat", 20, service_class=INTERACTIVE, max_tokens=1)
    first, _ = run_step(scheduler)
    # What decodes goes on beside it, the bulk prompt has to wait.
    assert sizes(first) == {"chat": 10, "d0": 1, "d1": 1}
    second, events = run_step(scheduler)
    assert sizes(second) == {"chat": 10, "d0": 1, "d1": 1}
    assert "chat" in events
    assert sizes(run_step(scheduler)[0]) == {"d0": 1, "d1": 1, "bulk": 10}


def test_prompts_of_a_higher_class_have_half_the_budget_at_least() -> None:
    scheduler = full_scheduler(max_num_batched_tokens=8, max_num_seqs=8)
    for index in range(7):
        add(scheduler, f"d{index}", 1, service_class=BATCH, max_tokens=30)
    run_step(scheduler)
    add(scheduler, "chat", 8, service_class=INTERACTIVE, max_tokens=1)
    plan, _ = run_step(scheduler)
    assert sizes(plan)["chat"] == 4
    assert len(plan.requests) == 5


# Blocks


def test_blocks_are_taken_from_a_lower_class_only_as_many_as_lack() -> None:
    scheduler = full_scheduler(num_blocks=8, enable_prefix_caching=False, without="forecast")
    low = add(scheduler, "low", 23, service_class=BATCH, max_tokens=6)  # six blocks of four
    run_step(scheduler)
    run_step(scheduler)
    # Three; one is left of eight once `low` has a seventh.
    add(scheduler, "high", 11, service_class=INTERACTIVE, max_tokens=1)
    plan, _ = run_step(scheduler)
    assert "high" in sizes(plan)
    assert [victim.request_id for victim in plan.preempted] == ["low"]
    assert (low.state, len(low.block_table), low.num_computed) == (RequestState.PAUSED, 5, 20)
    plan, _ = run_step(scheduler)
    (planned,) = plan.requests
    assert (planned.request_id, planned.start, len(planned.tokens)) == ("low", 20, 5)


def test_a_class_takes_no_blocks_from_a_higher_one() -> None:
    scheduler = full_scheduler(num_blocks=4, enable_prefix_caching=False, without="forecast")
    add(scheduler, "high", 8, service_class=INTERACTIVE, max_tokens=8)
    add(scheduler, "low", 7, service_class=BATCH, max_tokens=8)
    ends = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert ends == ["high", "low"]


def test_a_block_that_others_share_is_not_taken() -> None:
    prompt = list(range(500, 508))
    scheduler = full_scheduler(num_blocks=6, without="forecast")
    shared = add(scheduler, "shared", prompt, service_class=INTERACTIVE, max_tokens=16)  # type: ignore[arg-type]
    run_step(scheduler)
    victim = add(scheduler, "victim", [*prompt, 1, 2], service_class=BATCH, max_tokens=8)  # type: ignore[arg-type]
    run_step(scheduler)
    prefix = shared.block_table[:2]
    assert victim.block_table[:2] == prefix
    while victim.state is RequestState.RUNNING:
        run_step(scheduler)
    assert victim.state is RequestState.PAUSED
    assert victim.block_table[:2] == shared.block_table[:2] == prefix
    run_to_end(scheduler)


def test_nobody_enters_where_a_peer_lost_blocks_but_a_higher_class_does() -> None:
    def crowd() -> Scheduler:
        scheduler = full_scheduler(
            num_blocks=6, max_num_seqs=8, enable_prefix_caching=False, without="forecast"
        )
        for name in ("old", "mid", "new"):
            add(scheduler, name, 8, max_tokens=6)
        run_step(scheduler)
        return scheduler

    scheduler = crowd()
    add(scheduler, "tiny", 1, max_tokens=1)
    plan, _ = run_step(scheduler)
    assert plan.preempted and "tiny" not in sizes(plan)
    scheduler = crowd()
    add(scheduler, "urgent", 1, max_tokens=1, service_class=INTERACTIVE)
    plan, _ = run_step(scheduler)
    assert plan.preempted and "urgent" in sizes(plan)


def test_the_leader_inherits_the_class_of_siblings_that_wait_for_it() -> None:
    scheduler = full_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    prompt = list(range(800, 824))
    leader = add(scheduler, "leader", prompt, group_id="g", service_class=BATCH)  # type: ignore[arg-type]
    run_step(scheduler)
    add(scheduler, "sibling", prompt, group_id="g", service_class=INTERACTIVE)  # type: ignore[arg-type]
    assert leader.rank == Rank.INTERACTIVE
    # It is as urgent as what waits for it, so a standard request displaces it no more.
    for index in range(2):
        add(scheduler, f"standard{index}", 8, service_class=STANDARD)
    for _ in range(2):
        plan, _ = run_step(scheduler)
        assert "leader" in sizes(plan)
    assert leader.num_output == 1
    assert leader.rank == Rank.BATCH, "nobody waits for it any more"
    assert "sibling" in sizes(run_step(scheduler)[0])


# Never at zero, never for ever


def test_age_lifts_a_request_by_one_class_and_never_to_the_top() -> None:
    scheduler = full_scheduler(max_num_seqs=1, ageing=10.0)
    add(scheduler, "busy", service_class=STANDARD, max_tokens=3)
    run_step(scheduler)
    aged = add(scheduler, "aged", service_class=BATCH, max_tokens=1, priority=5)
    add(scheduler, "before", service_class=STANDARD, max_tokens=1)
    run_step(scheduler, now=9.0)
    assert aged.rank == Rank.BATCH
    run_step(scheduler, now=11.0)
    assert aged.rank == Rank.STANDARD
    add(scheduler, "after", service_class=STANDARD, max_tokens=1)
    add(scheduler, "top", service_class=INTERACTIVE, max_tokens=1)
    order = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert order == ["top", "before", "aged", "after"]


def test_a_long_queue_of_batch_work_does_not_become_standard_work() -> None:
    scheduler = full_scheduler(max_num_seqs=1, ageing=1.0)
    add(scheduler, "busy", service_class=STANDARD, max_tokens=50)
    requests = [add(scheduler, f"b{index}", service_class=BATCH) for index in range(20)]
    for second in range(30):
        run_step(scheduler, now=float(second))
    assert sum(request.rank == Rank.STANDARD for request in requests) == 1


def test_what_age_lifts_has_a_small_share_while_others_come() -> None:
    scheduler = full_scheduler(max_num_seqs=2, ageing=1.0, num_blocks=64)
    for index in range(200):
        add(scheduler, f"old{index}", 8, service_class=BATCH, max_tokens=1)
    counts = {"old": 0, "new": 0}
    num_new = 0
    for step in range(2500):
        for index in range(4 - num_new):
            add(scheduler, f"new{step}.{index}", 8, max_tokens=4, arrival=2.0 + step)
            num_new += 1
        plan, events = run_step(scheduler, now=2.0 + step)
        for name, size in sizes(plan).items():
            counts[name[:3]] += size
        num_new -= sum("new" in name and e.finish_reason is not None for name, e in events.items())
    share = counts["old"] / sum(counts.values())
    assert 0.007 < share < 0.013


def test_age_lifts_the_oldest_of_the_late_whatever_its_class() -> None:
    scheduler = full_scheduler(
        cost_model=LinearCost(),
        max_num_seqs=1,
        ageing=30.0,
        late_share=0.0,
        targets=dict.fromkeys((STANDARD, INTERACTIVE), LatencyTargets(ttft=0.1)),
    )
    add(scheduler, "busy", service_class=INTERACTIVE, max_tokens=50)
    old = add(scheduler, "old", service_class=STANDARD, arrival=0.0)
    newer = add(scheduler, "newer", service_class=INTERACTIVE, arrival=5.0)
    run_step(scheduler, now=20.0)
    assert old.rank == newer.rank == Rank.LATE
    run_step(scheduler, now=36.0)
    assert (old.rank, newer.rank) == (Rank.STANDARD, Rank.LATE)


@pytest.mark.parametrize("seats", [1, 4])
def test_the_batch_class_is_never_at_zero(seats: int) -> None:
    scheduler = full_scheduler(
        max_num_seqs=seats, batch_share=0.1, ageing=None, num_blocks=64, max_num_batched_tokens=32
    )
    for index in range(4):
        add(scheduler, f"low{index}", 8, service_class=BATCH, max_tokens=40)
    counts = {"low": 0, "top": 0}
    gap = longest = 0
    for step in range(400):
        while scheduler.stats().num_waiting < 8:
            add(
                scheduler,
                f"top{step}.{scheduler.stats().num_waiting}",
                6,
                max_tokens=6,
                service_class=INTERACTIVE,
            )
        plan, _ = run_step(scheduler)
        served = sum(size for name, size in sizes(plan).items() if name.startswith("low"))
        counts["low"] += served
        counts["top"] += plan.num_tokens - served
        gap = 0 if served else gap + 1
        longest = max(longest, gap)
    share = counts["low"] / (counts["low"] + counts["top"])
    assert 0.08 < share < 0.2
    assert longest < 100


def test_without_a_share_the_batch_class_waits() -> None:
    scheduler = full_scheduler(max_num_seqs=1, batch_share=0.0, ageing=None)
    low = add(scheduler, "low", service_class=BATCH)
    for step in range(40):
        add(scheduler, f"top{step}", max_tokens=1, service_class=INTERACTIVE)
        run_step(scheduler)
    assert low.num_computed == 0


def test_what_is_owed_is_not_lost_between_two_pieces() -> None:
    """The request that gets the share keeps its blocks, though the pool is full of others."""
    scheduler = full_scheduler(
        num_blocks=12, max_num_seqs=3, batch_share=0.2, ageing=None, enable_prefix_caching=False
    )
    low = add(scheduler, "low", 12, service_class=BATCH, max_tokens=12)
    for step in range(300):
        while scheduler.stats().num_waiting < 3:
            add(
                scheduler,
                f"top{step}.{scheduler.stats().num_waiting}",
                9,
                max_tokens=9,
                service_class=INTERACTIVE,
            )
        run_step(scheduler)
        if low.finish_reason is not None:
            break
    assert low.finish_reason is FinishReason.LENGTH
    assert low.num_evictions <= 1
