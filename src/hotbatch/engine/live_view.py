"""What somebody who watches the engine may ask: the batch's size, who waits, what a step costs.

Everything here only reads, and any thread may call it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotbatch.core.cost_model import StepFeatures
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.service_class import NO_TARGETS, LatencyTargets, ServiceClass
from hotbatch.engine.outstanding import Outstanding
from hotbatch.engine.protocol import Clock
from hotbatch.engine.step_trace import Promise


class LiveView:
    """`num_seats` is how many requests the batch can hold."""

    def __init__(
        self, scheduler: Scheduler, outstanding: Outstanding, clock: Clock, num_seats: int
    ) -> None:
        self.num_seats = num_seats
        self._scheduler = scheduler
        self._outstanding = outstanding
        self._clock = clock

    def promise_of(self, request_id: str) -> Promise | None:
        """What an outstanding request was promised; None if it has ended."""
        return self._outstanding.promise_of(request_id)

    def longest_waits(self) -> list[float]:
        """Seconds that the oldest request which no step has computed yet waits, by class.

        Linear in the requests that came before it.
        """
        return self._outstanding.longest_waits(self._clock.now())

    def targets_of(self, service_class: ServiceClass) -> LatencyTargets:
        """What a request of the class is promised that does not say so itself."""
        return self._scheduler.config.targets_of(service_class, NO_TARGETS)

    def predicted_curve(self, context_len: int, sizes: Sequence[int]) -> list[float]:
        """Predicted seconds of steps of so many decodes, each over `context_len` tokens; empty
        as long as the scheduler cannot tell."""
        model = self._scheduler.cost_model
        if model is None or not model.is_trained:
            return []
        return [
            model.predict(StepFeatures(size, size, size * context_len, size * context_len, size))
            for size in sizes
        ]
