"""What a step will cost, learnt from the steps that ran on this machine.

The time of a step is taken as a curve of its tokens plus a price for each sequence, for each KV
token read, for each pair of a token with one it attends to, and for each row that is sampled:

    seconds = curve(num_tokens) + a * num_requests + b * context_tokens + c * attended
              + d * num_sampled

A sequence has a price of its own because a guess is not a decode: it finds the keys of its
request read already. With one price for both, rows seemed dear wherever many decode.

The curve is piecewise linear with bends at fixed places, so that it can be flat up to the knee
and rise behind it, wherever the knee is; all of it is linear in its coefficients, which are
fitted by recursive least squares with forgetting. Errors are weighed relative to the step, as
a chunk that takes a second must not drown a decode that takes ten milliseconds. Slopes and
prices are held at zero or above, so that a longer chunk is never predicted to be quicker.

On top comes what was measured: for steps of up to 64 tokens that are all sampled from, as
decodes and drafts are, the mean ratio
between measured and fitted time at exactly that many tokens. That holds the teeth of the real
curve (kernels work in tiles), where most steps happen. And all of it is taken times the pace of
the moment (`pace`): what steps of any kind took lately against what the coefficients say, which
follow more slowly.

A step during which the machine did something else is an outlier: its excess is clipped. Many
in a row are a changed machine, and its pace is taken as that of the moment at once. The
coefficients follow as they do otherwise: a machine that is slow for a second, and then what it
was, must not leave other prices behind.

Cost: about 20 microseconds an observation, less than one a prediction.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, isfinite, log
from typing import TYPE_CHECKING, NamedTuple

from hotbatch.core.least_squares import RecentQuantiles, RecursiveLeastSquares
from hotbatch.core.pace import Pace

if TYPE_CHECKING:
    from hotbatch.core.plan import StepPlan


class StepFeatures(NamedTuple):
    """What of a step its time depends on. A named tuple, as some are made in every step.

    Attributes:
        num_tokens: rows of the step.
        num_requests: sequences in it.
        context_tokens: KV tokens read: the sum of the requests' context lengths, but what
            several begin with once.
        attended: the sum over rows of the context that each row attends to.
        num_sampled: rows through the head.
    """

    num_tokens: int = 0
    num_requests: int = 0
    context_tokens: int = 0
    attended: int = 0
    num_sampled: int = 0

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepFeatures:
        num_tokens = context_tokens = attended = num_sampled = 0
        for request in plan.requests:
            size = len(request.tokens)
            num_tokens += size
            context_tokens += request.start + size
            attended += _attended(request.start, size)
            if request.sample is not None:
                num_sampled += 1 + request.num_drafts
        return cls(num_tokens, len(plan.requests), context_tokens, attended, num_sampled)

    @property
    def is_decode_only(self) -> bool:
        """Every row is sampled from: decodes and drafts, whose time the same tiles settle."""
        return self.num_tokens == self.num_sampled

    def plus_decode(self, context_len: int, count: int = 1, num_shared: int = 0) -> StepFeatures:
        """With one more row, the last of `context_len` tokens, which is sampled; -1: without.

        Args:
            num_shared: of its tokens, read for others in any case.
        """
        length = count * context_len
        return StepFeatures(
            self.num_tokens + count,
            self.num_requests + count,
            self.context_tokens + length - count * num_shared,
            self.attended + length,
            self.num_sampled + count,
        )

    def plus(self, part: StepFeatures) -> StepFeatures:
        """Both together."""
        return StepFeatures(*(own + other for own, other in zip(self, part, strict=True)))

    def minus(self, part: StepFeatures) -> StepFeatures:
        """What is left without a part of it."""
        return StepFeatures(*(own - other for own, other in zip(self, part, strict=True)))

    def plus_chunk(
        self, start: int, size: int, num_sampled: int = 0, num_shared: int = 0
    ) -> StepFeatures:
        """With `size` more rows of one request, at positions from `start` on; `num_shared` as in
        `plus_decode`."""
        return StepFeatures(
            self.num_tokens + size,
            self.num_requests + 1,
            self.context_tokens + start + size - num_shared,
            self.attended + _attended(start, size),
            self.num_sampled + num_sampled,
        )


def _attended(start: int, size: int) -> int:
    return size * start + size * (size + 1) // 2


class PredictionErrors(NamedTuple):
    """Relative errors of recent predictions, |measured - predicted| / measured."""

    median: float
    p95: float


# The curve's bends. Between two of them it is straight: the finest knees lie at few tokens.
_BENDS = (16, 32, 128, 512)
# What makes each feature about 1 in a full step; sequences less, as their price is that of rows
# until a step with guesses tells them apart.
_TOKENS, _REQUESTS, _CONTEXT, _ATTENDED, _SAMPLED = 64.0, 512.0, 4096.0, 262144.0, 64.0
# An observation's weight halves after 350 steps: seconds to minutes, on any machine.
_FORGETTING = 0.998
_SIZE = 6 + len(_BENDS)  # of the vector: 1, tokens, tokens past each bend, four prices
_PRICES = range(_SIZE - 4, _SIZE)
_UNITS = [[float(i == j) for i in range(_SIZE)] for j in range(_SIZE)]
_SLOPES = [[float(1 <= i <= j) for i in range(_SIZE)] for j in range(_PRICES.start)]
_PRIOR = 1.0  # seconds squared; any sane coefficient is far smaller
_LEAST = 1e-6  # seconds; no step is quicker
_WARM_UP = 32  # steps whose times are believed whatever they are
_MIXED_WARM_UP = 4  # of these, with a part of a prompt
_FIRST_STEPS = 16  # that a rough price of rows takes, one of them with a part of a prompt
_CLIP = 2.0  # a step this much slower or quicker than predicted is an outlier ...
_FIT_CLIP = 1.3  # and of the coefficients it may say no more than this
_REGIME = 8  # ... unless so many in a row are, all to the same side
_TABLE = 64  # tokens of the largest decode-only step with a measured ratio
_TABLE_MEMORY = 200  # steps that a cell remembers
_TABLE_DOUBT = 16  # steps after which a cell is half believed
_WINDOW = 256  # recent predictions that errors are taken from


class CostModel:
    """Predicts seconds of a step; learns from each one that ran."""

    def __init__(self) -> None:
        self._fit = RecursiveLeastSquares(_SIZE, forgetting=_FORGETTING, prior=_PRIOR)
        self._prices = _Prices()
        self._pace = Pace()
        self._table = [1.0] * (_TABLE + 1)
        self._table_counts = [0] * (_TABLE + 1)
        # Of steps that decode only, and of steps with a part of a prompt: measured / predicted.
        self._ratios = (RecentQuantiles(_WINDOW), RecentQuantiles(_WINDOW))
        self._errors = RecentQuantiles(_WINDOW)
        self._tails = [1.0, 1.0]
        self._num_observed = 0
        self._num_mixed = 0
        self._streak = 0  # outliers in a row; negative: to the quick side
        self._streak_log = 0.0

    @property
    def is_trained(self) -> bool:
        """Enough steps were seen, of both kinds, for predictions to be worth something."""
        return self._num_observed >= _WARM_UP and self._num_mixed >= _MIXED_WARM_UP

    @property
    def can_price_rows(self) -> bool:
        """Enough was seen to tell roughly what a few more rows cost; trying them tells more."""
        return self._num_observed >= _FIRST_STEPS and self._num_mixed > 0

    def predict(self, features: StepFeatures) -> float:
        """Expected seconds; 0 before anything was observed. Any thread may ask."""
        if not self._num_observed:
            return 0.0
        num_tokens = features.num_tokens
        seconds = self._prices.of(features) * self._pace.factor
        if num_tokens <= _TABLE and num_tokens == features.num_sampled:
            seconds *= self._table[num_tokens]
        return seconds if seconds > _LEAST else _LEAST

    def added_seconds(self, base: StepFeatures, context: int, first: int, last: int) -> list[float]:
        """What `first` to `last` more rows, sampled from, with `context` tokens each, add to a
        step.

        Both sides by the table or both without: at its edge a ratio must not look like a price.
        """
        prices, pace = self._prices, self._pace.factor
        num_tokens, is_decode_only = base.num_tokens, base.is_decode_only
        fixed = prices.rest(base)
        per_row = prices.rest(StepFeatures(1, 0, 1, context, 1))
        plain = prices.of(base)
        in_table = self.predict(base)
        added = []
        for number in range(first, last + 1):
            tokens = num_tokens + number
            seconds = prices.curve(tokens) + fixed + number * per_row
            if is_decode_only and tokens <= _TABLE:
                seconds = seconds * pace * self._table[tokens] - in_table
            else:
                seconds = (seconds - plain) * pace
            added.append(seconds if seconds > 0.0 else 0.0)
        return added

    def predict_p95(self, features: StepFeatures) -> float:
        """Seconds that 19 of 20 such steps keep, going by the recent ones."""
        return self.predict(features) * self._tails[features.num_tokens != features.num_sampled]

    def prompt_seconds(self, start: int, num_tokens: int, most: int) -> float:
        """Seconds to compute `num_tokens` tokens of a prompt from position `start` on, in steps
        of at most `most` tokens that it has to itself."""
        size = max(1, min(num_tokens, most))
        count = num_tokens / size
        chunk = StepFeatures().plus_chunk(0, size)
        longer = start + (num_tokens - size) / 2.0  # mean context before a chunk
        seconds = self._prices.of(chunk)
        seconds += longer * (self._prices.context + size * self._prices.attended)
        return max(_LEAST, count * seconds)

    def largest_chunk(
        self, base: StepFeatures, start: int, num_uncomputed: int, seconds: float
    ) -> int:
        """How many tokens of a prompt may join a step that must end in time.

        Args:
            base: the step so far.
            start: position of the prompt's first token that is not computed.
            num_uncomputed: tokens left; the last of them is sampled.
            seconds: the time within which 19 of 20 such steps must end.

        Returns:
            The largest number whose `predict_p95` stays within `seconds`; 0 if none does.
        """
        fits, too_many = 0, num_uncomputed + 1
        while too_many - fits > 1:
            size = (fits + too_many) // 2
            if fits == 0 and too_many == num_uncomputed + 1:
                size = num_uncomputed  # all of it, more often than not
            step = base.plus_chunk(start, size, int(size == num_uncomputed))
            if self.predict_p95(step) <= seconds:
                fits = size
            else:
                too_many = size
        return fits

    def errors(self) -> PredictionErrors:
        """How far recent predictions were off, each made before its step was learnt from."""
        return PredictionErrors(self._errors.quantile(0.5), self._errors.quantile(0.95))

    def observe(self, features: StepFeatures, seconds: float, *, is_live: bool = True) -> None:
        """Learn from a step that took `seconds`; times that cannot be are ignored.

        Args:
            is_live: it ran just now. One that was measured earlier says nothing of the pace.
        """
        if not (isfinite(seconds) and seconds > 0.0) or features.num_tokens < 1:
            return
        predicted = self.predict(features)
        at_usual_pace = seconds
        if self._num_observed:
            self._note_error(features, predicted, seconds)
            pace = self._pace.factor
            seconds = self._clipped(predicted, seconds)
            if self._num_observed >= _WARM_UP:
                if is_live:
                    self._pace.note(seconds / (predicted * self._pace.factor / pace))
                predicted /= pace  # by the coefficients and the table alone
                least, most = predicted / _FIT_CLIP, predicted * _FIT_CLIP
                at_usual_pace = min(max(seconds / self._pace.excess, least), most)
                # At the measured pace, not the usual one: what a pace explains at once would
                # never become a price, and the other kinds of steps would be taxed for it.
                seconds = min(max(seconds, least), most)
        believed = predicted if self._num_observed > _WARM_UP else seconds
        weight = 1.0 / max(believed, 0.25 * seconds, _LEAST)
        self._fit.update(_vector(features, weight), seconds * weight)
        self._hold_bounds()
        self._prices = _Prices.of_fit(self._fit.theta)
        # A tooth is what a size costs beside others. Those that happen to be seen while all are
        # slow must not look dear for long after.
        self._note_ratio(features, at_usual_pace)
        self._num_observed += 1
        self._num_mixed += not features.is_decode_only

    def _note_error(self, features: StepFeatures, predicted: float, seconds: float) -> None:
        mixed = not features.is_decode_only
        ratios = self._ratios[mixed]
        ratios.add(seconds / predicted)
        # Few steps say nothing of one in twenty: then the largest of them is taken.
        self._tails[mixed] = max(1.0, ratios.quantile(0.95, 1.0))
        self._errors.add(abs(seconds - predicted) / seconds)

    def _clipped(self, predicted: float, seconds: float) -> float:
        """The measured time, bounded to what one step can tell of the machine."""
        ratio = seconds / predicted
        if 1.0 / _CLIP <= ratio <= _CLIP or self._num_observed < _WARM_UP:
            self._streak = 0
            self._streak_log = 0.0
            return seconds
        side = 1 if ratio > 1.0 else -1
        if self._streak * side < 0:
            self._streak, self._streak_log = 0, 0.0
        self._streak += side
        self._streak_log += log(ratio)
        if abs(self._streak) < _REGIME:
            return predicted * (_CLIP if side > 0 else 1.0 / _CLIP)
        self._pace.jump(exp(self._streak_log / _REGIME))
        self._streak, self._streak_log = 0, 0.0
        return seconds

    def _hold_bounds(self) -> None:
        """No slope of the curve and no price below zero, as far as two rounds get."""
        theta = self._fit.theta
        for _ in range(2):
            for price in _PRICES:
                if theta[price] < 0.0:
                    self._fit.lift(_UNITS[price])
            slope = 0.0
            for index in range(1, _PRICES.start):
                slope += theta[index]
                if slope < 0.0:
                    self._fit.lift(_SLOPES[index])
                    slope = 0.0

    def _note_ratio(self, features: StepFeatures, seconds: float) -> None:
        """Into the table: a running mean, drawn to 1 while there are few steps."""
        num_tokens = features.num_tokens
        if num_tokens > _TABLE or not features.is_decode_only:
            return
        fitted = max(self._prices.of(features), _LEAST)
        ratio = min(max(seconds / fitted, 1.0 / _CLIP), _CLIP)
        count = min(self._table_counts[num_tokens] + 1, _TABLE_MEMORY)
        self._table_counts[num_tokens] = count
        self._table[num_tokens] += (ratio - self._table[num_tokens]) / (count + _TABLE_DOUBT)


class _Prices:
    """The fitted coefficients made ready for prediction; replaced whole, never changed."""

    __slots__ = ("attended", "context", "intercepts", "request", "sampled", "slopes")

    def __init__(self) -> None:
        self.intercepts = [0.0] * (len(_BENDS) + 1)
        self.slopes = [0.0] * (len(_BENDS) + 1)
        self.request = self.context = self.attended = self.sampled = 0.0

    @classmethod
    def of_fit(cls, theta: list[float]) -> _Prices:
        prices = cls()
        constant, slope, *bends, request, context, attended, sampled = theta
        prices.request = max(0.0, request / _REQUESTS)
        prices.context = max(0.0, context / _CONTEXT)
        prices.attended = max(0.0, attended / _ATTENDED)
        prices.sampled = max(0.0, sampled / _SAMPLED)
        level, place, kept = constant, 0, max(0.0, slope / _TOKENS)
        prices.intercepts[0], prices.slopes[0] = constant, kept
        for index, (bend, change) in enumerate(zip(_BENDS, bends, strict=True), start=1):
            level += kept * (bend - place)
            place = bend
            slope += change
            kept = max(0.0, slope / _TOKENS)
            prices.intercepts[index] = level - kept * bend
            prices.slopes[index] = kept
        return prices

    def of(self, features: StepFeatures) -> float:
        return self.curve(features.num_tokens) + self.rest(features)

    def curve(self, num_tokens: int) -> float:
        piece = bisect_right(_BENDS, num_tokens)
        return self.intercepts[piece] + self.slopes[piece] * num_tokens

    def rest(self, features: StepFeatures) -> float:
        """All but the curve."""
        return (
            self.request * features.num_requests
            + self.context * features.context_tokens
            + self.attended * features.attended
            + self.sampled * features.num_sampled
        )


def _vector(features: StepFeatures, weight: float) -> list[float]:
    num_tokens = features.num_tokens
    per_token = weight / _TOKENS
    return [
        weight,
        num_tokens * per_token,
        *[max(0, num_tokens - bend) * per_token for bend in _BENDS],
        features.num_requests * weight / _REQUESTS,
        features.context_tokens * weight / _CONTEXT,
        features.attended * weight / _ATTENDED,
        features.num_sampled * weight / _SAMPLED,
    ]
