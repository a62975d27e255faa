"""The finalists against each other on the real engine.

A machine is quicker in one minute than in the next, and some stretches of a workload are harder
than others. So finalists are compared by what they played in the same rounds only, in which all
have the same requests. Whoever is about to replace the default plays once more against it, the
other way about: it must be better in both rounds together. First-come batching plays the first
one, to compare with.

A play is more than the machine can do, and long: where all fits, settings are alike, and a queue
takes its time to grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hotbatch.tuning.finalist import Finalist, choose
from hotbatch.tuning.settings import Figures, Settings
from hotbatch.tuning.workload import Job, piece_of

LOAD = 1.4  # of the machine's best
ROUNDS = 2
_LEAST_JOBS, _MOST_JOBS = 8, 2000  # of a play
_ONCE_MORE = 2  # plays of the second round
_TAIL = 7.0  # seconds that its last answers are thought to take

Play = Callable[[Settings, Sequence[Job], float], Figures]
"""Serve the jobs at so many a second with these settings; what came of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played to each finalist.

    Args:
        jobs: of the workload, `num_jobs` if there are; each round has a piece of them.
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
        count = min(num_jobs(self.capacity, self.seconds) // ROUNDS, len(self.jobs))
        return piece_of(self.jobs, min(number * count, len(self.jobs) - count), count)

    @property
    def play_seconds(self) -> float:
        """About how long a play takes."""
        return len(self.piece(0)) / self.rate + _TAIL

    def seconds_of(self, num_finalists: int) -> float:
        """About how long all takes at most."""
        return (num_finalists + _ONCE_MORE) * self.play_seconds


def num_jobs(capacity: float, seconds: float) -> int:
    """How many all rounds need."""
    return ROUNDS * int(min(_MOST_JOBS, max(_LEAST_JOBS, seconds * LOAD * capacity)))


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

    def play_round(number: int, indices: Sequence[int], num_later: int) -> None:
        piece = plan.piece(number)
        for place, index in enumerate(indices):
            one = played[index]
            on_play(one, (len(indices) - place + num_later) * plan.play_seconds)
            figures = play(one.trial.settings, piece, plan.rate)
            played[index] = replace(one, real=(*one.real, figures))

    play_round(0, range(len(played)), _ONCE_MORE)
    chosen = choose(played)
    if not chosen.is_default:
        again = [index for index, one in enumerate(played) if one is chosen or one.is_default]
        play_round(1, again[::-1], 0)
    return played
