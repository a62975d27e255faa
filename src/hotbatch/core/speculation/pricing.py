"""What a draft costs and what it earns: how many of a step's guesses join it.

A second of decoding earns tokens: `n` of them in the time of a step that does nothing else.
`n` counts whoever has a seat or is about to get one: while prompts are computed few decode and
a token seems dear, but it will be cheap as soon as all do, and a guess now would only save that.
Verifying one more row costs the difference between two predicted steps, whatever else is in
them, and earns a token with the chance that the guess is right. So the number of drafts that is
best for the step, and for all its requests together, is the one with the most expected tokens
per second:

    (n + sum of the k best chances) / (seconds without drafts + seconds that k rows add)

As the chances of one request's guesses fall with their depth, the best ones can be taken from
all requests in one order. The rule is the marginal one (`p x value > lambda x dT/dn`, lambda
being what a second earns otherwise), but looks past the teeth of the curve: where kernels work
in tiles, a row that costs much may be followed by some that cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.step import Step

# The least gain in tokens per second for which anything is guessed, and what is added to it in
# large steps: there a row is a small part of the step, and its price of little certainty.
_LEAST_GAIN = 0.01
_UNCERTAINTY = 0.07
_LARGE = 64  # decodes
_PROBES = (1, 2, 4, 8)  # rows for which the cheapest price is looked for
_PATIENCE = 16  # rows without any gain after which no more are tried: no tile is larger
_HOPELESS = 0.97  # no chance is higher for long
_HALVINGS = 8  # of the range in which a chance is looked for


class Bargain(NamedTuple):
    """So many drafts are best, and the tokens per second that are expected then."""

    number: int
    rate: float


class Market:
    """The prices of one step, filled but for its drafts.

    Args:
        num_expected: requests that decode or soon will.

    Attributes:
        seconds: predicted for the step without drafts.
        seconds_a_token: what a decoded token costs without drafts, with all of those.
        least_chance: no guess below it can pay.
    """

    def __init__(self, model: CostModel, step: Step, num_expected: int = 0) -> None:
        self._model = model
        self._base = base = step.measure()
        self._context = step.decode_context // step.num_decodes
        self._most = step.budget
        self.num_decodes = n = max(step.num_decodes, num_expected)
        self.seconds = model.predict(base)
        if n == base.num_tokens:
            self._alone = self.seconds
        else:
            reads = n * (step.decode_reads // step.num_decodes)
            self._alone = model.predict(StepFeatures(n, n, reads, n * self._context, n))
        self.seconds_a_token = self._alone / n
        self._added: list[float] = []
        cheapest = min(self.added_seconds(number) / number for number in _PROBES)
        self.least_chance = cheapest / self.seconds_a_token

    def worth_asking(self, seconds: float, deepest: int) -> float:
        """The chance of each token, from which on a guess is worth looking for it.

        A guess of several tokens is found at once: each of them earns what its chance of being
        reached and right is above `least_chance`, and together they must earn the `seconds` that
        it takes to find them. Above 1 where nothing would.

        Args:
            deepest: most tokens of a guess.
        """
        least, needed = self.least_chance, seconds / self.seconds_a_token
        low, high = least, 1.0
        if deepest * (1.0 - least) <= needed:
            return 1.0 + needed
        for _ in range(_HALVINGS):
            chance = 0.5 * (low + high)
            depth = min(deepest, int(log(least) / log(chance))) if least > 0.0 else deepest
            earned = chance * (1.0 - chance**depth) / (1.0 - chance) - depth * least
            if earned < needed:
                low = chance
            else:
                high = chance
        return high

    @property
    def is_closed(self) -> bool:
        """Guesses cannot pay in this step, however good they are."""
        return self.least_chance > _HOPELESS

    def added_seconds(self, num_drafts: int) -> float:
        """What verifying so many guesses adds to the step."""
        added = self._added
        if num_drafts > len(added):
            last = max(num_drafts, len(added) + _PROBES[-1])
            added += self._model.added_seconds(self._base, self._context, len(added) + 1, last)
        return added[num_drafts - 1] if num_drafts else 0.0

    def best(self, chances: Sequence[float], latest: float, other_seconds: float = 0.0) -> Bargain:
        """How many drafts to verify.

        Args:
            chances: of being reached and right, the best first.
            latest: seconds that the step may take for sure.
            other_seconds: what making these guesses takes, however many are verified.
        """
        earned = float(self.num_decodes)
        alone = self._alone + other_seconds
        # What is needed for any is asked of all together: of a large batch the first few gain less.
        needed = self._needed / self.seconds_a_token
        best, best_rate = 0, 1.0 / self.seconds_a_token
        chances = chances[: self._most]
        self.added_seconds(len(chances))
        added = self._added
        for number, chance in enumerate(chances, start=1):
            earned += chance
            rate = earned / (alone + added[number - 1])
            if rate > best_rate and self.is_in_time(number, latest, other_seconds):
                best, best_rate = number, rate
            elif number - best >= _PATIENCE:
                break
        return Bargain(best, best_rate) if best_rate > needed else Bargain(0, needed)

    def number_worth(self, chances: Sequence[float], latest: float) -> int:
        """How many drafts earn most beyond their own price, whatever else is in the step.

        Beside parts of prompts few may decode, and the best of guesses for them is little to the
        tokens per second of all: so the least gain is asked of the guesses alone. `chances` and
        `latest` as in `best`.
        """
        value = self.seconds_a_token / self._needed
        chances = chances[: self._most]
        self.added_seconds(len(chances))
        best, most_earned, earned = 0, 0.0, 0.0
        for number, (chance, added) in enumerate(zip(chances, self._added, strict=False), start=1):
            earned += chance * value
            if earned - added > most_earned and self.is_in_time(number, latest):
                best, most_earned = number, earned - added
            elif number - best >= _PATIENCE:
                break
        return best

    def most_beside(self, chances: Sequence[float], num_decodes: int, gap: float) -> int:
        """How many of these drafts leave the prompts of the step what they would have without.

        Args:
            chances: as in `best`.
            num_decodes: of the step, without those that soon will.
            gap: seconds that a token of these may take beside prompts.

        A step may last as many of these gaps as it yields tokens for each decode.
        """
        gap = min(gap, self.seconds)
        earned = 0.0
        for number, chance in enumerate(chances, start=1):
            earned += chance
            if (1.0 + earned / num_decodes) * gap > self.seconds + self.added_seconds(number):
                return number - 1
        return len(chances)

    @property
    def _needed(self) -> float:
        """Times as many tokens per second, for which anything is guessed."""
        return 1.0 + _LEAST_GAIN + _UNCERTAINTY * min(1.0, self.num_decodes / _LARGE)

    def rate(self, chances: Sequence[float], other_seconds: float = 0.0) -> float:
        """Tokens per second where all of these guesses are verified."""
        seconds = self._alone + self.added_seconds(len(chances)) + other_seconds
        return (self.num_decodes + sum(chances)) / seconds

    def is_in_time(self, num_drafts: int, latest: float, other_seconds: float = 0.0) -> bool:
        """All but one in twenty such steps end in time."""
        if latest == inf:
            return True
        tail = self._model.predict_p95(self._base) / self.seconds
        return tail * (self.seconds + self.added_seconds(num_drafts)) + other_seconds <= latest

    def latest_end(self, dues: Sequence[float], now: float) -> float:
        """Seconds until the first of those moments that the step without drafts would keep."""
        first = min(dues, default=inf)
        if first == inf:
            return inf
        safe = now + self._model.predict_p95(self._base)
        return min((due for due in dues if due >= safe), default=inf) - now
