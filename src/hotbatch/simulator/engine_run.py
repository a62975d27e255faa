"""The real engine in virtual time: its own loop, accounts and observers, without its thread.

`Simulation` drives the scheduler alone, which is all that a policy needs. Whoever asks what the
engine says of itself (its accounts, what /metrics shows) lets it run here: clients come when
they are due or when the answer before theirs has ended, and the host may be as slow as told.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from hotbatch.core.plan import TokenEvent
from hotbatch.core.request import Request
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine.ceiling import Ceiling
from hotbatch.engine.engine import Engine
from hotbatch.simulator.executor import SimulatedExecutor


class EngineRun:
    """An engine on the executor's virtual clock.

    Args:
        ceiling: of the simulated machine; with it, and an executor that was given `work`, the
            engine accounts for its time.
        host_seconds: spent by each delivery of events, as a slow host would.
        on_event: hears every event after the host's time was spent, and may submit or schedule
            more.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        *,
        ceiling: Ceiling | None = None,
        host_seconds: float = 0.0,
        on_event: Callable[[TokenEvent], None] = lambda event: None,
    ) -> None:
        self.scheduler = scheduler
        self.clock = executor.clock
        self.host_seconds = host_seconds
        self.on_event = on_event
        self.engine = Engine(
            scheduler, executor, self.clock, deliver=self._deliver, ceiling=ceiling
        )
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._num_entries = 0

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Do something at a moment, or with the next turn if that has passed."""
        heapq.heappush(self._agenda, (moment, self._num_entries, action))
        self._num_entries += 1

    def arrive(self, request: Request) -> None:
        """Submit a request at its `arrival`."""
        self.at(request.arrival, lambda: self.engine.submit(request))

    def run(self, until: float | None = None) -> None:
        """Go on until nothing is left to do, or until the first turn that begins at `until`."""
        while until is None or self.clock.now() < until:
            while self._agenda and self._agenda[0][0] <= self.clock.now():
                heapq.heappop(self._agenda)[2]()
            if self.engine.tick():
                continue
            moments = [self._agenda[0][0]] if self._agenda else []
            wakeup = self.scheduler.next_wakeup(self.clock.now())
            if wakeup is not None:
                moments.append(wakeup)
            if not moments:
                assert not self.scheduler.has_work, "requests are left, yet nothing is planned"
                break
            self.clock.advance_to(min(moments))
        if until is not None:
            self.clock.advance_to(until)

    def _deliver(self, events: list[TokenEvent]) -> None:
        self.clock.advance(self.host_seconds)
        for event in events:
            self.on_event(event)
