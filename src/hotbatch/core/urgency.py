"""What a request competes as: its class, and what lifts it for a while.

Three things lift a request above its class, or back up to it. Age does, never to the top.
Siblings do that wait for the prompt it computes: it is as urgent as they are. And what the
batch class is owed does, for one step, or those whose first token is long overdue
(`owed_share`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile
from math import inf

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.owed_share import OwedShares
from hotbatch.core.policies import Policies
from hotbatch.core.rank import RANK_OF, Rank, late_key
from hotbatch.core.request import Request, RequestState
from hotbatch.core.roster import Roster
from hotbatch.core.service_class import ServiceClass

_AGEING_INTERVAL = 0.5  # seconds between two looks at who has waited too long
_OVERDUE = 3.0  # times its target that a late one waits before a share is kept for it
_AMONG = 16  # of the late ones in the queue: those that are looked at for that
_RETURNING = 20  # times the ageing after which a late one goes on that had lost its seat
_AGE_SHARE = 0.01  # of all tokens: what the prompts of those that age has lifted may take
_PRESSING = 0.5  # of its time, after which batch work that was promised something is begun
_UPCOMING = 24  # of those that wait, the next that are looked at for that
_SINGLE_CLASS = ServiceClass.STANDARD  # everybody's, where classes are switched off


class Urgency:
    """Sets the ranks of requests, and what they were promised."""

    def __init__(
        self, config: SchedulerConfig, policies: Policies, roster: Roster, shares: OwedShares
    ) -> None:
        self._config = config
        self._classes = policies.classes
        self._deadlines = policies.deadlines
        self._roster = roster
        self._shares = shares
        self._next_ageing = self._next_raising = -inf
        self._age_credit = 0.0  # tokens; below zero, age has lifted more than its share
        self._lifted: Request | None = None  # the last that was late and without its seat
        self.last_arrival = [-inf] * len(Rank)  # by rank: when somebody of it came last

    def classify(self, request: Request) -> None:
        """Settle what it competes as, what it was promised, and who pays for it."""
        service_class = request.service_class if self._classes else _SINGLE_CLASS
        rank = request.base_rank = request.rank = int(RANK_OF[service_class])
        request.account = (rank, request.tenant)
        self.last_arrival[rank] = max(self.last_arrival[rank], request.arrival)
        if self._deadlines:
            promised = self._config.targets_of(request.service_class, request.targets)
            request.promised = promised
            if promised.ttft is not None:
                request.due = request.arrival + promised.ttft

    def inherit(self, leader: Request | None, rank: int) -> None:
        """Whoever computes a prompt that others wait for is as urgent as they are."""
        if leader is None or leader.rank >= rank or leader.group is None:
            return
        if leader.group.is_prompt_pending():
            self._roster.set_rank(leader, rank)

    def lift_aged(self, next_order: int, now: float) -> bool:
        """Let whoever has waited longest, of the batch class and of those that are late, compete
        as a standard request.

        One newcomer at a time waits there, behind those that came before it was lifted, and their
        prompts take a hundredth of all tokens at most: a long queue of batch work must not become
        a long queue of standard work by waiting, nor those that are late make others late.

        Args:
            next_order: what the next arrival would get; it is used up if somebody is lifted.

        Returns:
            Whether somebody was lifted.
        """
        ageing = self._config.ageing
        if ageing is None or not self._classes or now < self._next_ageing:
            return False
        self._next_ageing = now + min(_AGEING_INTERVAL, ageing)
        queues = self._roster.queues
        self._lift_returning(queues[Rank.LATE].oldest_returning(), now - _RETURNING * ageing)
        upper = queues[Rank.STANDARD]
        if upper.has_lifted or self._age_credit < 0.0:
            return False
        oldest = [queues[Rank.BATCH].oldest_newcomer(), *self._oldest_late()]
        request = min(filter(None, oldest), key=lambda one: one.arrival, default=None)
        if request is None or now - request.arrival < ageing:
            return False
        queues[request.rank].remove(request)
        self._age_credit -= len(request.tokens)
        request.is_lifted = True
        request.base_rank = request.rank = int(Rank.STANDARD)
        if request.service_class is ServiceClass.BATCH:
            request.account = (int(Rank.STANDARD), request.tenant)
        request.queue_key = (next_order,)
        upper.push(request)
        return True

    def raise_pressing(self, now: float) -> None:
        """Let batch work that was promised a first token go before those that are late already,
        once half of its time is over: until then there may be room for both."""
        if not self._classes or now < self._next_raising:
            return
        self._next_raising = now + min(_AGEING_INTERVAL, self._config.ageing or _AGEING_INTERVAL)
        queue = self._roster.queues[Rank.BATCH]
        running = takewhile(
            lambda request: request.rank == Rank.BATCH, reversed(self._roster.running)
        )
        for request in [*running, *queue.returning(_UPCOMING), *queue.upcoming(_UPCOMING)]:
            if not request.num_output and _is_pressing(request, now):
                request.base_rank = int(Rank.PROMISED)
                request.account = (int(Rank.PROMISED), request.tenant)
                self._roster.set_rank(request, Rank.PROMISED)

    def note_step(self, num_tokens: int) -> None:
        """A step was planned with so many tokens: a part of them is for those that age lifts."""
        self._age_credit = min(0.0, self._age_credit + _AGE_SHARE * num_tokens)

    def _lift_returning(self, request: Request | None, latest_arrival: float) -> None:
        """One that is late and lost its seat before its first token: it goes on before others."""
        last = self._lifted
        if last is not None and last.num_output == 0 and last.state is not RequestState.FINISHED:
            return  # one at a time
        if request is not None and request.arrival <= latest_arrival:
            self._lifted = request
            request.is_lifted = True
            request.base_rank = int(Rank.STANDARD)
            self._roster.set_rank(request, Rank.STANDARD)

    def call_owed(self, now: float) -> dict[Request, int]:
        """The requests of the batch class, and of those that are overdue, that compete above all
        in this step, if any do, each with the tokens that it may have for that."""
        if not self._classes:
            return {}
        owed: dict[Request, int] = {}
        for share, choose in zip(
            self._shares, (self._choose_batch, self._choose_late), strict=True
        ):
            if not share.is_owed:
                continue
            if share.may_choose:
                chosen = choose(now)
                if chosen is not None:
                    share.chosen[chosen] = None
            owed.update(share.due())
        for request in owed:
            self._roster.set_rank(request, Rank.OWED)
        return owed

    def _choose_batch(self, now: float) -> Request | None:
        """The oldest of the class that runs, else the first in its queue; who can still keep what
        it was promised before others."""
        chosen = self._shares.batch.chosen
        oldest = None
        for request in reversed(self._roster.running):
            if request.rank > Rank.PROMISED:
                break
            if request.rank != Rank.LATE and request not in chosen:
                oldest = request
        queues = self._roster.queues
        if oldest is None:
            oldest = queues[Rank.PROMISED].first() or queues[Rank.BATCH].first()
        return None if oldest in chosen else oldest

    def _choose_late(self, now: float) -> Request | None:
        """Of those that are overdue, and run or wait first, the one with least to compute; one at
        a time, as it holds a seat and blocks until its turn is over."""
        if self._shares.late.chosen:
            return None
        found: Request | None = None
        least = 0
        for request in self._late_ones():
            ttft = request.promised.ttft
            if ttft is None or request.num_output or now < request.arrival + _OVERDUE * ttft:
                continue
            group = request.group
            if group is not None and group.holds_back(request):
                continue  # a sibling computes its prompt
            left = len(request.tokens) - request.num_computed
            if found is None or left < least:
                found, least = request, left
        return found

    def _oldest_late(self) -> Iterator[Request | None]:
        """Of each class, as they stand in the queue by class first."""
        queue = self._roster.queues[Rank.LATE]
        return (queue.newcomer_from(late_key(one)) for one in ServiceClass)

    def _late_ones(self) -> Iterator[Request]:
        for request in reversed(self._roster.running):
            if request.rank > Rank.LATE:
                break
            if request.rank == Rank.LATE:
                yield request
        yield from islice(self._roster.queues[Rank.LATE], _AMONG)

    def note_first_token(self, request: Request) -> None:
        """Nobody waits for its prompt any more; and if that came late, what follows need not."""
        self._shares.late.chosen.pop(request, None)
        if request.base_rank == Rank.LATE:
            service_class = request.service_class if self._classes else _SINGLE_CLASS
            request.base_rank = int(RANK_OF[service_class])
        if request.rank != request.base_rank:
            self.settle(request)

    def settle(self, request: Request) -> None:
        """Give a request the rank that it has when it is owed nothing."""
        group = request.group
        inherited = group.rank if group is not None and group.holds_others(request) else 0
        self._roster.set_rank(request, max(request.base_rank, inherited))


def _is_pressing(request: Request, now: float) -> bool:
    """Is half of the time over in which its first token was promised, and not yet all of it?"""
    time = request.due - request.arrival
    return time < inf and request.arrival + _PRESSING * time <= now < request.due
