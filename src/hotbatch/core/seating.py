"""Who gets a seat, and the blocks for all its known tokens.

Seats go to the classes from the highest down, in each to the head of its queue, and to nobody
else until the head fits: a large request is not overtaken for ever. Where seats or blocks
lack, those of lower classes are taken. A newcomer needs more than it fits now: everybody
writes on, so the most that all of them are expected to hold at once must fit as well
(Past-Future, arXiv 2507.10150). When nobody runs, whoever comes first is seated in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.kv_cache import KvCache
from hotbatch.core.light_tenants import LightTenants
from hotbatch.core.output_lengths import OutputLengths, expected_peak
from hotbatch.core.policies import Policies
from hotbatch.core.preemption import Preemptor
from hotbatch.core.rank import Rank
from hotbatch.core.request import Request, RequestState
from hotbatch.core.roster import Roster
from hotbatch.core.seat_limit import SeatLimit
from hotbatch.core.service_class import ServiceClass
from hotbatch.core.step import Step

_QUANTUM = 16  # tokens for which a seat is safe from equals


class Seating:
    """Gives seats to requests that wait."""

    def __init__(
        self,
        config: SchedulerConfig,
        policies: Policies,
        roster: Roster,
        kv: KvCache,
        preemptor: Preemptor,
        counters: list[VirtualTokenCounters] | None,
        light_tenants: LightTenants | None,
    ) -> None:
        self._limit = SeatLimit(config.max_num_seqs)
        self._num_tokens = config.num_blocks * config.block_size
        self._watermark = ceil(config.watermark * config.num_blocks)
        self._policies = policies
        self._roster = roster
        self._kv = kv
        self._preemptor = preemptor
        self._counters = counters
        self._light_tenants = light_tenants
        self._lengths = [OutputLengths() for _ in ServiceClass]
        self._held: list[tuple[int, int]] | None = None  # for the forecast, of this plan
        self._held_rank = 0
        self.is_blocked = False  # somebody could not be seated in this plan: nobody overtakes

    def begin(self) -> None:
        """A new plan is made."""
        self.is_blocked = False
        self._held = None

    def note_end(self, request: Request, now: float) -> None:
        """A request ended by itself: what later ones are expected to write, and whether it had
        too many beside it."""
        if self._policies.forecast:
            self._lengths[request.service_class].observe(request.num_output)
        is_adapting = self._policies.deadlines and self._policies.online
        if not is_adapting or request.first_token_at is None:
            return
        if request.num_pauses or request.num_evictions:
            return  # what it lacked was not speed
        ttft, tpot = request.promised.ttft, request.promised.tpot
        gaps = request.num_output - 1
        if tpot is not None and gaps > 0:
            self._limit.note_end(
                was_slow=now - request.first_token_at > tpot * gaps,
                was_late=ttft is not None and request.first_token_at - request.arrival > ttft,
            )

    @property
    def limit(self) -> int:
        """Seats that may be taken at the moment."""
        return self._limit.limit

    # Back to the seats

    def resume(self, rank: int, now: float) -> list[Request]:
        """Let paused requests of a class go on in place, the oldest first.

        One that has all its blocks need not wait behind one that lost them; one that needs
        blocks waits until it is the first of its class.
        """
        paused = self._roster.paused
        if not paused or not self._has_seat(rank):
            return []
        resumed = []
        for request in sorted(
            (request for request in paused if request.rank == rank),
            key=lambda request: request.order,
        ):
            if not self._has_seat(rank):
                break
            if len(request.tokens) > request.capacity and not self._regain(request, now):
                continue
            self._take_seat(request)
            resumed.append(request)
        return resumed

    def _regain(self, request: Request, now: float) -> bool:
        """Give the first of its class back what it lost, if that lasts for a while."""
        queue = self._roster.queues[request.rank]
        if (
            self.is_blocked
            or queue.first() is not request
            or not self._preemptor.may_admit(request.rank)
        ):
            return False
        lasting = min(len(request.tokens) + _QUANTUM, request.num_prompt + request.max_output)
        shortage = self._kv.shortage(request, None, lasting, 0)
        if shortage > 0 and not self._preemptor.reclaim(request, shortage):
            return False
        return self._kv.resume(request)

    # New in the seats

    def first(self, rank: int, now: float) -> Request | None:
        """Who of a class might be seated now; None if nobody waits or no seat can be had."""
        queue = self._roster.queues[rank]
        if self.is_blocked or not len(queue):
            return None
        if not self._has_seat(rank):
            newcomer = queue.first_newcomer()
            return newcomer if self._preemptor.may_admit(rank) and self._givers(newcomer) else None
        if not self._preemptor.may_admit(rank):
            self.is_blocked = True
            return None
        request = queue.first()
        if request is not None and request.state is RequestState.PAUSED:
            self.is_blocked = True  # `resume` found no blocks for it
            return None
        return request

    def seat(self, request: Request, step: Step) -> bool:
        """Give a request that `first` named its blocks and its seat; False if blocks lack."""
        if not self._is_affordable(request) or not self._place(request, step):
            self.is_blocked = True
            return False
        if request.state is RequestState.WAITING and self._counters is not None:
            rank, tenant = request.account
            num_prompt = len(request.tokens) - request.num_computed
            self._counters[rank].charge(tenant, num_prompt=num_prompt)
        self._take_seat(request)
        if request.group is not None:
            request.group.lead(request)
            if request.group.holds_others(request):
                self._roster.set_rank(request, max(request.rank, request.group.rank))
        return True

    def place_first(self, request: Request, step: Step) -> None:
        """Seat the only one that can move, whatever it takes."""
        placed = self._kv.resume(request) if request.block_table else self._place(request, step)
        assert placed, f"{request!r} does not fit although it is alone"
        self._take_seat(request)
        if request.group is not None:
            request.group.lead(request)

    @property
    def has_seats(self) -> bool:
        """Could anybody at all be seated now?"""
        return self._has_seat(Rank.INTERACTIVE)

    def _has_seat(self, rank: int) -> bool:
        if self._limit.allows(len(self._roster.running)):
            return True
        return self._preemptor.can_displace(rank)

    def _givers(self, request: Request | None) -> Sequence[Request]:
        """Peers whose tenants hold so much more that one of them makes room for a newcomer."""
        if self._light_tenants is None or request is None:
            return ()
        return self._light_tenants.givers(request)

    def _is_light(self, request: Request) -> bool:
        return self._light_tenants is not None and self._light_tenants.is_light(request)

    def _take_seat(self, request: Request) -> None:
        if len(self._roster.running) >= self.limit:
            if self._preemptor.can_displace(request.rank):
                self._preemptor.displace(request.rank, self._is_light)
            else:
                self._preemptor.pause_one_of(self._givers(request))
        request.quantum_end = min(request.num_computed, len(request.tokens) - 1) + _QUANTUM
        self._roster.seat(request)
        if self._held is not None:
            self._held.append(self._outlook(request))

    def _place(self, request: Request, step: Step) -> bool:
        # When nobody runs, nobody needs room to grow.
        keep_free = self._watermark if self._roster.running else 0
        placement = self._kv.place(request, _prompt_owner(request), keep_free)
        if placement is None and self._policies.classes:
            owner = _prompt_owner(request)
            shortage = self._kv.shortage(request, owner, len(request.tokens), keep_free)
            if self._preemptor.reclaim(request, shortage):
                # The owner may have been a victim.
                placement = self._kv.place(request, _prompt_owner(request), keep_free)
        if placement is None:
            return False
        if placement.copy is not None:
            step.copies.append(placement.copy)
        return True

    # The forecast

    def _is_affordable(self, request: Request) -> bool:
        """Will the tokens of all that run, and of this one, fit at their peak?"""
        if not self._policies.forecast or not self._roster.running:
            return True
        if self._held is None or self._held_rank != request.rank:
            # What lower classes hold will be taken if it has to be.
            self._held = [
                self._outlook(holder)
                for holder in self._roster.holders
                if holder.rank >= request.rank
            ]
            self._held_rank = request.rank
        if not self._held:
            return True
        pool = self._kv.pool
        counted = sum(current for current, _ in self._held)
        # Blocks that several share were counted for each of them.
        shared = max(0, counted - pool.num_used * self._kv.block_size)
        peak = expected_peak([*self._held, self._outlook(request)])
        return peak <= self._num_tokens + shared

    def _outlook(self, request: Request) -> tuple[int, int]:
        """Tokens held now (whole blocks), and output tokens still to come."""
        num_output = request.num_output
        if request.expected_output <= num_output:
            request.expected_output = self._lengths[request.service_class].expected_total(
                num_output, request.max_output
            )
        size = self._kv.block_size
        held = max(request.capacity, -(-len(request.tokens) // size) * size)
        return held, max(0, request.expected_output - num_output)


def _prompt_owner(request: Request) -> Request | None:
    return request.group.prompt_owner() if request.group is not None else None
