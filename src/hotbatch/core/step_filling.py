"""Filling a step: class by class, decodes before prompts before newcomers, under one budget.

The order is told in `scheduler`; here it is carried out. With deadlines, the size of the
prompts' parts comes from the time that the step may take and is shared among them; without,
a policy sizes each in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from hotbatch.core.cost_model import CostModel
from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.kv_cache import KvCache
from hotbatch.core.lateness import Lateness
from hotbatch.core.light_tenants import LightTenants
from hotbatch.core.owed_share import OwedShares
from hotbatch.core.policies import Policies
from hotbatch.core.preemption import Preemptor
from hotbatch.core.rank import DESCENDING, Rank
from hotbatch.core.request import Request, RequestState
from hotbatch.core.roster import Roster
from hotbatch.core.seating import Seating
from hotbatch.core.shares import by_deadline, share_out
from hotbatch.core.speculation import Drafter
from hotbatch.core.step import Step
from hotbatch.core.step_time import StepClock
from hotbatch.core.turnaround import Turnaround
from hotbatch.core.urgency import Urgency

_MAX_PROMPTS = 4  # that are computed at a time, apart from those that end in the step
_FEW_PROMPTS = 5  # a long one, and short ones beside it
_LEAD = 1024.0  # weighted tokens by which tenants are told apart when prompts are ordered


class StepFiller:
    """Decides what enters a step, of those that run and those that wait."""

    def __init__(
        self,
        policies: Policies,
        roster: Roster,
        kv: KvCache,
        preemptor: Preemptor,
        seating: Seating,
        urgency: Urgency,
        shares: OwedShares,
        model: CostModel | None,
        counters: list[VirtualTokenCounters] | None,
        seconds_for: Callable[[int, int], float],
        max_tokens: int,
        max_chunk: int,
        light_tenants: LightTenants | None,
        turnaround: Turnaround,
        drafter: Drafter | None,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_chunk = max_chunk
        self._policies = policies
        self._roster = roster
        self._kv = kv
        self._preemptor = preemptor
        self._seating = seating
        self._urgency = urgency
        self._shares = shares
        self._model = model
        self._counters = counters
        self._lateness: Lateness | None = None
        if policies.deadlines and model is not None:
            self._lateness = Lateness(roster, seconds_for, model)
        self._light_tenants = light_tenants
        self._turnaround = turnaround
        self._drafter = drafter
        self._light: list[Request] = []  # requests of light tenants that have a seat
        self._skipped: frozenset[Request] = frozenset()  # decodes left out of the last step
        self._skipped_before: frozenset[Request] = frozenset()  # of the one before

    def fill(self, step: Step, owed: dict[Request, int], now: float) -> None:
        decodes: list[list[Request]] = [[] for _ in Rank]
        prompts: list[list[Request]] = [[] for _ in Rank]
        for request in self._roster.running:
            num_uncomputed = len(request.tokens) - request.num_computed
            if num_uncomputed == 1:
                decodes[request.rank].append(request)
            elif num_uncomputed > 1:
                prompts[request.rank].append(request)
        if self._light_tenants is not None:
            self._light_tenants.begin(now)
        self._turnaround.note_plan(any(decodes))
        if self._lateness is not None and (any(prompts) or self._seating.has_seats):
            self._lateness.review(prompts, decodes, now)
        clock = self._clock(decodes, prompts, now)
        num_had = [0] * len(Rank)  # tokens, by what a request is when it is owed nothing
        num_lower = sum(map(len, decodes))
        for rank in DESCENDING:
            num_lower -= len(decodes[rank])
            if not (decodes[rank] or prompts[rank] or len(self._roster.queues[rank])):
                continue
            most = sum(owed.values()) if rank == Rank.OWED else step.budget
            begun = len(step.planned)
            self._fill_rank(step, rank, decodes[rank], prompts[rank], num_lower, most, clock, now)
            if rank in (Rank.OWED, Rank.PROMISED, Rank.LATE, Rank.BATCH):
                for request, planned in zip(
                    step.requests[begun:], step.planned[begun:], strict=True
                ):
                    num_had[request.base_rank] += len(planned.tokens)
        if clock is not None:
            step.gap = clock.gap
        if self._policies.classes:
            self._urgency.note_step(step.num_tokens)
            batch, late = self._shares
            num_batch = num_had[Rank.BATCH] + num_had[Rank.PROMISED]
            has_batch = self._has_work(Rank.BATCH) or self._has_work(Rank.PROMISED)
            batch.note(step.num_tokens, num_batch, has_batch)
            late.note(step.num_tokens, num_had[Rank.LATE], self._has_work(Rank.LATE))

    def _clock(
        self, decodes: list[list[Request]], prompts: list[list[Request]], now: float
    ) -> StepClock | None:
        model = self._model
        policies = self._policies
        is_paced = policies.deadlines and policies.online
        if model is None or not is_paced or not model.is_trained:
            return None
        num_prompts = sum(map(len, prompts)) + self._roster.num_queued
        if self._light_tenants is not None:
            self._light = self._light_tenants.running()
        clock = StepClock(
            model,
            decodes,
            self._skipped,
            num_prompts,
            self._urgency.last_arrival,
            now,
            self._light,
            self._skipped & self._skipped_before,
            self._turnaround.seconds,
            1.0 if self._drafter is None else self._drafter.tokens_a_decode,
        )
        self._skipped_before, self._skipped = self._skipped, clock.skipped
        return clock

    def _is_long(self, request: Request) -> bool:
        """No one step computes its prompt, whoever else is in it."""
        return len(request.tokens) > self._max_tokens

    def _has_work(self, rank: Rank) -> bool:
        """Is there anybody of a rank that a share is kept for?"""
        if len(self._roster.queues[rank]):
            return True
        for request in self._roster.running:
            if request.rank != Rank.OWED:
                break
            if request.base_rank == rank:
                return True
        for request in reversed(self._roster.running):
            if request.rank >= rank:
                return request.rank == rank
        return False

    def _fill_rank(
        self,
        step: Step,
        rank: int,
        decodes: list[Request],
        prompts: list[Request],
        num_lower: int,
        most: int,
        clock: StepClock | None,
        now: float,
    ) -> None:
        """Enter what one class has to compute.

        Args:
            num_lower: decodes of lower classes, which are left some budget by prompts.
            most: tokens that prompts of this class may have at most.
        """
        for request in self._seating.resume(rank, now):
            num_uncomputed = len(request.tokens) - request.num_computed
            (decodes if num_uncomputed == 1 else prompts).append(request)
            if clock is not None and num_uncomputed == 1:
                clock.note_chunk(request.num_computed, 1)
        if decodes:
            self._enter_decodes(step, decodes, clock)
        # Half of what is left, at least, is for these prompts.
        room = min(most, step.budget - min(num_lower, step.budget // 2))
        if self._policies.deadlines:
            self._enter_prompts_by_deadline(step, rank, prompts, room, clock, now)
        else:
            self._enter_prompts_in_order(step, rank, prompts, room, now)

    def _enter_decodes(
        self, step: Step, decodes: Sequence[Request], clock: StepClock | None
    ) -> None:
        skipped = clock.skipped if clock is not None else ()
        running = RequestState.RUNNING
        # Without blocks: they will come back with a step in flight. Not running: displaced.
        able = [
            request
            for request in decodes
            if len(request.tokens) <= request.capacity and request.state is running
        ]
        if skipped:
            able = [request for request in able if request not in skipped]
        step.enter_decodes(able[: max(0, step.budget)])

    def _enter_prompts_in_order(
        self, step: Step, rank: int, prompts: Sequence[Request], room: int, now: float
    ) -> None:
        """Prompts in order of arrival, each as large as the policy says; then newcomers."""
        for request in prompts:
            if room <= 0:
                return
            if request.state is RequestState.RUNNING:
                room -= self._enter_by_policy(step, request, room, at_least=0)
        while room > 0:
            newcomer = self._seating.first(rank, now)
            if newcomer is None or not self._seating.seat(newcomer, step):
                return
            # At least one token, as its copy and its place in the batch are made in this step.
            room -= self._enter_by_policy(step, newcomer, room, at_least=1)

    def _enter_by_policy(self, step: Step, request: Request, room: int, at_least: int) -> int:
        num_uncomputed = len(request.tokens) - request.num_computed
        size = self._policies.chunk_size(request, num_uncomputed, room)
        size = min(max(size, at_least), num_uncomputed, self._max_chunk, room)
        if size > 0:
            step.enter_chunk(request, size)
        return max(0, size)

    def _enter_prompts_by_deadline(
        self,
        step: Step,
        rank: int,
        prompts: list[Request],
        room: int,
        clock: StepClock | None,
        now: float,
    ) -> None:
        """Prompts by deadline and remaining work, as large as the step's time allows, with a
        part for those that come new."""
        prompts = [
            request
            for request in by_deadline(prompts, self._service_had, self._is_light)
            if request.state is RequestState.RUNNING
        ]
        newcomer = self._seating.first(rank, now) if room > 0 else None
        if not prompts and newcomer is None:
            return
        if clock is not None and self._enter_short_first(step, rank, prompts, room, clock, now):
            return
        wanted = [
            min(len(request.tokens) - request.num_computed, self._max_chunk) for request in prompts
        ]
        if clock is not None:
            start = max((request.num_computed for request in prompts), default=0)
            most = room if newcomer is not None else min(room, sum(wanted))
            first = prompts[0] if prompts else newcomer
            assert first is not None
            is_light = self._is_light(first) or (newcomer is not None and self._is_light(newcomer))
            is_lone = self._is_long(first) and clock.num_prompts == 1
            size = clock.tokens_for(rank, start, most, first, is_lone=is_lone, is_light=is_light)
            room = min(room, size) if most > 0 else 0
        if room <= 0:
            return
        promised = [request.due < inf for request in prompts]
        for_newcomers = 0
        if newcomer is not None and self._is_light(newcomer):
            for_newcomers = room
        elif newcomer is not None:
            for_newcomers = share_out(room, [*wanted, room], [*promised, newcomer.due < inf])[-1]
        admitted = self._admit(step, rank, newcomer, for_newcomers, len(prompts), now)
        left = room - sum(size for _, size in admitted)
        shares = [*zip(prompts, share_out(left, wanted, promised), strict=True), *admitted]
        for request, size in shares:
            if size > 0:
                if clock is not None:
                    clock.note_chunk(request.num_computed, size)
                step.enter_chunk(request, size)

    def _enter_short_first(
        self,
        step: Step,
        rank: int,
        prompts: list[Request],
        room: int,
        clock: StepClock,
        now: float,
    ) -> bool:
        """Where a few short prompts stand beside a long one that has time, they go first and it is
        hardly felt. By deadline alone it would take all that the slack of the decodes allows, and
        everybody would wait for steps of a quarter of a second. Returns whether it is so."""
        long = [request for request in prompts if self._is_long(request)]
        if len(long) != 1 or not 1 < clock.num_prompts <= _FEW_PROMPTS:
            return False
        waiting = self._roster.queues[rank].upcoming(_FEW_PROMPTS)
        if len(prompts) + len(waiting) < clock.num_prompts or any(map(self._is_long, waiting)):
            return False
        num_left = len(long[0].tokens) - long[0].num_computed
        if not clock.has_time(rank, long[0], num_left):
            return False
        begun = step.num_tokens
        short = [request for request in prompts if request is not long[0]]
        self._enter_prompts_by_deadline(step, rank, short, room - 1, clock, now)
        room -= step.num_tokens - begun
        if long[0].state is RequestState.RUNNING:
            size = min(room, self._max_chunk, clock.beside_short(long[0], num_left))
            step.enter_chunk(long[0], size)
        return True

    def _admit(
        self,
        step: Step,
        rank: int,
        newcomer: Request | None,
        room: int,
        num_prompts: int,
        now: float,
    ) -> list[tuple[Request, int]]:
        """Seat newcomers for whose prompts there is room; returns each with its tokens."""
        admitted: list[tuple[Request, int]] = []
        while newcomer is not None and room > 0:
            most = min(room, self._max_chunk)
            is_long = len(newcomer.tokens) > most
            if is_long and num_prompts >= _MAX_PROMPTS:
                break
            if not self._seating.seat(newcomer, step):
                break
            size = min(most, len(newcomer.tokens) - newcomer.num_computed)
            admitted.append((newcomer, size))
            room -= size
            num_prompts += is_long
            newcomer = self._seating.first(rank, now) if room > 0 else None
        return admitted

    def _service_had(self, request: Request) -> float:
        """What the tenant was served, coarsely: small leads do not overrule deadlines."""
        if self._counters is None:
            return 0.0
        rank, tenant = request.account
        return self._counters[rank].counter(tenant) // _LEAD

    def _is_light(self, request: Request) -> bool:
        return self._light_tenants is not None and self._light_tenants.is_light(request)

    def move_somebody(self, step: Step, now: float) -> None:
        """Nothing was planned and nothing is in flight: let one go on, whatever it takes.

        The last resort: whoever is first gets the blocks of all the others if it has to.
        """
        for request in self._roster.running:
            num_uncomputed = len(request.tokens) - request.num_computed
            if num_uncomputed > 0:
                self._clear_for(request)
                self._kv.grow(request, len(request.tokens))
                step.enter_chunk(request, min(num_uncomputed, self._max_chunk, step.budget))
                return
        for rank in DESCENDING:
            first = self._roster.queues[rank].first()
            if first is not None:
                self._clear_for(first)
                self._seating.place_first(first, step)
                num_uncomputed = len(first.tokens) - first.num_computed
                step.enter_chunk(first, min(num_uncomputed, self._max_chunk, step.budget))
                return

    def _clear_for(self, request: Request) -> None:
        num_blocks = -(-len(request.tokens) // self._kv.block_size)
        self._preemptor.clear_for(request, num_blocks - len(request.block_table))
