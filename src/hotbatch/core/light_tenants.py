"""Tenants that ask for less than their share: those that ask for more must not slow them down.

Virtual token counters say who gets the next seat. Whoever has one decodes in every step, and a
step takes longer the more of somebody else's work is in it: a tenant with one request beside
another with seven gets its seat in time and then waits for all seven in each step. So a tenant
of a class that holds at most half of its fair part of the seats, while nothing of it waits, is
*light*. Requests come in twos and threes, however few they are: one that had at most half of its
fair part of the service of the last ten to twenty seconds is light with any number of seats up to
its part. Its tokens come at a pace near that of a machine it has for itself and other light ones
(`step_time`), and what that costs is borne by those that hold more than their part. Nor does a
light tenant's newcomer wait for a seat: one of those that hold more is paused for it.

All that goes for requests that named no target of their own: who named one is served by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.policies import PATIENCE
from hotbatch.core.request import Request, RequestState
from hotbatch.core.roster import Roster

_PART = 0.5  # of its fair part, of the seats or of recent service, that a light tenant has at most
_FAIR = 1.0  # times its fair part of the seats: what one may hold that had little of late
_PAGE = 10.0  # seconds: what a tenant had in this page and the last is what it had of late

Account = tuple[int, str]  # a class and a tenant


@dataclass(slots=True)
class Seats:
    """Who holds how many seats, by class and tenant.

    Args:
        weights: of tenants, relative to others; 1 where not named.
    """

    weights: Mapping[str, float]
    held: dict[Account, int] = field(default_factory=dict)
    in_class: dict[int, int] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)  # weights of a class's tenants, added

    def take(self, account: Account) -> None:
        service_class, tenant = account
        if account not in self.held:
            self.held[account] = 0
            weight = self.weights.get(tenant, 1.0)
            self.shares[service_class] = self.shares.get(service_class, 0.0) + weight
        self.held[account] += 1
        self.in_class[service_class] = self.in_class.get(service_class, 0) + 1

    def part(self, account: Account, more: int = 0) -> float:
        """Seats that the tenant holds, as a multiple of its fair part of its class's seats.

        Args:
            more: seats that it would take, beside those that are held.
        """
        service_class, tenant = account
        weight = self.weights.get(tenant, 1.0)
        shares = self.shares.get(service_class, 0.0)
        if account not in self.held:
            shares += weight
        total = self.in_class.get(service_class, 0) + more
        return (self.held.get(account, 0) + more) * shares / (weight * total)

    def has_others(self, account: Account) -> bool:
        """Has any other tenant of its class a seat?"""
        return self.in_class.get(account[0], 0) > self.held.get(account, 0)


class LightTenants:
    """Finds them among those that run, and those that come.

    Args:
        counters: of each class; they know who has something waiting, and who had how much.
        weights: as in `Seats`.
    """

    def __init__(
        self,
        roster: Roster,
        counters: Sequence[VirtualTokenCounters],
        weights: Mapping[str, float],
    ) -> None:
        self._roster = roster
        self._counters = counters
        self._recent = [of_rank.watch() for of_rank in counters]
        self._weights = weights
        self._next_page = -inf
        self._little: dict[Account, bool] = {}  # who had little, as of this plan
        self._seen = -1  # changes of the seats, when they were looked at last
        self._seats = Seats(weights)
        self._modest: dict[Account, list[Request]] = {}  # of those with less than their part

    def begin(self, now: float) -> None:
        """A new plan is made."""
        self._little.clear()
        if now >= self._next_page:
            num_turns = 1 if now < self._next_page + _PAGE else 2
            self._next_page = now + _PAGE
            for recent in self._recent:
                for _ in range(num_turns):
                    recent.turn_page()

    def running(self) -> list[Request]:
        """The requests of light tenants that have a seat and named no target for their tokens."""
        self._look()
        return [
            request
            for account, requests in self._modest.items()
            if self._asks_for_little(account)
            for request in requests
        ]

    def is_light(self, request: Request) -> bool:
        """True if its tenant is light, with this request in a seat, and it named no target for
        its first token."""
        if request.targets.ttft is not None:
            return False
        self._look()
        more = 0 if request.state is RequestState.RUNNING else 1
        account = request.account
        part = self._seats.part(account, more)
        if part <= _PART:
            return True
        return part <= _FAIR and self._seats.has_others(account) and self._had_little(account)

    def givers(self, newcomer: Request) -> list[Request]:
        """Who could be paused for a newcomer that no seat is left for: peers whose tenants hold
        more than their part, if the newcomer's would be light even with one seat more."""
        if not self.is_light(newcomer):
            return []
        seats = Seats(self._weights)
        for request in [*self._roster.running, newcomer]:
            seats.take(request.account)
        return [
            request
            for request in self._roster.running
            if request.rank == newcomer.rank
            and request.account[0] == newcomer.account[0]
            and request.num_computed >= request.quantum_end
            and request.num_pauses < PATIENCE
            and seats.part(request.account) > 1.0
        ]

    def _asks_for_little(self, account: Account) -> bool:
        """Is a tenant light that holds less than its fair part of the seats?"""
        service_class, tenant = account
        if self._counters[service_class].is_waiting(tenant):
            return False  # for more than it has
        return self._had_little(account) or self._seats.part(account) <= _PART

    def _had_little(self, account: Account) -> bool:
        """As it was when first asked in this plan: who is charged for a prompt on its way to a
        seat that somebody was to leave for it is given that seat."""
        had_little = self._little.get(account)
        if had_little is None:
            service_class, tenant = account
            had_little = self._recent[service_class].part(tenant) <= _PART
            self._little[account] = had_little
        return had_little

    def _look(self) -> None:
        if self._seen == self._roster.num_changes:
            return
        self._seen = self._roster.num_changes
        seats = self._seats = Seats(self._weights)
        for request in self._roster.running:
            seats.take(request.account)
        modest: dict[Account, list[Request]] = {
            account: [] for account in seats.held if seats.part(account) < _FAIR
        }
        self._modest = modest
        if modest:
            for request in self._roster.running:
                if request.account in modest and request.targets.tpot is None:
                    modest[request.account].append(request)
