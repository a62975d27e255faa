"""When conversations come back: how long people take for their next turn, and whether they do.

Gaps between the end of an answer and the next prompt that continues it are counted in bins that
grow with the square root of two, as people's gaps spread over seconds to hours. For each bin it
is known how many conversations were still waited for when it began, and how many of them came
back within it; those that never came are in the first number only. The quotient is the hazard
(the life table of survival analysis; Kaplan and Meier 1958 is its limit of narrow bins), so that
nothing has to be waited for to the end before it teaches something.

What keeping a conversation earns is a chance and a time: kept for another `T` seconds, it comes
back with some probability and holds its memory until it does, or for `T`. The best quotient over
all `T` of chance per second held is the *return rate* by which conversations are compared (the
index of Gittins 1979 for a bandit that is either played on or given up). It sees that somebody
who answered ten seconds ago will likely write within the next minute, where the hazard of this
very moment is still small, and that nobody comes back after an hour.

Conversations that had many turns come back more often, so each number of turns (in classes) has
its own table, and so has each tenant. A table with little in it leans on the one of all tenants,
and that on a belief: the longer somebody is away, the less likely he is back any moment, which
keeps what plain LRU keeps. Counts are halved when there are many, so that habits may change.

Cost: a few additions for each gap, and half a millisecond for a table that is made anew after an
eighth more was seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from itertools import pairwise

_FIRST = 0.5  # seconds, the end of the first bin
_RATIO = 2.0**0.5
BORDERS = (0.0, *(_FIRST * _RATIO**index for index in range(26)))  # to 48 minutes
NUM_BINS = len(BORDERS) - 1
HORIZON = BORDERS[-1]  # seconds after which a conversation is taken to be over

TURN_CLASSES = 6  # first turns, second ones, ... , from the sixth on
COMMON = TURN_CLASSES  # the class of prefixes that several conversations share
_NUM_CLASSES = TURN_CLASSES + 1

_MOST_WEIGHT = 2000.0  # conversations in a table before its counts are halved
_DOUBT = 16.0  # conversations that the wider table weighs in a narrower one
_BELIEF_SCALE, _BELIEF_POWER = 30.0, 0.25  # survival (1 + t / scale) ** -power
_MOST_TENANTS = 256
_LEAST_NEWS = 8.0
_NEWS_SHARE = 8


def bin_of(gap: float) -> int:
    """The bin of a gap in seconds; `NUM_BINS` past the horizon."""
    return max(0, bisect_right(BORDERS, gap) - 1)


def turn_class(turn: int) -> int:
    """The class of a conversation that has had `turn` turns before the one that ended."""
    return min(turn, TURN_CLASSES - 1)


def _believed_hazards() -> list[float]:
    def survival(gap: float) -> float:
        return float((1.0 + gap / _BELIEF_SCALE) ** -_BELIEF_POWER)

    return [1.0 - survival(end) / survival(start) for start, end in pairwise(BORDERS)]


class ReturnTable:
    """One class of conversations: the hazard of each bin, the return rate from each bin on.

    Args:
        wider: the table that this one leans on while it has seen little.

    Attributes:
        rates: chance of a return per second held, from the beginning of each bin on; 0 in one
            more, past the horizon.
        chances: that it returns at all, from the beginning of each bin on.
        version: grows whenever these are made anew.
    """

    def __init__(self, wider: ReturnTable | None = None) -> None:
        self._wider = wider
        self._at_risk = [0.0] * NUM_BINS
        self._returned = [0.0] * NUM_BINS
        self._news = 0.0
        self.version = 0
        self.hazards: list[float] = []
        self.rates: list[float] = []
        self.chances: list[float] = []
        self._renew()

    def note_survived(self, index: int) -> bool:
        """A conversation did not come back within a bin. True if the rates were made anew."""
        self._at_risk[index] += 1.0
        return self._note_news()

    def note_returned(self, index: int, counted: int) -> bool:
        """A conversation came back within a bin.

        Args:
            counted: bins that it was said to have survived already; those from `index` on were
                a mistake, as nobody had told of its return yet.

        Returns:
            True if the rates were made anew.
        """
        at_risk = self._at_risk
        for survived in range(index, min(counted, NUM_BINS)):
            at_risk[survived] = max(0.0, at_risk[survived] - 1.0)
        if index < NUM_BINS:
            at_risk[index] += 1.0
            self._returned[index] += 1.0
        return self._note_news()

    def _note_news(self) -> bool:
        self._news += 1.0
        weight = max(self._at_risk)
        if self._news < max(_LEAST_NEWS, weight / _NEWS_SHARE):
            return False
        if weight > _MOST_WEIGHT:
            self._at_risk = [count / 2.0 for count in self._at_risk]
            self._returned = [count / 2.0 for count in self._returned]
        self._renew()
        return True

    def _renew(self) -> None:
        believed = _BELIEVED if self._wider is None else self._wider.hazards
        self.hazards = [
            (returned + _DOUBT * belief) / (at_risk + _DOUBT)
            for returned, at_risk, belief in zip(
                _smoothed(self._returned), _smoothed(self._at_risk), believed, strict=True
            )
        ]
        self.rates, self.chances = _rates_of(self.hazards)
        self._news = 0.0
        self.version += 1


def _smoothed(counts: list[float]) -> list[float]:
    """Each with a quarter of its neighbours: gaps have no edges at the borders of bins, but the
    best rate over all `T` would find those that chance makes."""
    padded = [counts[0], *counts, counts[-1]]
    return [
        (before + 2.0 * count + after) / 4.0
        for before, count, after in zip(padded[:-2], padded[1:-1], padded[2:], strict=True)
    ]


def _rates_of(hazards: list[float]) -> tuple[list[float], list[float]]:
    rates, chances = [], []
    for first in range(NUM_BINS):
        waiting, returned, held, best = 1.0, 0.0, 0.0, 0.0
        for index in range(first, NUM_BINS):
            returns = waiting * hazards[index]
            returned += returns
            held += (waiting - returns / 2.0) * (BORDERS[index + 1] - BORDERS[index])
            waiting -= returns
            if returned > best * held:
                best = returned / held
        rates.append(best)
        chances.append(returned)
    return [*rates, 0.0], [*chances, 0.0]


_BELIEVED = _believed_hazards()


class ReturnTimes:
    """The tables of all tenants; those of tenants that were not heard of for long are dropped."""

    def __init__(self) -> None:
        self._all = [ReturnTable() for _ in range(_NUM_CLASSES)]
        self._tenants: OrderedDict[str, list[ReturnTable]] = OrderedDict()

    def tables(self, tenant: str, turns: int) -> tuple[ReturnTable, ReturnTable]:
        """The tenant's table of a class and that of everybody."""
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = [ReturnTable(wider) for wider in self._all]
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        return own[turns], self._all[turns]
