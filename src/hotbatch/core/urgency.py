"""What a request competes as: its class, and what lifts it for a while.

Three things lift a request above its class. Age does, by one class and never to the top.
Siblings do that wait for the prompt it computes: it is as urgent as they are. And what the
batch class is owed does, for one step (`batch_share`).
"""

from __future__ import annotations

from math import inf

from hotbatch.core.batch_share import BatchShare
from hotbatch.core.config import SchedulerConfig
from hotbatch.core.policies import Policies
from hotbatch.core.request import Request
from hotbatch.core.roster import OWED, RANKS, Roster
from hotbatch.core.service_class import ServiceClass

_AGEING_INTERVAL = 0.5  # seconds between two looks at who has waited too long
_SINGLE_CLASS = int(ServiceClass.STANDARD)  # everybody's, where classes are switched off


class Urgency:
    """Sets the ranks of requests, and what they were promised."""

    def __init__(
        self, config: SchedulerConfig, policies: Policies, roster: Roster, share: BatchShare
    ) -> None:
        self._config = config
        self._classes = policies.classes
        self._deadlines = policies.deadlines
        self._roster = roster
        self._share = share
        self._next_ageing = -inf
        self.last_arrival = [-inf] * len(RANKS)  # by rank: when somebody of it came last

    def classify(self, request: Request) -> None:
        """Settle what it competes as, what it was promised, and who pays for it."""
        rank = int(request.service_class) if self._classes else _SINGLE_CLASS
        request.base_rank = request.rank = rank
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
        """Let the request of the batch class that has waited longest compete one class higher.

        One at a time waits there, behind those that came before it was lifted: a long queue of
        batch work must not become a long queue of standard work by waiting.

        Args:
            next_order: what the next arrival would get; it is used up if somebody is lifted.

        Returns:
            Whether somebody was lifted.
        """
        ageing = self._config.ageing
        if ageing is None or not self._classes or now < self._next_ageing:
            return False
        self._next_ageing = now + min(_AGEING_INTERVAL, ageing)
        lower, upper = self._roster.queues[ServiceClass.BATCH : ServiceClass.STANDARD + 1]
        if upper.has_lifted:
            return False
        request = lower.oldest_newcomer()
        if request is None or now - request.arrival < ageing:
            return False
        lower.remove(request)
        request.is_lifted = True
        request.base_rank = request.rank = int(ServiceClass.STANDARD)
        request.account = (request.rank, request.tenant)
        request.queue_key = (next_order,)
        upper.push(request)
        return True

    def call_owed(self, now: float) -> dict[Request, int]:
        """The requests of the batch class that compete above all in this step, if any do, each
        with the tokens that it may have for that."""
        share = self._share
        if not self._classes or not share.is_owed:
            return {}
        if share.may_choose:
            chosen = self._choose_owed(now)
            if chosen is not None:
                share.chosen[chosen] = None
        owed = dict(share.due())
        for request in owed:
            self._roster.set_rank(request, OWED)
        return owed

    def _choose_owed(self, now: float) -> Request | None:
        """The oldest of the class that runs, else the first in its queue."""
        chosen = self._share.chosen
        oldest = None
        for request in reversed(self._roster.running):
            if request.rank != ServiceClass.BATCH:
                break
            if request not in chosen:
                oldest = request
        if oldest is None:
            oldest = self._roster.queues[ServiceClass.BATCH].first(now)
        return None if oldest in chosen else oldest

    def settle(self, request: Request) -> None:
        """Give a request the rank that it has when it is owed nothing."""
        group = request.group
        inherited = group.rank if group is not None and group.holds_others(request) else 0
        self._roster.set_rank(request, max(request.base_rank, inherited))
