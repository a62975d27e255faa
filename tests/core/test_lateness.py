"""Who is given up so that others' first tokens come in time, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import inf

import pytest
from core_factories import (
    LinearCost,
    full_scheduler,
    make_request,
    run_step,
    run_to_end,
)
from hypothesis import given
from hypothesis import strategies as st

from hotbatch.core import LatencyTargets, Request, Scheduler, ServiceClass
from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.lateness import longest_of_the_late
from hotbatch.core.owed_share import OwedShare
from hotbatch.core.rank import Rank
from hotbatch.core.step_time import sharing

STANDARD, INTERACTIVE = ServiceClass.STANDARD, ServiceClass.INTERACTIVE
_JOBS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), max_size=7)


def test_the_longest_is_given_up_not_the_last() -> None:
    assert longest_of_the_late([(9.0, 10.0), (2.0, 10.5), (1.0, 11.0)], 0.0) == [0]
    assert longest_of_the_late([(9.0, 10.0), (2.0, 11.0), (1.0, 12.0)], 0.0) == []
    assert longest_of_the_late([(9.0, inf), (2.0, 10.5)], 0.0) == [1], "the other is never late"


def _is_feasible(jobs: list[tuple[int, int]]) -> bool:
    end = 0
    for seconds, due in sorted(jobs, key=lambda job: job[1]):
        end += seconds
        if end > due:
            return False
    return True


@given(_JOBS)
def test_as_few_as_possible_are_given_up(jobs: list[tuple[int, int]]) -> None:
    jobs.sort(key=lambda job: job[1])
    late = longest_of_the_late([(float(s), float(d)) for s, d in jobs], 0.0)
    kept = [job for index, job in enumerate(jobs) if index not in late]
    assert _is_feasible(kept)
    assert len(kept) == max(
        size
        for size in range(len(jobs) + 1)
        if any(_is_feasible(list(some)) for some in combinations(jobs, size))
    )


def test_a_target_that_no_machine_can_keep_makes_nobody_late_at_once() -> None:
    scheduler = full_scheduler(
        cost_model=LinearCost(),
        num_blocks=500,
        max_model_len=1000,
        max_num_batched_tokens=50,
        targets={INTERACTIVE: LatencyTargets(ttft=0.001)},
    )
    long = make_request("long", 400, max_tokens=2, service_class=INTERACTIVE)
    scheduler.add(long)
    run_step(scheduler)
    assert long.rank == Rank.INTERACTIVE
    run_step(scheduler, now=60.0)
    assert long.rank == Rank.LATE
    while long.num_output == 0:
        run_step(scheduler, now=60.0)
    assert long.rank == Rank.INTERACTIVE, "what comes after its first token need not be late"


def test_the_next_tenants_are_found_without_looking_at_all() -> None:
    counters = VirtualTokenCounters()
    for index in range(1000):
        counters.charge(f"t{index}", num_prompt=(index * 37) % 1000)
        counters.arrive(f"t{index}")
    found = counters.next_few(10)
    assert len(found) == len(set(found)) == 10
    assert counters.smallest() in found


def test_nobody_is_looked_at_again_while_all_have_time_to_spare() -> None:
    looked_at = []

    class Counting(LinearCost):
        def prompt_seconds(self, start: int, num_tokens: int, most: int) -> float:
            looked_at.append(num_tokens)
            return super().prompt_seconds(start, num_tokens, most)

    scheduler = full_scheduler(
        cost_model=Counting(),
        num_blocks=500,
        max_model_len=1000,
        max_num_seqs=1,
        targets={STANDARD: LatencyTargets(ttft=5.0)},
    )
    scheduler.add(make_request("seated", 4, max_tokens=50, service_class=STANDARD))
    scheduler.add(make_request("waiting", 333, max_tokens=2, service_class=STANDARD))
    run_step(scheduler, now=0.0)
    run_step(scheduler, now=0.01)
    looked_at.clear()
    run_step(scheduler, now=0.02)
    run_step(scheduler, now=0.03)
    assert 333 not in looked_at
    run_step(scheduler, now=0.2)
    assert 333 in looked_at, "whose turn is next may have changed"


def test_prompts_have_of_a_step_what_the_decodes_leave() -> None:
    model = LinearCost()
    assert sharing(model, []) == sharing(model, [[], []])
    few = [make_request(f"d{index}", 9) for index in range(9)]  # 10 ms of 22.5 alone
    assert sharing(model, [few]) == pytest.approx(sharing(model, []) * 2.25 / 1.25)
    for request in few:
        request.promised = LatencyTargets(tpot=0.1)  # 10 ms of 90
    assert sharing(model, [few]) == pytest.approx(sharing(model, []) * 90 / 80)
    for request in few:
        request.promised = LatencyTargets(tpot=0.011)
    assert sharing(model, [few]) == pytest.approx(sharing(model, []) * 3.0)


def test_nobody_is_given_up_who_comes_in_time_as_nothing_decodes() -> None:
    scheduler = full_scheduler(
        cost_model=LinearCost(), num_blocks=500, max_model_len=1000, max_num_batched_tokens=100
    )
    requests = [
        make_request(f"r{index}", 50, max_tokens=1, targets=LatencyTargets(ttft=0.5))
        for index in range(8)
    ]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    assert all(request.rank == Rank.STANDARD for request in requests), "408 ms in all"


def crowded(late_share: float) -> Iterator[tuple[float, Request]]:
    """One seat, always somebody of the top class who can be served in time, and one who is late:
    the moments until its first token, a step a second."""
    scheduler = full_scheduler(
        cost_model=LinearCost(),
        max_num_seqs=1,
        num_blocks=64,
        max_num_batched_tokens=32,
        late_share=late_share,
        ageing=None,
        targets={INTERACTIVE: LatencyTargets(ttft=4.0)},
    )
    late = make_request("late", 24, max_tokens=3, service_class=INTERACTIVE, arrival=0.0)
    scheduler.add(make_request("first", 4, service_class=INTERACTIVE, max_tokens=9, arrival=0.0))
    scheduler.add(late)
    for step in range(300):
        now = 5.0 + step
        while scheduler.stats().num_waiting < 3:
            name = f"new{step}.{scheduler.stats().num_waiting}"
            scheduler.add(
                make_request(name, 8, max_tokens=4, service_class=INTERACTIVE, arrival=now)
            )
        run_step(scheduler, now=now)
        scheduler.check_integrity()
        yield now, late
        if late.num_output:
            return


def test_one_that_is_late_waits_a_few_times_its_target_and_then_has_a_share() -> None:
    moments = list(crowded(0.2))
    now, late = moments[-1]
    assert late.rank == Rank.INTERACTIVE, "what comes after its first token is no share any more"
    # Twelve seconds are three times its target; then 24 tokens at a fifth of some three a step.
    assert 12.0 <= now < 75.0
    computed = [late.num_output for moment, late in moments if moment < 12.0]
    assert computed, "before that it lets those pass that can be served in time"


def test_without_that_share_it_waits_as_long_as_others_come() -> None:
    now, late = list(crowded(0.0))[-1]
    assert now == 304.0 and late.num_output == 0 and late.rank == Rank.LATE


def busy_seat() -> Scheduler:
    """The only seat is taken for long, and half of all tokens are kept for the late ones."""
    scheduler = full_scheduler(
        cost_model=LinearCost(),
        max_num_seqs=1,
        late_share=0.5,
        ageing=None,
        targets={INTERACTIVE: LatencyTargets(ttft=0.1)},
    )
    scheduler.add(make_request("busy", 4, service_class=INTERACTIVE, max_tokens=90))
    return scheduler


def test_of_those_that_are_overdue_the_one_with_least_to_do_has_the_share() -> None:
    scheduler = busy_seat()
    for name, size in (("long", 30), ("short", 8), ("middle", 20)):
        scheduler.add(make_request(name, size, service_class=INTERACTIVE, max_tokens=3))
    chosen: list[str] = []
    for step in range(1, 90):
        run_step(scheduler, now=float(step))
        assert len(scheduler._shares.late.chosen) <= 1
        chosen += [
            r.request_id for r in scheduler._shares.late.chosen if r.request_id not in chosen
        ]
    assert chosen == ["short", "middle", "long"]


def test_what_others_left_to_the_late_counts_for_a_while_and_is_forgotten_beyond_that() -> None:
    share = OwedShare(0.02, memory=2000.0)
    share.note(5000, 5000, has_work=True)  # all to themselves
    share.note(99_000, 0, has_work=True)
    assert not share.is_owed
    share.note(1100, 0, has_work=True)
    assert share.is_owed, "2,000 of the 5,000 tokens counted"
    forgetful = OwedShare(0.02)
    forgetful.note(5000, 5000, has_work=True)
    forgetful.note(100, 0, has_work=True)
    assert forgetful.is_owed


def test_the_one_that_gets_the_late_share_can_be_cancelled() -> None:
    scheduler = busy_seat()
    scheduler.add(make_request("late", 3, service_class=INTERACTIVE, max_tokens=3))
    step = 0
    while not scheduler._shares.late.chosen:
        step += 1
        scheduler.add(make_request(f"n{step}", 4, service_class=INTERACTIVE, arrival=float(step)))
        run_step(scheduler, now=float(step))
    scheduler.cancel("late")
    assert not scheduler._shares.late.chosen
    scheduler.check_integrity()
    run_to_end(scheduler)
    assert not scheduler.has_work
