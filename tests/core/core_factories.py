"""Keyword factories: a test names only what it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotbatch.core import (
    LatencyTargets,
    Policies,
    Request,
    RequestResult,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    ServiceClass,
    StepPlan,
    StepResult,
    TokenEvent,
)
from hotbatch.core.cost_model import StepFeatures
from hotbatch.core.policies import full_policies
from hotbatch.core.service_class import NO_TARGETS

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


def make_scheduler(
    *, policies: Policies | None = None, cost_model: Any = None, **overrides: Any
) -> Scheduler:
    return Scheduler(make_config(**overrides), policies, cost_model)


def full_scheduler(*, cost_model: Any = None, without: str = "", **overrides: Any) -> Scheduler:
    """Every ingredient but those named, in a scheduler that owes the batch class nothing."""
    switched_off = dict.fromkeys(without.split(), False)
    settings = {"batch_share": 0.0} | overrides
    return make_scheduler(policies=full_policies(**switched_off), cost_model=cost_model, **settings)


class LinearCost:
    """A trained cost model for exact tests: a millisecond a step, and one a token."""

    is_trained = True

    def __init__(self) -> None:
        self.observed: list[tuple[StepFeatures, float]] = []

    def observe(self, features: StepFeatures, seconds: float) -> None:
        self.observed.append((features, seconds))

    def predict(self, features: StepFeatures) -> float:
        return 0.001 * (1 + features.num_tokens)

    predict_p95 = predict

    def prompt_seconds(self, start: int, num_tokens: int, most: int) -> float:
        return 0.001 * (1 + num_tokens)

    def largest_chunk(
        self, base: StepFeatures, start: int, num_uncomputed: int, seconds: float
    ) -> int:
        fits = int(seconds / 0.001 + 1e-9) - 1 - base.num_tokens
        return max(0, min(num_uncomputed, fits))


def make_request(
    request_id: str = "a",
    prompt: int | Sequence[int] = 6,
    *,
    seed: int = 0,
    arrival: float = 0.0,
    group_id: str | None = None,
    cache_salt: str | None = None,
    tenant: str = "",
    priority: int = 0,
    service_class: ServiceClass = ServiceClass.STANDARD,
    targets: LatencyTargets = NO_TARGETS,
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
        tenant=tenant,
        priority=priority,
        service_class=service_class,
        targets=targets,
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
