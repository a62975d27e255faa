"""Those of one service class who want a seat, in the order in which they get it.

First come those who had one already and lost it, oldest first: they hold KV, or are owed a
recomputation, and everybody behind them came later. Then the newcomers: of the tenants that
have some, the one that was served least (virtual token counters), and its requests in the
order of the policy's key; among tenants that were served nearly the same, the request that is due
first. Who was lifted into the class because it had waited too long goes
before all newcomers that came after that moment, whatever their tenant or key.

Cost: logarithmic in the tenants and, as sorted lists are, a move of pointers in the requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import chain

from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.request import Request, RequestState
from hotbatch.core.waiting_queue import WaitingQueue

_AMONG = 16  # tenants among whom the one that is due first is looked for


class ClassQueue:
    """One class's queue.

    Args:
        counters: of the class's tenants; without them, everybody is one tenant.
        leeway: how far a tenant's counter may be above the smallest for a request of it to go
            first because it is due earlier.
    """

    def __init__(self, counters: VirtualTokenCounters | None, leeway: float = 0.0) -> None:
        self._counters = counters
        self._leeway = leeway
        self._returning = WaitingQueue()
        self._newcomers: dict[str, WaitingQueue] = {}  # by tenant; none is empty
        self._lifted = WaitingQueue()
        self._num_newcomers = 0
        self.num_changes = 0  # comings and goings since the start

    def __len__(self) -> int:
        return len(self._returning) + self._num_newcomers + len(self._lifted)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returning, *self._newcomers.values(), self._lifted)

    @property
    def num_returning(self) -> int:
        """Those that had a seat before, paused ones included."""
        return len(self._returning)

    @property
    def has_lifted(self) -> bool:
        return bool(self._lifted)

    def push(self, request: Request) -> None:
        """Take in a request, at the place that its state and its key give it."""
        if request.state is not RequestState.WAITING:
            request.queue_key = (request.order,)
        self.num_changes += 1
        queue = self._special(request)
        if queue is None:
            self._push_newcomer(request)
        else:
            queue.push(request)

    def remove(self, request: Request) -> None:
        """Take out a request whose state is still the one it was pushed with."""
        self.num_changes += 1
        queue = self._special(request)
        if queue is None:
            self._remove_newcomer(request)
        else:
            queue.remove(request)

    def first(self) -> Request | None:
        """Who is to be seated next; siblings whose prompt is being computed let others pass."""
        request = _first_free(self._returning)
        if request is not None:
            return request
        request = self.first_newcomer()
        lifted = _first_free(self._lifted)
        if lifted is not None and (request is None or lifted.queue_key[0] < request.order):
            return lifted
        return request

    def upcoming(self, count: int) -> list[Request]:
        """The next newcomers, at most `count`, in the order in which tenants would take turns if
        nothing but their prompts were charged."""
        counters = self._counters
        if counters is None or len(self._newcomers) < 2:
            return [request for queue in self._newcomers.values() for request in queue.head(count)]
        # Each entry: what the tenant will have been served by then, and its next request.
        heads = [
            (counters.counter(tenant), self._newcomers[tenant][0].order, 0, tenant)
            for tenant in counters.next_few(count)
        ]
        heapify(heads)
        result: list[Request] = []
        while heads and len(result) < count:
            served, _, index, tenant = heads[0]
            queue = self._newcomers[tenant]
            request = queue[index]
            result.append(request)
            if index + 1 == len(queue):
                heappop(heads)
                continue
            served += counters.price(tenant, num_prompt=request.num_prompt)
            heapreplace(heads, (served, queue[index + 1].order, index + 1, tenant))
        return result

    def returning(self, count: int) -> list[Request]:
        """The oldest of those that had a seat before, at most `count`."""
        return self._returning.head(count)

    def oldest_returning(self) -> Request | None:
        return self._returning[0] if self._returning else None

    def oldest_newcomer(self) -> Request | None:
        """The one that has waited longest; linear in the tenants."""
        heads = (queue[0] for queue in self._newcomers.values())
        return min(heads, key=lambda request: request.arrival, default=None)

    def newcomer_from(self, key: tuple[float, ...]) -> Request | None:
        """The one that has waited longest of the first newcomers at this place or behind it."""
        heads = (queue.first_from(key) for queue in self._newcomers.values())
        return min(filter(None, heads), key=lambda request: request.arrival, default=None)

    def _special(self, request: Request) -> WaitingQueue | None:
        """The queue of those who do not stand in their tenant's."""
        if request.state is not RequestState.WAITING:
            return self._returning
        return self._lifted if request.is_lifted else None

    def _push_newcomer(self, request: Request) -> None:
        tenant = self._tenant(request)
        queue = self._newcomers.get(tenant)
        if queue is None:
            queue = self._newcomers[tenant] = WaitingQueue()
        queue.push(request)
        self._num_newcomers += 1
        if self._counters is not None:
            self._counters.arrive(tenant)

    def _remove_newcomer(self, request: Request) -> None:
        tenant = self._tenant(request)
        queue = self._newcomers[tenant]
        queue.remove(request)
        if not queue:
            del self._newcomers[tenant]
        self._num_newcomers -= 1
        if self._counters is not None:
            self._counters.leave(tenant)

    def first_newcomer(self) -> Request | None:
        """Who is next among those that never had a seat, whoever else waits."""
        if not self._num_newcomers:
            return None
        tenant = self._next_tenant()
        request = _first_free(self._newcomers[tenant])
        if request is not None:
            return self._due_before(request, tenant)
        # Rare: all of that tenant's are siblings that wait for one that runs.
        counters = self._counters
        if counters is None:
            return None
        for tenant in sorted(self._newcomers, key=counters.counter):
            request = _first_free(self._newcomers[tenant])
            if request is not None:
                return request
        return None

    def _due_before(self, first: Request, tenant: str) -> Request:
        """Who goes instead of the first of the tenant whose turn it is: one that is due earlier, of
        a tenant that was served little more. Whoever named no target of its own is passed by
        nobody: it knows of no deadlines, and turns are all that it has."""
        counters = self._counters
        if counters is None or len(self._newcomers) < 2 or first.targets.ttft is None:
            return first
        most = counters.counter(tenant) + self._leeway
        for other in counters.next_few(_AMONG):
            if counters.counter(other) <= most:
                request = _first_free(self._newcomers[other])
                if request is not None and request.due < first.due:
                    first = request
        return first

    def _next_tenant(self) -> str:
        if self._counters is None:
            return ""
        tenant = self._counters.smallest()
        assert tenant is not None, "newcomers wait, yet no tenant does"
        return tenant

    def _tenant(self, request: Request) -> str:
        return "" if self._counters is None else request.tenant


def _first_free(queue: WaitingQueue) -> Request | None:
    for request in queue:
        group = request.group
        if group is None or not group.holds_back(request):
            return request
    return None
