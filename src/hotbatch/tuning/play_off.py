"""The finalists against each other on the real engine, in two rounds.

A machine is quicker in one minute than in the next, and some stretches of a workload are harder
than others. So finalists are compared by what they played in the same rounds only: in a round
all of them have the same requests, at each load in turn, and the second round goes the other
way about. After the first one who is clearly beaten goes home, which leaves the time to those
between whom it is close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hotbatch.tuning.finalist import Finalist
from hotbatch.tuning.settings import Figures, Settings, over_loads
from hotbatch.tuning.workload import Job, piece_of

# Of the machine's best: nearly full, and more than it can. Below, all settings are alike.
LOADS = (0.9, 1.3)
ROUNDS = 2
_LEFT = 2  # finalists besides first-come batching in the second round
_BEATEN = 0.95  # of the best one's goodput in the first round
_LEAST_JOBS, _MOST_JOBS = 8, 400  # of a play
_TAIL = 3.0  # seconds that the last answers of a play are thought to take

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

    def piece(self, number: int, load: float) -> list[Job]:
        """The jobs of a round at a load."""
        count = int(min(_MOST_JOBS, max(_LEAST_JOBS, self.seconds * load * self.capacity)))
        count = min(count, len(self.jobs))
        return piece_of(self.jobs, min(number * count, len(self.jobs) - count), count)

    def play_seconds(self, load: float) -> float:
        """About how long a play takes."""
        count = len(self.piece(0, load))
        return count / (self.capacity * min(1.0, load)) + _TAIL

    def seconds_of(self, num_finalists: int) -> float:
        """About how long all takes at most."""
        num_plays = num_finalists + (ROUNDS - 1) * min(num_finalists, _LEFT + 1)
        return num_plays * sum(map(self.play_seconds, LOADS))


def play_off(
    finalists: Sequence[Finalist],
    plan: Plan,
    play: Play,
    on_play: Callable[[Finalist, float, float], None] = lambda finalist, load, left: None,
) -> list[Finalist]:
    """Play all rounds; returns the finalists with what came of it, in the same order.

    Args:
        on_play: told who is next, at which load, and how many seconds are left about.
    """
    standings = dict(enumerate(finalists))
    playing = list(standings)
    for number in range(ROUNDS):
        left = len(playing) + (ROUNDS - 1 - number) * min(len(playing), _LEFT + 1)
        seconds = left * sum(map(plan.play_seconds, LOADS))
        figures: dict[int, list[Figures]] = {index: [] for index in playing}
        for load in LOADS:
            piece = plan.piece(number, load)
            for index in playing if number % 2 == 0 else playing[::-1]:
                on_play(standings[index], load, seconds)
                settings = standings[index].trial.settings
                figures[index].append(play(settings, piece, load * plan.capacity))
                seconds -= plan.play_seconds(load)
        for index in playing:
            one = standings[index]
            standings[index] = replace(one, real=(*one.real, over_loads(figures[index])))
        playing = [index for index in playing if _goes_on(standings[index], standings, playing)]
    return list(standings.values())


def _goes_on(one: Finalist, standings: dict[int, Finalist], playing: Sequence[int]) -> bool:
    """The better first-come batching does, to compare with; of the others the best few."""
    rivals = [standings[index] for index in playing if standings[index].is_plain is one.is_plain]
    best = max(rival.goodput for rival in rivals)
    if one.is_plain:
        return one.goodput == best
    better = sum(rival.goodput > one.goodput for rival in rivals)
    return better < _LEFT and one.goodput >= _BEATEN * best
