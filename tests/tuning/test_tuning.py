"""The search finds what is better on machines that are known, and the engine confirms it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import StepPlan
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.simulator import RooflineStepTime, SimulatedExecutor
from hotbatch.tuning import (
    PROFILES,
    CurveStepTime,
    Settings,
    Targets,
    confirm,
    make_jobs,
    measure_curve,
    search,
)
from hotbatch.tuning.settings import Heard, all_pairs, figures_of
from hotbatch.tuning.trials import LOADS, Simulator, Trial, best_rate, refine
from hotbatch.tuning.workload import Job, jobs_of

STEP_TIME = RooflineStepTime(overhead=0.0, weights=0.004, per_token=0.0003)
INFO = ExecutorInfo(
    model_name="m", precision="int8", device="cpu", vocab_size=500, max_model_len=2048,
    num_blocks=2000, block_size=16,
)  # fmt: skip


def machine(num_blocks: int = 2000) -> SimulatedExecutor:
    return SimulatedExecutor(
        num_blocks=num_blocks, max_model_len=2048, step_time=STEP_TIME, strict=False
    )


def curve() -> CostModel:
    """Learnt from the simulated machine, as `measure_curve` would from a real one."""
    executor = FreeExecutor()
    model = CostModel()
    timed = measure_curve(executor, 0.0, 1024, clock=executor.clock)
    for _ in range(3):
        for features, seconds in timed:
            model.observe(features, seconds)
    return model


class FreeExecutor:
    """Takes the step's time on a clock of its own and computes nothing."""

    info = INFO

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[StepPlan] = []

    def clock(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.now += STEP_TIME(plan)

    def close(self) -> None: ...


def test_the_curve_has_every_kind_of_step_and_the_right_times() -> None:
    executor = FreeExecutor()
    seen: list[int] = []
    timed = measure_curve(executor, 1.0, 512, on_round=seen.append, clock=executor.clock)
    assert seen == [1, 2, 3, 4]
    features = [step for step, _ in timed]
    assert StepFeatures(1, 1, 64, 64, 1) in features
    assert any(step.num_tokens == 512 and step.num_requests == 1 for step in features)
    assert any(1 < step.num_requests < step.num_tokens for step in features)
    assert StepFeatures(64, 16, 16 * 259, 16 * (4 * 255 + 10), 64) in features, "guesses"
    for step, seconds in timed:
        memory = 0.004 + 7e-7 * step.context_tokens
        assert seconds == pytest.approx(max(memory, 0.0003 * step.num_tokens))
    for plan in executor.plans:
        blocks = [block for request in plan.requests for block in request.block_ids]
        assert len(blocks) == len(set(blocks)) and max(blocks) < INFO.num_blocks


def test_a_neighbour_who_is_busy_for_a_while_does_not_spoil_the_curve() -> None:
    executor = FreeExecutor()
    run = executor.run

    def disturbed(plan: StepPlan) -> None:
        run(plan)
        if len(executor.plans) > 60 and len(executor.plans) < 110:
            executor.now += 0.5

    executor.run = disturbed
    for step, seconds in measure_curve(executor, 0.0, 512, clock=executor.clock):
        memory = 0.004 + 7e-7 * step.context_tokens
        assert seconds == pytest.approx(max(memory, 0.0003 * step.num_tokens))


def test_steps_that_do_not_fit_the_cache_are_left_out() -> None:
    executor = FreeExecutor()
    executor.info = ExecutorInfo("m", "int8", "cpu", 500, 128, 16, 16)
    timed = measure_curve(executor, 0.0, 1024, clock=executor.clock)
    assert timed
    assert max(step.context_tokens for step, _ in timed) <= 16 * 16


def test_a_workload_fits_the_context_and_keeps_its_pace() -> None:
    for profile in PROFILES.values():
        jobs = make_jobs(profile, 300, longest=512)
        assert len(jobs) == 300
        assert all(job.num_prompt + job.num_output <= 512 for job in jobs)
        assert all(a.time <= b.time for a, b in pairwise(jobs))
        assert jobs[-1].time == pytest.approx(300 - profile.burst), "one each unit of time"
        assert jobs == make_jobs(profile, 300, longest=512)


def test_a_recorded_workload() -> None:
    jobs = jobs_of([(10.0, 100, 20), (14.0, 5000, 9000), (18.0, 1, 1)], longest=1000)
    assert [job.time for job in jobs] == [0.0, 1.0, 2.0]
    assert jobs[1] == Job(1.0, 500, 500)


def test_good_is_what_keeps_both_targets_to_the_end() -> None:
    job = Job(0.0, 10, 3)
    targets = Targets(1.0, 0.1)
    good = [2.5, 2.59, 2.68]
    assert figures_of([Heard(job, 2.0, good)], targets).attainment == 1.0
    assert figures_of([Heard(job, 1.0, good)], targets).attainment == 0.0, "first token late"
    assert figures_of([Heard(job, 2.0, [2.5, 2.7, 2.9])], targets).attainment == 0.0, "slow"
    assert figures_of([Heard(job, 2.0, good[:2])], targets).attainment == 0.0, "not whole"
    figures = figures_of([Heard(job, 2.0, good), Heard(job, 2.0, [])], targets)
    assert (figures.goodput, figures.throughput) == pytest.approx((1 / 0.68, 3 / 0.68))


def test_the_best_rate_is_that_of_a_full_batch() -> None:
    rate = best_rate(CurveStepTime(curve()), [Job(0.0, 10, 100)])
    # 100 tokens at 0.3 ms each beyond the knee, and the prompt's step of 4 ms.
    assert rate == pytest.approx(1 / 0.034, rel=0.15)


def simulator(jobs: int = 60, profile: str = "chat", tpot: float = 0.03) -> Simulator:
    return Simulator(
        INFO,
        {None: CurveStepTime(curve(), 0.0002)},
        make_jobs(PROFILES[profile], jobs, 1024),
        Targets(1.0, tpot),
    )


def test_the_search_prefers_a_batch_that_keeps_the_promise() -> None:
    candidates = [Settings(seats, 128) for seats in (1, 4, 16, 32, 128)]
    trials = search(simulator(), candidates=candidates, keep=2)
    assert {trial.settings for trial in trials} == set(candidates)
    by_seats = {trial.settings.max_num_seqs: trial.worth for trial in trials}
    assert trials[0].worth == max(by_seats.values())
    assert trials[0].settings.max_num_seqs in (16, 32, 128)
    assert by_seats[1] < 0.5 * trials[0].worth


def test_the_same_search_has_the_same_result() -> None:
    candidates = [Settings(8, 64), Settings(32, 256)]
    assert search(simulator(), candidates=candidates) == search(simulator(), candidates=candidates)


def test_every_setting_holds_a_token_of_each_sequence() -> None:
    settings = all_pairs(Settings(1, 1, num_blocks=7))
    assert all(s.num_blocks == 7 for s in settings)
    assert len(settings) == len(set(settings)) > 30
    assert all(s.max_num_batched_tokens >= s.max_num_seqs for s in settings)


def test_the_real_engine_confirms() -> None:
    jobs = [Job(float(index), 8, 5) for index in range(6)]
    executor = machine()
    figures = confirm(executor, Settings(4, 64), jobs, 200.0, Targets(5.0, 5.0))
    assert figures.attainment == 1.0
    assert figures.throughput > 0.0
    again = confirm(executor, Settings(2, 64), jobs, 200.0, Targets(1e-9, 5.0))
    assert again.attainment == 0.0, "the executor stays open from one finalist to the next"


def test_a_play_ends_when_nothing_can_become_good() -> None:
    executor = machine()
    jobs = [Job(0.0, 8, 5), *(Job(0.0, 8, 1500) for _ in range(20))]
    figures = confirm(executor, Settings(1, 64), jobs, 100.0, Targets(0.001, 5.0))
    assert executor.steps_run < 20 * 1500, "those that were late from the start are not waited for"
    assert figures.attainment < 0.1


def test_a_larger_cache_and_other_threads_are_taken_only_if_they_bring_something() -> None:
    base = simulator(profile="documents", tpot=1.0)
    slow, quick = CurveStepTime(curve(), 0.02), CurveStepTime(curve(), 0.0)

    def refined(num_blocks: int, other: CurveStepTime) -> Trial:
        trial = Simulator(
            INFO, {None: CurveStepTime(curve(), 0.002), 1: other}, base.jobs, base.targets
        )
        best = trial.trial(Settings(64, 256, num_blocks), len(base.jobs))
        tried = refine(trial, best, num_blocks=(2000,), threads=(1,))
        assert len(tried) == 3 and best in tried
        return tried[0]

    assert refined(70, slow).settings == Settings(64, 256, 2000), "two documents at a time: more"
    assert refined(1900, slow).settings == Settings(64, 256, 1900), "it was enough"
    assert refined(1900, quick).settings.threads == 1


def test_a_bound_for_the_part_of_one_prompt_is_tried_and_taken_if_it_brings_something() -> None:
    """Few requests write for long, and documents come beside them."""
    jobs = [
        Job(0.5 * index, 8 if index % 8 else 900, 100 if index % 8 else 2) for index in range(80)
    ]
    default = Settings(64, 1024)

    def refined(tpot: float) -> tuple[Trial, list[Trial]]:
        machine = Simulator(INFO, {None: CurveStepTime(curve(), 0.0)}, jobs, Targets(2.0, tpot))
        best = machine.trial(default, len(jobs))
        return best, refine(machine, best, chunks=(64, 256, 1024), num_blocks=(), threads=())

    best, tried = refined(0.018)
    assert {one.settings.max_chunk for one in tried} == {0, 64, 256}, "smaller than the budget"
    assert tried[0].settings.max_chunk == 64, "it does"
    assert tried[0].worth > 1.02 * best.worth
    assert tried[0].settings.config(INFO).max_chunk == 64
    assert refined(0.04)[1][0].settings == default, "there is nothing to bring"


def test_plain_batching_is_what_it_says() -> None:
    plain, full = Settings(8, 64, is_plain=True), Settings(8, 64)
    assert not plain.policies().deadlines and full.policies().deadlines
    base = simulator()
    assert base.trial(plain, 40) != base.trial(full, 40)
    assert len(base.trial(plain, 40).figures) == len(LOADS)


def test_a_setting_uses_no_more_of_the_cache_than_it_says() -> None:
    assert Settings(4, 64, 100).config(INFO).num_blocks == 100
    assert Settings(4, 64).config(INFO).num_blocks == INFO.num_blocks
    assert Settings(4, 64, 9000).config(INFO).num_blocks == INFO.num_blocks
