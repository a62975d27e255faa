"""Prompts take what the step's time allows, in the order of what was promised."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from core_factories import (
    LinearCost,
    full_scheduler,
    make_request,
    make_scheduler,
    must_plan,
    result_of,
    run_step,
    sizes,
)

from hotbatch.core import LatencyTargets, Request, Scheduler, SchedulerConfig, ServiceClass
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.policies import full_policies
from hotbatch.core.shares import by_deadline, share_out
from hotbatch.simulator import RooflineStepTime, SimulatedExecutor, Simulation, TokenModel

BATCH, STANDARD, INTERACTIVE = ServiceClass


def decoding(
    count: int = 8,
    *,
    promised: LatencyTargets | None = None,
    without: str = "",
    max_chunk: int = 0,
    **fields: object,
) -> Scheduler:
    """So many requests that decode, under a model of a millisecond a step and one a token."""
    scheduler = full_scheduler(
        cost_model=LinearCost(),
        without=without,
        num_blocks=5000,
        max_model_len=1000,
        max_num_seqs=32,
        max_num_batched_tokens=400,
        long_prefill_token_threshold=max_chunk,
        targets={} if promised is None else {STANDARD: promised},
    )
    for index in range(count):
        scheduler.add(make_request(f"d{index}", 1, max_tokens=400, **fields))  # type: ignore[arg-type]
    now = 0.0
    while scheduler.stats().prompt_tokens < count:
        run_step(scheduler, now=now)
    return scheduler


# How large


def test_no_prompt_takes_more_of_a_step_than_its_bound() -> None:
    scheduler = decoding(1, max_chunk=50, targets=LatencyTargets(tpot=1.0))
    for name in ("a", "b"):
        scheduler.add(make_request(name, 120, max_tokens=1))
    assert sizes(run_step(scheduler)[0]) == {"d0": 1, "a": 50, "b": 50}
    scheduler = unhurried(promised=LatencyTargets(ttft=5.0), max_chunk=3)
    run_step(scheduler)
    scheduler.add(make_request("short", 30, max_tokens=1))
    assert {"short": 3, "long": 3}.items() <= sizes(run_step(scheduler)[0]).items()


def test_a_prompt_is_hardly_felt_by_those_who_decode() -> None:
    scheduler = decoding(31)
    scheduler.add(make_request("long", 300, max_tokens=1))
    # 32 ms without it, so 72 ms with it: 71 rows.
    assert sizes(run_step(scheduler)[0])["long"] == 40


def test_held_still_a_prompt_takes_the_whole_budget() -> None:
    scheduler = decoding(31, without="online")
    scheduler.add(make_request("long", 300, max_tokens=1))
    assert sizes(run_step(scheduler)[0])["long"] == 300


def test_a_step_has_room_for_a_small_chunk_however_little_time_there_is() -> None:
    scheduler = decoding(4)
    scheduler.add(make_request("long", 300, max_tokens=1))
    assert sizes(run_step(scheduler)[0])["long"] == 16


def test_the_chunk_ends_within_the_tightest_slack() -> None:
    scheduler = decoding(7)
    promised = LatencyTargets(tpot=0.1)
    scheduler.add(make_request("promised", 1, max_tokens=99, targets=promised))
    run_step(scheduler, now=1.0)
    scheduler.add(make_request("long", 300, max_tokens=1))
    # Due at 1.1 s; at 1.04 s there are 60 ms left: 59 rows, 8 of which decode.
    assert sizes(run_step(scheduler, now=1.04)[0])["long"] == 51


def test_one_that_is_late_anyway_holds_prompts_back_no_more_than_one_without_a_target() -> None:
    scheduler = decoding(31, targets=LatencyTargets(tpot=0.002))
    scheduler.add(make_request("long", 300, max_tokens=1))
    assert sizes(run_step(scheduler, now=5.0)[0])["long"] == 40


def test_those_that_are_behind_fall_no_further_behind() -> None:
    scheduler = decoding(10, targets=LatencyTargets(tpot=0.1))
    scheduler.add(make_request("long", 300, max_tokens=1))
    # Nine tenths of 100 ms: 89 rows.
    assert sizes(run_step(scheduler, now=5.0)[0])["long"] == 79


def test_where_decodes_alone_need_more_than_the_target_prompts_get_the_least() -> None:
    scheduler = decoding(31, targets=LatencyTargets(tpot=0.02))
    scheduler.add(make_request("long", 300, max_tokens=1))
    assert sizes(run_step(scheduler, now=5.0)[0])["long"] == 16


def unhurried(
    *, promised: LatencyTargets | None = None, max_chunk: int = 0, **fields: object
) -> Scheduler:
    """Eight that decode with seconds of slack, and a prompt that no one step computes."""
    scheduler = decoding(
        8, promised=promised, max_chunk=max_chunk, targets=LatencyTargets(tpot=1.0)
    )
    scheduler.add(make_request("long", 900, max_tokens=1, **fields))  # type: ignore[arg-type]
    return scheduler


def test_a_long_prompt_is_not_felt_if_it_is_the_only_one_and_has_time() -> None:
    # 2.05 times 9 ms: 17 rows, 8 of which decode.
    assert sizes(run_step(unhurried())[0])["long"] == 9
    promised = LatencyTargets(ttft=3.0)
    assert sizes(run_step(unhurried(targets=promised))[0])["long"] == 9


def test_it_takes_no_more_than_it_needs_if_it_would_be_late_otherwise() -> None:
    # 900 tokens by 9, 18 ms each, take 1.8 s; by 14, 23 ms each, 1.5.
    promised = LatencyTargets(ttft=1.5)
    assert sizes(run_step(unhurried(targets=promised))[0])["long"] == 14
    # That soon it is only with all that the slack allows.
    promised = LatencyTargets(ttft=0.901)
    assert sizes(run_step(unhurried(targets=promised))[0])["long"] == 392


def test_a_doubtful_prediction_does_not_make_it_hurry() -> None:
    class Doubtful(LinearCost):
        """One step in twenty takes twice as long."""

        def predict_p95(self, features: StepFeatures) -> float:
            return (
                2.0 * self.predict(features) if features.num_tokens > 8 else self.predict(features)
            )

        def largest_chunk(
            self, base: StepFeatures, start: int, num_uncomputed: int, seconds: float
        ) -> int:
            return super().largest_chunk(base, start, num_uncomputed, seconds / 2.0)

    scheduler = unhurried(targets=LatencyTargets(ttft=2.5))
    scheduler._filler._model = Doubtful()  # type: ignore[assignment]
    assert sizes(run_step(scheduler)[0])["long"] == 9


def test_what_is_promised_to_all_of_its_class_cannot_be_less_than_twice_its_time_alone() -> None:
    # Alone it takes 0.9 s; by 14 tokens, 23 ms each, 1.5 s, and by 9 a little more than 1.8.
    assert sizes(run_step(unhurried(promised=LatencyTargets(ttft=0.9)))[0])["long"] == 14


def test_or_if_others_wait_behind_it() -> None:
    scheduler = unhurried()
    scheduler.add(make_request("next", 900, max_tokens=1))
    assert sum(sizes(run_step(scheduler)[0]).values()) == 400


def test_short_prompts_go_before_a_long_one_that_has_time() -> None:
    """They came later, and would wait for steps as long as the slack of the decodes allows."""
    scheduler = unhurried(promised=LatencyTargets(ttft=5.0))
    run_step(scheduler)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 30, max_tokens=1))
    assert sizes(run_step(scheduler)[0]) == {
        **{f"d{index}": 1 for index in range(8)}, "a": 30, "b": 30, "long": 4
    }  # fmt: skip
    # And one whose prompt needs little leaves it what a step may have.
    scheduler.add(make_request("c", 3, max_tokens=1))
    assert {"c": 3, "long": 6}.items() <= sizes(run_step(scheduler)[0]).items()


def test_but_not_if_it_would_be_late_for_them() -> None:
    scheduler = unhurried(targets=LatencyTargets(ttft=0.95))
    scheduler.add(make_request("a", 30, max_tokens=1))
    assert sizes(run_step(scheduler)[0])["long"] > 300


def test_nor_if_many_wait_or_more_are_long() -> None:
    scheduler = unhurried(promised=LatencyTargets(ttft=5.0))
    for index in range(5):
        scheduler.add(make_request(f"s{index}", 30, max_tokens=1))
    assert sum(sizes(run_step(scheduler)[0]).values()) > 300
    scheduler = unhurried(promised=LatencyTargets(ttft=5.0))
    for name in ("a", "next"):
        scheduler.add(make_request(name, 30 if name == "a" else 900, max_tokens=1))
    assert sum(sizes(run_step(scheduler)[0]).values()) > 300


def test_a_step_ends_before_the_first_of_its_prompts_is_due() -> None:
    scheduler = full_scheduler(
        cost_model=LinearCost(), num_blocks=500, max_model_len=1000, max_num_batched_tokens=400
    )
    for name, size, ttft in (("soon", 100, 0.15), ("later", 300, 1.0)):
        scheduler.add(make_request(name, size, max_tokens=1, targets=LatencyTargets(ttft=ttft)))
    assert sizes(run_step(scheduler)[0]) == {"soon": 100, "later": 49}
    # What is late anyway limits nothing.
    scheduler.add(make_request("hasty", 140, max_tokens=1, targets=LatencyTargets(ttft=0.1)))
    assert sum(sizes(run_step(scheduler)[0]).values()) == 391


def test_being_early_is_banked_for_two_tokens_at_most() -> None:
    scheduler = decoding(1, targets=LatencyTargets(tpot=1.0))
    for _ in range(20):
        run_step(scheduler, now=0.5)
    (request,) = scheduler._roster.running
    assert request.due == 2.5


def test_where_only_batch_work_decodes_prompts_take_the_whole_budget() -> None:
    scheduler = decoding(8, service_class=BATCH)
    scheduler.add(make_request("long", 500, max_tokens=1, service_class=BATCH))
    assert sizes(run_step(scheduler)[0])["long"] == 392


def test_batch_steps_are_brief_while_somebody_of_a_higher_class_may_come() -> None:
    scheduler = decoding(2, service_class=BATCH)
    scheduler.add(make_request("chat", 1, max_tokens=1, arrival=1.0))
    run_step(scheduler, now=1.0)
    scheduler.add(make_request("bulk", 900, max_tokens=1, service_class=BATCH, arrival=1.0))
    assert sizes(run_step(scheduler, now=2.0)[0])["bulk"] == 17  # 20 ms in all
    assert sizes(run_step(scheduler, now=40.0)[0])["bulk"] == 398


def test_where_many_wait_for_each_one_that_decodes_they_get_more() -> None:
    scheduler = decoding(10)
    for index in range(40):
        scheduler.add(make_request(f"p{index}", 300, max_tokens=1))
    plan, _ = run_step(scheduler)
    # Twice 2.25 times the 11 ms of a step that decodes only.
    assert plan.num_tokens == 48


def test_decodes_with_time_skip_a_step_when_others_have_none_but_not_two() -> None:
    scheduler = decoding(20)
    promised = LatencyTargets(tpot=0.04)
    for index in range(10):
        scheduler.add(make_request(f"p{index}", 1, max_tokens=99, targets=promised))
    run_step(scheduler, now=1.0)
    # Due at 1.04 s, and the 31 ms of all would end at 1.046 s: seven make room.
    plan, _ = run_step(scheduler, now=1.015)
    assert len(plan.requests) == 24
    assert all(f"p{index}" in sizes(plan) for index in range(10))
    left_out = {f"d{index}" for index in range(20)} - set(sizes(plan))
    plan, _ = run_step(scheduler, now=1.055)
    assert left_out <= set(sizes(plan))


def test_before_the_model_is_trained_the_budget_rules() -> None:
    scheduler = full_scheduler(max_num_batched_tokens=30)
    scheduler.add(make_request("d", 1, max_tokens=9))
    run_step(scheduler)
    scheduler.add(make_request("long", 100, max_tokens=1))
    assert sizes(run_step(scheduler)[0]) == {"d": 1, "long": 29}


# In which order


def prompt(name: str, remaining: int, due: float = inf, order: int = 0) -> Request:
    request = make_request(name, remaining)
    request.due, request.order = due, order
    return request


def ordered(*prompts: Request, served: dict[str, float] | None = None) -> list[str]:
    def service_had(request: Request) -> float:
        return (served or {}).get(request.request_id, 0.0)

    return [request.request_id for request in by_deadline(prompts, service_had)]


def test_prompts_go_by_deadline_then_by_what_remains() -> None:
    assert ordered(
        prompt("long", 90), prompt("short", 5), prompt("later", 5, 9.0), prompt("soon", 80, 3.0)
    ) == ["soon", "later", "short", "long"]


def test_where_nothing_is_due_tenants_that_were_served_less_go_first() -> None:
    pair = (prompt("rich", 5), prompt("poor", 50))
    assert ordered(*pair) == ["rich", "poor"]
    assert ordered(*pair, served={"rich": 2.0}) == ["poor", "rich"]
    # They took turns when they got their seats; now it is what is due that counts.
    due = (prompt("rich", 5, 3.0), prompt("poor", 50, 4.0))
    assert ordered(*due, served={"rich": 2.0}) == ["rich", "poor"]


@pytest.mark.parametrize(
    ("num_tokens", "wanted", "shares"),
    [
        (100, [500], [100]),
        (100, [500, 500], [75, 25]),
        (100, [20, 500], [20, 80]),
        (100, [500, 500, 10], [78, 12, 10]),
        (100, [10, 10], [10, 10]),
        (2, [9, 9, 9], [0, 1, 1]),
        (0, [9, 9], [0, 0]),
    ],
)
def test_each_prompt_is_sure_of_a_share(
    num_tokens: int, wanted: list[int], shares: list[int]
) -> None:
    assert share_out(num_tokens, wanted) == shares


def test_who_was_promised_a_moment_leaves_the_step_to_those_that_are_due_before() -> None:
    assert share_out(100, [500, 500, 500], [True, True, True]) == [98, 1, 1]
    assert share_out(100, [500, 500, 500], [True, False, True]) == [87, 12, 1]
    assert share_out(100, [10, 500, 500], [True, True, True]) == [10, 89, 1]


def test_one_long_prompt_does_not_hold_the_budget() -> None:  # vllm#10235, sglang#34623
    scheduler = full_scheduler(
        cost_model=LinearCost(), num_blocks=500, max_model_len=1000, max_num_batched_tokens=40
    )
    scheduler.add(make_request("long", 600, max_tokens=1))
    run_step(scheduler)
    done: dict[str, int] = {}
    for step in range(60):
        if step < 30:
            scheduler.add(make_request(f"short{step}", 9, max_tokens=1))
        if not scheduler.has_work:
            break
        plan, events = run_step(scheduler)
        if "long" not in done:
            assert "long" in sizes(plan), "the long one goes on in every step"
        done |= {name: step for name, event in events.items() if event.finish_reason}
    assert all(done[f"short{step}"] - step <= 1 for step in range(30))
    assert done["long"] < 35


def test_newcomers_whose_moment_has_passed_let_those_pass_that_can_be_served_in_time() -> None:
    scheduler = full_scheduler(
        cost_model=LinearCost(), max_num_seqs=1, targets={STANDARD: LatencyTargets(ttft=1.0)}
    )
    for index in range(3):
        scheduler.add(make_request(f"old{index}", 2, max_tokens=1, arrival=0.0))
    for index in range(2):
        scheduler.add(make_request(f"new{index}", 2, max_tokens=1, arrival=4.5))
    order = []
    while scheduler.has_work:
        _, events = run_step(scheduler, now=5.0)
        order += list(events)
    assert order == ["new0", "new1", "old0", "old1", "old2"]


def test_one_that_is_late_is_lifted_by_its_age() -> None:
    scheduler = full_scheduler(
        cost_model=LinearCost(),
        max_num_seqs=1,
        ageing=12.0,
        targets={STANDARD: LatencyTargets(ttft=1.0)},
    )
    scheduler.add(make_request("late", 2, max_tokens=1, arrival=0.0))
    for step in range(40):
        now = 5.0 + step
        scheduler.add(make_request(f"new{step}", 2, max_tokens=1, arrival=now))
        scheduler.add(make_request(f"too{step}", 2, max_tokens=1, arrival=now))
        if "late" in run_step(scheduler, now=now)[1]:
            break
    assert step < 20, "age brings it back among those that are in time"


def test_a_request_s_own_targets_go_before_those_of_its_class() -> None:
    config = SchedulerConfig(
        num_blocks=8, max_model_len=64, targets={STANDARD: LatencyTargets(ttft=1.0, tpot=0.1)}
    )
    own = LatencyTargets(ttft=3.0)
    assert config.targets_of(STANDARD, own) == LatencyTargets(3.0, 0.1)
    assert config.targets_of(BATCH, own) == own
    with pytest.raises(InvalidRequestError, match="ttft of the class standard must be above 0"):
        SchedulerConfig(
            num_blocks=8, max_model_len=64, targets={STANDARD: LatencyTargets(ttft=0.0)}
        )


# The prediction


def test_a_plan_says_how_long_it_will_take_and_the_model_hears_how_long_it_took() -> None:
    model = LinearCost()
    scheduler = full_scheduler(cost_model=model)
    scheduler.add(make_request("a", 6))
    plan = must_plan(scheduler)
    assert plan.predicted_seconds == pytest.approx(0.007)
    scheduler.commit(plan, result_of(plan), 0.0)
    assert model.observed == [(StepFeatures.of_plan(plan), 0.01)]


def test_features_are_those_of_the_plan_drafts_included() -> None:
    model = LinearCost()
    policies = full_policies(propose_drafts=lambda request, limit: (5,) * min(limit, 2))
    scheduler = make_scheduler(policies=policies, cost_model=model)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 6, max_tokens=9))
    for _ in range(3):
        plan, _ = run_step(scheduler)
        assert model.observed[-1][0] == StepFeatures.of_plan(plan)


def test_the_longest_gap_beside_a_long_prompt_is_short_with_a_model_that_has_to_learn() -> None:
    model = CostModel()
    for _ in range(5):
        scheduler = Scheduler(
            SchedulerConfig(num_blocks=1000, max_model_len=6000), full_policies(), model
        )
        executor = SimulatedExecutor(
            num_blocks=1000,
            max_model_len=6000,
            model=TokenModel(),
            step_time=RooflineStepTime(),
            strict=False,
        )
        simulation = Simulation(scheduler, executor)
        for index in range(8):
            simulation.arrive(make_request(f"d{index}", 20, max_tokens=300, ignore_eos=True))
        long = make_request("long", 4000, arrival=0.5, max_tokens=1, ignore_eos=True)
        simulation.arrive(long)
        outcomes = simulation.run()
    times = outcomes["d0"].token_times
    gaps = sorted(after - before for before, after in pairwise(times))
    usual = gaps[len(gaps) // 4]
    assert gaps[-1] < 2.5 * usual
    first = outcomes["long"].time_to_first_token
    assert first is not None and first < 2.0 * 4000 * 0.0003
