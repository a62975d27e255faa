"""A request that waited too long hears so; one that has started never does."""

from __future__ import annotations

import pytest
from core_factories import full_scheduler, make_request, make_scheduler, run_step, run_to_end

from hotbatch.core import FinishReason, InvalidRequestError, RequestState, SchedulerConfig
from hotbatch.simulator import SimulatedExecutor, Simulation


def test_a_request_that_waited_too_long_ends_with_an_error_that_names_the_limit() -> None:
    # vllm#58192, vllm#55812
    scheduler = make_scheduler(max_num_seqs=1, queue_time_to_live=2.5)
    scheduler.add(make_request("runs", max_tokens=3, arrival=1.0))
    run_step(scheduler, now=1.0)
    scheduler.add(make_request("waits", arrival=1.0))
    scheduler.add(make_request("later", arrival=2.0, max_tokens=1))
    assert scheduler.expire(3.4) == []
    assert scheduler.next_wakeup(3.4) == 3.5
    (event,) = scheduler.expire(3.5)
    assert (event.request_id, event.finish_reason) == ("waits", FinishReason.ERROR)
    assert event.error_reason == "queue_ttl"
    assert event.error is not None and "waited 2.5 seconds in the queue" in event.error
    assert scheduler.stats().expired == 1
    scheduler.check_integrity()
    ends = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert ends == ["runs", "later"]
    assert scheduler.next_wakeup(9.0) is None


def test_one_that_lost_its_seat_or_its_blocks_does_not_expire() -> None:
    scheduler = full_scheduler(num_blocks=6, queue_time_to_live=1.0, without="forecast")
    requests = [make_request(name, 8, max_tokens=6) for name in ("old", "mid", "new")]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    run_step(scheduler)
    assert requests[2].state is not RequestState.RUNNING
    assert scheduler.expire(99.0) == []
    assert len([event for event in run_to_end(scheduler) if event.finish_reason]) == 3


def test_no_time_to_live_is_for_ever() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    assert scheduler.expire(1e9) == []
    assert scheduler.next_wakeup(0.0) is None
    with pytest.raises(InvalidRequestError, match="queue_time_to_live must be above 0"):
        SchedulerConfig(num_blocks=8, max_model_len=64, queue_time_to_live=0.0)


@pytest.mark.parametrize("batching", ["static", "request"])
def test_closed_batches_expire_who_is_not_in_one(batching: str) -> None:
    scheduler = make_scheduler(
        batching=batching, static_batch_size=2, static_timeout=0.0, queue_time_to_live=1.0
    )
    for name in ("a", "b", "c", "d"):
        scheduler.add(make_request(name, max_tokens=4))
    plan, _ = run_step(scheduler)
    in_batch = {planned.request_id for planned in plan.requests}
    expired = {event.request_id for event in scheduler.expire(5.0)}
    assert expired == {"a", "b", "c", "d"} - in_batch
    scheduler.check_integrity()
    run_to_end(scheduler)


def test_a_static_batch_that_gathers_wakes_for_whatever_comes_first() -> None:
    scheduler = make_scheduler(
        batching="static", static_batch_size=8, static_timeout=5.0, queue_time_to_live=2.0
    )
    scheduler.add(make_request("a", arrival=1.0))
    assert scheduler.next_wakeup(1.0) == 3.0
    assert [event.request_id for event in scheduler.expire(3.0)] == ["a"]
    assert scheduler.next_wakeup(3.0) is None and not scheduler.has_work


def test_the_simulation_hears_of_it() -> None:
    scheduler = make_scheduler(max_num_seqs=1, queue_time_to_live=0.05)
    executor = SimulatedExecutor(num_blocks=64, block_size=4, max_model_len=128)
    simulation = Simulation(scheduler, executor)
    for name in ("a", "b"):
        simulation.arrive(make_request(name, max_tokens=20, ignore_eos=True))
    outcomes = simulation.run()
    assert outcomes["a"].error is None
    assert outcomes["b"].finish_reason is FinishReason.ERROR
    assert outcomes["b"].finish_time == pytest.approx(0.05, abs=0.011)
