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

    The executor must have the settings' threads, and their blocks at least.
    """
    times: dict[str, list[float]] = {request_id(index): [] for index in range(len(jobs))}
    left = len(jobs)
    all_ended = threading.Event()

    def hear(events: list[TokenEvent]) -> None:
        nonlocal left
        now = engine.now()
        for event in events:
            times[event.request_id] += [now] * len(event.token_ids)
            left -= event.finish_reason is not None
        if left == 0:
            all_ended.set()

    scheduler = Scheduler(settings.config(executor.info), settings.policies(), cost_model())
    engine = Engine(scheduler, _KeptOpen(executor), deliver=hear)
    engine.start()
    began = engine.now()
    arrivals = []
    try:
        for index, job in enumerate(jobs):
            time.sleep(max(0.0, began + job.time / rate - engine.now()))
            arrivals.append(engine.now())
            engine.submit(request_of(index, job, arrivals[-1], targets))
        all_ended.wait(_PATIENCE)
    finally:
        engine.stop()
    heard = [
        Heard(job, arrival, times[request_id(index)])
        for index, (job, arrival) in enumerate(zip(jobs, arrivals, strict=True))
    ]
    return figures_of(heard, targets)
