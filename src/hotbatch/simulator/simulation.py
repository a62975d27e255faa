"""The real scheduler against a simulated machine, in virtual time.

The loop is short: hand over what is due, plan, run, commit; if there is nothing to run, jump
to the next moment at which something happens. It is the engine's loop without its threads,
and exact: two runs of the same workload are equal to the last bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hotbatch.core.errors import OverloadedError
from hotbatch.core.plan import FinishReason, StepPlan, StepResult, TokenEvent, TokenLogprob
from hotbatch.core.request import Request
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine.protocol import Executor
from hotbatch.simulator.clock import VirtualClock
from hotbatch.simulator.executor import SimulatedFailure

StepObserver = Callable[[StepPlan, StepResult], None]


class VirtualExecutor(Executor, Protocol):
    """An executor that lets its steps take time on a clock of its own."""

    @property
    def clock(self) -> VirtualClock: ...


class SimulationStuckError(RuntimeError):
    """Requests are left, but nothing will ever happen again: a bug of the scheduler."""


@dataclass(slots=True)
class Outcome:
    """All that one request's client heard, with the time of each token, in virtual seconds."""

    arrival: float
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    finish_time: float | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_reason: str | None = None  # the limit that refused or ended it, if one did
    num_cached: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None


class Simulation:
    """Drives a scheduler and a simulated executor until every request has ended.

    Args:
        check_integrity: let the scheduler check all its blocks after every step.
        observer: called after each step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: VirtualExecutor,
        *,
        check_integrity: bool = False,
        observer: StepObserver | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = executor.clock
        self.outcomes: dict[str, Outcome] = {}
        self._check_integrity = check_integrity
        self._observer = observer
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._next_entry = 0

    def arrive(self, request: Request) -> None:
        """Let a request arrive at its `arrival`; if it is refused then, its outcome says so.

        Raises:
            InvalidRequestError: it can never be served.
        """
        self.scheduler.check(request)
        self.outcomes[request.request_id] = Outcome(request.arrival)
        self._at(request.arrival, lambda: self._add(request))

    def cancel(self, request_id: str, at: float) -> None:
        """Let a client go away at a moment; nothing happens if its request has ended."""
        self._at(at, lambda: self._cancel(request_id))

    def run(self, max_steps: int = 1_000_000) -> dict[str, Outcome]:
        """Go on until nothing is left to do; returns what each client heard, by request id.

        Raises:
            SimulationStuckError: requests are left, yet nothing can be planned, or `max_steps`
                were not enough.
        """
        for _ in range(max_steps):
            if not self.advance():
                return self.outcomes
        raise SimulationStuckError(f"requests are left after {max_steps} steps")

    def advance(self) -> bool:
        """Run one step, or jump to the next moment at which there may be one; False: all done."""
        self._hand_over_due()
        self._deliver(self.scheduler.expire(self.clock.now()))
        plan = self.scheduler.plan(self.clock.now())
        if plan is None:
            return self._jump()
        self._run_step(plan)
        if self._check_integrity:
            self.scheduler.check_integrity()
        return True

    def _run_step(self, plan: StepPlan) -> None:
        try:
            result = self.executor.run(plan)
        except SimulatedFailure as failure:
            self._deliver(self.scheduler.fail(plan, str(failure)))
            return
        # What became due while the step ran comes in before its result, as in the engine.
        self._hand_over_due()
        self._deliver(self.scheduler.commit(plan, result, self.clock.now()))
        if self._observer is not None:
            self._observer(plan, result)

    def _jump(self) -> bool:
        moments = [self._agenda[0][0]] if self._agenda else []
        wakeup = self.scheduler.next_wakeup(self.clock.now())
        if wakeup is not None:
            moments.append(wakeup)
        if moments:
            if min(moments) <= self.clock.now():
                raise SimulationStuckError("something is due now, yet nothing is planned")
            self.clock.advance_to(min(moments))
            return True
        if self.scheduler.has_work:
            raise SimulationStuckError("requests are left, yet nothing is planned")
        return False

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (moment, self._next_entry, action))
        self._next_entry += 1

    def _hand_over_due(self) -> None:
        while self._agenda and self._agenda[0][0] <= self.clock.now():
            heapq.heappop(self._agenda)[2]()

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except OverloadedError as error:
            outcome = self.outcomes[request.request_id]
            outcome.finish_reason = FinishReason.ERROR
            outcome.finish_time = self.clock.now()
            outcome.error = error.message
            outcome.error_reason = error.reason

    def _cancel(self, request_id: str) -> None:
        event = self.scheduler.cancel(request_id)
        if event is not None:
            self._deliver([event])

    def _deliver(self, events: list[TokenEvent]) -> None:
        now = self.clock.now()
        for event in events:
            outcome = self.outcomes[event.request_id]
            assert outcome.finish_reason is None, f"{event.request_id} speaks after its end"
            outcome.token_ids += event.token_ids
            outcome.token_times += [now] * len(event.token_ids)
            outcome.logprobs += event.logprobs
            outcome.prompt_logprobs = outcome.prompt_logprobs or event.prompt_logprobs
            outcome.num_cached = event.num_cached
            if event.finish_reason is not None:
                outcome.finish_reason = event.finish_reason
                outcome.finish_time = now
                outcome.stop_token_id = event.stop_token_id
                outcome.error = event.error
                outcome.error_reason = event.error_reason
