"""The finalists on the real engine, in real time: what the simulator promised, is it so?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hotbatch.core.cost_model import CostModel
from hotbatch.core.plan import StepPlan, StepResult, TokenEvent
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine.engine import Engine
from hotbatch.engine.protocol import Executor, ExecutorInfo
from hotbatch.tuning.settings import (
    Figures,
    Heard,
    Settings,
    Targets,
    figures_of,
    request_id,
    request_of,
)
from hotbatch.tuning.workload import Job

_PATIENCE = 120.0  # seconds that the last answer may take
_GLANCE = 0.1  # seconds between two looks at whether anything can still become good


class _KeptOpen:
    """An executor that outlives the engines that use it in turn."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def run(self, plan: StepPlan) -> StepResult:
        return self._executor.run(plan)

    def close(self) -> None:
        """Its owner does."""


def confirm(
    executor: Executor,
    settings: Settings,
    jobs: Sequence[Job],
    rate: float,
    targets: Targets,
    cost_model: Callable[[], CostModel] = CostModel,
) -> Figures:
    """Play the jobs at `rate` a second to an engine with these settings.

    It ends when no answer that is not whole can be a good one any more: what a queue that was
    given up takes to drain tells nothing. The executor must have the settings' threads, and
    their blocks at least.
    """
    times: dict[str, list[float]] = {request_id(index): [] for index in range(len(jobs))}
    left = set(times)
    all_ended = threading.Event()

    def hear(events: list[TokenEvent]) -> None:
        now = engine.now()
        for event in events:
            times[event.request_id] += [now] * len(event.token_ids)
            if event.finish_reason is not None:
                left.discard(event.request_id)
        if not left:
            all_ended.set()

    scheduler = Scheduler(settings.config(executor.info), settings.policies(), cost_model())
    engine = Engine(scheduler, _KeptOpen(executor), deliver=hear)
    engine.start()
    began = engine.now()
    arrivals: dict[str, float] = {}
    try:
        for index, job in enumerate(jobs):
            time.sleep(max(0.0, began + job.time / rate - engine.now()))
            request = request_of(index, job, engine.now(), targets)
            arrivals[request.request_id] = request.arrival
            engine.submit(request)
        until = engine.now() + _PATIENCE
        while not all_ended.wait(_GLANCE) and engine.now() < until:
            now = engine.now()
            open_ = [(arrivals[name], times[name]) for name in left.copy()]
            if all(_is_late(arrival, heard, targets.ttft, now) for arrival, heard in open_):
                break
    finally:
        engine.stop()
    heard = [
        Heard(job, arrivals[name], times[name])
        for job, name in zip(jobs, map(request_id, range(len(jobs))), strict=True)
    ]
    return figures_of(heard, targets)


def _is_late(arrival: float, token_times: Sequence[float], ttft: float, now: float) -> bool:
    first = token_times[0] if token_times else now
    return first - arrival > ttft
