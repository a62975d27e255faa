"""How often guesses come true: learnt from all of them, by what they are based on.

The chance of a guessed token, given that those before it in the guess are right, is looked up
by where the guess is from, whether the request samples, how long the match behind it is and
how far its places agree. Each such cell holds a running rate that starts from a belief and
forgets slowly. A request that does better or worse than the cells say shifts its own chances.

Every guess is learnt from, whether it was verified as a draft or not: the token that came
instead tells as much.
"""

from __future__ import annotations

from math import inf

from hotbatch.core.speculation.suffix_index import AGREEMENTS, LEVELS

OWN, ANSWERS, MODEL = range(3)
"""Where a guess is from: the request's own text, answers to others, a draft model."""

_SOURCES = 3
_BELIEF = (0.12, 0.25, 0.5, 0.7, 0.85, 0.92)  # of the first token, by level, as a start
_TRUST = (0.9, 1.0, 0.75, 0.4)  # times that, by agreement
_SAMPLED = 0.6  # times that, where tokens are drawn at a temperature
_BELIEF_IN_MODEL = (0.65,) * len(_BELIEF)  # a draft model's: its levels are depths
_DOUBT = 8.0  # guesses that the belief weighs
_MEMORY = 200.0  # guesses that a cell remembers
_LEAST, _MOST = 0.005, 0.99
_OWN_DOUBT = 2.0  # guesses that a request's own record has to outweigh
_OWN_MEMORY = 0.95  # what is left of its record after each guess


def cell_of(source: int, is_sampled: bool, level: int, agreement: int) -> int:
    """The number of a cell."""
    return ((source * 2 + is_sampled) * len(LEVELS) + level) * AGREEMENTS + agreement


def chance_of(rate: float, factor: float) -> float:
    """The table's rate for a request that does `factor` times as well as expected: failures are
    scaled where that is better."""
    chance = rate * factor if factor <= 1.0 else 1.0 - (1.0 - rate) / factor
    return min(max(chance, _LEAST), _MOST)


class AcceptanceTable:
    """Rates of acceptance by cell."""

    def __init__(self) -> None:
        self.rates = [
            belief * trust * (_SAMPLED if is_sampled else 1.0)
            for source in range(_SOURCES)
            for is_sampled in (False, True)
            for belief in (_BELIEF_IN_MODEL if source == MODEL else _BELIEF)
            for trust in _TRUST
        ]
        self._weights = [_DOUBT] * len(self.rates)
        # Of each level, whatever its places agree on.
        self._best = [
            max(self.rates[first : first + AGREEMENTS])
            for first in range(0, len(self.rates), AGREEMENTS)
        ]

    def note(self, cell: int, is_right: bool) -> None:
        weight = min(self._weights[cell] + 1.0, _MEMORY)
        self._weights[cell] = weight
        self.rates[cell] += (is_right - self.rates[cell]) / weight
        first = cell - cell % AGREEMENTS
        self._best[cell // AGREEMENTS] = max(self.rates[first : first + AGREEMENTS])

    def least_level(self, source: int, is_sampled: bool, rate: float) -> int:
        """The shortest match whose guess may have this rate; `len(LEVELS)` if none may."""
        first = (source * 2 + is_sampled) * len(LEVELS)
        for level in range(len(LEVELS)):
            if self._best[first + level] >= rate:
                return level
        return len(LEVELS)


class OwnRecord:
    """What a request's guesses were expected to yield, and what they did."""

    __slots__ = ("_expected", "_right", "factor")

    def __init__(self) -> None:
        self._expected = 0.0
        self._right = 0.0
        self.factor = 1.0

    def note(self, rate: float, is_right: bool) -> None:
        """A guess to which the table gave `rate`."""
        self._expected = self._expected * _OWN_MEMORY + rate
        self._right = self._right * _OWN_MEMORY + is_right
        self.factor = (self._right + _OWN_DOUBT) / (self._expected + _OWN_DOUBT)

    def chance(self, rate: float) -> float:
        """The table's rate, shifted by the record."""
        return chance_of(rate, self.factor)

    def needed_rate(self, chance: float) -> float:
        """The least rate in the table from which this chance is made."""
        if chance > _MOST:
            return inf
        factor = self.factor
        return chance / factor if factor <= 1.0 else 1.0 - (1.0 - chance) * factor
