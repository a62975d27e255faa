"""What those at the bottom are owed: a small share of all tokens, however busy the others are.

Two kinds stand there, each with a share of its own: the batch class, and requests that are so
late that their clients have waited several times what they were promised.

A counter in tokens: it rises by the share of what is computed while some of them wait, and
falls by what they get. Where others leave them much anyway, it falls below zero, to a bound, and
for that long nothing is taken from anybody for them. Once it covers the next piece of one of
them, that request competes above all classes for one step, and so gets a seat, blocks and tokens
like anybody else. It is the same request until it ends, or is not late any more, and its blocks
are the last that others take: otherwise each piece might be lost again before the next one. As a
request that decodes can use one token a step, there are several of them where one cannot use
what is owed.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator
from typing import NamedTuple

from hotbatch.core.request import Request

_LARGEST_PIECE = 32  # tokens of a prompt
_MOST_CHOSEN = 8


class OwedShare:
    """Whom those at the bottom send, and when.

    Args:
        share: of all tokens, from 0 to 1.
        memory: tokens that they got beyond their share and that count at most against what they
            are owed later.
    """

    def __init__(self, share: float, memory: float = 0.0) -> None:
        self._share = share
        self._memory = memory
        self._owed = 0.0  # tokens
        self.chosen: dict[Request, None] = {}  # a set in order

    @property
    def is_owed(self) -> bool:
        return self._owed >= 1.0

    @property
    def may_choose(self) -> bool:
        """Is there more owed than those that are chosen can use?"""
        if not self.chosen:
            return self.is_owed
        return len(self.chosen) < _MOST_CHOSEN and self._owed >= _LARGEST_PIECE * 1.5

    def due(self) -> Iterator[tuple[Request, int]]:
        """The chosen requests for whose next piece enough is owed, each with its tokens."""
        owed = int(self._owed)
        for request in self.chosen:
            left = len(request.tokens) - request.num_computed
            size = max(1, min(left, _LARGEST_PIECE))
            if size <= owed and not request.in_flight:
                owed -= size
                yield request, size

    def note(self, num_tokens: int, num_had: int, has_work: bool) -> None:
        """A step was planned: of its tokens, they had `num_had`."""
        owed = self._owed + self._share * num_tokens - num_had
        # Without work there is nothing to be owed; and a debt of long ago is not paid at once.
        self._owed = min(max(owed, -self._memory), 2.0 * _LARGEST_PIECE) if has_work else 0.0


class OwedShares(NamedTuple):
    """The share of the batch class and the share of the late ones."""

    batch: OwedShare
    late: OwedShare

    def drop(self, request: Request) -> None:
        """It has ended, or needs no share any more."""
        self.batch.chosen.pop(request, None)
        self.late.chosen.pop(request, None)

    @property
    def chosen(self) -> Collection[Request]:
        """All that are chosen at the moment: a view."""
        return ChainMap(self.batch.chosen, self.late.chosen)
