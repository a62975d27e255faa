"""How long answers will get, and what a batch will need at its peak.

Reserving `max_tokens` for everybody leaves most of the KV cache empty, as few answers get that
long; reserving nothing evicts. What comes between is to expect what recent answers suggest,
given what each has written already, and to look at when the batch will need most: requests end
one after the other and give their tokens back (Gong et al., "Past-Future Scheduler for LLM
Serving under SLA Guarantees", ASPLOS 2025, arXiv 2507.10150).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

_WINDOW = 512
_GUESS = 256  # tokens of an answer when none has ended yet
_DOUBT = 8  # answers that the guess counts for


class OutputLengths:
    """The lengths of the last answers of one kind (a service class, say).

    Where the paper draws from the distribution, the mean is taken: a plan must not depend on
    chance, and it is a sum over many requests that is asked for.
    """

    def __init__(self, window: int = _WINDOW, *, guess: int = _GUESS) -> None:
        self._window = window
        self._guess = guess
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # of the longest 1, 2, ...; made when asked for

    def __len__(self) -> int:
        return len(self._recent)

    def observe(self, num_output: int) -> None:
        """An answer ended, after so many tokens."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(num_output)
        insort(self._sorted, num_output)
        self._sums = None

    def expected_total(self, num_output_so_far: int, max_output: int) -> int:
        """Expected output tokens in all, given that there are `num_output_so_far` already.

        The mean over recent answers that were longer. The fewer these are, the more the guess
        counts: what nobody has seen, or twice what there is if that is more. More than
        `num_output_so_far`, unless that is `max_output` already; never more than `max_output`.
        """
        num_longer = len(self._sorted) - bisect_right(self._sorted, num_output_so_far)
        guess = max(self._guess, 2 * num_output_so_far)
        total = 0
        if num_longer:
            if self._sums is None:
                self._sums = list(accumulate(reversed(self._sorted)))
            total = self._sums[num_longer - 1]
        doubt = max(0, _DOUBT - num_longer)
        expected = -(-(total + doubt * guess) // (num_longer + doubt))
        return min(max(expected, num_output_so_far + 1), max_output)


def expected_peak(current_and_remaining: Sequence[tuple[int, int]]) -> int:
    """The most KV tokens that a batch holds at once, if nobody else joins.

    Each request is (tokens it holds now, output tokens still to come); all write one token a
    step, and one that has written its last gives everything back. The most is held at the
    moment that one of them ends: with the requests sorted by what remains, longest first, it is
    the largest over k of (the tokens that the first k hold) + k * (what remains to the k-th).
    """
    held = peak = 0
    by_remaining = sorted(current_and_remaining, key=_remaining, reverse=True)
    for count, (current, remaining) in enumerate(by_remaining, start=1):
        held += current
        peak = max(peak, held + count * remaining)
    return peak


def _remaining(request: tuple[int, int]) -> int:
    return request[1]
