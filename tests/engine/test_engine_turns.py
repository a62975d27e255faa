"""The loop turn by turn, without a thread, on a clock that moves only when told."""

from __future__ import annotations

import queue

import pytest
from engine_parts import STEP_SECONDS, Rig, make_request, make_scheduler, solo_tokens

from hotbatch.core.errors import ContextLengthError, EngineStoppedError, InvalidRequestError
from hotbatch.core.plan import FinishReason, StepResult


def test_a_request_runs_to_its_end():
    rig = Rig()
    rig.engine.submit(make_request(prompt=5, tokens=4, seed=3))
    assert rig.run_until_idle() == 4  # the prompt's step samples the first token
    assert rig.heard.tokens("a") == solo_tokens(make_request(prompt=5, tokens=4, seed=3))
    assert rig.heard.ends("a") == [FinishReason.LENGTH]
    assert rig.engine.num_outstanding == 0


def test_events_are_delivered_once_a_step_for_all_requests():
    rig = Rig()
    for name in "abc":
        rig.engine.submit(make_request(name, tokens=4))
    rig.run_until_idle()
    assert [len(events) for events in rig.heard.deliveries] == [3, 3, 3, 3]


def test_a_request_joins_while_others_run():
    rig = Rig()
    rig.engine.submit(make_request("a", tokens=4))
    rig.engine.tick()
    rig.engine.submit(make_request("b", tokens=2))
    rig.run_until_idle()
    assert [len(plan.requests) for plan in rig.executor.plans] == [1, 2, 2, 1]


def test_an_idle_turn_runs_no_step_and_says_nothing():
    rig = Rig()
    assert rig.engine.tick() is False
    assert rig.heard.deliveries == []
    assert rig.executor.plans == []


def test_cancel_while_running_ends_with_one_abort_and_frees_the_blocks():
    rig = Rig()
    rig.engine.submit(make_request("a", tokens=50))
    rig.engine.submit(make_request("b", tokens=5))
    rig.engine.tick()
    rig.engine.cancel("a")
    rig.engine.cancel("a")
    rig.run_until_idle()
    assert rig.heard.ends("a") == [FinishReason.ABORT]
    assert rig.heard.ends("b") == [FinishReason.LENGTH]
    assert rig.engine.stats().blocks_used == 0


def test_one_that_waited_too_long_hears_so_and_the_others_go_on():
    rig = Rig(scheduler=make_scheduler(max_num_seqs=1, queue_time_to_live=2.5 * STEP_SECONDS))
    rig.engine.submit(make_request("a", tokens=5))
    rig.engine.submit(make_request("b", tokens=5))
    assert rig.run_until_idle() == 5
    assert rig.heard.ends("a") == [FinishReason.LENGTH]
    assert rig.heard.ends("b") == [FinishReason.ERROR]
    (last,) = [event for events in rig.heard.deliveries for event in events if event.error]
    assert last.error_reason == "queue_ttl"
    assert rig.engine.num_outstanding == 0


def test_cancel_right_after_submit_never_computes():
    rig = Rig()
    rig.engine.submit(make_request("a"))
    rig.engine.cancel("a")
    rig.run_until_idle()
    assert rig.executor.plans == []
    assert rig.heard.ends("a") == [FinishReason.ABORT]


def test_cancel_during_its_step_drops_that_steps_token():
    rig = Rig()
    rig.engine.submit(make_request("a"))
    rig.executor.before_step = lambda plan: rig.engine.cancel("a")
    rig.engine.tick()
    rig.engine.tick()
    assert rig.heard.ends("a") == [FinishReason.ABORT]
    assert len(rig.executor.plans) == 1


@pytest.mark.parametrize("request_id", ["a", "never-seen"])
def test_cancel_of_what_has_ended_or_never_was_is_nothing(request_id: str):
    rig = Rig()
    rig.engine.submit(make_request("a"))
    rig.run_until_idle()
    before = len(rig.heard.events)
    rig.engine.cancel(request_id)
    rig.run_until_idle()
    assert len(rig.heard.events) == before


def test_what_can_never_run_is_refused_on_the_callers_thread():
    rig = Rig()
    with pytest.raises(ContextLengthError):
        rig.engine.submit(make_request(prompt=300))
    assert rig.engine.num_outstanding == 0


def test_an_id_in_use_is_refused_and_free_again_after_the_end():
    rig = Rig()
    rig.engine.submit(make_request("a"))
    with pytest.raises(InvalidRequestError) as refusal:
        rig.engine.submit(make_request("a"))
    assert refusal.value.param == "request_id"
    rig.run_until_idle()
    rig.engine.submit(make_request("a"))
    rig.run_until_idle()
    assert rig.heard.ends("a") == [FinishReason.LENGTH] * 2


def test_a_request_is_stamped_with_its_arrival():
    rig = Rig()
    request = make_request()
    rig.engine.submit(request)
    assert request.arrival == rig.clock.now()


# ---- faults


def fail_steps(rig: Rig, *steps: int) -> None:
    def before_step(plan):
        if plan.step_id in steps:
            raise RuntimeError(f"scripted fault in step {plan.step_id}")

    rig.executor.before_step = before_step


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on():
    rig = Rig()
    fail_steps(rig, 1)
    rig.engine.submit(make_request("a"))
    rig.engine.tick()
    rig.engine.tick()
    assert rig.heard.ends("a") == [FinishReason.ERROR]
    assert "scripted fault in step 1" in rig.heard.events[-1].error
    assert rig.engine.is_healthy
    rig.engine.submit(make_request("b"))
    rig.run_until_idle()
    assert rig.heard.ends("b") == [FinishReason.LENGTH]
    assert rig.engine.stats().blocks_used == 0


def test_failures_in_a_row_make_it_unhealthy_until_a_step_succeeds():
    rig = Rig(unhealthy_after=2)
    fail_steps(rig, 0, 1)
    health = []
    for name in "abc":
        rig.engine.submit(make_request(name, tokens=1))
        rig.engine.tick()
        health.append(rig.engine.is_healthy)
    assert health == [True, False, True]
    assert rig.engine.is_accepting


@pytest.mark.parametrize("method", ["plan", "commit", "cancel", "add"])
def test_an_exception_of_the_scheduler_kills_the_engine_and_nobody_waits(method: str):
    rig = Rig()
    rig.engine.submit(make_request("a"))
    rig.engine.submit(make_request("b"))
    rig.engine.cancel("b")

    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    setattr(rig.scheduler, method, broken)
    assert rig.engine.tick() is False
    assert rig.heard.ends("a") == rig.heard.ends("b") == [FinishReason.ERROR]
    assert not rig.engine.is_healthy
    assert not rig.engine.is_accepting
    with pytest.raises(EngineStoppedError, match="a bug of ours"):
        rig.engine.submit(make_request("c"))
    rig.engine.stop()
    assert rig.executor.num_closed == 1


def test_a_result_that_does_not_fit_its_plan_is_our_bug_too():
    rig = Rig()
    rig.engine.submit(make_request("a"))
    rig.executor.run = lambda plan: StepResult(99, (), 0.0)
    rig.engine.tick()
    assert rig.heard.ends("a") == [FinishReason.ERROR]
    assert not rig.engine.is_healthy


def test_a_refusal_after_the_door_is_an_answer():
    rig = Rig()
    rig.engine.submit(make_request("a"))

    def refuse(request: object) -> None:
        raise InvalidRequestError("too late")

    rig.scheduler.add = refuse
    rig.engine.tick()
    assert rig.heard.ends("a") == [FinishReason.ERROR]
    assert rig.heard.events[0].error == "too late"
    assert rig.engine.is_healthy


def test_a_scheduler_that_never_plans_its_work_is_found_out():
    rig = Rig()
    rig.engine.submit(make_request("a"))
    rig.scheduler.plan = lambda now: None
    rig.engine.start()
    assert rig.heard.wait_for_end("a") is FinishReason.ERROR
    rig.engine.stop()


def test_a_deliver_that_raises_does_not_stop_the_loop():
    rig = Rig()
    rig.engine.submit(make_request("a", tokens=3))

    def broken(events: object) -> None:
        raise ValueError

    rig.engine._deliver = broken
    assert rig.run_until_idle() == 3
    assert rig.engine.is_healthy


# ---- statistics


def test_observers_get_the_numbers_of_each_step():
    rig = Rig()
    steps = []
    rig.engine.step_observers.append(steps.append)
    rig.engine.submit(make_request("a", prompt=5, tokens=3))
    rig.engine.tick()
    rig.engine.submit(make_request("b", prompt=7, tokens=1, start=100))
    rig.run_until_idle()
    assert [stats.step_id for stats in steps] == [0, 1, 2]
    assert [stats.num_requests for stats in steps] == [1, 2, 1]
    assert [stats.num_prompt_tokens for stats in steps] == [5, 7, 0]
    assert [stats.num_decode_tokens for stats in steps] == [0, 1, 1]
    assert [stats.num_tokens for stats in steps] == [5, 8, 1]
    assert [stats.num_sampled_tokens for stats in steps] == [1, 2, 1]
    assert [stats.num_running for stats in steps] == [1, 1, 0]
    assert [len(stats.time_to_first_token) for stats in steps] == [1, 1, 0]
    assert [stats.inter_token for stats in steps] == [(), (STEP_SECONDS,), (STEP_SECONDS,)]
    assert {stats.execute_seconds for stats in steps} == {STEP_SECONDS}
    assert {stats.plan_seconds + stats.commit_seconds for stats in steps} == {0.0}
    assert steps[0].blocks_used == 2
    assert steps[0].blocks_total == 64
    assert not any(stats.failed for stats in steps)


def test_a_failed_step_is_marked():
    rig = Rig()
    steps = []
    rig.engine.step_observers.append(steps.append)
    fail_steps(rig, 0)
    rig.engine.submit(make_request())
    rig.run_until_idle()
    assert [stats.failed for stats in steps] == [True]


def test_observers_get_the_life_of_each_request():
    rig = Rig()
    lives = []
    rig.engine.request_observers.append(lives.append)
    rig.engine.submit(make_request("a", prompt=5, tokens=3))
    rig.clock.advance(1.0)
    rig.run_until_idle()
    (life,) = lives
    assert (life.request_id, life.num_prompt, life.num_output) == ("a", 5, 3)
    assert life.arrival == 100.0
    assert life.first_scheduled == 101.0
    assert life.first_token == 101.0 + STEP_SECONDS
    assert life.last_token == life.finished == 101.0 + 3 * STEP_SECONDS
    assert life.finish_reason is FinishReason.LENGTH


def test_a_request_that_never_ran_has_no_moments():
    rig = Rig()
    lives = []
    rig.engine.request_observers.append(lives.append)
    rig.engine.submit(make_request("a", prompt=6))
    rig.engine.cancel("a")
    rig.run_until_idle()
    assert lives[0].first_scheduled is lives[0].first_token is lives[0].last_token is None
    assert lives[0].num_prompt == 6
    assert lives[0].finish_reason is FinishReason.ABORT


def test_preemptions_are_counted_for_the_step_and_the_request():
    rig = Rig(scheduler=make_scheduler(num_blocks=6, watermark=0.0))
    steps, lives = [], []
    rig.engine.step_observers.append(steps.append)
    rig.engine.request_observers.append(lives.append)
    rig.engine.submit(make_request("a", prompt=8, tokens=12))
    rig.engine.submit(make_request("b", prompt=8, tokens=12, seed=2))
    rig.run_until_idle()
    assert sum(stats.num_preemptions for stats in steps) > 0
    assert {life.request_id: life.num_preemptions for life in lives}["a"] == 0
    assert sum(life.num_preemptions for life in lives) == rig.engine.stats().preemptions


def test_an_observer_that_raises_is_dropped():
    rig = Rig()
    calls = []

    def broken(stats: object) -> None:
        calls.append(stats)
        raise ValueError

    rig.engine.step_observers.append(broken)
    rig.engine.submit(make_request())
    rig.run_until_idle()
    assert len(calls) == 1
    assert rig.engine.step_observers == []


# ---- rest


class EmptyInbox:
    """Never has a message; remembers how long it was waited for."""

    def __init__(self) -> None:
        self.timeouts: list[float | None] = []

    def get(self, timeout: float | None = None) -> object:
        self.timeouts.append(timeout)
        raise queue.Empty

    def empty(self) -> bool:
        return True


def test_without_work_it_checks_the_blocks_once_and_sleeps_without_end():
    rig = Rig()
    rig.engine.submit(make_request())
    rig.run_until_idle()
    checks = []
    rig.scheduler.check_integrity = lambda: checks.append(1)
    rig.engine._inbox = inbox = EmptyInbox()
    rig.engine._rest()
    assert checks == [1]
    assert inbox.timeouts[-1] is None


def test_while_a_static_batch_gathers_it_sleeps_until_the_batch_is_due():
    rig = Rig(scheduler=make_scheduler(batching="static", static_batch_size=4, static_timeout=2.0))
    rig.engine.submit(make_request())
    rig.clock.advance(0.5)
    assert rig.engine.tick() is False
    rig.engine._inbox = inbox = EmptyInbox()
    rig.engine._rest()
    assert inbox.timeouts == [1.5]


def test_a_block_lost_is_found_at_rest():
    rig = Rig(real_time=True)

    def broken() -> None:
        raise AssertionError("block 3 is in two states")

    rig.scheduler.check_integrity = broken
    rig.engine.start()
    rig.engine._thread.join(30)
    assert not rig.engine.is_healthy
    with pytest.raises(EngineStoppedError, match="block 3"):
        rig.engine.submit(make_request())
    rig.engine.stop()


def test_a_request_lost_is_found_at_rest():
    rig = Rig(real_time=True)
    rig.scheduler.add = lambda request: None
    rig.engine.start()
    rig.engine.submit(make_request("a"))
    assert rig.heard.wait_for_end("a") is FinishReason.ERROR
    rig.engine.stop()


# ---- stop, without a thread


def test_stop_before_start_cuts_what_was_submitted_and_closes():
    rig = Rig()
    rig.engine.submit(make_request("a"))
    rig.engine.stop(5.0)
    rig.engine.stop(5.0)
    assert rig.heard.ends("a") == [FinishReason.ABORT]
    assert rig.executor.num_closed == 1
    with pytest.raises(EngineStoppedError):
        rig.engine.submit(make_request("b"))
    with pytest.raises(EngineStoppedError):
        rig.engine.start()
