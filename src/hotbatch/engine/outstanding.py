"""The requests that were accepted and have not ended: who is owed an answer, and since when.

Submitters add from any thread; everything else happens on the engine's thread. Adding and
removing are single dict operations, so no lock is needed beyond the engine's gate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.plan import FinishReason, StepPlan, TokenEvent
from hotbatch.engine.step_stats import RequestTimings


@dataclass(slots=True)
class _Life:
    arrival: float
    num_prompt: int
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_output: int = 0
    num_cached: int = 0
    num_preemptions: int = 0


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

    def __len__(self) -> int:
        return len(self._lives)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lives

    def ids(self) -> list[str]:
        return list(self._lives)

    def add(self, request_id: str, *, arrival: float, num_prompt: int) -> None:
        """Raises InvalidRequestError if a request of this id has not ended yet."""
        if request_id in self._lives:
            raise InvalidRequestError(
                f"request_id {request_id!r} is in use by a request that has not ended; "
                "choose another id.",
                param="request_id",
            )
        self._lives[request_id] = _Life(arrival, num_prompt)

    def remove(self, request_id: str) -> None:
        self._lives.pop(request_id, None)

    def note_plan(self, plan: StepPlan, now: float) -> None:
        """The step is about to run: whoever is in it for the first time waits no longer."""
        lives = self._lives
        for planned in plan.requests:
            life = lives.get(planned.request_id)
            if life is not None and life.first_scheduled is None:
                life.first_scheduled = now
        for preemption in plan.preempted:
            life = lives.get(preemption.request_id)
            if life is not None:
                life.num_preemptions += 1

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


def _timings(request_id: str, life: _Life, now: float, reason: FinishReason) -> RequestTimings:
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
    )
