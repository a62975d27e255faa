"""The sequence limit follows what it does to promises, and only where there are any."""

from __future__ import annotations

from core_factories import LinearCost, full_scheduler, make_request, run_step

from hotbatch.core import LatencyTargets, Scheduler
from hotbatch.core.seat_limit import SeatLimit
from hotbatch.simulator import RooflineStepTime, Simulation, TimeOnlyExecutor


def after(limit: SeatLimit, *, slow: int = 0, late: int = 0, running: int = 64) -> int:
    """What it is after a window with so many complaints, at so many seats taken."""
    limit.allows(running)
    for index in range(16):
        limit.note_end(was_slow=index < slow, was_late=slow <= index < slow + late)
    return limit.limit


def test_it_falls_where_tokens_came_too_slowly() -> None:
    limit = SeatLimit(64)
    assert after(limit, slow=8) == 57
    assert after(limit, slow=8, running=57) == 51


def test_it_falls_from_the_seats_that_were_taken() -> None:
    assert after(SeatLimit(256), slow=8, running=20) == 18


def test_it_rises_again_where_first_tokens_come_late_behind_it_and_not_beyond_the_seats() -> None:
    limit = SeatLimit(64)
    after(limit, slow=8, running=40)
    assert limit.limit == 36
    assert after(limit, late=8, running=36) == 40
    assert after(limit, late=8, running=20) == 40, "nobody waited because of it"
    for _ in range(10):
        after(limit, running=limit.limit)
    assert limit.limit == 64


def test_complaints_of_both_kinds_leave_it_where_it_is() -> None:
    assert after(SeatLimit(64), slow=8, late=7) == 64
    assert after(SeatLimit(64), slow=1) == 64, "one in sixteen is chance"


def test_a_few_seats_always_remain() -> None:
    limit = SeatLimit(64)
    for _ in range(60):
        after(limit, slow=16, running=limit.limit)
    assert limit.limit == 4
    assert after(SeatLimit(2), slow=16, running=2) == 2


def served(scheduler: Scheduler, now: float, **fields: object) -> None:
    """Sixteen requests that run together, a token a second."""
    for index in range(16):
        name = f"{now:.0f}-{index}"
        request = make_request(name, 1, max_tokens=4, arrival=now, **fields)  # type: ignore[arg-type]
        scheduler.add(request)
    while scheduler.has_work:
        run_step(scheduler, now=now)
        now += 1.0


def many_seats() -> Scheduler:
    return full_scheduler(
        cost_model=LinearCost(), max_num_seqs=16, num_blocks=256, max_num_batched_tokens=64
    )


def test_a_scheduler_that_cannot_keep_the_pace_gives_fewer_seats() -> None:
    scheduler = many_seats()
    served(scheduler, 0.0, targets=LatencyTargets(ttft=9.0, tpot=0.5))
    assert scheduler._seating.limit == 14
    scheduler.add(make_request("last", 1, max_tokens=4))
    for index in range(15):
        scheduler.add(make_request(f"n{index}", 1, max_tokens=4))
    plan, _ = run_step(scheduler, now=50.0)
    assert len(plan.requests) == 14, "they wait, though there are seats"


def test_where_the_pace_is_kept_or_nothing_was_promised_nothing_is_limited() -> None:
    for targets in (LatencyTargets(ttft=9.0, tpot=1.5), LatencyTargets(ttft=0.001)):
        scheduler = many_seats()
        served(scheduler, 0.0, targets=targets)
        assert scheduler._seating.limit == 16


def test_held_still_there_are_as_many_seats_as_set() -> None:
    scheduler = full_scheduler(
        without="online",
        cost_model=LinearCost(),
        max_num_seqs=16,
        num_blocks=256,
        max_num_batched_tokens=64,
    )
    served(scheduler, 0.0, targets=LatencyTargets(ttft=9.0, tpot=0.5))
    assert scheduler._seating.limit == 16


def test_one_that_lost_its_seat_says_nothing_of_the_pace() -> None:
    scheduler = many_seats()
    for index in range(16):
        request = make_request(
            f"p{index}", 1, max_tokens=4, targets=LatencyTargets(ttft=9.0, tpot=0.5)
        )
        scheduler.add(request)
        request.num_pauses = 1
    now = 0.0
    while scheduler.has_work:
        run_step(scheduler, now=now)
        now += 1.0
    assert scheduler._seating.limit == 16


def test_bursts_beyond_what_decodes_alone_can_keep_are_served_better_with_it() -> None:
    def good(follows: bool) -> int:
        scheduler = full_scheduler(
            num_blocks=4000, max_model_len=1000, max_num_seqs=200, max_num_batched_tokens=512
        )
        if not follows:
            scheduler._seating._limit.note_end = lambda **kinds: None  # type: ignore[method-assign]
        executor = TimeOnlyExecutor(
            num_blocks=4000,
            block_size=4,
            max_model_len=1000,
            step_time=RooflineStepTime(overhead=0.0, weights=0.004, per_token=0.0004),
        )
        simulation = Simulation(scheduler, executor)
        targets = LatencyTargets(ttft=1.0, tpot=0.012)
        for index in range(480):
            request = make_request(
                f"r{index}", 20, max_tokens=80, arrival=3.0 * (index // 96), ignore_eos=True,
                targets=targets,
            )  # fmt: skip
            simulation.arrive(request)
        count = 0
        for outcome in simulation.run().values():
            times = outcome.token_times
            is_quick = times[0] - outcome.arrival <= 1.0
            count += is_quick and times[-1] - times[0] <= 0.012 * (len(times) - 1)
        return count

    assert good(follows=True) > 1.15 * good(follows=False)
