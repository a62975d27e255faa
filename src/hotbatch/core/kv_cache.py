"""Which KV blocks a request holds: placing it on a computed prefix, growing, letting go.

Joins the block pool and the prefix cache. A request that enters is placed on the longest
prefix whose KV exists already: full blocks are shared, and where its first own token falls
into a shared block (the whole prompt was found, or a sibling's last block is part full), the
block is copied first, so that no request ever writes into a block that another one reads.
At least one token is always left to compute, as its logits are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotbatch.core.block_pool import BlockPool
from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel
from hotbatch.core.prefix_cache import PrefixCache, extend_block_keys
from hotbatch.core.recompute_cost import RecomputeCost
from hotbatch.core.request import Request, RequestState
from hotbatch.core.return_order import Ending, ReturnOrder


@dataclass(frozen=True, slots=True)
class ComputedPrefix:
    """`num_tokens` computed tokens: `shared` full blocks, and part of `copy_source`, if any."""

    shared: tuple[int, ...] = ()
    copy_source: int | None = None
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A request has its blocks; `copy` is the (source, destination) to copy before the step.

    The source carries one more reference, to be dropped when the step is committed.
    """

    copy: tuple[int, int] | None


class WarmedBlocks(dict[int, int]):
    """Blocks that were computed before anybody asked for them, each with its place in its
    prefix; and how many of such were found by a prompt."""

    num_found = 0
    mean_index = 0.0

    def find(self, blocks: Sequence[int]) -> None:
        """A prompt begins with these blocks; those computed ahead were not in vain."""
        for block in blocks:
            index = self.pop(block, None)
            if index is not None:
                self.num_found += 1
                self.mean_index += (index - self.mean_index) / self.num_found


class KvCache:
    """All KV blocks of one scheduler.

    Args:
        cost_model: prices what is cached, where that decides what is given up.
    """

    def __init__(self, config: SchedulerConfig, cost_model: CostModel | None = None) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.prefix_cache = PrefixCache(config.block_size)
        self.returns: ReturnOrder | None = None
        if config.prefix_eviction == "return-time" and config.enable_prefix_caching:
            cost = RecomputeCost(cost_model, config.max_num_batched_tokens)
            self.returns = ReturnOrder(config.num_blocks, config.block_size, cost)
        self.warmed = WarmedBlocks()
        self._guessed: set[int] = set()  # computed for guessed requests, and used by no other
        self.pool = BlockPool(config.num_blocks, self._forget, self.returns)
        self.query_tokens = 0
        self.hit_tokens = 0

    def note_time(self, now: float) -> None:
        """It is `now`, in seconds on the engine's clock."""
        if self.returns is not None:
            self.returns.now = now

    def place(
        self, request: Request, prompt_owner: Request | None, keep_free: int
    ) -> Placement | None:
        """Give blocks for all known tokens, on the longest computed prefix there is.

        Args:
            prompt_owner: a running request that has computed the same prompt.
            keep_free: blocks that must be left available.

        Returns:
            None, and nothing changed, if there are too few blocks.
        """
        prefix = self._find_prefix(request, prompt_owner)
        if not self._fits(request, prefix, keep_free):
            if prefix.copy_source is None:
                return None
            # Recomputing the part of a block needs one block less than copying it.
            prefix = self._without_copy(prefix)
            if not self._fits(request, prefix, keep_free):
                return None
        return self._take(request, prefix)

    def place_ahead(self, request: Request, keep_free: int) -> bool:
        """The same for a guess, which may lose its blocks before the step runs: nothing is
        copied for it."""
        prefix = self._without_copy(self._find_prefix(request, None))
        if not self._fits(request, prefix, keep_free):
            return False
        self._take(request, prefix, is_guess=True)
        return True

    def grow(self, request: Request, num_tokens: int, at_most: int | None = None) -> bool:
        """Extend the block table to hold `num_tokens`; False if there are too few blocks, or
        more than `at_most` would be needed."""
        missing = -(-num_tokens // self.block_size) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self.pool.num_available or (at_most is not None and missing > at_most):
            return False
        request.block_table += self.pool.allocate(missing)
        request.capacity = len(request.block_table) * self.block_size
        return True

    def shortage(
        self, request: Request, prompt_owner: Request | None, num_tokens: int, keep_free: int
    ) -> int:
        """Blocks that lack for `place` (no table yet), or for `resume` up to `num_tokens`."""
        if request.block_table:
            return self._num_missing_for(request, num_tokens) + keep_free - self.pool.num_available
        prefix = self._without_copy(self._find_prefix(request, prompt_owner))
        taken = self.pool.num_unreferenced(prefix.shared) + self._num_missing(request, prefix)
        return taken + keep_free - self.pool.num_available

    def resume(self, request: Request) -> bool:
        """Give a paused request blocks for all its known tokens; False if there are too few.

        What it lost is found again where the prefix cache still has it, and counts as computed.
        """
        if self._num_missing_for(request, len(request.tokens)) > self.pool.num_available:
            return False
        self._find_lost(request)
        return self.grow(request, len(request.tokens))

    def num_exclusive(self, request: Request, at_most: int) -> int:
        """How many blocks at the end of the table nobody else uses, counted up to `at_most`."""
        count = 0
        for block in reversed(request.block_table):
            if count == at_most or self.pool.ref_count(block) > 1:
                break
            count += 1
        return count

    def cut(self, request: Request, num_blocks: int) -> None:
        """Take the last `num_blocks` blocks back; their tokens have to be computed again."""
        kept = len(request.block_table) - num_blocks
        self.pool.release(request.block_table[kept:])
        request.block_table = request.block_table[:kept]
        request.capacity = kept * self.block_size
        request.num_computed = min(request.num_computed, request.capacity)
        request.num_committed = min(request.num_committed, request.capacity)
        request.num_indexed = min(request.num_indexed, kept)

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Take the blocks behind the one of the last of `num_tokens` back."""
        num_over = len(request.block_table) - -(-num_tokens // self.block_size)
        if num_over > 0:
            self.cut(request, num_over)

    def release(self, request: Request) -> None:
        """Take all blocks back; what the prefix cache knows stays findable."""
        if self.returns is not None and request.state is RequestState.FINISHED:
            self._release_for_next_turn(self.returns, request)
        else:
            self.pool.release(request.block_table)
        request.block_table = ()
        request.capacity = 0

    def _release_for_next_turn(self, returns: ReturnOrder, request: Request) -> None:
        num_keys = min(len(request.block_keys), request.num_indexed)
        if num_keys:
            keys, num_prompt = request.block_keys[:num_keys], request.num_prompt
            tail = tuple(request.tokens[num_prompt - num_prompt % self.block_size : num_prompt])
            returns.open(Ending(request.tenant, request.arrival, num_prompt, keys, tail))
        self.pool.release(request.block_table)
        returns.close()

    def release_guess(self, request: Request) -> None:
        """Take a guess's blocks back. What it computed goes before all other content; what it
        found is kept as if it had been used."""
        table = request.block_table
        self.pool.release([block for block in table if block in self._guessed], is_ahead=True)
        self.pool.release([block for block in table if block not in self._guessed])
        request.block_table = ()
        request.capacity = 0

    def release_warmed(self, request: Request) -> None:
        """Take the blocks back of what was computed ahead: they belong to the conversation."""
        if self.returns is not None:
            self.returns.reopen(request.block_keys[: request.num_indexed], request.tenant)
        self.pool.release(request.block_table)
        request.block_table = ()
        request.capacity = 0
        if self.returns is not None:
            self.returns.close()

    def _forget(self, block: int) -> None:
        self.prefix_cache.forget(block)
        if self.warmed:
            self.warmed.pop(block, None)
        self._guessed.discard(block)

    def index(self, request: Request, *, is_ahead: bool = False, is_guess: bool = False) -> None:
        """Make the blocks that are full and committed findable by content.

        Args:
            is_ahead: a next turn will begin with them, if it comes.
            is_guess: they are of a whole request that nobody has sent yet.
        """
        num_full = request.num_committed // self.block_size
        if num_full <= request.num_indexed or not self.enable_prefix_caching:
            return
        keys = extend_block_keys(request, num_full, self.block_size)
        for index in range(request.num_indexed, num_full):
            block = request.block_table[index]
            if self.prefix_cache.enter(keys[index], block):
                self.pool.keep(block)
                if is_ahead:
                    self.warmed[block] = index
                if is_guess:
                    self._guessed.add(block)
                if self.returns is not None:
                    before = self.prefix_cache.block_of(keys[index - 1]) if index else None
                    self.returns.entered(block, before, index)
        request.num_indexed = num_full

    def check_integrity(self, holders: Iterable[Request], held: Sequence[int]) -> None:
        """Assert that every block is in one state.

        Args:
            holders: all requests that may hold blocks.
            held: the sources of copies whose steps are not committed.
        """
        references = Counter(held)
        for request in holders:
            assert len(set(request.block_table)) == len(request.block_table), (
                f"{request!r} has a block twice"
            )
            assert request.capacity == len(request.block_table) * self.block_size
            references.update(request.block_table)
        self.prefix_cache.check_integrity()
        assert self._guessed <= self.prefix_cache.blocks, "a guess's block is not findable"
        self.pool.check_integrity(references, self.prefix_cache.blocks)

    def _find_lost(self, request: Request) -> None:
        """Extend a table that was cut by the blocks that are still in the prefix cache."""
        wants_rows = request.params.prompt_logprobs is not None and request.num_output == 0
        if not self.enable_prefix_caching or wants_rows or request.in_flight:
            return
        if request.num_committed < request.capacity:
            return
        # One token at least is left to compute.
        num_full = (len(request.tokens) - 1) // self.block_size
        held = len(request.block_table)
        keys = extend_block_keys(request, num_full, self.block_size)
        found = self.prefix_cache.run_of(keys[held:num_full])
        self.pool.retain(found)
        if self._guessed:
            self._guessed.difference_update(found)
        request.block_table += tuple(found)
        request.capacity = len(request.block_table) * self.block_size
        request.num_computed = request.num_committed = request.capacity
        if found:
            request.num_indexed = len(request.block_table)

    def _num_missing_for(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(request.block_table))

    def _find_prefix(self, request: Request, prompt_owner: Request | None) -> ComputedPrefix:
        if request.num_output == 0:
            if request.params.prompt_logprobs is not None:
                return ComputedPrefix()  # every row of the prompt has to be computed
            if prompt_owner is not None:
                return self._prefix_in(prompt_owner.block_table, request.num_prompt - 1)
        if not self.enable_prefix_caching:
            return ComputedPrefix()
        blocks = self.prefix_cache.match(request)
        num_found = len(blocks) * self.block_size
        return self._prefix_in(blocks, min(num_found, len(request.tokens) - 1))

    def _prefix_in(self, blocks: Sequence[int], num_tokens: int) -> ComputedPrefix:
        num_full, part = divmod(num_tokens, self.block_size)
        source = blocks[num_full] if part else None
        return ComputedPrefix(tuple(blocks[:num_full]), source, num_tokens)

    def _without_copy(self, prefix: ComputedPrefix) -> ComputedPrefix:
        return ComputedPrefix(prefix.shared, None, len(prefix.shared) * self.block_size)

    def _num_missing(self, request: Request, prefix: ComputedPrefix) -> int:
        return -(-len(request.tokens) // self.block_size) - len(prefix.shared)

    def _fits(self, request: Request, prefix: ComputedPrefix, keep_free: int) -> bool:
        revived = self.pool.num_unreferenced(prefix.shared)
        if prefix.copy_source is not None:
            revived += self.pool.num_unreferenced((prefix.copy_source,))
        taken = revived + self._num_missing(request, prefix)
        return self.pool.num_available - taken >= keep_free

    def _take(
        self, request: Request, prefix: ComputedPrefix, *, is_guess: bool = False
    ) -> Placement:
        # First retain, so that allocation cannot reclaim what is about to be shared.
        self.pool.retain(prefix.shared)
        if prefix.copy_source is not None:
            self.pool.retain((prefix.copy_source,))
        if self._guessed and not is_guess:
            self._guessed.difference_update(prefix.shared)
        own = self.pool.allocate(self._num_missing(request, prefix))
        request.block_table = prefix.shared + own
        request.capacity = len(request.block_table) * self.block_size
        request.num_computed = prefix.num_tokens
        # What is yet to be copied is not there before the step is committed.
        request.num_committed = len(prefix.shared) * self.block_size
        request.num_indexed = len(prefix.shared) if self.enable_prefix_caching else 0
        if request.num_cached is None:
            request.num_cached = prefix.num_tokens
            self.query_tokens += request.num_prompt
            self.hit_tokens += prefix.num_tokens
            if self.warmed:
                self.warmed.find(prefix.shared)
        if prefix.copy_source is None:
            return Placement(None)
        return Placement((prefix.copy_source, own[0]))
