"""The host's part of a step, on a clock that tells what is counted."""

from __future__ import annotations

import pytest

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.engine.host_time import measure_host
from hotbatch.simulator import TimeOnlyExecutor


class EachReading:
    """Goes on by a millisecond each time that it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 0.001
        return self.seconds


def config(**changes: int) -> SchedulerConfig:
    sizes = {"num_blocks": 100, "max_model_len": 256, "max_num_seqs": 64, **changes}
    return SchedulerConfig(**sizes, targets={})


def test_planning_booking_and_delivering_count_and_the_model_does_not() -> None:
    clock = EachReading()
    executor = TimeOnlyExecutor(num_blocks=100)
    run, plans = executor.run, []

    def slow(plan: StepPlan) -> StepResult:
        plans.append(plan)
        clock.seconds += 0.5
        return run(plan)

    executor.run = slow  # type: ignore[method-assign]
    # The clock is read at the turn's start and after planning, the model, booking, delivering.
    assert measure_host(executor, config(), 1000.0, clock) == pytest.approx(0.003)
    assert len(plans) == 24 and len(plans[-1].requests) == 16


def test_it_ends_in_time_on_a_slow_machine() -> None:
    clock = EachReading()
    executor = TimeOnlyExecutor(num_blocks=100)
    assert measure_host(executor, config(), 0.0, clock) > 0.0
    assert executor.steps_run == 1


@pytest.mark.parametrize("sizes", [{"max_model_len": 16}, {"num_blocks": 2}])
def test_a_machine_that_holds_no_request(sizes: dict[str, int]) -> None:
    assert measure_host(TimeOnlyExecutor(num_blocks=100), config(**sizes), 1.0) == 0.0
