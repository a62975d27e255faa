"""The three ways of batching, on one scheduler."""

from __future__ import annotations

from core_factories import make_request, make_scheduler, run_step, sizes

from hotbatch.core import Scheduler


def batches(scheduler: Scheduler, now: float = 0.0) -> list[set[str]]:
    seen = []
    while scheduler.has_work:
        seen.append(set(sizes(run_step(scheduler, now=now)[0])))
    return seen


def test_request_batching_runs_one_at_a_time_to_its_end() -> None:
    scheduler = make_scheduler(batching="request")
    for name in ("a", "b"):
        scheduler.add(make_request(name, max_tokens=2))
    assert batches(scheduler) == [{"a"}, {"a"}, {"b"}, {"b"}]


def test_static_batching_waits_for_a_full_batch() -> None:
    scheduler = make_scheduler(batching="static", static_batch_size=2, static_timeout=10.0)
    scheduler.add(make_request("a", arrival=1.0, max_tokens=1))
    assert scheduler.plan(1.0) is None
    assert scheduler.next_wakeup(1.0) == 11.0
    scheduler.add(make_request("b", arrival=2.0, max_tokens=1))
    assert sizes(run_step(scheduler, now=2.0)[0]) == {"a": 6, "b": 6}
    assert scheduler.next_wakeup(2.0) is None


def test_static_batching_starts_an_incomplete_batch_at_its_timeout() -> None:
    scheduler = make_scheduler(batching="static", static_batch_size=4, static_timeout=0.3)
    scheduler.add(make_request("a", arrival=0.1))
    wakeup = scheduler.next_wakeup(0.1)
    assert wakeup is not None
    assert scheduler.plan(wakeup - 1e-6) is None
    assert sizes(run_step(scheduler, now=wakeup)[0]) == {"a": 6}


def test_static_batching_runs_to_its_longest_member_before_the_next() -> None:
    scheduler = make_scheduler(batching="static", static_batch_size=2, static_timeout=0.0)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 1), ("d", 1)):
        scheduler.add(make_request(name, max_tokens=max_tokens))
    assert batches(scheduler) == [{"a", "b"}, {"b"}, {"b"}, {"c", "d"}]


def test_a_static_batch_larger_than_the_budget_or_the_pool_still_runs_as_one() -> None:
    scheduler = make_scheduler(
        batching="static",
        static_batch_size=4,
        static_timeout=0.0,
        num_blocks=6,
        max_num_batched_tokens=8,
    )
    for name in ("a", "b", "c", "d"):
        scheduler.add(make_request(name, 8, max_tokens=6))
    scheduler.add(make_request("next", 8, max_tokens=1))
    seen = batches(scheduler)
    assert scheduler.stats().preemptions > 0
    assert [batch for batch in seen if "next" in batch] == [{"next"}]
    assert seen[-1] == {"next"}


def test_cancelling_the_last_member_lets_the_next_static_batch_start() -> None:
    scheduler = make_scheduler(batching="static", static_batch_size=2, static_timeout=0.0)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name))
    run_step(scheduler)
    for name in ("a", "b"):
        scheduler.cancel(name)
    scheduler.check_integrity()
    assert sizes(run_step(scheduler)[0]) == {"c": 6}


def test_continuous_batching_never_needs_to_be_woken() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name in ("a", "b"):
        scheduler.add(make_request(name))
    run_step(scheduler)
    assert scheduler.next_wakeup(0.0) is None
