"""Fixed frames around earlier answers: how a program makes its next prompt from the last one.

An agent or a pipeline sends prompts that no person types: the next one is the answer just read,
in a frame that stays the same from run to run. A frame is induced from one observed pair and has
three parts:

    next prompt = beginning + middle + answer + end

`middle` and `end` are fixed. The beginning is part of the prompt before (all of a conversation so
far, say), or nothing. Where that part stops can be told in two ways, and one pair does not say
which is meant: so many symbols before its end, or where its own answer was inserted. So a pair
yields several frames; the next pairs show which of them hold.

Prompts and answers are strings of symbols. A symbol is a character where the client sends text
(the seam between an answer and what follows it is tokenized by whoever renders the prompt, so
that matches are exact), or a token id as a code point where it sends ids.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import NamedTuple

_LEAST_ANSWER = 4  # symbols; a shorter one is found anywhere by chance
_LEAST_SHARED = 8  # symbols that a beginning shares with the prompt before
_LONGEST = 8192  # symbols of a middle or an end that are remembered


class Beginning(enum.Enum):
    """What of the prompt before stands at the beginning of the next."""

    NOTHING = "nothing"
    WITHOUT_TAIL = "without tail"  # all but its last `cut` symbols
    UP_TO_HOLE = "up to hole"  # what stood before the answer in it


class Rendered(NamedTuple):
    """A prompt, and where the answer before it was inserted."""

    prompt: str
    hole: int


class Frame(NamedTuple):
    """How a next prompt is made; `manner` is how it is asked for (opaque, compared only)."""

    beginning: Beginning
    cut: int
    middle: str
    end: str
    is_stripped: bool  # white space around the answer is dropped
    manner: Hashable

    @property
    def size(self) -> int:
        """Symbols that remembering it takes."""
        return len(self.middle) + len(self.end)

    def render(self, prompt: str, answer: str, hole: int | None) -> Rendered | None:
        """The next prompt after this one; None if the frame does not fit it.

        Args:
            prompt, answer: of the request before.
            hole: where an earlier answer was inserted in `prompt`, if one was.
        """
        kept = 0
        if self.beginning is Beginning.WITHOUT_TAIL:
            kept = len(prompt) - self.cut
            if kept < 0:
                return None
        elif self.beginning is Beginning.UP_TO_HOLE:
            if hole is None:
                return None
            kept = hole
        before = prompt[:kept] + self.middle
        inserted = answer.strip() if self.is_stripped else answer
        return Rendered(before + inserted + self.end, len(before))


def induce(
    prompt: str, answer: str, hole: int | None, next_prompt: str, manner: Hashable
) -> list[Frame]:
    """The frames that make `next_prompt` of a prompt and its answer; none if it lacks the answer.

    Linear in the prompts, by searching and comparing strings.
    """
    core = answer.strip()
    if len(core) < _LEAST_ANSWER:
        return []
    shared = _num_shared(prompt, next_prompt)
    goes_on = shared == len(prompt)  # the next prompt, where the last one ended
    start = next_prompt.find(core, shared) if goes_on else next_prompt.rfind(core)
    if start < 0:
        return []
    stop = start + len(core)
    is_stripped = True
    lead = len(answer) - len(answer.lstrip())
    if core != answer and next_prompt[max(0, start - lead) :].startswith(answer):
        start -= lead
        stop = start + len(answer)
        is_stripped = False
    before, end = next_prompt[:start], next_prompt[stop:]
    shared = min(shared, len(before))
    beginnings = [(Beginning.NOTHING, 0, 0)]
    if shared >= _LEAST_SHARED:
        beginnings.append((Beginning.WITHOUT_TAIL, len(prompt) - shared, shared))
        if hole is not None and shared >= hole:
            beginnings.append((Beginning.UP_TO_HOLE, 0, hole))
    return [
        Frame(beginning, cut, before[kept:], end, is_stripped, manner)
        for beginning, cut, kept in beginnings
        if len(before) - kept <= _LONGEST and len(end) <= _LONGEST
    ]


def _num_shared(one: str, other: str) -> int:
    """Length of the common prefix; halving, as comparing slices is what strings do fast."""
    same, differs = 0, min(len(one), len(other)) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differs = middle
    return same
