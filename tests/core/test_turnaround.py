"""What passes between two steps counts in gaps, and no prompt makes it longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_factories import LinearCost, full_scheduler, make_request, must_plan, result_of, sizes

from hotbatch.core.turnaround import Turnaround


def test_it_is_the_time_from_end_to_end_without_the_step() -> None:
    turnaround = Turnaround()
    for index in range(200):
        turnaround.note_plan(is_following=True)
        turnaround.note_commit(0.012 * index, 0.010)
    assert turnaround.seconds == pytest.approx(0.002, rel=0.01)


def test_a_time_without_anybody_who_waits_is_none() -> None:
    turnaround = Turnaround()
    for index in range(50):
        turnaround.note_plan(is_following=index % 2 == 0)
        turnaround.note_commit(0.012 * index + (index % 2) * 0.002, 0.010)
    assert turnaround.seconds < 0.001


def test_one_long_stop_is_no_turnaround() -> None:
    turnaround = Turnaround()
    for index in range(100):
        turnaround.note_plan(is_following=True)
        turnaround.note_commit(0.012 * index + (60.0 if index == 99 else 0.0), 0.010)
    assert turnaround.seconds < 0.003


@pytest.mark.parametrize(("between", "size"), [(0.0, 40), (0.0161, 60)])
def test_a_prompt_takes_what_makes_the_gap_and_not_the_step_so_many_times_as_long(
    between: float, size: int
) -> None:
    scheduler = full_scheduler(
        cost_model=LinearCost(),
        num_blocks=5000,
        max_model_len=1000,
        max_num_seqs=32,
        max_num_batched_tokens=400,
    )
    for index in range(31):
        scheduler.add(make_request(f"d{index}", 1, max_tokens=400))
    now = 0.0
    for _ in range(200):
        plan = must_plan(scheduler, now)
        seconds = 0.001 * (1 + plan.num_tokens)
        now += seconds
        scheduler.commit(plan, replace(result_of(plan), seconds=seconds), now)
        now += between
    scheduler.add(make_request("long", 300, max_tokens=1))
    # 32 ms without it: 2.25 times 32 and 48, less what is between.
    assert sizes(must_plan(scheduler, now))["long"] == size
