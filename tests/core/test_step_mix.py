"""What a plan says of its step: which rows decode, which repeat, and why others wait."""

from __future__ import annotations

from dataclasses import replace

from core_factories import make_request, make_scheduler, must_plan, result_of, run_step
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import guess

from hotbatch.core import Policies
from hotbatch.core.policies import full_policies
from hotbatch.core.step_mix import HeldBack, StepMix


def test_the_scheduler_says_what_a_plan_made_by_hand_would_show():
    scheduler = make_scheduler(policies=Policies(propose_drafts=guess))
    for name in "abc":
        scheduler.add(make_request(name, prompt=9, max_tokens=6))
    for _ in range(12):
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        by_hand = StepMix.of_plan(replace(plan, mix=None))
        assert plan.mix is not None
        assert plan.mix._replace(held_back=None) == by_hand
        scheduler.commit(plan, result_of(plan), 0.0)


def test_prompts_beside_decodes_are_told_apart():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt=6))
    run_step(scheduler)
    scheduler.add(make_request("b", prompt=8))
    mix = StepMix.of_plan(must_plan(scheduler))
    assert (mix.all.num_tokens, mix.decode.num_tokens) == (9, 1)
    assert mix.decode.context_tokens == 7
    assert mix.all.num_sampled == 2


def test_what_was_lost_with_its_blocks_counts_as_recomputed():
    scheduler = make_scheduler(num_blocks=6, block_size=4, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(make_request(name, prompt=8, max_tokens=12))
    num_recomputed = 0
    lost = {}
    for _ in range(60):
        before = {r.request_id: r.num_committed for r in scheduler._roster.running}
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        for preemption in plan.preempted:
            lost[preemption.request_id] = before[preemption.request_id]
        num_recomputed += StepMix.of_plan(plan).num_recomputed
        scheduler.commit(plan, result_of(plan), 0.0)
    assert lost, "somebody had to give blocks back"
    assert num_recomputed == sum(lost.values())


def test_who_waits_for_blocks_is_held_back_by_the_cache():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    for name in "ab":
        scheduler.add(make_request(name, prompt=12, max_tokens=4))
    assert StepMix.of_plan(must_plan(scheduler)).held_back is HeldBack.KV


def test_who_waits_for_a_seat_is_held_back_by_the_limit():
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "ab":
        scheduler.add(make_request(name))
    assert StepMix.of_plan(must_plan(scheduler)).held_back is HeldBack.SEATS


def test_a_closed_batch_holds_the_others_back():
    scheduler = make_scheduler(batching="static", static_batch_size=2, static_timeout=0.0)
    for name in "abc":
        scheduler.add(make_request(name))
    assert StepMix.of_plan(must_plan(scheduler)).held_back is HeldBack.SEATS


def test_who_waits_for_the_budget_alone_is_not_held_back():
    scheduler = make_scheduler(max_num_batched_tokens=8, policies=full_policies())
    for name in "ab":
        scheduler.add(make_request(name, prompt=8))
    assert StepMix.of_plan(must_plan(scheduler)).held_back is None


@given(st.integers(1, 4), st.integers(1, 20))
def test_nobody_is_held_back_where_nobody_waits(count, prompt):
    scheduler = make_scheduler()
    for index in range(count):
        scheduler.add(make_request(f"r{index}", prompt=prompt))
    run_step(scheduler)
    assert StepMix.of_plan(must_plan(scheduler)).held_back is None
