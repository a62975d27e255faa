"""The loop in virtual time: exact, repeatable, and loud when nothing can go on."""

from __future__ import annotations

from typing import Any

import pytest

from hotbatch.core import FinishReason, Request, SamplingParams, Scheduler, SchedulerConfig
from hotbatch.simulator import SimulatedExecutor, Simulation, SimulationStuckError, TokenModel

MODEL = TokenModel(vocab_size=100)


def make_simulation(*, fail_steps: dict[int, str] | None = None, **config: Any) -> Simulation:
    settings: dict[str, Any] = {"num_blocks": 16, "block_size": 4, "max_model_len": 64}
    executor = SimulatedExecutor(
        num_blocks=16, block_size=4, max_model_len=64, model=MODEL, fail_steps=fail_steps
    )
    scheduler = Scheduler(SchedulerConfig(**(settings | config)))
    return Simulation(scheduler, executor, check_integrity=True)


def make_request(request_id: str, arrival: float = 0.0, max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id, [1, 2, 3], params, seed=len(request_id), arrival=arrival)


def test_requests_arrive_at_their_time_and_tokens_at_the_end_of_steps() -> None:
    simulation = make_simulation()
    request = make_request("late", arrival=2.0)
    simulation.arrive(request)
    outcome = simulation.run()["late"]
    assert outcome.token_ids == MODEL.continuation(request, 64)[0]
    assert outcome.token_times == pytest.approx([2.01, 2.02, 2.03, 2.04])
    assert outcome.time_to_first_token == pytest.approx(0.01)
    assert outcome.finish_time == outcome.token_times[-1]


def test_two_runs_are_equal() -> None:
    def run() -> dict[str, Any]:
        simulation = make_simulation()
        for index in range(6):
            simulation.arrive(make_request(f"r{index}", arrival=0.007 * index))
        simulation.cancel("r3", at=0.031)
        return simulation.run()

    assert run() == run()


def test_a_cancellation_while_the_step_runs_comes_before_its_result() -> None:
    simulation = make_simulation()
    simulation.arrive(make_request("a", max_tokens=10))
    simulation.cancel("a", at=0.025)
    outcome = simulation.run()["a"]
    assert outcome.finish_reason is FinishReason.ABORT
    assert len(outcome.token_ids) == 2
    assert simulation.scheduler.stats().blocks_used == 0


def test_a_failed_step_ends_its_requests_and_the_next_ones_go_on() -> None:
    simulation = make_simulation(fail_steps={1: "no memory"})
    simulation.arrive(make_request("a"))
    simulation.arrive(make_request("b", arrival=1.0))
    outcomes = simulation.run()
    assert (outcomes["a"].finish_reason, outcomes["a"].error) == (FinishReason.ERROR, "no memory")
    assert outcomes["b"].finish_reason is FinishReason.LENGTH


def test_time_jumps_to_the_timeout_of_a_static_batch() -> None:
    simulation = make_simulation(batching="static", static_batch_size=4, static_timeout=5.0)
    simulation.arrive(make_request("a", arrival=1.0))
    assert simulation.run()["a"].token_times[0] == pytest.approx(6.01)


def test_the_observer_sees_every_step() -> None:
    seen = []
    simulation = make_simulation()
    simulation = Simulation(
        simulation.scheduler,
        simulation.executor,
        observer=lambda plan, result: seen.append((plan.num_tokens, result.seconds)),
    )
    simulation.arrive(make_request("a"))
    simulation.run()
    assert seen == [(3, 0.01), (1, 0.01), (1, 0.01), (1, 0.01)]


def test_running_out_of_steps_is_loud() -> None:
    simulation = make_simulation()
    simulation.arrive(make_request("a", max_tokens=10))
    with pytest.raises(SimulationStuckError, match="after 3 steps"):
        simulation.run(max_steps=3)


def test_a_scheduler_that_plans_nothing_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = make_simulation()
    simulation.arrive(make_request("a"))
    monkeypatch.setattr(simulation.scheduler, "plan", lambda now: None)
    with pytest.raises(SimulationStuckError, match="nothing is planned"):
        simulation.run()
