"""What passes between two steps: what a client's gap between tokens has beside the step itself.

Planning, booking, telling the clients: a fraction of a millisecond to a few, which the cost
model does not see, as it is told the seconds of steps. With a step as short as that, it counts.
"""

from __future__ import annotations

_RATE = 0.05  # of the latest in the mean


class Turnaround:
    """The mean time from the end of one step to the next, less what the model computes."""

    __slots__ = ("_ended", "_is_following", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ended: float | None = None  # the last step
        self._is_following = False  # somebody who got a token in it waited for the next

    def note_plan(self, is_following: bool) -> None:
        """A step is planned; is it for somebody who had a token of the last one?"""
        self._is_following = is_following

    def note_commit(self, now: float, step_seconds: float) -> None:
        """A step that took `step_seconds` has ended."""
        ended, self._ended = self._ended, now
        if ended is None or not self._is_following:
            return
        # Longer than a step is no turnaround: somebody waited, or the machine did something else.
        between = min(max(0.0, now - ended - step_seconds), step_seconds)
        self.seconds += _RATE * (between - self.seconds)
