"""Fair shares among tenants: virtual token counters.

Each tenant has a counter of the service it got: prompt tokens and output tokens, by price and
divided by its weight. Who has the smallest counter among those that wait is served next, so
tenants that always have work waiting get equal service, and what one leaves unused goes to the
others. A tenant that comes back after a pause is lifted to the smallest counter of those that
wait: it cannot save up service (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024, arXiv 2401.00588). For two tenants that both always have work waiting, the difference
in service never exceeds

    2 * max(prompt_price * longest prompt, output_price * tokens of a full batch)

Counters of tenants that are gone are dropped as soon as they say nothing more; memory follows
the tenants that were active lately. All operations are logarithmic in the tenants.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush, heapreplace

_SPARE = 1024  # entries that are kept before the useless ones are looked for


class RecentService:
    """What each tenant got lately, as a multiple of its fair part: of the last page and of the
    one that is being written, so of one to two pages' time. All operations but turning a page
    take the same time however many tenants there are.

    Args:
        weights: share of a tenant relative to others; 1 where it is not named.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._page: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._total = self._last_total = 0.0
        self._shares = 0.0  # weights of the tenants on either page, added

    def note(self, tenant: str, service: float) -> None:
        """The tenant got service, in tokens by price."""
        page = self._page
        if tenant not in page:
            page[tenant] = 0.0
            if tenant not in self._last:
                self._shares += self._weights.get(tenant, 1.0)
        page[tenant] += service
        self._total += service

    def turn_page(self) -> None:
        """Forget the last page, and begin a new one."""
        self._last, self._page = self._page, {}
        self._last_total, self._total = self._total, 0.0
        self._shares = sum(self._weights.get(tenant, 1.0) for tenant in self._last)

    def part(self, tenant: str) -> float:
        """What the tenant got, as a multiple of its fair part; 0 if it got nothing."""
        got = self._page.get(tenant, 0.0) + self._last.get(tenant, 0.0)
        if not got:
            return 0.0
        fair = self._weights.get(tenant, 1.0) / self._shares * (self._total + self._last_total)
        return got / fair


class VirtualTokenCounters:
    """The counters of one service class.

    Args:
        weights: share of a tenant relative to others; 1 where it is not named.
        prompt_price: of a prompt token that is computed.
        output_price: of an output token; the paper takes twice that of a prompt token.

    Raises:
        ValueError: a weight is not positive.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        prompt_price: float = 1.0,
        output_price: float = 2.0,
    ) -> None:
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not weight > 0.0:
                raise ValueError(f"the weight of tenant {tenant!r} must be positive, got {weight}")
        self._prompt_price = prompt_price
        self._output_price = output_price
        self._counters: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}  # requests, of tenants that have some
        # (counter, moment of arrival, tenant); counters only grow, so an entry that is out of
        # date stands too far in front and is corrected when it comes up.
        self._heap: list[tuple[float, int, str]] = []
        self._arrived: dict[str, int] = {}  # of the tenant's entry that is valid
        self._num_arrivals = 0
        self._floor = 0.0  # nobody who arrives gets less
        self._recent: RecentService | None = None
        self._sweep_at = _SPARE

    def watch(self) -> RecentService:
        """From now on, what each tenant had lately, too. Who asks for it must turn its pages, or
        it remembers everybody."""
        if self._recent is None:
            self._recent = RecentService(self._weights)
        return self._recent

    def arrive(self, tenant: str) -> None:
        """One more request of the tenant waits."""
        if tenant in self._num_waiting:
            self._num_waiting[tenant] += 1
            return
        smallest = self.smallest()
        if smallest is not None:
            self._floor = max(self._floor, self._counters[smallest])
        counter = max(self._counters.get(tenant, 0.0), self._floor)
        self._counters[tenant] = counter
        self._num_waiting[tenant] = 1
        self._arrived[tenant] = self._num_arrivals
        heappush(self._heap, (counter, self._num_arrivals, tenant))
        self._num_arrivals += 1
        self._forget()

    def leave(self, tenant: str) -> None:
        """One request of the tenant waits no longer: it is served, or was cancelled."""
        left = self._num_waiting[tenant] - 1
        if left:
            self._num_waiting[tenant] = left
            return
        del self._num_waiting[tenant]
        del self._arrived[tenant]
        if not self._num_waiting:  # the last one to leave sets the mark for the next to come
            self._floor = max(self._floor, self._counters[tenant])
            self._heap.clear()

    def is_waiting(self, tenant: str) -> bool:
        """True if any request of the tenant waits."""
        return tenant in self._num_waiting

    def charge(self, tenant: str, num_prompt: int = 0, num_output: int = 0) -> None:
        """Book service that the tenant got, in tokens, whether or not it has work waiting."""
        counter = self._counters.get(tenant, self._floor)
        service = self._service(num_prompt, num_output)
        self._counters[tenant] = counter + service / self._weights.get(tenant, 1.0)
        if self._recent is not None:
            self._recent.note(tenant, service)

    def price(self, tenant: str, num_prompt: int = 0, num_output: int = 0) -> float:
        """What so many tokens add to the tenant's counter."""
        return self._service(num_prompt, num_output) / self._weights.get(tenant, 1.0)

    def _service(self, num_prompt: int, num_output: int) -> float:
        return self._prompt_price * num_prompt + self._output_price * num_output

    def counter(self, tenant: str) -> float:
        """Weighted service of the tenant; one that is not known has that of a newcomer."""
        return self._counters.get(tenant, self._floor)

    def smallest(self) -> str | None:
        """The tenant to serve next: of those that wait, the one with the smallest counter, and
        of equals the one that has waited longest; None if nobody waits."""
        heap = self._heap
        while heap:
            counter, arrival, tenant = heap[0]
            if self._arrived.get(tenant) != arrival:
                heappop(heap)
                continue
            actual = self._counters[tenant]
            if actual == counter:
                return tenant
            heapreplace(heap, (actual, arrival, tenant))
        return None

    def next_few(self, count: int) -> list[str]:
        """At most `count` tenants that wait, roughly those to serve next: where a counter has
        grown since its entry was made, the tenant may stand too far in front. The cost is that
        of looking at a few entries, however many tenants there are."""
        heap = self._heap
        found: list[str] = []
        # From the top of the heap down, the smaller entries first.
        frontier = [(heap[0], 0)] if heap else []
        for _ in range(4 * count):
            if not frontier or len(found) == count:
                break
            (_, arrival, tenant), place = heappop(frontier)
            if self._arrived.get(tenant) == arrival:
                found.append(tenant)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))
        return found

    def lead(self, tenant: str) -> float:
        """How far the tenant's counter is above the smallest of those that wait: what a policy
        looks at that lets somebody pass (for a cached prefix, say) within a bound."""
        smallest = self.smallest()
        return 0.0 if smallest is None else self.counter(tenant) - self._counters[smallest]

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._counters)

    def _forget(self) -> None:
        """Drop entries of arrivals that are over, and counters that would be lifted anyway."""
        if len(self._heap) > 2 * len(self._arrived) + _SPARE:
            self._heap = [entry for entry in self._heap if self._arrived.get(entry[2]) == entry[1]]
            heapify(self._heap)
        if len(self._counters) > self._sweep_at:
            floor, waiting = self._floor, self._num_waiting
            self._counters = {
                tenant: counter
                for tenant, counter in self._counters.items()
                if tenant in waiting or counter > floor
            }
            self._sweep_at = max(_SPARE, 2 * len(self._counters))
