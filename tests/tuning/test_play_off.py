"""The finalists play the same requests in the same rounds, and who is beaten goes home."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hotbatch.tuning import (
    Figures,
    Finalist,
    Job,
    Plan,
    Settings,
    Trial,
    best_plain,
    choose,
    num_jobs,
    play_off,
    times_better,
)
from hotbatch.tuning.workload import PROFILES, make_jobs, piece_of

JOBS = make_jobs(PROFILES["chat"], 200, 1024)
PLAN = Plan(JOBS, capacity=10.0, seconds=4.0)


def finalist(seats: int, *, is_plain: bool = False, is_default: bool = False) -> Finalist:
    trial = Trial(Settings(seats, 256, is_plain=is_plain), (Figures(1.0, 1.0, 1.0),))
    return Finalist(trial, is_default=is_default)


FINALISTS = [finalist(1, is_plain=True), finalist(64, is_default=True), finalist(32), finalist(8)]
GOODPUT = {1: 2.0, 64: 10.0, 32: 11.0, 8: 3.0}


class Engine:
    """Brings what GOODPUT says, and remembers what it was asked."""

    def __init__(self, **changes: float) -> None:
        self.goodput = {**GOODPUT, **{int(seats[1:]): value for seats, value in changes.items()}}
        self.played: list[tuple[int, tuple[Job, ...], float]] = []

    def play(self, settings: Settings, jobs: Sequence[Job], rate: float) -> Figures:
        self.played.append((settings.max_num_seqs, tuple(jobs), rate))
        return Figures(self.goodput[settings.max_num_seqs], 50.0, 0.5)

    @property
    def seats(self) -> list[int]:
        return [seats for seats, _, _ in self.played]


def rounds(played: Sequence[Finalist]) -> dict[int, int]:
    return {one.trial.settings.max_num_seqs: len(one.real) for one in played}


def test_who_would_replace_the_default_plays_once_more_against_it() -> None:
    played = play_off(FINALISTS, PLAN, Engine().play)
    assert rounds(played) == {1: 1, 64: 2, 32: 2, 8: 1}
    assert choose(played) is played[2]
    close = play_off(FINALISTS, PLAN, Engine(s32=10.2).play)
    assert rounds(close) == {1: 1, 64: 1, 32: 1, 8: 1}, "it would not"
    assert choose(close).is_default


def test_it_must_be_better_in_both_rounds_together() -> None:
    engine = Engine()

    def lucky_once(settings: Settings, jobs: Sequence[Job], rate: float) -> Figures:
        if len(engine.played) == len(FINALISTS):
            engine.goodput[32] = 9.0
        return engine.play(settings, jobs, rate)

    played = play_off(FINALISTS, PLAN, lucky_once)
    assert [figures.goodput for figures in played[2].real] == [11.0, 9.0]
    assert choose(played).is_default


def test_first_come_batching_is_compared_in_the_round_that_it_played() -> None:
    played = play_off(FINALISTS, PLAN, Engine().play)
    plain = best_plain(played)
    assert plain is played[0]
    second = Figures(99.0, 50.0, 0.5)
    lucky = Finalist(played[2].trial, (played[2].real[0], second))
    assert times_better(lucky, plain) == pytest.approx(5.5)
    assert times_better(finalist(4), finalist(2)) == 1.0, "by what the simulator promised"


def test_all_of_a_round_have_the_same_requests_and_take_turns() -> None:
    engine = Engine()
    play_off(FINALISTS, PLAN, engine.play)
    assert engine.seats == [1, 64, 32, 8, 32, 64], "the second round the other way about"
    assert {rate for _, _, rate in engine.played} == {14.0}
    first, second = engine.played[:4], engine.played[4:]
    assert len({jobs for _, jobs, _ in first}) == len({jobs for _, jobs, _ in second}) == 1
    assert first[0][1] != second[0][1], "other requests in the second round"
    assert len(JOBS) >= num_jobs(PLAN.capacity, PLAN.seconds) == 2 * len(first[0][1])


def test_it_is_said_how_long_it_takes() -> None:
    left: list[float] = []
    play_off(FINALISTS, PLAN, Engine().play, lambda one, seconds: left.append(seconds))
    assert left[0] == pytest.approx(PLAN.seconds_of(len(FINALISTS)))
    assert left == sorted(left, reverse=True)
    assert left[-1] == pytest.approx(PLAN.play_seconds) == pytest.approx(4.0 + 7.0)


def test_a_piece_begins_at_once_and_keeps_the_pace() -> None:
    for profile in PROFILES.values():
        jobs = make_jobs(profile, 400, 1024)
        for first in (0, 96, 300):
            piece = piece_of(jobs, first, 100)
            assert [job.num_prompt for job in piece] == [
                job.num_prompt for job in jobs[first : first + 100]
            ]
            assert piece[0].time == 0.0
            last = piece[-1].time
            before = sum(job.time < last for job in piece)
            assert last == pytest.approx(before), "one each unit of time"
    alone = piece_of([Job(5.0, 1, 1), Job(5.0, 1, 1)], 0, 2)
    assert [job.time for job in alone] == [0.0, 0.0], "all at once"
