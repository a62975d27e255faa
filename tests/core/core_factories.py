"""Keyword factories: a test names only what it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotbatch.core import (
    Policies,
    Request,
    RequestResult,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
    TokenEvent,
)

EOS = 2


def make_config(**overrides: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "watermark": 0.0,
    }
    return SchedulerConfig(**(settings | overrides))


def make_scheduler(*, policies: Policies | None = None, **overrides: Any) -> Scheduler:
    return Scheduler(make_config(**overrides), policies)


def make_request(
    request_id: str = "a",
    prompt: int | Sequence[int] = 6,
    *,
    seed: int = 0,
    arrival: float = 0.0,
    group_id: str | None = None,
    cache_salt: str | None = None,
    **params: Any,
) -> Request:
    """A request; an int for `prompt` makes a prompt of that length that nobody else shares."""
    if isinstance(prompt, int):
        first = 1000 * (1 + sum(ord(letter) for letter in request_id))
        prompt = range(first, first + prompt)
    settings: dict[str, Any] = {"max_tokens": 8}
    return Request(
        request_id,
        prompt,
        SamplingParams(**(settings | params)),
        seed=seed,
        arrival=arrival,
        eos_token_ids=frozenset({EOS}),
        group_id=group_id,
        cache_salt=cache_salt,
    )


def must_plan(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.plan(now)
    assert plan is not None, "there is something to plan"
    return plan


def result_of(
    plan: StepPlan,
    tokens: Mapping[str, int | Sequence[int]] | None = None,
    errors: Mapping[str, str] | None = None,
) -> StepResult:
    """A result that samples token 7 wherever `tokens` says nothing else."""
    results = []
    for planned in plan.requests:
        sampled: int | Sequence[int] = (tokens or {}).get(planned.request_id, 7)
        sampled = (sampled,) if isinstance(sampled, int) else tuple(sampled)
        results.append(
            RequestResult(
                planned.request_id,
                sampled if planned.sample is not None else (),
                error=(errors or {}).get(planned.request_id),
            )
        )
    return StepResult(plan.step_id, tuple(results), 0.01)


def run_step(
    scheduler: Scheduler,
    tokens: Mapping[str, int | Sequence[int]] | None = None,
    now: float = 0.0,
) -> tuple[StepPlan, dict[str, TokenEvent]]:
    """Plan, make up a result, commit, check; returns the plan and the events by request."""
    plan = must_plan(scheduler, now)
    events = scheduler.commit(plan, result_of(plan, tokens), now)
    scheduler.check_integrity()
    return plan, {event.request_id: event for event in events}


def run_to_end(scheduler: Scheduler, max_steps: int = 500) -> list[TokenEvent]:
    """Step until nothing is left; returns all events in order."""
    events: list[TokenEvent] = []
    for _ in range(max_steps):
        plan = scheduler.plan(0.0)
        if plan is None:
            assert not scheduler.has_work, "requests are left, yet nothing is planned"
            return events
        events += scheduler.commit(plan, result_of(plan), 0.0)
        scheduler.check_integrity()
    raise AssertionError(f"requests are left after {max_steps} steps")


def sizes(plan: StepPlan) -> dict[str, int]:
    """Tokens of each request in a plan, in the plan's order."""
    return {planned.request_id: len(planned.tokens) for planned in plan.requests}
