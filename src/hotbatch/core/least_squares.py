"""Recursive least squares with forgetting, and quantiles of a recent window: what the cost
model is made of. Pure Python, as the vectors have ten entries and arrive one a step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence


class RecursiveLeastSquares:
    """Fits y = theta . x to a stream of observations, one update in O(k^2).

    The covariance is kept as U diag(D) U' (Bierman, "Factorization Methods for Discrete
    Sequential Estimation", 1977), which stays positive definite whatever is fed to it.

    Old observations fade only in the direction of new ones (Kulhavy, "Restricted exponential
    forgetting in real-time identification", 1987): the variance of x . theta falls with each
    observation at x to `1 - forgetting`, where it would stay if all observations were alike and
    older ones faded, and no further. So what is observed goes on being followed, and what is not
    observed for a while stays known as well as it was: with one kind of observation for minutes,
    the first of another kind, should it be off, must not turn everything over.

    Args:
        size: entries of x.
        forgetting: weight of an observation relative to the one after it, at most 1.
        prior: variance of theta before anything was observed, in units of the noise.
    """

    def __init__(self, size: int, *, forgetting: float, prior: float) -> None:
        self.theta = [0.0] * size
        self._forgetting = forgetting
        self._prior = prior
        # Column j of U above its diagonal of ones.
        self._columns = [[0.0] * j for j in range(size)]
        self._diagonal = [prior] * size

    def update(self, x: Sequence[float], y: float) -> None:
        """Take in one observation of unit weight; to weigh it otherwise, scale both sides."""
        theta, diagonal, columns = self.theta, self._diagonal, self._columns
        error = y
        for value, factor in zip(theta, x, strict=True):
            error -= value * factor
        projected = []
        variance = 0.0  # of x . theta
        for j, column in enumerate(columns):
            value = x[j]
            for u, factor in zip(column, x, strict=False):
                value += u * factor
            projected.append(value)
            variance += value * value * diagonal[j]
        least = 1.0 - self._forgetting
        learns = variance > least
        # As if measured with so much noise that the variance does not fall below the least.
        alpha = variance / (variance - least) if learns else 1.0
        gain: list[float] = []
        for j, column in enumerate(columns):
            value = projected[j]
            scaled = diagonal[j] * value
            beta = alpha
            alpha += value * scaled
            if learns:
                diagonal[j] *= beta / alpha
            step = -value / beta if learns else 0.0
            for i, u in enumerate(column):
                column[i] = u + gain[i] * step
                gain[i] += scaled * u
            gain.append(scaled)
        error /= self._forgetting + variance
        for i, value in enumerate(gain):
            theta[i] += value * error

    def lift(self, x: Sequence[float]) -> None:
        """Move theta to where theta . x = 0, the least that the observations speak against.

        Used to hold a bound theta . x >= 0 that is violated; the covariance is left alone, so
        that the bound costs nothing where observations agree with it.
        """
        projected = [
            x[j] + sum(u * factor for u, factor in zip(column, x, strict=False))
            for j, column in enumerate(self._columns)
        ]
        scaled = [value * d for value, d in zip(projected, self._diagonal, strict=True)]
        variance = sum(p * s for p, s in zip(projected, scaled, strict=True))
        if variance <= 0.0:
            return
        step = -sum(value * factor for value, factor in zip(self.theta, x, strict=True)) / variance
        for j, (column, value) in enumerate(zip(self._columns, scaled, strict=True)):
            value *= step
            for i, u in enumerate(column):
                self.theta[i] += u * value
            self.theta[j] += value


class RecentQuantiles:
    """The last `size` values, kept sorted: adding and asking cost about a microsecond."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, value: float) -> None:
        if len(self._recent) == self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float, default: float = 0.0) -> float:
        """The smallest value that `share` of the window does not exceed; `default` if empty."""
        values = self._sorted
        if not values:
            return default
        return values[min(int(share * len(values)), len(values) - 1)]
