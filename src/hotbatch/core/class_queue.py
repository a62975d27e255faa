"""Those of one service class who want a seat, in the order in which they get it.

First come those who had one already and lost it, oldest first: they hold KV, or are owed a
recomputation, and everybody behind them came later. Then the newcomers: of the tenants that
have some, the one that was served least (virtual token counters), and its requests in the
order of the policy's key. Where a promise was made, newcomers whose first token cannot come in
time any more let those pass that still can be served as promised, but one in sixteen seats is
theirs, and all that nobody else wants. Who was lifted into the class because it had waited too
long goes before all newcomers that came after that moment, whatever their tenant or key.

Cost: logarithmic in the tenants and, as sorted lists are, a move of pointers in the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from math import inf

from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.request import Request, RequestState
from hotbatch.core.waiting_queue import WaitingQueue

_LATE_TURNS = 16


class ClassQueue:
    """One class's queue.

    Args:
        counters: of the class's tenants; without them, everybody is one tenant.
        seconds_for: how long a prompt of so many tokens will take.
    """

    def __init__(
        self, counters: VirtualTokenCounters | None, seconds_for: Callable[[int], float]
    ) -> None:
        self._counters = counters
        self._seconds_for = seconds_for
        self._returning = WaitingQueue()
        self._newcomers: dict[str, WaitingQueue] = {}  # by tenant; none is empty
        self._late = WaitingQueue()
        self._lifted = WaitingQueue()
        self._num_newcomers = 0
        self._turn = 0  # newcomers seated, to give the late ones their turn

    def __len__(self) -> int:
        return len(self._returning) + self._num_newcomers + len(self._late) + len(self._lifted)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returning, *self._newcomers.values(), self._late, self._lifted)

    @property
    def has_lifted(self) -> bool:
        return bool(self._lifted)

    def push(self, request: Request) -> None:
        """Take in a request, at the place that its state and its key give it."""
        if request.state is not RequestState.WAITING:
            request.queue_key = (request.order,)
        queue = self._special(request)
        if queue is None:
            self._push_newcomer(request)
        else:
            queue.push(request)

    def remove(self, request: Request) -> None:
        """Take out a request whose state is still the one it was pushed with."""
        queue = self._special(request)
        if queue is None:
            self._remove_newcomer(request)
        else:
            queue.remove(request)

    def take(self, request: Request) -> None:
        """Take out a request that gets a seat."""
        if request.state is RequestState.WAITING:
            self._turn += 1
        self.remove(request)

    def first(self, now: float) -> Request | None:
        """Who is to be seated next; siblings whose prompt is being computed let others pass."""
        request = _first_free(self._returning)
        if request is not None:
            return request
        if self._num_newcomers:
            self._set_late_aside(now)
        if self._late and self._turn % _LATE_TURNS == _LATE_TURNS - 1:
            request = _first_free(self._late)
        request = request or self._first_newcomer()
        lifted = _first_free(self._lifted)
        if lifted is not None and (request is None or lifted.queue_key[0] < request.order):
            return lifted
        return request or _first_free(self._late)

    def oldest_newcomer(self) -> Request | None:
        """The one that has waited longest; linear in the tenants."""
        heads = [queue[0] for queue in self._newcomers.values()]
        if self._late:
            heads.append(self._late[0])
        return min(heads, key=lambda request: request.arrival, default=None)

    def _special(self, request: Request) -> WaitingQueue | None:
        """The queue of those who do not stand in their tenant's."""
        if request.state is not RequestState.WAITING:
            return self._returning
        if request.is_lifted:
            return self._lifted
        return self._late if request.is_late else None

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

    def _first_newcomer(self) -> Request | None:
        if not self._num_newcomers:
            return None
        request = _first_free(self._newcomers[self._next_tenant()])
        if request is not None:
            return request
        # Rare: all of that tenant's are siblings that wait for one that runs.
        counters = self._counters
        if counters is None:
            return None
        for tenant in sorted(self._newcomers, key=counters.counter):
            request = _first_free(self._newcomers[tenant])
            if request is not None:
                return request
        return None

    def _next_tenant(self) -> str:
        if self._counters is None:
            return ""
        tenant = self._counters.smallest()
        assert tenant is not None, "newcomers wait, yet no tenant does"
        return tenant

    def _set_late_aside(self, now: float) -> None:
        """Move newcomers at the head whose moment has passed out of the way."""
        while self._num_newcomers:
            head = self._newcomers[self._next_tenant()][0]
            if head.due == inf or now + self._seconds_for(head.num_prompt) <= head.due:
                return
            self._remove_newcomer(head)
            head.is_late = True
            self._late.push(head)

    def _tenant(self, request: Request) -> str:
        return "" if self._counters is None else request.tenant


def _first_free(queue: WaitingQueue) -> Request | None:
    for request in queue:
        group = request.group
        if group is None or not group.holds_back(request):
            return request
    return None
