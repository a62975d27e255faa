"""What the engine tells of its load: what waits, what is free, and how fast it goes."""

from __future__ import annotations

import pytest
from engine_parts import STEP_SECONDS, Rig, make_request, make_scheduler

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.policies import full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.engine.drain import DrainRates
from hotbatch.engine.step_stats import RequestTimings

BATCH, STANDARD, INTERACTIVE = ServiceClass


def request_of(service_class: ServiceClass, name: str, prompt: int = 5, tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, list(range(prompt)), params, seed=1, service_class=service_class)


def test_what_waits_is_counted_from_submission_to_the_first_step():
    rig = Rig(scheduler=make_scheduler(max_num_seqs=2))
    for number, service_class in enumerate([STANDARD, STANDARD, BATCH, INTERACTIVE]):
        rig.engine.submit(request_of(service_class, str(number), prompt=5 + number))
    load = rig.engine.load()
    assert load.waiting == [1, 2, 1]
    assert load.waiting_tokens == [7, 11, 8]
    assert load.free_seats == 2

    seen = []
    rig.executor.before_step = lambda plan: seen.append(rig.engine.load())
    rig.engine.tick()
    # While the first step runs: first come, first served here.
    assert seen[0].waiting == [1, 0, 1]
    assert seen[0].free_seats == 0
    assert seen[0].free_tokens == 64 * 4 - 11, "what began holds blocks already"
    rig.run_until_idle()
    load = rig.engine.load()
    assert load.waiting == load.waiting_tokens == [0, 0, 0]
    assert (load.free_seats, load.num_seats) == (2, 2)
    assert load.free_tokens == load.num_tokens == 64 * 4


def test_who_leaves_the_queue_waits_no_longer():
    rig = Rig(scheduler=make_scheduler(max_num_seqs=1))
    for name in "abc":
        rig.engine.submit(make_request(name, tokens=3))
    rig.engine.tick()
    rig.engine.cancel("b")
    rig.engine.tick()
    assert rig.engine.load().waiting == [0, 1, 0]
    rig.run_until_idle()
    assert rig.engine.load().waiting == [0, 0, 0]
    assert rig.engine.load().free_seats == 1


def test_expired_requests_are_told_so_and_wait_no_longer():
    rig = Rig(scheduler=make_scheduler(max_num_seqs=1, queue_time_to_live=2 * STEP_SECONDS))
    rig.engine.submit(make_request("a", tokens=10))
    rig.engine.tick()
    rig.engine.submit(make_request("b"))
    rig.run_until_idle()
    (event,) = [event for event in rig.heard.events if event.request_id == "b"]
    assert event.error_reason == "queue_ttl"
    assert rig.engine.load().waiting == [0, 0, 0]


@pytest.mark.parametrize(("classes", "displaceable"), [(True, [0, 1, 3]), (False, [0, 0, 0])])
def test_lower_classes_can_be_displaced_where_there_are_classes(
    classes: bool, displaceable: list[int]
):
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=256)
    rig = Rig(scheduler=Scheduler(config, full_policies(classes=classes)))
    for number, service_class in enumerate([BATCH, STANDARD, STANDARD, INTERACTIVE]):
        rig.engine.submit(request_of(service_class, str(number)))
    rig.engine.tick()
    assert rig.engine.load().displaceable == displaceable


def test_rates_are_known_after_the_first_requests():
    rig = Rig()
    assert rig.engine.load().completions_per_second == 0.0
    rig.engine.submit(make_request("a", tokens=4))
    rig.run_until_idle()
    for name in "bcd":
        rig.engine.submit(make_request(name, tokens=4))
    rig.engine.tick()
    assert rig.engine.load().completions_per_second == pytest.approx(3 / (4 * STEP_SECONDS))


def test_only_large_steps_tell_how_fast_prompts_are_computed():
    rates = DrainRates(token_budget=100)
    rates.note_step(20, 0.1)
    rates.note_step(100, 0.0)
    assert rates.prompt_tokens_per_second == 0.0
    rates.note_step(80, 0.1)
    assert rates.prompt_tokens_per_second == 800.0
    for _ in range(100):
        rates.note_step(100, 0.25)
    assert rates.prompt_tokens_per_second == pytest.approx(400.0, rel=0.01)


def test_timings_know_the_class_and_what_it_was_promised():
    promised = {INTERACTIVE: LatencyTargets(0.5, 0.1)}
    rig = Rig(scheduler=make_scheduler(targets=promised))
    heard: list[RequestTimings] = []
    rig.engine.request_observers.append(heard.append)
    rig.engine.submit(request_of(INTERACTIVE, "a", tokens=3))
    rig.run_until_idle()
    assert heard[0].service_class is INTERACTIVE
    assert heard[0].targets == LatencyTargets(0.5, 0.1)
    assert heard[0].time_per_output_token == pytest.approx(STEP_SECONDS)
