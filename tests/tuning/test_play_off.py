"""The finalists play the same requests in the same rounds, and who is beaten goes home."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hotbatch.tuning import Figures, Finalist, Job, Plan, Settings, Trial, play_off
from hotbatch.tuning.play_off import LOADS
from hotbatch.tuning.report import table
from hotbatch.tuning.workload import PROFILES, make_jobs, piece_of

JOBS = make_jobs(PROFILES["chat"], 200, 1024)
PLAN = Plan(JOBS, capacity=10.0, seconds=4.0)


def finalist(seats: int, *, is_plain: bool = False, is_default: bool = False) -> Finalist:
    trial = Trial(Settings(seats, 256, is_plain=is_plain), (Figures(1.0, 1.0, 1.0),))
    return Finalist(trial, is_default=is_default)


FINALISTS = [
    finalist(1, is_plain=True),
    finalist(2, is_plain=True),
    finalist(64, is_default=True),
    finalist(32),
    finalist(16),
    finalist(8),
]
GOODPUT = {1: 1.0, 2: 2.0, 64: 9.9, 32: 10.0, 16: 9.8, 8: 3.0}


class Engine:
    """Brings what GOODPUT says, and remembers what it was asked to play."""

    def __init__(self, goodput: dict[int, float]) -> None:
        self.goodput = goodput
        self.played: list[tuple[int, tuple[Job, ...], float]] = []

    def play(self, settings: Settings, jobs: Sequence[Job], rate: float) -> Figures:
        self.played.append((settings.max_num_seqs, tuple(jobs), rate))
        return Figures(self.goodput[settings.max_num_seqs], 50.0, 0.5)

    def seats(self, first: int, last: int) -> list[int]:
        return [seats for seats, _, _ in self.played[first:last]]


def test_who_is_beaten_clearly_goes_home_and_the_default_with_it() -> None:
    played = play_off(FINALISTS, PLAN, Engine(GOODPUT).play)
    rounds = {one.trial.settings.max_num_seqs: len(one.real) for one in played}
    assert rounds == {1: 1, 2: 2, 64: 2, 32: 2, 16: 1, 8: 1}, "the best two, the better plain one"
    beaten = play_off(FINALISTS, PLAN, Engine({**GOODPUT, 64: 9.0}).play)
    rounds = {one.trial.settings.max_num_seqs: len(one.real) for one in beaten}
    assert rounds[64] == 1 and rounds[16] == 2
    assert "default, beaten early" in table(beaten, beaten[3], 16)


def test_all_of_a_round_have_the_same_requests_and_take_turns() -> None:
    engine = Engine(GOODPUT)
    play_off(FINALISTS, PLAN, engine.play)
    first, second = engine.played[:12], engine.played[12:]
    assert engine.seats(0, 6) == engine.seats(6, 12) == [1, 2, 64, 32, 16, 8]
    assert engine.seats(12, 15) == engine.seats(15, 18) == [32, 64, 2], "the other way about"
    for round_, count in ((first, 6), (second, 3)):
        for index, load in enumerate(LOADS):
            plays = round_[index * count : (index + 1) * count]
            assert {rate for _, _, rate in plays} == {load * PLAN.capacity}
            assert len({jobs for _, jobs, _ in plays}) == 1
    assert first[0][1] != second[0][1], "other requests in the second round"


def test_it_is_said_how_long_it_takes() -> None:
    left: list[float] = []
    play_off(FINALISTS, PLAN, Engine(GOODPUT).play, lambda one, load, seconds: left.append(seconds))
    assert left[0] == pytest.approx(PLAN.seconds_of(len(FINALISTS)))
    assert left == sorted(left, reverse=True)
    assert left[-1] == pytest.approx(PLAN.play_seconds(LOADS[-1]))
    assert PLAN.play_seconds(0.9) == pytest.approx(36 / 9 + 3.0)


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
