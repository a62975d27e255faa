"""How many requests may run at once, by what that does to those who were promised something.

The configured limit is what memory and the owner allow. Below it, a seat more lets somebody
begin sooner and makes everybody's tokens come a little later. Which of the two costs more
requests their promise is seen when they end: those whose tokens came too slowly had too many
beside them, those whose first token alone came late had waited too long. So every few endings
the limit gives way to the more frequent complaint, a tenth at a time (as in additive increase,
multiplicative decrease, but to both sides in proportion). Chunks of prompts are kept within the
slack already (`step_time`), so the limit falls only where the decodes alone are too many.

Where nothing was promised, nothing is limited.
"""

from __future__ import annotations

_WINDOW = 16  # endings between two decisions
_LOWER, _RAISE = 0.9, 1.1
_LEAST = 4  # seats
_CLEAR = 2  # complaints of one kind more than of the other that are not chance


class SeatLimit:
    """The limit of the moment.

    Args:
        most: seats that there are.

    Attributes:
        limit: seats that may be taken now.
    """

    def __init__(self, most: int) -> None:
        self.limit = most
        self._most = most
        self._peak = 0  # seats taken at a time in this window
        self._was_felt = False  # somebody had to wait though there were more seats
        self._num_ended = self._num_slow = self._num_late = 0

    def allows(self, num_running: int) -> bool:
        """May one more be seated beside so many?"""
        self._peak = max(self._peak, num_running)
        if num_running < self.limit:
            return True
        self._was_felt = self._was_felt or num_running < self._most
        return False

    def note_end(self, *, was_slow: bool, was_late: bool) -> None:
        """A request ended that was promised how soon its tokens would come.

        Args:
            was_slow: they came too slowly.
            was_late: its first token came too late.
        """
        self._num_ended += 1
        self._num_slow += was_slow
        self._num_late += was_late and not was_slow
        if self._num_ended < _WINDOW:
            return
        if self._num_slow >= self._num_late + _CLEAR:
            self.limit = max(min(_LEAST, self._most), int(_LOWER * min(self.limit, self._peak)))
        elif self._was_felt and (self._num_late >= self._num_slow + _CLEAR or not self._num_slow):
            self.limit = min(self._most, int(_RAISE * self.limit) + 1)
        self._peak, self._was_felt = 0, False
        self._num_ended = self._num_slow = self._num_late = 0
