"""What the batch class is owed: a small share of all tokens, however busy the others are.

A counter in tokens: it rises by the share of what is computed while batch work waits, and
falls by what the batch class gets. Once it covers the next piece of a batch request, that
request competes above all classes for one step, and so gets a seat, blocks and tokens like
anybody else. It is the same request until it ends, and its blocks are the last that others
take: otherwise each piece might be lost again before the next one. As a request that decodes
can use one token a step, there are several of them where one cannot use what is owed.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotbatch.core.request import Request

_LARGEST_PIECE = 32  # tokens of a prompt
_MOST_CHOSEN = 8


class BatchShare:
    """Whom the batch class sends, and when.

    Args:
        share: of all tokens, from 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
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

    def note(self, num_tokens: int, num_batch: int, has_work: bool) -> None:
        """A step was planned: of its tokens, `num_batch` are the batch class's."""
        owed = self._owed + self._share * num_tokens - num_batch
        # Without work there is nothing to be owed; and a debt of long ago is not paid at once.
        self._owed = min(max(owed, 0.0), 2.0 * _LARGEST_PIECE) if has_work else 0.0
