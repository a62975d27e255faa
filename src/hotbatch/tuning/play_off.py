"""The finalists against each other on the real engine, in two rounds.

A machine is quicker in one minute than in the next, and some stretches of a workload are harder
than others. So finalists are compared by what they played in the same rounds only: in a round
all of them have the same requests, and the second round goes the other way about. Who is clearly
beaten in the first one goes home, as does first-come batching, which is there to compare with;
where one is left there is no second.

A play is more than the machine can do, and long: where all fits, settings are alike, and a queue
takes its time to grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hotbatch.tuning.finalist import Finalist
from hotbatch.tuning.settings import Figures, Settings
from hotbatch.tuning.workload import Job, piece_of

LOAD = 1.2  # of the machine's best
ROUNDS = 2
_LEFT = 2  # finalists in the second round
_BEATEN = 0.95  # of the best one's goodput in the first round
_LEAST_JOBS, _MOST_JOBS = 8, 2000  # of a play
_TAIL = 3.0  # seconds that its last answers are thought to take

Play = Callable[[Settings, Sequence[Job], float], Figures]
"""Serve the jobs at so many a second with these settings; what came of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played to each finalist.

    Args:
        jobs: of the workload; each round has a piece of them.
        capacity: requests a second that the machine can do at best.
        seconds: of arrivals in a play.
    """

    jobs: Sequence[Job]
    capacity: float
    seconds: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return LOAD * self.capacity

    def piece(self, number: int) -> list[Job]:
        """The jobs of a round."""
        count = int(min(_MOST_JOBS, max(_LEAST_JOBS, self.seconds * self.rate)))
        count = min(count, len(self.jobs))
        return piece_of(self.jobs, min(number * count, len(self.jobs) - count), count)

    @property
    def play_seconds(self) -> float:
        """About how long a play takes."""
        return len(self.piece(0)) / self.rate + _TAIL

    def seconds_of(self, num_finalists: int) -> float:
        """About how long all takes at most."""
        return (num_finalists + (ROUNDS - 1) * _LEFT) * self.play_seconds


def play_off(
    finalists: Sequence[Finalist],
    plan: Plan,
    play: Play,
    on_play: Callable[[Finalist, float], None] = lambda finalist, left: None,
) -> list[Finalist]:
    """Play all rounds; returns the finalists with what came of it, in the same order.

    Args:
        on_play: told who is next, and how many seconds are left about, at most.
    """
    played = list(finalists)
    playing = list(range(len(played)))
    for number in range(ROUNDS):
        if number and len(playing) < 2:
            break
        piece = plan.piece(number)
        num_left = len(playing) + (ROUNDS - 1 - number) * _LEFT
        for index in playing if number % 2 == 0 else playing[::-1]:
            one = played[index]
            on_play(one, num_left * plan.play_seconds)
            figures = play(one.trial.settings, piece, plan.rate)
            played[index] = replace(one, real=(*one.real, figures))
            num_left -= 1
        rivals = [played[index] for index in playing if not played[index].is_plain]
        playing = [index for index in playing if _goes_on(played[index], rivals)]
    return played


def _goes_on(one: Finalist, rivals: Sequence[Finalist]) -> bool:
    better = sum(rival.goodput > one.goodput for rival in rivals)
    best = max(rival.goodput for rival in rivals)
    return not one.is_plain and better < _LEFT and one.goodput >= _BEATEN * best
