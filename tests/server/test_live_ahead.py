"""Lanes of guessed requests."""

from __future__ import annotations

from hotbatch.core.plan import PlannedRequest, SampleSpec
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.speculation import Fate, GuessNews
from hotbatch.server.live_ahead import (
    AHEAD_FIELDS,
    CLAIMED,
    COMPUTED,
    COMPUTING,
    DROPPED,
    LiveAhead,
)


def chunk(name: str, start: int, size: int, num_prompt: int = 6) -> PlannedRequest:
    end = start + size
    sample = SampleSpec(SamplingParams(), 0, end, num_prompt) if end >= num_prompt else None
    return PlannedRequest(name, start, tuple(range(size)), (0, 1, 2), sample)


def lanes(ahead: LiveAhead) -> list[dict[str, int]]:
    flat, width = ahead.take_frame(), len(AHEAD_FIELDS)
    return [
        dict(zip(AHEAD_FIELDS, flat[at : at + width], strict=True))
        for at in range(0, len(flat), width)
    ]


def test_a_frame_tells_what_was_computed_since_the_last_one() -> None:
    ahead = LiveAhead()
    ahead.note_step([chunk("a", 0, 4)])
    ahead.note_step([chunk("a", 4, 2)])
    ahead.note_step([chunk("a", 6, 1), chunk("b", 0, 3)])
    one, two = lanes(ahead)
    assert one == {"number": 0, "state": COMPUTING, "prompt": 6, "decode": 1, "context": 7}
    assert two == {"number": 1, "state": COMPUTING, "prompt": 3, "decode": 0, "context": 3}
    assert [lane["prompt"] + lane["decode"] for lane in lanes(ahead)] == [0, 0]


def test_a_lane_that_is_over_is_told_once_more() -> None:
    ahead = LiveAhead()
    ahead.note_step([chunk("a", 0, 6), chunk("b", 0, 6)])
    ahead.note_news([GuessNews("a", Fate.COMPUTED), GuessNews("unseen", Fate.DROPPED)])
    assert [lane["state"] for lane in lanes(ahead)] == [COMPUTED, COMPUTING]
    ahead.note_news([GuessNews("a", Fate.CLAIMED), GuessNews("b", Fate.DROPPED)])
    assert [lane["state"] for lane in lanes(ahead)] == [CLAIMED, DROPPED]
    assert lanes(ahead) == []


def test_lanes_are_bounded() -> None:
    ahead = LiveAhead()
    for number in range(1000):
        ahead.note_step([chunk(str(number), 0, 1)])
    assert len(lanes(ahead)) == 256
