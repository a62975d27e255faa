"""Keeps cached prefixes by what they are likely to save: chance of return and recompute cost.

The blocks that become unreferenced when a request ends are a *chain*: the part of a prefix that
nobody else uses, kept for one conversation. A chain is worth

    return rate (chance per second held, `return_times`) x root of the recompute cost of a block

and the chain of least worth gives up its last block, so that what stays can still be found. A
rate holds for all chains of a class (tenant, number of turns) that ended about equally long ago;
it changes when a chain grows older by a bin of the table, or when the table is made anew. Only
then is a chain's worth taken again, and put on a heap.

Prefixes that several conversations share (system prompts, few-shot examples) are chains of their
own, with a table of their own: their next user may be somebody new. A block with findable blocks
behind it waits until they are gone, whoever's they are; its chain is *parked* until then.

A conversation is recognised by the keys of its last blocks, at its prompt's end and at its
answer's. These are remembered when the blocks are long evicted, up to the horizon: otherwise
only those would be learnt from that came back in time.

Cost: amortised a handful of dictionary operations a block, O(log chains) for each bin that a
chain grows older by (26 at most) and for each chain that is emptied. Nothing ever walks over all
blocks; a table that is made anew takes the worth of its own chains again, after an eighth more
was seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from hotbatch.core.recompute_cost import RecomputeCost
from hotbatch.core.return_times import (
    BORDERS,
    COMMON,
    NUM_BINS,
    ReturnTable,
    ReturnTimes,
    bin_of,
    turn_class,
)
from hotbatch.core.speculation.ledger import CalibrationRow, Ledger

_MOST_REMEMBERED = 16_384  # conversations, with their blocks or without
_SOON = 1.0  # chance that what a request in service gave up is wanted within its present age
_FORKS = 3  # conversations that went on from a block, after which it is nobody's own
_SHARED = -1
# At 1, seconds in all would count alone: long conversations are kept at the expense of the many
# short ones, whose first tokens come later where memory nearly suffices, and more blocks are missed
# in all. At 0, nobody would know that a deep block is dear.
_COST_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Ending:
    """A request has ended and its blocks are about to be released.

    Attributes:
        tenant: whose it is.
        arrival: when it came, in seconds on the engine's clock.
        num_prompt: tokens of its prompt.
        keys: of the full blocks of its prompt and answer, from the first on.
        tail: tokens of its prompt behind the last full block.
    """

    tenant: str
    arrival: float
    num_prompt: int
    keys: Sequence[bytes]
    tail: tuple[int, ...] = ()


class _Chain:
    """Cached blocks that were released together, and who is waited for to use them again.

    Without blocks it is only the memory of a conversation. `blocks` may hold stale ones, which
    belong to another chain by now or are in use.
    """

    __slots__ = (
        "age",
        "blocks",
        "chance",
        "is_over",
        "keys",
        "num_blocks",
        "num_prompt",
        "started",
        "tables",
        "tail",
        "turn",
        "version",
    )

    def __init__(
        self,
        started: float,
        tables: tuple[ReturnTable, ...] = (),
        turn: int = 0,
        num_prompt: int = 0,
        keys: tuple[bytes, ...] = (),
        tail: tuple[int, ...] = (),
    ) -> None:
        self.started = started
        self.tables = tables  # the tenant's and everybody's; none if a request in service gave it
        self.turn = turn  # turns before it; `_SHARED` for a prefix that is nobody's own
        self.num_prompt = num_prompt
        self.keys = keys
        self.tail = tail
        self.age = 0  # the bin that it is in
        self.chance = tables[0].chances[0] if tables else 1.0
        self.blocks: list[int] = []  # the first of the prefix first
        self.num_blocks = 0  # without the stale ones
        self.version = 0  # of its entry on the heap
        self.is_over = False  # came back, or is waited for no more

    @property
    def is_conversation(self) -> bool:
        return bool(self.tables) and self.turn != _SHARED


class ReturnOrder:
    """An `EvictionOrder` by chance of return times recompute cost.

    Args:
        num_blocks: of the pool.
        block_size: tokens a block.
        cost: what computing KV again takes.

    Attributes:
        now: seconds on the engine's clock, set by whoever releases and allocates.
    """

    def __init__(self, num_blocks: int, block_size: int, cost: RecomputeCost) -> None:
        self.now = 0.0
        self._ledger = Ledger()
        self._calibration: list[CalibrationRow] = []
        self._block_size = block_size
        self._cost = cost
        self._times = ReturnTimes()
        self._open: tuple[_Chain, str] | None = None  # gets what is released next; its tenant
        self._chain_of: dict[int, _Chain] = {}  # of the cached blocks
        self._heap: list[tuple[float, int, int, _Chain]] = []
        self._serials = count()
        self._parked: dict[int, _Chain] = {}  # by their last block, which others stand behind
        self._ages: list[deque[_Chain]] = [deque() for _ in range(NUM_BINS)]
        self._num_awaited = 0  # in `_ages`
        self._next_birthday = inf
        self._by_key: dict[bytes, _Chain] = {}
        self._by_table: dict[ReturnTable, dict[_Chain, None]] = {}
        # The tree of prefixes, of blocks whose content is known.
        self._index = [0] * num_blocks
        self._life = [0] * num_blocks  # how often the block got new content
        self._before: list[tuple[int, int] | None] = [None] * num_blocks  # a block and its life
        self._num_behind = [0] * num_blocks
        self._num_branches = [0] * num_blocks  # all that were ever behind it

    def __len__(self) -> int:
        return len(self._chain_of)

    def __contains__(self, block: int) -> bool:
        return block in self._chain_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._chain_of)

    # The tree of prefixes

    def entered(self, block: int, before: int | None, index: int) -> None:
        self._index[block] = index
        self._life[block] += 1
        self._num_behind[block] = self._num_branches[block] = 0
        self._before[block] = None
        if before is not None:
            self._before[block] = (before, self._life[before])
            self._num_behind[before] += 1
            self._num_branches[before] += 1

    def _leave_tree(self, block: int) -> None:
        link = self._before[block]
        if link is None or self._life[link[0]] != link[1]:
            return
        before = link[0]
        self._num_behind[before] -= 1
        if self._num_behind[before] == 0:
            chain = self._parked.pop(before, None)
            if chain is not None:
                self._rank(chain)

    # Requests that end, and their blocks

    def open(self, ending: Ending) -> None:
        """A request has ended: what is released until `close` is kept for its next turn."""
        self._grow_older()
        former = self._former(ending)
        turn = 0
        if former is not None:
            turn = former.turn + 1
            self._note_return(former, ending.arrival - former.started)
        tables = self._times.tables(ending.tenant, turn_class(turn))
        num_full = ending.num_prompt // self._block_size
        last = {len(ending.keys) - 1, min(num_full, len(ending.keys)) - 1} - {-1}
        keys = tuple(ending.keys[index] for index in last)
        chain = _Chain(self.now, tables, turn, ending.num_prompt, keys, ending.tail)
        for key in keys:
            self._by_key[key] = chain
        self._await(chain)
        self._open = (chain, ending.tenant)

    def reopen(self, keys: Sequence[bytes], tenant: str) -> None:
        """What is released until `close` was computed ahead for a conversation that has ended,
        and takes the place of what is kept for it."""
        self._grow_older()
        chain = self._awaited(keys)
        if chain is None:
            return
        left = [block for block in chain.blocks if self._chain_of.get(block) is chain]
        if left:
            # The answer as it was generated, where the next prompt repeats it otherwise.
            self._parked.pop(left[-1], None)
            self._emptied(chain)
            chain.num_blocks = 0
            rest = _Chain(chain.started)
            rest.is_over = True
            self._hold(rest, left)
        if keys[-1] not in self._by_key:
            chain.keys = (*chain.keys, keys[-1])
            self._by_key[keys[-1]] = chain
        self._open = (chain, tenant)

    def close(self) -> None:
        self._open = None

    def chance_of(self, keys: Sequence[bytes]) -> float:
        """That the conversation goes on which these blocks belong to."""
        chain = self._awaited(keys)
        tables = self._times.tables("", 0) if chain is None else chain.tables
        return tables[0].chances[0 if chain is None else chain.age]

    def is_worth_more(self, keys: Sequence[bytes]) -> bool:
        """Are blocks at the end of these worth more than those that would go for them?"""
        self._grow_older()
        chain = self._awaited(keys)
        if chain is None:
            return False
        rate = chain.tables[0].rates[chain.age]
        worth = rate * self._weight(len(keys))
        return worth > min((entry[0] for entry in self._heap[:1]), default=0.0)

    def _awaited(self, keys: Sequence[bytes]) -> _Chain | None:
        for key in reversed(keys):
            chain = self._by_key.get(key)
            if chain is not None:
                return chain
        return None

    def _former(self, ending: Ending) -> _Chain | None:
        """The turn before, if it is remembered: the prompt begins with all of its prompt, or is the
        same once more."""
        by_key, keys = self._by_key, ending.keys
        for index in range(min(ending.num_prompt // self._block_size, len(keys)) - 1, -1, -1):
            chain = by_key.get(keys[index])
            if chain is not None:
                # A short question behind a common prefix is no sign of who asks.
                grown = ending.num_prompt - chain.num_prompt
                is_same = grown == 0 and ending.tail == chain.tail
                if is_same or grown >= self._block_size:
                    return chain
        return None

    def add(self, blocks: Sequence[int]) -> None:
        own = list(reversed(blocks))
        if self._open is None:
            # Of a request that goes on, or of a copy: somebody is about to want them.
            chain = _Chain(self.now)
            self._await(chain)
            self._hold(chain, own)
            return
        shared = 0
        for place in range(len(own), 0, -1):
            if self._num_branches[own[place - 1]] >= _FORKS:
                shared = place
                break
        chain, tenant = self._open
        self._hold(chain, own[shared:])
        if shared:
            common = _Chain(self.now, self._times.tables(tenant, COMMON), _SHARED)
            self._await(common)
            self._hold(common, own[:shared])

    def add_worthless(self, blocks: Sequence[int]) -> None:
        chain = _Chain(self.now)
        chain.is_over = True
        self._hold(chain, list(reversed(blocks)))

    def _hold(self, chain: _Chain, blocks: list[int]) -> None:
        if not blocks:
            return
        chain.blocks = blocks
        chain.num_blocks = len(blocks)
        self._chain_of.update(dict.fromkeys(blocks, chain))
        if chain.tables:
            self._by_table.setdefault(chain.tables[0], {})[chain] = None
        self._rank(chain)

    def remove(self, block: int) -> None:
        chain = self._chain_of.pop(block)
        chain.num_blocks -= 1
        was_parked = self._parked.pop(block, None) is not None
        if chain.turn == _SHARED and not chain.is_over:
            self._note_return(chain, self.now - chain.started)
        if chain.num_blocks == 0:
            self._emptied(chain)
        elif was_parked:
            self._rank(chain)
        elif len(chain.blocks) > 2 * chain.num_blocks + 8:
            chain.blocks = [each for each in chain.blocks if self._chain_of.get(each) is chain]

    def pop(self) -> int:
        self._grow_older()
        heap = self._heap
        while heap:
            _, _, version, chain = heap[0]
            if version != chain.version or not chain.num_blocks:
                heappop(heap)
                continue
            block = self._last_block(chain)
            if not self._num_behind[block]:
                return self._give_up(chain, block)
            heappop(heap)
            chain.version += 1
            self._parked[block] = chain
        # What is behind the rest is in use by requests that hold copies of the same beginning.
        block, chain = next(iter(self._parked.items()))
        del self._parked[block]
        self._give_up(chain, block)
        if chain.num_blocks:
            self._rank(chain)
        return block

    def _last_block(self, chain: _Chain) -> int:
        blocks, chain_of = chain.blocks, self._chain_of
        while chain_of.get(blocks[-1]) is not chain:
            blocks.pop()
        return blocks[-1]

    def _give_up(self, chain: _Chain, block: int) -> int:
        chain.blocks.pop()
        chain.num_blocks -= 1
        del self._chain_of[block]
        self._leave_tree(block)
        if chain.num_blocks == 0:
            self._emptied(chain)
        return block

    def _emptied(self, chain: _Chain) -> None:
        chain.blocks = []
        chain.version += 1
        if chain.turn == _SHARED:
            chain.is_over = True  # whoever wants it next will not be seen to
        if chain.tables:
            chains = self._by_table[chain.tables[0]]
            del chains[chain]
            if not chains:
                del self._by_table[chain.tables[0]]

    # What chains are worth

    def _rank(self, chain: _Chain) -> None:
        chain.version += 1
        entry = (self._worth(chain), next(self._serials), chain.version, chain)
        heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self._chain_of) + 64:
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].version]
            heapify(self._heap)

    def _worth(self, chain: _Chain) -> float:
        if chain.is_over:
            return 0.0
        rate = chain.tables[0].rates[chain.age] if chain.tables else _SOON / BORDERS[chain.age + 1]
        middle = self._index[self._last_block(chain)] - chain.num_blocks / 2
        return rate * self._weight(max(0.0, middle))

    def _weight(self, depth: float) -> float:
        """How much what a block costs counts, with `depth` blocks before it."""
        return float(self._cost.relative(depth * self._block_size) ** _COST_WEIGHT)

    # Time

    def _await(self, chain: _Chain) -> None:
        self._ages[0].append(chain)
        self._num_awaited += 1
        self._next_birthday = min(self._next_birthday, chain.started + BORDERS[1])
        if self._num_awaited > _MOST_REMEMBERED:
            oldest = next(ages for ages in reversed(self._ages) if ages)
            self._forget(oldest.popleft())

    def _forget(self, chain: _Chain) -> None:
        """Wait for it no more."""
        self._num_awaited -= 1
        chain.is_over = True
        self._drop_keys(chain)
        if chain.num_blocks:
            self._rank(chain)

    def _drop_keys(self, chain: _Chain) -> None:
        for key in chain.keys:
            if self._by_key.get(key) is chain:
                del self._by_key[key]

    def _grow_older(self) -> None:
        """Move chains on to the bin that they are in by now."""
        now = self.now
        if now < self._next_birthday:
            return
        for age in range(NUM_BINS - 1, -1, -1):
            chains, end = self._ages[age], BORDERS[age + 1]
            while chains and chains[0].started + end <= now:
                self._celebrate(chains.popleft())
        self._next_birthday = min(
            (
                chains[0].started + BORDERS[age + 1]
                for age, chains in enumerate(self._ages)
                if chains
            ),
            default=inf,
        )

    def _celebrate(self, chain: _Chain) -> None:
        """A chain has survived the bin that it was in, and maybe some more."""
        if chain.is_over:
            self._num_awaited -= 1
            return
        # By the sum it has survived its bin; the difference may round to the other side.
        age = max(chain.age + 1, bin_of(self.now - chain.started))
        for survived in range(chain.age, age):
            for table in chain.tables:
                if table.note_survived(survived):
                    self._renewed(table)
        chain.age = age
        if age == NUM_BINS:
            if chain.is_conversation:
                self._note_chance(chain.chance, False)
            self._forget(chain)
            return
        self._ages[age].append(chain)
        if chain.num_blocks:
            self._rank(chain)

    def _note_return(self, chain: _Chain, gap: float) -> None:
        chain.is_over = True
        self._drop_keys(chain)
        index = bin_of(max(0.0, gap))
        for table in chain.tables:
            if table.note_returned(index, chain.age):
                self._renewed(table)
        if chain.is_conversation:
            self._note_chance(chain.chance, True)
        if chain.num_blocks:
            self._rank(chain)

    def _renewed(self, table: ReturnTable) -> None:
        for chain in self._by_table.get(table, ()):
            self._rank(chain)

    def _note_chance(self, told: float, is_true: bool) -> None:
        self._ledger.note_chance(told, is_true)
        self._calibration = self._ledger.calibration()

    def calibration(self) -> list[CalibrationRow]:
        """How well the chances of return were told, as far as it is known by now."""
        return self._calibration

    def check_integrity(self, cached: Collection[int]) -> None:
        assert set(cached) == self._chain_of.keys()
        live: dict[_Chain, int] = {}
        for block, chain in self._chain_of.items():
            live[chain] = live.get(chain, 0) + 1
            assert block in chain.blocks, f"block {block} is not in its chain"
        ranked = {entry[3] for entry in self._heap if entry[2] == entry[3].version}
        for chain, number in live.items():
            assert chain.num_blocks == number, "a chain miscounts its blocks"
            is_parked = self._parked.get(self._last_block(chain)) is chain
            assert chain in ranked or is_parked, "a chain would never be given up"
