"""Steps before the first client: the cost model is trained, whatever the machine holds."""

from __future__ import annotations

import pytest

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import StepPlan
from hotbatch.engine.warm_up import is_as_known, warm_up
from hotbatch.simulator import ConstantStepTime, RooflineStepTime
from hotbatch.simulator.time_only import TimeOnlyExecutor


def warmed(executor: TimeOnlyExecutor, max_tokens: int = 512, max_requests: int = 256) -> CostModel:
    model = CostModel()
    warm_up(executor, model, executor.clock, max_tokens=max_tokens, max_requests=max_requests)
    return model


def test_the_model_is_trained_before_the_first_client_comes() -> None:
    quick = RooflineStepTime(per_token=1e-5, weights=1e-4, overhead=1e-5)
    executor = TimeOnlyExecutor(num_blocks=2048, max_model_len=8192, step_time=quick)
    model = warmed(executor)
    assert model.is_trained
    step = StepFeatures(8, 8, 8 * 200, 8 * 200, 8).plus_chunk(1024, 48)
    # weights and contexts are read, 56 tokens computed
    expected = 1e-5 + max(1e-4 + 7e-7 * step.context_tokens, 56 * 1e-5)
    assert model.predict(step) == pytest.approx(expected, rel=0.5)


def test_a_slow_machine_is_not_kept_from_its_clients() -> None:
    executor = TimeOnlyExecutor(
        num_blocks=2048, max_model_len=8192, step_time=ConstantStepTime(0.5)
    )
    warmed(executor)
    assert 0.8 <= executor.clock.now() <= 1.3, "at most one step over the time"
    began = executor.clock.now()
    model = CostModel()
    model.observe(StepFeatures(1, 1, 64, 64, 1), 0.5)
    assert is_as_known(executor, model, executor.clock, max_tokens=512, max_requests=256)
    assert executor.clock.now() - began <= 1.0


class Disturbed:
    """A machine on which every step takes three times as long when it is run first."""

    def __init__(self) -> None:
        self.quick = RooflineStepTime(per_token=1e-5, weights=1e-4, overhead=1e-5)
        self._last: StepPlan | None = None

    def __call__(self, plan: StepPlan) -> float:
        is_first, self._last = plan is not self._last, plan
        return self.quick(plan) * (3.0 if is_first else 1.0)


def test_the_first_run_of_a_step_is_not_what_it_costs() -> None:
    machine = Disturbed()
    executor = TimeOnlyExecutor(num_blocks=2048, max_model_len=8192, step_time=machine)
    steps = warm_up(executor, CostModel(), executor.clock, max_tokens=512, max_requests=256)
    as_it_is = TimeOnlyExecutor(num_blocks=2048, max_model_len=8192, step_time=machine.quick)
    expected = warm_up(as_it_is, CostModel(), as_it_is.clock, max_tokens=512, max_requests=256)
    assert steps == expected


@pytest.mark.parametrize(
    ("times", "is_known"), [(1.0, True), (1.15, True), (1.4, False), (0.5, False)]
)
def test_a_machine_that_is_not_as_it_was_is_told(times: float, is_known: bool) -> None:
    quick = RooflineStepTime(per_token=1e-5, weights=1e-4, overhead=1e-5)
    executor = TimeOnlyExecutor(num_blocks=2048, max_model_len=8192, step_time=quick)
    model = warmed(executor)
    executor = TimeOnlyExecutor(
        num_blocks=2048, max_model_len=8192, step_time=lambda plan: times * quick(plan)
    )
    assert (
        is_as_known(executor, model, executor.clock, max_tokens=512, max_requests=256) == is_known
    )
    assert executor.clock.now() < 0.1


def test_that_the_first_step_of_all_is_slow_does_not_matter() -> None:
    seconds = iter((3.0, *[0.5] * 99))
    executor = TimeOnlyExecutor(
        num_blocks=2048, max_model_len=8192, step_time=lambda _: next(seconds)
    )
    model = CostModel()
    model.observe(StepFeatures(1, 1, 64, 64, 1), 0.5)
    assert is_as_known(executor, model, executor.clock, max_tokens=512, max_requests=256)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "max_tokens", "max_requests"),
    [(1, 16, 512, 256), (4, 2, 1, 1), (2048, 64, 16, 4), (8, 8192, 512, 256)],
)
def test_steps_fit_the_smallest_machine(
    num_blocks: int, max_model_len: int, max_tokens: int, max_requests: int
) -> None:
    executor = TimeOnlyExecutor(num_blocks=num_blocks, max_model_len=max_model_len)
    seen = []
    run = executor.run
    executor.run = lambda plan: seen.append(plan) or run(plan)  # type: ignore[method-assign]
    warmed(executor, max_tokens, max_requests)
    for plan in seen:
        assert plan.num_tokens <= max_tokens
        assert len(plan.requests) <= max_requests
        for request in plan.requests:
            assert request.context_len <= executor.info.context_len
            assert max(request.block_ids) < num_blocks
            assert len(request.block_ids) * 16 >= request.context_len
