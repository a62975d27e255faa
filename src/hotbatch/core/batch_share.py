"""What the batch class is owed: a small share of all tokens, however busy the others are.

A counter in tokens: it rises by the share of what is computed while batch work waits, and
falls by what the batch class gets. Once it covers the next piece of one batch request, that
request competes above all classes for one step, and so gets a seat, blocks and tokens like
anybody else. It is the same request until it ends, and its blocks are safe from others:
otherwise each piece might be lost again before the next one.
"""

from __future__ import annotations

from hotbatch.core.request import Request

_LARGEST_PIECE = 32  # tokens of a prompt


class BatchShare:
    """Whom the batch class sends, and when.

    Args:
        share: of all tokens, from 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed = 0.0  # tokens
        self.chosen: Request | None = None

    @property
    def num_owed(self) -> int:
        """Tokens that the class is owed now."""
        return int(self._owed)

    def is_due(self, request: Request) -> bool:
        """Is the class owed enough for the next piece of this request?"""
        left = len(request.tokens) - request.num_computed
        return self._owed >= max(1, min(left, _LARGEST_PIECE))

    def note(self, num_tokens: int, num_batch: int, has_work: bool) -> None:
        """A step was planned: of its tokens, `num_batch` are the batch class's."""
        owed = self._owed + self._share * num_tokens - num_batch
        # Without work there is nothing to be owed; and a debt of long ago is not paid at once.
        self._owed = min(max(owed, 0.0), 2.0 * _LARGEST_PIECE) if has_work else 0.0
