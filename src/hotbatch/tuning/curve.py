"""The curve T(n) of a loaded model: steps of every size, timed on the executor itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import StepPlan
from hotbatch.engine.protocol import Executor, ExecutorInfo
from hotbatch.engine.warm_up import made_up_step

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
CONTEXTS = (64, 256, 1024)
PROMPTS = (16, 32, 64, 128, 256, 512, 1024)
MIXED = ((8, 32), (8, 128), (24, 64), (24, 256))  # decodes, and tokens of a prompt beside them
GUESSED = ((2, 3), (8, 3), (16, 3), (64, 1))  # decodes, and guesses of each
_LEAST_REPEATS = 3

Timed = tuple[StepFeatures, float]


def measure_curve(
    executor: Executor,
    seconds: float,
    max_rows: int,
    on_round: Callable[[int], None] = lambda done: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """The time of steps of every kind that fits the cache, on a quiet machine.

    All kinds are run in turn, again and again, so that a neighbour who is busy for a while does
    not spoil some of them; of each the lower quartile counts.

    Args:
        executor: idle; what its cache holds is lost.
        seconds: of measuring; each kind runs three times at least.
        max_rows: of the largest step.
        on_round: told how often each kind was run.
    """
    plans = _plans(executor.info, max_rows)
    times: list[list[float]] = [[] for _ in plans]
    until = clock() + seconds
    while len(times[0]) <= _LEAST_REPEATS or clock() < until:
        for plan, measured in zip(plans, times, strict=True):
            started = clock()
            executor.run(plan)
            measured.append(clock() - started)
        on_round(len(times[0]))
    # The first time touches fresh memory, which is not what a step costs.
    return [
        (StepFeatures.of_plan(plan), sorted(measured[1:])[(len(measured) - 1) // 4])
        for plan, measured in zip(plans, times, strict=True)
    ]


def _plans(info: ExecutorInfo, max_rows: int) -> list[StepPlan]:
    shapes = [
        [(context - 1, 1)] * rows for context in CONTEXTS for rows in ROWS if rows <= max_rows
    ]
    shapes += [[(0, size)] for size in PROMPTS if size <= max_rows]
    shapes += [[(255, 1)] * rows + [(0, size)] for rows, size in MIXED if rows + size <= max_rows]
    plans = [made_up_step(shape, info) for shape in shapes]
    plans += [
        made_up_step([(255, 1 + guesses)] * rows, info, guesses)
        for rows, guesses in GUESSED
        if rows * (1 + guesses) <= max_rows
    ]
    return [plan for plan in plans if plan is not None]


@dataclass(frozen=True, slots=True)
class CurveStepTime:
    """A step's time on the simulator, by a cost model that has seen the curve.

    `host_seconds` is what planning, booking and delivering add to each step.
    """

    model: CostModel
    host_seconds: float = 0.0

    def __call__(self, plan: StepPlan) -> float:
        return self.model.predict(StepFeatures.of_plan(plan)) + self.host_seconds
