"""The pool of KV blocks: which are free, in use, or kept for their content.

Each block is in exactly one state:

- *in use*: its reference count is above zero. Several requests may share one.
- *cached*: nobody refers to it, but the prefix cache knows its content and may revive it.
- *free*: nobody refers to it and its content is worthless.

Blocks are ints. Free ones lie on a stack, cached ones in an order of eviction that is given
(`eviction_order`). Allocation takes free blocks first and then the cached block that is first
in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotbatch.core.eviction_order import EvictionOrder, LeastRecentlyReleased


class BlockPool:
    """`num_blocks` blocks with reference counts.

    `on_reclaim(block)` is called when a cached block is taken for new content. `order` says
    which one that is; without it, the one that was released longest ago.
    """

    def __init__(
        self,
        num_blocks: int,
        on_reclaim: Callable[[int], None],
        order: EvictionOrder | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._on_reclaim = on_reclaim
        self._ref_counts = [0] * num_blocks
        self._kept = bytearray(num_blocks)  # 1: the prefix cache knows the content
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: EvictionOrder = LeastRecentlyReleased() if order is None else order

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks for new content; there must be as many available."""
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} available"
        return tuple([self._take() for _ in range(count)])

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = self._cached.pop()
            self._kept[block] = 0
            self._on_reclaim(block)
        self._ref_counts[block] = 1
        return block

    def retain(self, blocks: Sequence[int]) -> None:
        """Add one reference to each; an unreferenced one must be cached."""
        counts = self._ref_counts
        for block in blocks:
            if counts[block] == 0:
                self._cached.remove(block)
            counts[block] += 1

    def release(self, blocks: Sequence[int], *, is_ahead: bool = False) -> None:
        """Drop one reference of each.

        The last blocks of a table go first, so that the end of a prefix is reclaimed before
        its beginning, without which the end cannot be found.

        Args:
            is_ahead: nobody has asked for their content; it is reclaimed before all other.
        """
        counts = self._ref_counts
        cached = []
        for block in reversed(blocks):
            assert counts[block] > 0, f"block {block} released once too often"
            counts[block] -= 1
            if counts[block] == 0:
                if self._kept[block]:
                    cached.append(block)
                else:
                    self._free.append(block)
        if cached:
            (self._cached.add_worthless if is_ahead else self._cached.add)(cached)

    def keep(self, block: int) -> None:
        """Note that the content of a block in use is worth keeping after its release."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use"
        self._kept[block] = 1

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of these would leave the available blocks if retained."""
        counts = self._ref_counts
        return sum(1 for block in blocks if counts[block] == 0)

    def check_integrity(self, references: dict[int, int], kept: set[int]) -> None:
        """Assert that every block is in exactly one state.

        Args:
            references: how often each block is referred to by the pool's users.
            kept: the blocks whose content the prefix cache knows.
        """
        free = set(self._free)
        cached = set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks {free & cached} are both free and cached"
        assert not free & kept, f"free blocks {free & kept} are in the prefix cache"
        assert cached <= kept, f"cached blocks {cached - kept} have no content key"
        self._cached.check_integrity(cached)
        for block, count in enumerate(self._ref_counts):
            expected = references.get(block, 0)
            assert count == expected, f"block {block}: {count} references, {expected} users"
            assert (count > 0) == (block not in free and block not in cached), (
                f"block {block} has {count} references and is in the wrong state"
            )
            assert bool(self._kept[block]) == (block in kept), f"block {block} kept by mistake"
