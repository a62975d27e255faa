"""What computing a guessed request costs and what it earns, row by row.

A row of a guess saves the seconds that the request would wait for it later, if exactly that
request comes: `chance x seconds`. Beside requests that somebody sent, the row delays every one of
them by what it adds to the step, so it joins while

    chance x seconds saved > seconds added x requests delayed

while the step still ends before the next token of any of them is due, and only if the guess is more
likely right than wrong: whoever is delayed is so for sure. In a step that would
not be made otherwise nobody is delayed, but rows delay one another: one more joins while the
value earned in a second of the step grows. Such a step is kept short, as whoever arrives while it
runs waits for its end.
"""

from __future__ import annotations

from math import inf

from hotbatch.core.cost_model import CostModel, StepFeatures

# Below this chance even an idle machine computes nothing: a request that comes in the middle of
# a step waits for its end, and at some arrivals a second that is what the guess earns.
LEAST_CHANCE = 0.05
_LEAST_BESIDE = 0.5  # chance below which nobody is delayed for a guess
_BRIEF = 0.02  # seconds that a step of guesses may take ...
_STRETCH = 2.0  # ... or so many times the quickest step there is
_UNPRICED_CHUNK = 16  # tokens of a prompt in a step whose time nobody can tell


class AheadPrices:
    """Prices of one step, for the guesses that may join it one after another.

    Args:
        model: None, or not trained yet: only a step that is idle otherwise takes a guess.
        base: the step as it is.
        num_delayed: requests in it that somebody sent.
        latest: seconds that the step may take at most.
    """

    def __init__(
        self, model: CostModel | None, base: StepFeatures, num_delayed: int, latest: float = inf
    ) -> None:
        self._model = model if model is not None and model.is_trained else None
        self._step = base
        self._base = base
        self._num_delayed = num_delayed
        self._latest = latest
        self._value = 0.0
        if self._model is not None and not num_delayed:
            one = self._model.predict(StepFeatures().plus_decode(1))
            self._latest = min(latest, max(_BRIEF, _STRETCH * one))

    @property
    def is_open(self) -> bool:
        """Could any guess join?"""
        return self._model is not None or not self._num_delayed

    @property
    def added_seconds(self) -> float:
        """What the guesses that joined add to the step, predicted."""
        if self._model is None:
            return 0.0
        return max(0.0, self._seconds(self._step) - self._seconds(self._base))

    def chunk(self, start: int, num_uncomputed: int) -> int:
        """How many tokens of a prompt might join; 0 for none."""
        if self._model is None:
            return min(num_uncomputed, _UNPRICED_CHUNK)
        size = self._model.largest_chunk(self._step, start, num_uncomputed, self._latest)
        if self._num_delayed:
            return min(size, _UNPRICED_CHUNK)  # small, as it is felt
        return size if self._step.num_tokens else max(size, min(num_uncomputed, _UNPRICED_CHUNK))

    def pays(self, start: int, size: int, num_sampled: int, chance: float) -> bool:
        """Would rows at positions from `start` on pay, and leave the step in time?"""
        if not self._step.num_tokens:
            return True  # something has to be first
        if self._model is None or (self._num_delayed and chance < _LEAST_BESIDE):
            return False
        more = self._step.plus_chunk(start, size, num_sampled)
        seconds, with_more = self._seconds(self._step), self._seconds(more)
        value = chance * self._saved(start, size, num_sampled)
        if self._num_delayed:
            pays = value > (with_more - seconds) * self._num_delayed
        else:
            pays = (self._value + value) * seconds > self._value * with_more
        return pays and self._model.predict_p95(more) <= self._latest

    def take(self, start: int, size: int, num_sampled: int, chance: float) -> bool:
        """Let rows join if they pay."""
        if not self.pays(start, size, num_sampled, chance):
            return False
        self._value += chance * self._saved(start, size, num_sampled)
        self._step = self._step.plus_chunk(start, size, num_sampled)
        return True

    def _saved(self, start: int, size: int, num_sampled: int) -> float:
        """Seconds that these rows would take later, by themselves."""
        if self._model is None:
            return 0.0
        return self._model.predict(StepFeatures().plus_chunk(start, size, num_sampled))

    def _seconds(self, features: StepFeatures) -> float:
        assert self._model is not None
        return self._model.predict(features) if features.num_tokens else 0.0
