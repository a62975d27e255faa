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


@pytest.mark.parametrize(("begins", "ends"), [(0, 1), (0, 10), (8, 30), (25, 40), (37, 60)])
def test_what_is_slow_for_a_moment_is_not_what_it_costs(begins: int, ends: int) -> None:
    quick = RooflineStepTime(per_token=1e-5, weights=1e-4, overhead=1e-5)
    runs = 0

    def disturbed(plan: StepPlan) -> float:
        nonlocal runs
        runs += 1
        return quick(plan) * (3.0 if begins < runs <= ends else 1.0)

    executor = TimeOnlyExecutor(num_blocks=2048, max_model_len=8192, step_time=disturbed)
    steps = warm_up(executor, CostModel(), executor.clock, max_tokens=512, max_requests=256)
    as_it_is = TimeOnlyExecutor(num_blocks=2048, max_model_len=8192, step_time=quick)
    expected = warm_up(as_it_is, CostModel(), as_it_is.clock, max_tokens=512, max_requests=256)
    assert ends < runs and steps == expected


def test_the_first_run_of_a_step_is_not_what_it_costs() -> None:
    quick = RooflineStepTime(per_token=1e-5, weights=1e-4, overhead=1e-5)
    seen: list[StepPlan] = []

    def cold(plan: StepPlan) -> float:
        is_first = not any(plan is other for other in seen)
        seen.append(plan)
        return quick(plan) * (3.0 if is_first else 1.0)

    executor = TimeOnlyExecutor(num_blocks=2048, max_model_len=8192, step_time=cold)
    steps = warm_up(executor, CostModel(), executor.clock, max_tokens=512, max_requests=256)
    as_it_is = TimeOnlyExecutor(num_blocks=2048, max_model_len=8192, step_time=quick)
    expected = warm_up(as_it_is, CostModel(), as_it_is.clock, max_tokens=512, max_requests=256)
    assert steps == expected


def test_a_row_is_told_from_a_request() -> None:
    """A guess is a row that finds its request there already."""
    executor = TimeOnlyExecutor(
        num_blocks=2048,
        max_model_len=8192,
        step_time=lambda plan: 1e-3 + 1e-4 * len(plan.requests) + 2e-5 * plan.num_tokens,
    )
    model = warmed(executor)
    for count in (4, 16, 64):
        step = StepFeatures(count, count, 200 * count, 200 * count, count)
        assert model.predict(step) == pytest.approx(1e-3 + 1.2e-4 * count, rel=0.05)
        assert model.added_seconds(step, 200, 8, 8) == [pytest.approx(8 * 2e-5, rel=0.3)]


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
