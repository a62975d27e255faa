"""Taking seats and KV blocks from some requests for others.

A seat is taken by pausing: the request is left out of steps, keeps its KV and goes on in
place. Blocks are taken only when blocks lack, and then only as many as lack, from the end of
the victim's table, so that the victim later recomputes its lost end and no more. What others
read as well is not taken: it would free nothing, and they may be of a higher class.

Nobody takes anything from a higher class. A seat is taken from an equal only for a tenant that
holds next to none (`light_tenants`). Blocks move between
equals only so that a running one can go on; the policy that chooses the victim spares the
oldest of the top class, which so ends for sure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hotbatch.core.kv_cache import KvCache
from hotbatch.core.plan import Preemption
from hotbatch.core.policies import PATIENCE, Policies, Reclaim
from hotbatch.core.request import Request, RequestState
from hotbatch.core.roster import Roster

_NOBODY = -1


class Preemptor:
    """Carries preemptions out, and notes them for the plan.

    Args:
        sheltered: requests whose blocks are the last that are taken.
    """

    def __init__(
        self, roster: Roster, kv: KvCache, policies: Policies, sheltered: Collection[Request]
    ) -> None:
        self._roster = roster
        self._kv = kv
        self._policies = policies
        self._sheltered = sheltered
        self.preempted: list[Preemption] = []  # since the last plan
        self.paused: list[str] = []  # since the last plan
        self.highest_victim = _NOBODY  # rank of those that lost blocks in this plan
        self.num_preemptions = 0
        self.num_pauses = 0

    def begin(self) -> None:
        """A new plan is made."""
        self.highest_victim = _NOBODY

    def end(self) -> tuple[tuple[Preemption, ...], tuple[str, ...]]:
        """The plan is made: what it has to tell of evictions and pauses."""
        if not self.preempted and not self.paused:
            return (), ()
        told = tuple(self.preempted), tuple(self.paused)
        self.preempted.clear()
        self.paused.clear()
        return told

    def may_admit(self, rank: int) -> bool:
        """Hysteresis: who enters where a peer has just lost blocks is only the next victim."""
        return rank > self.highest_victim

    # Blocks for those that run

    def make_room(self, is_idle: bool) -> None:
        """Give running requests the blocks that their known tokens need.

        Args:
            is_idle: no step is in flight, so no blocks will come back by themselves.
        """
        running = self._roster.running
        short = [request for request in running if len(request.tokens) > request.capacity]
        for request in short:
            if request.state is RequestState.RUNNING:
                self._grow(request, is_idle)

    def _grow(self, request: Request, is_idle: bool) -> None:
        while not self._kv.grow(request, len(request.tokens)):
            victim = self._choose(request)
            if victim is request:
                if is_idle:
                    self._give_up(request)
                return
            self._take_from(victim, self._lacking(request))

    def _lacking(self, request: Request) -> int:
        missing = -(-len(request.tokens) // self._kv.block_size) - len(request.block_table)
        return missing - self._kv.pool.num_available

    def _choose(self, needy: Request) -> Request:
        """Whose blocks a running request gets; itself if nobody else's."""
        candidates = [
            request
            for request in self._roster.holders
            if request is needy
            or (
                request.rank <= needy.rank
                and request not in self._sheltered
                and self._can_give(request)
            )
        ]
        if len(candidates) > 1:
            return self._policies.choose_victim(candidates)
        for sheltered in self._sheltered:
            if sheltered.rank < needy.rank and self._can_give(sheltered):
                return sheltered
        return needy

    def _can_give(self, request: Request) -> bool:
        # Blocks that a step in flight writes to must stay where they are.
        if request.in_flight:
            return False
        if not self._policies.partial_eviction:
            return bool(request.block_table)
        return self._kv.num_exclusive(request, 1) > 0 and self._is_reclaimable(request)

    def _is_reclaimable(self, request: Request) -> bool:
        answer = self._policies.reclaim(request, request.num_computed)
        return answer is Reclaim.RECOMPUTE

    def _give_up(self, request: Request) -> None:
        """A running request cannot go on, and nobody has to give way to it."""
        self.highest_victim = max(self.highest_victim, request.rank)
        if self._policies.partial_eviction:
            self._pause(request)
        else:
            self._evict(request)

    # Blocks and seats for those that come

    def reclaim(self, needy: Request, count: int) -> bool:
        """Take `count` more blocks from lower classes; does nothing if they have too few."""
        givers = [
            request
            for request in self._roster.holders
            if request.rank < needy.rank
            and request not in self._sheltered
            and self._can_give(request)
        ]
        if sum(self._kv.num_exclusive(request, count) for request in givers) < count:
            return False
        while count > 0:
            if not givers:
                return False
            before = self._kv.pool.num_available
            victim = self._policies.choose_victim(givers)
            self._take_from(victim, count)
            count -= self._kv.pool.num_available - before
            givers = [request for request in givers if self._can_give(request)]
        return True

    def can_displace(self, rank: int) -> bool:
        """Is there a running request that gives its seat to one of this rank?"""
        running = self._roster.running
        return self._policies.classes and bool(running) and running[-1].rank < rank

    def displace(self, rank: int, is_spared: Callable[[Request], bool]) -> None:
        """Pause a running request of a lower rank: one of the lowest that is not spared, if there
        is such a one that was not sent away too often already."""
        below = [request for request in self._roster.running if request.rank < rank]
        givers = [
            request
            for request in below
            if request.rank == below[-1].rank
            and request.num_pauses < PATIENCE
            and not is_spared(request)
        ]
        self.pause_one_of(givers or below)

    def pause_one_of(self, candidates: Sequence[Request]) -> None:
        """Pause the one of them that the policy chooses."""
        self._pause(self._policies.choose_displaced(candidates))

    def clear_for(self, needy: Request, num_blocks: int) -> None:
        """Take whatever is needed from whoever has it: only when nothing else would move.

        The last resort against a standstill, so nobody is spared but the needy itself.
        """
        pool = self._kv.pool
        while pool.num_available < num_blocks:
            holders = [r for r in self._roster.holders if r is not needy and not r.in_flight]
            if not holders:
                return
            self._evict(max(holders, key=lambda request: (-request.rank, request.order)))

    # How it is done

    def _take_from(self, victim: Request, count: int) -> None:
        kv = self._kv
        partial = self._policies.partial_eviction
        taken = kv.num_exclusive(victim, count) if partial else len(victim.block_table)
        if taken == 0 or taken == len(victim.block_table):
            self._evict(victim)
            return
        self.highest_victim = max(self.highest_victim, victim.rank)
        if victim.state is RequestState.RUNNING:
            self._pause(victim)
        victim.num_once_computed = max(victim.num_once_computed, victim.num_committed)
        kv.cut(victim, taken)
        self._note_loss(victim, f"out of KV blocks: gave back {taken} of its last")

    def _evict(self, victim: Request) -> None:
        self.highest_victim = max(self.highest_victim, victim.rank)
        self._kv.release(victim)
        victim.num_once_computed = max(victim.num_once_computed, victim.num_committed)
        victim.num_computed = victim.num_committed = victim.num_indexed = 0
        self._roster.evict(victim)
        self._note_loss(victim, "out of KV blocks")

    def _note_loss(self, victim: Request, reason: str) -> None:
        victim.num_evictions += 1
        if victim.num_output == 0:
            del victim.prompt_logprobs[victim.num_computed :]  # gathered anew when recomputed
        if victim.group is not None and victim.num_committed < victim.num_prompt:
            victim.group.dethrone(victim)
        keeps_blocks = bool(victim.block_table)
        self.preempted.append(Preemption(victim.request_id, reason, keeps_blocks))
        self.num_preemptions += 1

    def _pause(self, request: Request) -> None:
        self._roster.pause(request)
        self.paused.append(request.request_id)
        self.num_pauses += 1
