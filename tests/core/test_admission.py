"""The door: each limit refuses what exceeds it, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hotbatch.core.admission import (
    QUEUE_REQUESTS,
    QUEUE_TOKENS,
    QUEUE_WAIT,
    Door,
    Load,
    Newcomer,
    QueueLimits,
    Reservation,
)
from hotbatch.core.errors import InvalidRequestError, OverloadedError
from hotbatch.core.service_class import ServiceClass

FULL = Load(num_seats=256, num_tokens=10**6)  # nothing is free, nobody waits


def load(**facts: Any) -> Load:
    """Of a machine with 256 seats; nothing of it is free unless it is said."""
    return replace(FULL, **facts)


def enter(door: Door, now: Load, *args: Any, **kwargs: Any) -> Reservation:
    return door.enter(now, Newcomer(*args, **kwargs))


def refusal(door: Door, now: Load, *args: Any, **kwargs: Any) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        enter(door, now, *args, **kwargs)
    return caught.value


def test_without_limits_everybody_enters() -> None:
    door = Door()
    for _ in range(1000):
        enter(door, FULL, 1, 1000)
    assert door.num_entering == 1000


def test_the_queue_holds_so_many_requests_and_no_more() -> None:
    door = Door(QueueLimits(max_requests=8))
    kept = [enter(door, FULL, 1, 10) for _ in range(8)]
    error = refusal(door, FULL, 1, 10)
    assert error.reason == QUEUE_REQUESTS
    assert "8 requests may wait (--max-queue-requests)" in error.message
    assert door.refused == {QUEUE_REQUESTS: 1}
    door.close(kept[0])
    door.close(kept[0])  # once is enough
    enter(door, FULL, 1, 10)
    refusal(door, FULL, 1, 10)


def test_all_of_one_client_enter_or_none() -> None:
    door = Door(QueueLimits(max_requests=8))
    enter(door, FULL, 5, 10)
    refusal(door, FULL, 4, 10)
    enter(door, FULL, 3, 10)


def test_what_waits_in_the_engine_counts_like_what_is_entering() -> None:
    door = Door(QueueLimits(max_requests=8))
    now = load(waiting=(0, 4, 2), waiting_tokens=(0, 40, 20))
    enter(door, now, 2, 20)
    refusal(door, now, 1, 10)


def test_who_can_run_at_once_does_not_wait() -> None:
    door = Door(QueueLimits(max_requests=0, max_tokens=0))
    now = load(free_seats=(3, 3, 3), free_tokens=(1000, 1000, 1000))
    for _ in range(3):
        enter(door, now, 1, 100)
    refusal(door, now, 1, 100)


def test_seats_without_memory_are_no_room() -> None:
    door = Door(QueueLimits(max_requests=2))
    now = load(free_seats=(256, 256, 256), free_tokens=(500, 500, 500))
    for _ in range(7):  # five by memory, and two wait
        enter(door, now, 1, 100)
    assert refusal(door, now, 1, 100).reason == QUEUE_REQUESTS


def test_a_flood_of_a_lower_class_shuts_out_nobody_else() -> None:
    door = Door(QueueLimits(max_requests=8))
    for _ in range(8):
        enter(door, FULL, 1, 10, ServiceClass.BATCH)
    refusal(door, FULL, 1, 10, ServiceClass.BATCH)
    enter(door, FULL, 8, 10, ServiceClass.STANDARD)
    refusal(door, FULL, 1, 10, ServiceClass.STANDARD)
    refusal(door, FULL, 1, 10, ServiceClass.BATCH)
    enter(door, FULL, 1, 10, ServiceClass.INTERACTIVE)


def test_who_can_displace_does_not_wait() -> None:
    door = Door(QueueLimits(max_requests=0))
    now = load(free_seats=(0, 1, 2), free_tokens=(1000, 1000, 1000))
    enter(door, now, 1, 10, ServiceClass.INTERACTIVE)
    enter(door, now, 1, 10, ServiceClass.INTERACTIVE)
    refusal(door, now, 1, 10, ServiceClass.INTERACTIVE)
    refusal(door, now, 1, 10, ServiceClass.BATCH)


def test_prompt_tokens_are_bounded_too() -> None:
    door = Door(QueueLimits(max_tokens=1000))
    enter(door, FULL, 1, 900)
    error = refusal(door, FULL, 1, 200)
    assert error.reason == QUEUE_TOKENS
    assert "1000 prompt tokens may wait (--max-queue-tokens)" in error.message
    enter(door, FULL, 1, 100)


def test_a_long_prompt_is_no_queue_when_the_machine_is_free() -> None:
    door = Door(QueueLimits(max_tokens=100))
    enter(door, load(free_seats=(4, 4, 4), free_tokens=(10_000, 10_000, 10_000)), 1, 5000)


def test_a_predicted_wait_beyond_the_limit_is_refused() -> None:
    door = Door(QueueLimits(max_wait=2.0))
    now = load(waiting=(0, 19, 0), waiting_tokens=(0, 1900, 0), completions_per_second=10.0)
    enter(door, now, 1, 100)  # the twentieth seat becomes free after 2 s
    error = refusal(door, now, 1, 100)
    assert error.reason == QUEUE_WAIT
    assert "--max-queue-wait allows 2.0 s" in error.message
    assert error.retry_after == 1.0


def test_the_target_of_the_request_counts_if_it_is_tighter() -> None:
    door = Door(QueueLimits(max_wait=10.0))
    now = load(waiting=(0, 30, 0), waiting_tokens=(0, 30_000, 0), prompt_tokens_per_second=1e4)
    assert "the target for the first token" in refusal(door, now, 1, 10, max_wait=1.0).message
    enter(door, now, 1, 10, max_wait=60.0)
    enter(door, now, 1, 10, ServiceClass.INTERACTIVE, max_wait=1.0)


def test_an_urgent_request_waits_for_its_equals_only() -> None:
    door = Door(QueueLimits(max_wait=1.0))
    now = load(
        waiting=(50, 50, 2),
        free_seats=(0, 0, 4),
        free_tokens=(0, 0, 900),
        completions_per_second=1.0,
    )
    enter(door, now, 1, 10, ServiceClass.INTERACTIVE)
    refusal(door, now, 1, 10, ServiceClass.STANDARD)


def test_batch_work_may_wait_unless_it_says_otherwise() -> None:
    door = Door(QueueLimits(max_wait=1.0))
    now = load(waiting=(50, 0, 0), completions_per_second=1.0)
    enter(door, now, 1, 10, ServiceClass.BATCH)
    refusal(door, now, 1, 10, ServiceClass.BATCH, max_wait=20.0)


def test_a_slow_prompt_with_nobody_before_it_is_not_overload() -> None:
    door = Door(QueueLimits(max_wait=1.0))
    now = load(free_seats=(1, 1, 1), free_tokens=(9000, 9000, 9000), prompt_tokens_per_second=100.0)
    enter(door, now, 1, 5000)
    refusal(door, now, 1, 10)  # behind it


def test_what_is_not_known_costs_nothing() -> None:
    door = Door(QueueLimits(max_wait=0.001))
    enter(door, load(waiting=(0, 100, 0), waiting_tokens=(0, 10_000, 0)), 1, 100)


@pytest.mark.parametrize(
    ("rate", "seconds"), [(0.0, 1.0), (100.0, 1.0), (2.0, 5.0), (0.001, 120.0)]
)
def test_retry_after_is_when_the_queue_has_room(rate: float, seconds: float) -> None:
    door = Door(QueueLimits(max_requests=1))
    now = load(waiting=(0, 10, 0), completions_per_second=rate)
    error = refusal(door, now, 1, 0)  # ten too many
    assert error.retry_after == seconds
    assert f"Retry in {seconds:.0f} s" in error.message


def test_a_greedy_tenant_shuts_out_nobody_else() -> None:
    """Tenants take turns, so the modest one waits for a few of the greedy one's only."""
    door = Door(QueueLimits(max_requests=8, max_wait=5.0))
    greedy = load(
        waiting=(0, 8, 0),
        waiting_tokens=(0, 800, 0),
        completions_per_second=1.0,
        tenants=lambda rank: {"greedy": 8} if rank == ServiceClass.STANDARD else {},
    )
    assert refusal(door, greedy, 1, 10, tenant="greedy").reason == QUEUE_REQUESTS
    for _ in range(2):
        enter(door, greedy, 1, 10, tenant="modest")
    # The third would be the sixth in turn: three each.
    assert refusal(door, greedy, 1, 10, tenant="modest").reason == QUEUE_WAIT
    without_turns = replace(greedy, tenants=None)
    assert refusal(door, without_turns, 1, 10, tenant="new").reason == QUEUE_REQUESTS


@pytest.mark.parametrize(("weights", "entered"), [({"greedy": 3.0}, 1), ({"modest": 3.0}, 4)])
def test_turns_of_tenants_go_by_weight(weights: dict[str, float], entered: int) -> None:
    """Behind one of its own stand three of a tenant of three times its weight."""
    door = Door(QueueLimits(max_requests=8, max_wait=5.0))
    now = load(
        waiting=(0, 8, 0),
        completions_per_second=1.0,
        tenants=lambda rank: {"greedy": 8} if rank == ServiceClass.STANDARD else {},
        weights=weights,
    )
    for _ in range(entered):
        enter(door, now, 1, 10, tenant="modest")
    assert refusal(door, now, 1, 10, tenant="modest").reason == QUEUE_WAIT


def test_many_tenants_with_little_each_are_bounded_too() -> None:
    door = Door(QueueLimits(max_requests=8))
    now = replace(FULL, tenants=lambda rank: {})
    entered = 0
    for number in range(50):
        try:
            enter(door, now, 1, 10, tenant=f"tenant-{number}")
            entered += 1
        except OverloadedError:
            pass
    assert entered == 8, "all of them are before the next one"
    for count in range(8):
        enter(door, now, 1, 10, ServiceClass.INTERACTIVE, tenant=f"tenant-{count}")
    crowd = load(waiting=(0, 16, 0), tenants=lambda rank: {"greedy": 16})
    assert refusal(Door(QueueLimits(max_requests=8)), crowd, 1, 10, tenant="late")


def test_what_an_idle_server_refuses_is_refused_for_good() -> None:
    door = Door(QueueLimits(max_requests=2))
    idle = load(free_seats=(3, 3, 3), num_seats=3, free_tokens=(100, 100, 100), num_tokens=100)
    with pytest.raises(InvalidRequestError, match="runs 3 of them and lets 2 more wait"):
        enter(door, idle, 6, 60)
    with pytest.raises(InvalidRequestError, match="runs 1 of them"):
        enter(door, idle, 4, 400)
    assert not door.refused
    enter(door, idle, 5, 50)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_requests", -1), ("max_tokens", -1), ("time_to_live", 0.0), ("max_wait", float("nan"))],
)
def test_limits_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        QueueLimits(**{name: value})  # type: ignore[arg-type]
