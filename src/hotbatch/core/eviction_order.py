"""In which order cached blocks are given up.

A cached block is one that nobody refers to and whose content is known. The pool asks an order
for the next one to go; two orders exist: plain LRU here, and by chance of return times cost in
`return_order`. What is evicted must be a leaf of the tree of prefixes: a block whose beginning
is gone cannot be found any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol


class EvictionOrder(Protocol):
    """The cached blocks, in an order of one's own. Every operation is O(log n) a block or less."""

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def add(self, blocks: Sequence[int]) -> None:
        """These became unreferenced together, the last of a table first."""
        ...

    def add_worthless(self, blocks: Sequence[int]) -> None:
        """The same, of what nobody has asked for: these go before all others."""
        ...

    def remove(self, block: int) -> None:
        """Somebody refers to it again."""
        ...

    def pop(self) -> int:
        """Give up the block that is worth least; there must be one."""
        ...

    def entered(self, block: int, before: int | None, index: int) -> None:
        """A block in use became findable as the `index`-th of its prefix, behind another one."""
        ...

    def check_integrity(self, cached: Collection[int]) -> None:
        """Assert that it holds what it says, and nothing twice."""
        ...

    def __iter__(self) -> Iterator[int]: ...


class LeastRecentlyReleased:
    """Plain LRU: the block that was released longest ago goes first.

    As a table is released from its end, the end of a prefix goes before its beginning.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        self._blocks.update(dict.fromkeys(blocks))

    def add_worthless(self, blocks: Sequence[int]) -> None:
        self.add(blocks)
        for block in reversed(blocks):
            self._blocks.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def entered(self, block: int, before: int | None, index: int) -> None:
        """Where a block stands in its prefix is of no interest."""

    def check_integrity(self, cached: Collection[int]) -> None:
        assert len(cached) == len(self._blocks)
