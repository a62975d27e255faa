"""The requests that were accepted and have not ended: who is owed an answer, and since when.

Submitters add from any thread, one at a time (the engine's gate); everything else happens on
the engine's thread. Adding and removing are single dict operations, and each counter is written
by one side only, so they need no other lock: what waits is what came minus what began. Only the
counts by tenant have one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.plan import FinishReason, StepPlan, TokenEvent
from hotbatch.core.service_class import NO_TARGETS, LatencyTargets, ServiceClass
from hotbatch.engine.step_stats import RequestTimings
from hotbatch.engine.step_trace import Promise


@dataclass(slots=True)
class _Life:
    arrival: float
    num_prompt: int
    service_class: ServiceClass
    targets: LatencyTargets
    tenant: str
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_output: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    paused_at: float | None = None
    pauses: tuple[tuple[float, float], ...] = ()


class _Tally:
    """Requests and prompt tokens, by class."""

    def __init__(self) -> None:
        self.requests = [0] * len(ServiceClass)
        self.tokens = [0] * len(ServiceClass)

    def add(self, life: _Life) -> None:
        self.requests[life.service_class] += 1
        self.tokens[life.service_class] += life.num_prompt


@dataclass(slots=True)
class Heard:
    """What one delivery of events meant for the clients (seconds), and which requests ended."""

    time_to_first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    ended: list[RequestTimings] = field(default_factory=list)
    num_tokens: int = 0


class Outstanding:
    """Accepted requests by id, from submission to their last event."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        # Requests and their prompt tokens since the start, by class: all that came, those that
        # began (or ended before), and those that ended.
        self._tenants: list[dict[str, int]] = [{} for _ in ServiceClass]  # requests that wait
        self._tenants_lock = threading.Lock()
        self._came = _Tally()
        self._began = _Tally()
        self._ended = _Tally()

    def __len__(self) -> int:
        return len(self._lives)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lives

    def ids(self) -> list[str]:
        return list(self._lives)

    def waiting(self) -> tuple[list[int], list[int]]:
        """Requests that no step has computed yet, and their prompt tokens, by class."""
        # What began is read first: what begins meanwhile counts as waiting for a moment longer.
        began, began_tokens = self._began.requests.copy(), self._began.tokens.copy()
        return (
            [came - gone for came, gone in zip(self._came.requests, began, strict=True)],
            [came - gone for came, gone in zip(self._came.tokens, began_tokens, strict=True)],
        )

    def running(self) -> tuple[list[int], list[int]]:
        """Requests that have begun and not ended, and their prompt tokens, by class, wherever
        they stand now."""
        ended, ended_tokens = self._ended.requests.copy(), self._ended.tokens.copy()
        return (
            [began - gone for began, gone in zip(self._began.requests, ended, strict=True)],
            [began - gone for began, gone in zip(self._began.tokens, ended_tokens, strict=True)],
        )

    def waiting_of_tenants(self, service_class: int) -> dict[str, int]:
        """Of each tenant of a class that has any, the requests that no step has computed yet."""
        with self._tenants_lock:
            return self._tenants[service_class].copy()

    def _begin(self, life: _Life) -> None:
        self._began.add(life)
        with self._tenants_lock:
            tenants = self._tenants[life.service_class]
            left = tenants[life.tenant] - 1
            if left:
                tenants[life.tenant] = left
            else:
                del tenants[life.tenant]

    def promise_of(self, request_id: str) -> Promise | None:
        life = self._lives.get(request_id)
        if life is None:
            return None
        return Promise(life.arrival, life.num_prompt, life.service_class, life.targets)

    def longest_waits(self, now: float) -> list[float]:
        """Seconds since the arrival of the oldest request that has not begun, by class; 0 where
        none waits. Stops looking when it has found them."""
        waits = [0.0] * len(ServiceClass)
        missing = {ServiceClass(rank) for rank, count in enumerate(self.waiting()[0]) if count > 0}
        if not missing:
            return waits
        for life in list(self._lives.values()):  # a copy: submitters add meanwhile
            if life.first_scheduled is None and life.service_class in missing:
                waits[life.service_class] = max(0.0, now - life.arrival)
                missing.remove(life.service_class)
                if not missing:
                    break
        return waits

    @property
    def begun_tokens(self) -> int:
        """Prompt tokens of all requests that have begun since the start."""
        return sum(self._began.tokens)

    def add(
        self,
        request_id: str,
        *,
        arrival: float,
        num_prompt: int,
        service_class: ServiceClass = ServiceClass.STANDARD,
        targets: LatencyTargets = NO_TARGETS,
        tenant: str = "",
    ) -> None:
        """Raises InvalidRequestError if a request of this id has not ended yet."""
        if request_id in self._lives:
            raise InvalidRequestError(
                f"request_id {request_id!r} is in use by a request that has not ended; "
                "choose another id.",
                param="request_id",
            )
        life = _Life(arrival, num_prompt, service_class, targets, tenant)
        with self._tenants_lock:
            tenants = self._tenants[service_class]
            tenants[tenant] = tenants.get(tenant, 0) + 1
        self._came.add(life)
        self._lives[request_id] = life

    def note_plan(self, plan: StepPlan, now: float) -> None:
        """The step is about to run: whoever is in it for the first time waits no longer."""
        lives = self._lives
        for planned in plan.requests:
            life = lives.get(planned.request_id)
            if life is None:
                continue
            if life.first_scheduled is None:
                life.first_scheduled = now
                self._begin(life)
            if life.paused_at is not None:
                _end_pause(life, now)
        for preemption in plan.preempted:
            life = lives.get(preemption.request_id)
            if life is not None:
                life.num_preemptions += 1
        if plan.paused or plan.preempted:
            stopped = (*plan.paused, *(preemption.request_id for preemption in plan.preempted))
            for request_id in stopped:
                life = lives.get(request_id)
                if life is not None and life.paused_at is None:
                    life.paused_at = now

    def note_events(self, events: list[TokenEvent], now: float) -> Heard:
        """Books the events; requests that end with one of them are outstanding no more."""
        heard = Heard()
        for event in events:
            life = self._lives.get(event.request_id)
            if life is None:
                continue
            if event.token_ids:
                heard.num_tokens += len(event.token_ids)
                if life.last_token is None:
                    life.first_token = now
                    heard.time_to_first_token.append(now - life.arrival)
                else:
                    heard.inter_token.append(now - life.last_token)
                life.last_token = now
                life.num_output += len(event.token_ids)
                life.num_cached = event.num_cached
            if event.finish_reason is not None:
                del self._lives[event.request_id]
                if life.first_scheduled is None:
                    self._begin(life)
                self._ended.add(life)
                heard.ended.append(_timings(event.request_id, life, now, event.finish_reason))
        return heard

    def end_all(self, reason: FinishReason, error: str | None = None) -> list[TokenEvent]:
        """A last event for each outstanding request; none of them is removed yet."""
        return [
            TokenEvent(
                request_id=request_id,
                finish_reason=reason,
                error=error,
                num_prompt=life.num_prompt,
                num_output=life.num_output,
                num_cached=life.num_cached,
            )
            for request_id, life in list(self._lives.items())
        ]


def _end_pause(life: _Life, now: float) -> None:
    assert life.paused_at is not None
    life.pauses += ((life.paused_at, now),)
    life.paused_at = None


def _timings(request_id: str, life: _Life, now: float, reason: FinishReason) -> RequestTimings:
    if life.paused_at is not None:
        _end_pause(life, now)
    return RequestTimings(
        request_id=request_id,
        arrival=life.arrival,
        first_scheduled=life.first_scheduled,
        first_token=life.first_token,
        last_token=life.last_token,
        finished=now,
        num_prompt=life.num_prompt,
        num_output=life.num_output,
        num_cached=life.num_cached,
        num_preemptions=life.num_preemptions,
        finish_reason=reason,
        service_class=life.service_class,
        targets=life.targets,
        pauses=life.pauses,
    )
