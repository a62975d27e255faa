"""Who is given up so that others' first tokens come in time, and what becomes of it."""

from __future__ import annotations

from itertools import combinations
from math import inf

import pytest
from core_factories import LinearCost, full_scheduler, make_request, run_step
from hypothesis import given
from hypothesis import strategies as st

from hotbatch.core import LatencyTargets, ServiceClass
from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.lateness import longest_of_the_late
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
