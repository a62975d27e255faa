"""How much slower than usual the machine is at the moment.

Virtual machines have neighbours, and processors have moods: for seconds at a time every step
takes a tenth more, or less. The coefficients of a step's price must not chase that, and a
prediction must not ignore it. So the level has a place of its own: one factor, common to all
steps, moved by each of them a little towards what it took.

A step moves it by its sign more than by its size, so that one that was interrupted counts no
more than one that was a little slow: on machines with many interruptions the mean lies above
most steps.
"""

from __future__ import annotations

from math import exp, log

_RATE = 0.3  # of what a step was off, that the next is expected to be
_MOST = 0.1  # of the logarithm, that one step can be off
_USUAL = 0.1  # of the logarithm, that the factor strays on a quiet machine
_RETURN = 0.999  # a step; what stays is the coefficients' to learn


class Pace:
    """One factor on the predicted time of every step."""

    __slots__ = ("_log", "factor")

    def __init__(self) -> None:
        self._log = 0.0
        self.factor = 1.0

    @property
    def excess(self) -> float:
        """The factor without what it may well owe to the sizes of the last steps."""
        beyond = max(abs(self._log) - _USUAL, 0.0)
        return exp(beyond if self._log > 0.0 else -beyond)

    def jump(self, ratio: float) -> None:
        """Many steps in a row took about `ratio` times their predicted time: from now on."""
        self._log += log(ratio)
        self.factor = exp(self._log)

    def note(self, ratio: float) -> None:
        """A step took `ratio` times its predicted time, this factor included."""
        off = log(ratio)
        off = _MOST if off > _MOST else max(off, -_MOST)
        self._log = (self._log + _RATE * off) * _RETURN
        self.factor = exp(self._log)
