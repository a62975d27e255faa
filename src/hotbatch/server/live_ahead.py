"""Guessed requests as lanes: what was computed of each since the last frame, and its fate.

Beside the lanes of requests that somebody sent (`live_batch`), for a guess is in no class, has no
client and may end in ways of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hotbatch.core.plan import PlannedRequest
from hotbatch.core.speculation import Fate, GuessNews

# A lane's state in a frame.
COMPUTING, COMPUTED, CLAIMED, DROPPED = range(4)
AHEAD_FIELDS = ("number", "state", "prompt", "decode", "context")
"""A lane of a guess is so many integers: an id for as long as it lives, its state (0 computing,
1 computed to its end, 2 claimed by the request that it guessed, 3 over: dropped, or the beginning
of a next turn that was computed as far as there was time), tokens of its prompt
and of its answer computed since the last frame, and the tokens that it attends to now."""

_STATES = {Fate.COMPUTED: COMPUTED, Fate.CLAIMED: CLAIMED, Fate.DROPPED: DROPPED}
_MOST_LANES = 256


class _Lane:
    __slots__ = ("context", "decode", "number", "prompt", "state")

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = COMPUTING
        self.prompt = self.decode = self.context = 0


class LiveAhead:
    """Folds what steps computed ahead; `take_frame` tells it and starts anew."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._next_number = 0

    def note_step(self, guesses: Sequence[PlannedRequest]) -> None:
        """A step ran with these guesses in it."""
        for planned in guesses:
            lane = self._lane(planned.request_id)
            sample = planned.sample
            if sample is None or planned.start < sample.num_prompt:
                lane.prompt += len(planned.tokens)
            else:
                lane.decode += len(planned.tokens)
            lane.context = planned.context_len

    def note_news(self, news: Iterable[GuessNews]) -> None:
        """Guesses whose first step was not seen have no lane."""
        for piece in news:
            lane = self._lanes.get(piece.request_id)
            if lane is not None:
                lane.state = _STATES[piece.fate]

    def take_frame(self) -> list[int]:
        """All lanes (AHEAD_FIELDS one after the other); those that are over once more."""
        flat: list[int] = []
        for lane in self._lanes.values():
            flat += (lane.number, lane.state, lane.prompt, lane.decode, lane.context)
            lane.prompt = lane.decode = 0
        self._lanes = {
            request_id: lane
            for request_id, lane in self._lanes.items()
            if lane.state in (COMPUTING, COMPUTED)
        }
        return flat

    def _lane(self, request_id: str) -> _Lane:
        lane = self._lanes.get(request_id)
        if lane is None:
            while len(self._lanes) >= _MOST_LANES:
                del self._lanes[next(iter(self._lanes))]
            lane = self._lanes[request_id] = _Lane(self._next_number)
            self._next_number += 1
        return lane
