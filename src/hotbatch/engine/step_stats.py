"""What the engine tells its observers: one StepStats a step, one RequestTimings a request.

Both are plain frozen values, so that an observer may keep them or hand them to another
thread. All times are seconds on the engine's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotbatch.core.plan import FinishReason
from hotbatch.core.service_class import NO_TARGETS, LatencyTargets, ServiceClass


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step of the engine, in numbers.

    `started` is when the turn began; the four durations follow each other: `plan_seconds`
    (inbox and scheduler), `execute_seconds`, `commit_seconds`, `deliver_seconds`.
    `num_tokens` = `num_prompt_tokens` + `num_decode_tokens`; tokens recomputed after an
    eviction count as prompt tokens. `num_running`, `num_waiting` and the blocks are those
    after the step. `time_to_first_token` has one entry for each request whose first token
    came in this step, `inter_token` one for each that had a token before: the seconds since.
    `failed` is True if the step raised. `num_ahead_tokens` were computed for requests that nobody
    had sent; they and their requests are in no other figure.
    """

    step_id: int
    started: float
    plan_seconds: float
    execute_seconds: float
    commit_seconds: float
    deliver_seconds: float
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    num_decode_tokens: int
    num_sampled_tokens: int
    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_total: int
    num_preemptions: int
    predicted_seconds: float | None
    time_to_first_token: tuple[float, ...]
    inter_token: tuple[float, ...]
    failed: bool = False
    num_ahead_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """The life of one request. A moment that never came is None.

    `first_scheduled` is when the step that first computed it began to run; `first_token` and
    `last_token` are when the engine learnt of them, before any network. `pauses` are the
    stretches (start, end) in which it had lost its seat or its blocks.
    """

    request_id: str
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float
    num_prompt: int
    num_output: int
    num_cached: int
    num_preemptions: int
    finish_reason: FinishReason
    service_class: ServiceClass = ServiceClass.STANDARD
    targets: LatencyTargets = NO_TARGETS
    pauses: tuple[tuple[float, float], ...] = ()

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds of a token after the first; None if there was none."""
        if self.first_token is None or self.last_token is None or self.num_output < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_output - 1)
