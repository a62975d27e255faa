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

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.step import Step

# The least gain in tokens per second for which anything is guessed, and what is added to it in
# large steps: there a row is a small part of the step, and its price of little certainty.
_LEAST_GAIN = 0.01
_UNCERTAINTY = 0.02
_LARGE = 32  # decodes
_PROBES = (1, 2, 4, 8)  # rows for which the cheapest price is looked for
_PATIENCE = 16  # rows without any gain after which no more are tried: no tile is larger
_HOPELESS = 0.97  # no chance is higher for long


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
        self._base = step.measure()
        self._context = step.decode_context // step.num_decodes
        self._most = step.budget
        self.num_decodes = n = max(step.num_decodes, num_expected)
        self.seconds = model.predict(self._base)
        context = n * self._context
        self._alone = model.predict(StepFeatures(n, n, context, context, n))
        self.seconds_a_token = self._alone / n
        self.least_chance = self._least_chance()

    @property
    def is_closed(self) -> bool:
        """Guesses cannot pay in this step, however good they are."""
        return self.least_chance > _HOPELESS

    def added_seconds(self, num_drafts: int) -> float:
        return self._model.added_seconds(self._base, self._with(num_drafts))

    def best_number(self, chances: Sequence[float], latest: float) -> int:
        """How many drafts to verify.

        Args:
            chances: of being reached and right, the best first.
            latest: seconds that the step may take for sure.
        """
        earned = float(self.num_decodes)
        needed = 1.0 + _LEAST_GAIN + _UNCERTAINTY * min(1.0, self.num_decodes / _LARGE)
        best, best_rate = 0, needed / self.seconds_a_token
        for number, chance in enumerate(chances[: self._most], start=1):
            earned += chance
            rate = earned / (self._alone + self.added_seconds(number))
            if rate > best_rate and self._is_in_time(number, latest):
                best, best_rate = number, rate
            elif number - best >= _PATIENCE:
                break
        return best

    def _least_chance(self) -> float:
        cheapest = min(self.added_seconds(number) / number for number in _PROBES)
        return cheapest / self.seconds_a_token

    def _is_in_time(self, num_drafts: int, latest: float) -> bool:
        return self._model.predict_p95(self._with(num_drafts)) <= latest

    def latest_end(self, dues: Sequence[float], now: float) -> float:
        """Seconds until the first of those moments that the step without drafts would keep."""
        safe = now + self._model.predict_p95(self._base)
        return min((due for due in dues if due >= safe), default=float("inf")) - now

    def _with(self, num_drafts: int) -> StepFeatures:
        base = self._base
        return StepFeatures(
            base.num_tokens + num_drafts,
            base.num_requests,
            base.context_tokens + num_drafts,
            base.attended + num_drafts * self._context,
            base.num_sampled + num_drafts,
        )
