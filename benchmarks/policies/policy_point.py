"""One point of a comparison: a way of batching, a piece of a trace, a rate; in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from policy_machine import Machine
from policy_variant import Variant
from policy_workload import Ask, arrival_times, requests

from hotbatch.core import Scheduler, SchedulerConfig, StepPlan, StepResult
from hotbatch.core.cost_model import CostModel
from hotbatch.engine.warm_up import warm_up
from hotbatch.simulator import Outcome, Simulation, TimeOnlyExecutor, UnsteadyStepTime

Observer = Callable[[Simulation, StepPlan, StepResult], None]

_SPREAD = 0.05  # of step times around the model, as on a quiet machine


@dataclass(frozen=True, slots=True)
class Heard:
    """What one client heard: seconds to the first token and for each after it, or a refusal."""

    service_class: str
    tenant: str
    ttft: float | None
    tpot: float | None  # None for an answer of one token, too
    reason: str | None  # why there was no whole answer
    is_good: bool


def simulate(
    machine: Machine,
    variant: Variant,
    asked: Sequence[Ask],
    rate: float,
    *,
    seed: int = 0,
    observer: Observer | None = None,
) -> dict[str, object]:
    """Figures of one run; `rate` is requests per second, infinity offers all at once."""
    config = config_of(machine, variant, asked)
    scheduler = Scheduler(config, variant.policies(machine))
    executor = executor_of(machine, seed)
    if scheduler.cost_model is not None:  # as a server does before it takes anybody in
        limits = config.max_num_batched_tokens, config.max_num_seqs
        warm_up_on(executor_of(machine, seed), scheduler.cost_model, limits)
    steps = _Steps()

    def watch(plan: StepPlan, result: StepResult) -> None:
        steps.note(plan, result)
        if observer is not None:
            observer(simulation, plan, result)

    simulation = Simulation(scheduler, executor, observer=watch)
    arrivals = arrival_times(asked, rate)
    for request in requests(asked, arrivals):
        simulation.arrive(request)
    outcomes = simulation.run(max_steps=50_000_000)
    heard = [hear(ask, outcomes[f"r{index}"]) for index, ask in enumerate(asked)]
    offered = len(asked) / rate if math.isfinite(rate) else executor.clock.now()
    figures = figures_of(heard, offered)
    figures |= {
        "end": executor.clock.now(),
        "busy": executor.busy_seconds / executor.clock.now(),
        "output_tokens_per_s": sum(len(o.token_ids) for o in outcomes.values())
        / executor.clock.now(),
        "preemptions": scheduler.stats().preemptions,
        **steps.figures(),
    }
    return figures


def executor_of(machine: Machine, seed: int) -> TimeOnlyExecutor:
    return TimeOnlyExecutor(
        num_blocks=machine.num_blocks,
        block_size=machine.block_size,
        max_model_len=machine.max_model_len,
        step_time=UnsteadyStepTime(machine.step_time, _SPREAD, seed=seed),
    )


def warm_up_on(executor: TimeOnlyExecutor, model: CostModel, limits: tuple[int, int]) -> None:
    max_tokens, max_requests = limits
    warm_up(executor, model, executor.clock, max_tokens=max_tokens, max_requests=max_requests)


def config_of(machine: Machine, variant: Variant, asked: Sequence[Ask]) -> SchedulerConfig:
    settings = {
        "num_blocks": machine.num_blocks,
        "block_size": machine.block_size,
        "max_model_len": machine.max_model_len,
        "max_num_seqs": machine.max_num_seqs,
        "max_num_batched_tokens": machine.budgets[-1],
        # Prompts that share nothing need no hashing.
        "enable_prefix_caching": any(ask.row.prefix for ask in asked),
        **variant.overrides,
    }
    return SchedulerConfig(**settings)


def hear(ask: Ask, outcome: Outcome) -> Heard:
    times = outcome.token_times
    ttft = times[0] - outcome.arrival if times else None
    tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    is_whole = len(times) == ask.row.output_len
    reason = None if is_whole else (outcome.error_reason or "ended early")
    is_good = (
        is_whole
        and ttft is not None
        and (ask.ttft is None or ttft <= ask.ttft)
        and (ask.tpot is None or tpot is None or tpot <= ask.tpot)
    )
    return Heard(ask.service_class.label, ask.tenant, ttft, tpot, reason, is_good)


def figures_of(heard: Sequence[Heard], seconds: float) -> dict[str, object]:
    """Goodput is requests that met both targets, per second of `seconds`, in which all came."""
    by_class: dict[str, list[Heard]] = {}
    by_tenant: dict[str, list[Heard]] = {}
    for one in heard:
        by_class.setdefault(one.service_class, []).append(one)
        by_tenant.setdefault(one.tenant, []).append(one)
    return {
        "requests": len(heard),
        "offered_per_s": len(heard) / seconds,
        "goodput": sum(one.is_good for one in heard) / seconds,
        "attainment": _share(heard),
        "attainment_by_class": {name: _share(group) for name, group in by_class.items()},
        "attainment_by_tenant": {name: _share(group) for name, group in by_tenant.items()},
        "unanswered": dict(Counter(one.reason for one in heard if one.reason is not None)),
        "latency_by_class": {name: _latencies(group) for name, group in by_class.items()},
    }


def _share(group: Sequence[Heard]) -> float:
    return sum(one.is_good for one in group) / len(group)


def _latencies(group: Sequence[Heard]) -> dict[str, float | None]:
    ttfts = [one.ttft for one in group if one.ttft is not None]
    tpots = [one.tpot for one in group if one.tpot is not None]
    return {
        f"p{percent}_{name}": float(np.percentile(values, percent)) if values else None
        for name, values in (("ttft", ttfts), ("tpot", tpots))
        for percent in (50, 99)
    }


class _Steps:
    """Sums over steps: their number, sizes, and how well their times were predicted."""

    def __init__(self) -> None:
        self._count = self._tokens = self._requests = 0
        self._errors: list[float] = []

    def note(self, plan: StepPlan, result: StepResult) -> None:
        self._count += 1
        self._tokens += plan.num_tokens
        self._requests += len(plan.requests)
        if plan.predicted_seconds:
            self._errors.append(abs(plan.predicted_seconds / result.seconds - 1.0))

    def figures(self) -> dict[str, float | int | None]:
        return {
            "steps": self._count,
            "mean_step_tokens": self._tokens / max(1, self._count),
            "mean_step_requests": self._requests / max(1, self._count),
            "p50_prediction_error": float(np.median(self._errors)) if self._errors else None,
            "p95_prediction_error": (
                float(np.percentile(self._errors, 95)) if self._errors else None
            ),
        }


def saturation(machine: Machine, variant: Variant, asked: Sequence[Ask]) -> float:
    """Requests per second that are served when all are offered at once."""
    figures = simulate(machine, variant, asked, math.inf)
    return len(asked) / float(figures["end"])  # type: ignore[arg-type]
