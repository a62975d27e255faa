"""Siblings (n > 1) compute their prompt once, and never wait for one that will not come."""

from __future__ import annotations

import pytest
from core_factories import make_request, make_scheduler, must_plan, run_step, run_to_end, sizes

from hotbatch.core import Scheduler

PROMPT = list(range(300, 310))  # two full blocks of four, and a half


def add_siblings(scheduler: Scheduler, count: int = 3, **fields: object) -> None:
    for index in range(count):
        request = make_request(f"s{index}", PROMPT, seed=index, group_id="g", **fields)  # type: ignore[arg-type]
        scheduler.add(request)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_siblings_share_the_prompt_and_copy_its_last_block(enable_prefix_caching: bool) -> None:
    scheduler = make_scheduler(enable_prefix_caching=enable_prefix_caching)
    add_siblings(scheduler)
    assert sizes(run_step(scheduler)[0]) == {"s0": 10}
    plan, events = run_step(scheduler)
    assert sizes(plan) == {"s0": 1, "s1": 1, "s2": 1}
    tables = {planned.request_id: planned.block_ids for planned in plan.requests}
    assert tables["s0"][:2] == tables["s1"][:2] == tables["s2"][:2]
    assert len({table[2] for table in tables.values()}) == 3
    assert set(plan.copies) == {(tables["s0"][2], tables[name][2]) for name in ("s1", "s2")}
    assert [planned.start for planned in plan.requests] == [10, 9, 9]
    assert events["s1"].num_cached == 9
    run_to_end(scheduler)
    assert scheduler.stats().blocks_used == 0


def test_a_prompt_one_over_a_block_needs_no_copy() -> None:
    scheduler = make_scheduler()
    for index in range(2):
        scheduler.add(make_request(f"s{index}", PROMPT[:9], group_id="g"))
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert plan.copies == ()
    assert [planned.start for planned in plan.requests] == [9, 8]


def test_others_pass_siblings_that_wait_for_their_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12, max_num_seqs=8)
    add_siblings(scheduler)
    scheduler.add(make_request("other", 5))
    assert sizes(run_step(scheduler)[0]) == {"s0": 10, "other": 2}
    assert set(sizes(run_step(scheduler)[0])) == {"s0", "other", "s1", "s2"}


@pytest.mark.parametrize("when", ["waiting", "in flight", "half computed", "computed"])
def test_siblings_go_on_when_the_first_is_cancelled(when: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add_siblings(scheduler)
    if when == "in flight":
        plan = must_plan(scheduler)
        scheduler.cancel("s0")
        scheduler.fail(plan, "lost")
    else:
        for _ in range(["waiting", "half computed", "computed"].index(when)):
            run_step(scheduler)
        scheduler.cancel("s0")
    scheduler.check_integrity()
    ends = {event.request_id for event in run_to_end(scheduler) if event.finish_reason}
    assert ends == {"s1", "s2"}
    assert scheduler.stats().blocks_used == 0


def test_siblings_go_on_when_the_first_ends_with_its_first_token() -> None:
    scheduler = make_scheduler()
    add_siblings(scheduler, max_tokens=1)
    assert sizes(run_step(scheduler)[0]) == {"s0": 10}
    # The full blocks are in the cache; the half one is computed again, by one for all.
    assert sizes(run_step(scheduler)[0]) == {"s1": 2}
    assert sizes(run_step(scheduler)[0]) == {"s2": 2}
    assert not scheduler.has_work


def test_siblings_go_on_when_the_first_is_evicted() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8)
    scheduler.add(make_request("old", 8, max_tokens=16))
    run_step(scheduler)
    add_siblings(scheduler, max_tokens=6)
    ends = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert sorted(ends) == ["old", "s0", "s1", "s2"]
    assert scheduler.stats().preemptions > 0
    assert scheduler.stats().blocks_used == 0


def test_a_group_id_used_for_another_prompt_shares_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", PROMPT, group_id="g"))
    scheduler.add(make_request("b", [*PROMPT[:9], 1], group_id="g"))
    scheduler.add(make_request("c", PROMPT, group_id="g", cache_salt="s"))
    plan = must_plan(scheduler)
    assert [planned.start for planned in plan.requests] == [0, 0, 0]
    assert sizes(plan) == {"a": 10, "b": 10, "c": 10}


def test_siblings_with_prompt_logprobs_compute_every_row() -> None:
    scheduler = make_scheduler()
    add_siblings(scheduler, prompt_logprobs=1)
    assert sizes(must_plan(scheduler)) == {"s0": 10, "s1": 10, "s2": 10}
