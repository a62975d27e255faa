"""Steps before the first client: the cost model is trained, whatever the machine holds."""

from __future__ import annotations

import pytest

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.engine.warm_up import warm_up
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
