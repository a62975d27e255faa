"""How steps are filled: decodes first, then prompts in order of arrival, under one budget."""

from __future__ import annotations

from core_factories import (
    EOS,
    make_request,
    make_scheduler,
    must_plan,
    result_of,
    run_step,
    run_to_end,
    sizes,
)

from hotbatch.core import (
    FinishReason,
    Policies,
    Request,
    RequestResult,
    SampleSpec,
    StepResult,
    TokenLogprob,
)
from hotbatch.core.policies import full_policies
from hotbatch.core.service_class import LatencyTargets


def test_nothing_to_do_is_no_plan() -> None:
    scheduler = make_scheduler()
    assert scheduler.plan(0.0) is None
    assert not scheduler.has_work
    assert scheduler.next_wakeup(0.0) is None


def test_a_prompt_is_computed_in_chunks_and_samples_only_at_its_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = make_request("a", 18, max_tokens=2)
    scheduler.add(request)
    seen = []
    for _ in range(4):
        plan, events = run_step(scheduler)
        (planned,) = plan.requests
        seen.append((planned.start, len(planned.tokens), planned.sample is not None, len(events)))
    assert seen == [(0, 8, False, 0), (8, 8, False, 0), (16, 2, True, 1), (18, 1, True, 1)]
    assert not scheduler.has_work


def test_a_long_prompt_leaves_room_for_others_where_its_part_is_bounded() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    for name, length in (("long", 15), ("short", 4), ("next", 15)):
        scheduler.add(make_request(name, length, max_tokens=2))
    assert sizes(run_step(scheduler)[0]) == {"long": 6, "short": 4, "next": 6}
    assert sizes(run_step(scheduler)[0]) == {"short": 1, "long": 6, "next": 6}
    assert sizes(run_step(scheduler)[0]) == {"long": 3, "next": 3}


def test_decodes_come_first_and_the_rest_of_the_budget_goes_to_prompts_in_order() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 3))
    run_step(scheduler)
    for name, length in (("long", 13), ("late", 5)):
        scheduler.add(make_request(name, length))
    assert sizes(run_step(scheduler)[0]) == {"a": 1, "b": 1, "long": 8}
    assert sizes(run_step(scheduler)[0]) == {"a": 1, "b": 1, "long": 5, "late": 3}
    # `late` has two tokens left: still a chunk, behind the three decodes.
    assert list(sizes(run_step(scheduler)[0]).items()) == [
        ("a", 1),
        ("b", 1),
        ("long", 1),
        ("late", 2),
    ]


def test_requests_join_and_leave_at_every_step() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 1), ("d", 1)):
        scheduler.add(make_request(name, 2, max_tokens=max_tokens))
    batches = []
    while scheduler.has_work:
        batches.append(set(sizes(run_step(scheduler)[0])))
    assert batches == [{"a", "b"}, {"b", "c"}, {"b", "d"}]


def test_a_chunk_policy_bounds_what_a_prompt_takes() -> None:
    def at_most_three(request: Request, num_uncomputed: int, budget_left: int) -> int:
        return min(num_uncomputed, budget_left, 3)

    scheduler = make_scheduler(policies=Policies(chunk_size=at_most_three))
    for name in ("a", "b"):
        scheduler.add(make_request(name, 5))
    assert sizes(run_step(scheduler)[0]) == {"a": 3, "b": 3}
    assert sizes(run_step(scheduler)[0]) == {"a": 2, "b": 2}


def test_a_chunk_policy_can_hold_a_running_prompt_back_but_not_a_new_one() -> None:
    def only_a(request: Request, num_uncomputed: int, budget_left: int) -> int:
        return 3 if request.request_id == "a" else 0

    scheduler = make_scheduler(policies=Policies(chunk_size=only_a))
    for name in ("a", "b"):
        scheduler.add(make_request(name, 6))
    assert sizes(run_step(scheduler)[0]) == {"a": 3, "b": 1}
    assert sizes(run_step(scheduler)[0]) == {"a": 3}


def test_an_order_policy_decides_who_comes_first() -> None:
    def by_priority(request: Request) -> tuple[float, ...]:
        return (request.priority, request.order)

    scheduler = make_scheduler(policies=Policies(waiting_key=by_priority), max_num_seqs=1)
    for name, priority in (("low", 5), ("high", 1), ("high too", 1)):
        request = make_request(name, 2, max_tokens=1)
        request.priority = priority
        scheduler.add(request)
    order = [event.request_id for event in run_to_end(scheduler)]
    assert order == ["high", "high too", "low"]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_request("running", 12, max_tokens=4))
    run_step(scheduler)
    scheduler.add(make_request("large", 16, max_tokens=2))
    scheduler.add(make_request("small", 2, max_tokens=1))
    assert set(sizes(run_step(scheduler)[0])) == {"running"}
    order = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert order[0] == "running"
    assert sorted(order) == ["large", "running", "small"]


def test_the_watermark_keeps_room_to_grow_but_never_stops_a_lone_request() -> None:
    scheduler = make_scheduler(num_blocks=10, watermark=0.25)  # three blocks
    scheduler.add(make_request("lone", 36, max_tokens=1))  # nine of ten
    assert sizes(run_step(scheduler)[0]) == {"lone": 32}
    run_to_end(scheduler)
    other = make_scheduler(num_blocks=10, watermark=0.25)
    for name in ("a", "b", "c"):
        other.add(make_request(name, 12, max_tokens=1))
    assert set(sizes(must_plan(other))) == {"a", "b"}


def test_admission_looks_at_the_known_tokens_and_not_at_max_tokens() -> None:
    scheduler = make_scheduler(num_blocks=8)
    for index in range(4):
        scheduler.add(make_request(f"r{index}", 8, max_tokens=24))
    assert len(must_plan(scheduler).requests) == 4


def test_the_sample_spec_says_what_sampling_needs_and_no_more() -> None:
    scheduler = make_scheduler()
    plain = make_request("plain", [11, 12], seed=5)
    penal = make_request("penal", [11, 13], presence_penalty=0.5, min_tokens=1)
    for request in (plain, penal):
        scheduler.add(request)
    first = must_plan(scheduler)
    assert first.requests[0].sample == SampleSpec(plain.params, 5, position=2, num_prompt=2)
    assert first.requests[1].sample == SampleSpec(
        penal.params, 0, position=2, num_prompt=2, history=(11, 13), banned=(EOS,)
    )
    scheduler.commit(first, result_of(first), 0.0)
    second = must_plan(scheduler)
    assert second.requests[1].sample == SampleSpec(
        penal.params, 0, position=3, num_prompt=2, history=(11, 13, 7)
    )


def test_events_tell_tokens_counts_and_the_end() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, max_tokens=9))
    event = run_step(scheduler, {"a": 8})[1]["a"]
    assert (event.token_ids, event.num_prompt, event.num_output) == ((8,), 5, 1)
    assert event.finish_reason is None
    event = run_step(scheduler, {"a": EOS})[1]["a"]
    assert (event.token_ids, event.num_output) == ((EOS,), 2)
    assert (event.finish_reason, event.stop_token_id) == (FinishReason.STOP, EOS)
    assert not scheduler.has_work
    assert scheduler.stats().blocks_used == 0


def test_a_prompt_token_that_is_end_of_text_ends_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5, EOS, 6], max_tokens=1))
    assert run_to_end(scheduler)[-1].finish_reason is FinishReason.LENGTH


def test_prompt_logprobs_are_gathered_over_chunks_into_the_first_event() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", list(range(50, 59)), prompt_logprobs=2, max_tokens=2))
    expected = {0: tuple(range(51, 59)), 8: ()}
    for step in range(3):
        plan = must_plan(scheduler)
        (planned,) = plan.requests
        assert planned.next_tokens == expected.get(planned.start, ())
        assert planned.prompt_logprobs == (2 if planned.next_tokens else None)
        logprobs = tuple(TokenLogprob(token, -1.0, 1) for token in planned.next_tokens)
        sampled = (7,) if planned.sample else ()
        result = RequestResult("a", sampled, prompt_logprobs=logprobs)
        events = scheduler.commit(plan, StepResult(plan.step_id, (result,), 0.01), 0.0)
        counts = [len(event.prompt_logprobs) for event in events]
        assert counts == [[], [8], [0]][step]


def test_the_next_plan_can_be_made_while_the_last_one_runs() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 12, max_tokens=2))
    first, second = must_plan(scheduler), must_plan(scheduler)
    assert [plan.requests[0].start for plan in (first, second)] == [0, 8]
    assert scheduler.plan(0.0) is None, "the next token is not known yet"
    assert scheduler.commit(first, result_of(first), 0.0) == []
    (event,) = scheduler.commit(second, result_of(second), 0.0)
    assert event.token_ids == (7,)
    scheduler.check_integrity()


def drafting(*drafts: int) -> Policies:
    def propose(request: Request, limit: int) -> tuple[int, ...]:
        return drafts[:limit] if request.num_output == 1 else ()

    return Policies(propose_drafts=propose)


def test_accepted_drafts_are_kept_and_the_rest_is_rolled_back() -> None:
    scheduler = make_scheduler(policies=drafting(31, 32, 33), block_size=8)
    request = make_request("a", 3)
    scheduler.add(request)
    run_step(scheduler)
    plan = must_plan(scheduler)
    (planned,) = plan.requests
    assert (planned.start, planned.tokens, planned.num_drafts) == (3, (7, 31, 32, 33), 3)
    # The first two are right, the third is not.
    (event,) = scheduler.commit(plan, result_of(plan, {"a": (31, 32, 99)}), 0.0)
    assert event.token_ids == (31, 32, 99)
    assert request.num_computed == 6, "prompt, 7, 31 and 32; 99 has yet to be computed"
    following = must_plan(scheduler).requests[0]
    assert (following.start, following.tokens) == (6, (99,))


def test_tokens_after_the_first_stop_are_discarded() -> None:
    scheduler = make_scheduler(policies=drafting(31, EOS, 33), block_size=8)
    scheduler.add(make_request("a", 3))
    run_step(scheduler)
    _, events = run_step(scheduler, {"a": (31, EOS, 33, 34)})
    assert events["a"].token_ids == (31, EOS)
    assert events["a"].finish_reason is FinishReason.STOP
    assert not scheduler.has_work


def test_drafts_respect_max_tokens_the_blocks_and_the_budget_of_others() -> None:
    def many(request: Request, limit: int) -> tuple[int, ...]:
        return (5,) * limit

    near_end = make_scheduler(policies=Policies(propose_drafts=many), block_size=16)
    near_end.add(make_request("a", 3, max_tokens=3))
    run_step(near_end)
    assert must_plan(near_end).requests[0].num_drafts == 1

    block_end = make_scheduler(
        policies=Policies(propose_drafts=many), block_size=4, num_blocks=2, max_model_len=8
    )
    block_end.add(make_request("a", 2, max_tokens=6))
    run_step(block_end)
    assert must_plan(block_end).requests[0].num_drafts == 1, "the other block may be needed"

    tight = make_scheduler(
        policies=Policies(propose_drafts=many),
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=6,
    )
    for name in ("a", "b", "c"):
        tight.add(make_request(name, 2))
    run_step(tight)
    assert sizes(must_plan(tight)) == {"a": 4, "b": 1, "c": 1}


def test_drafts_have_blocks_that_nobody_wants_and_give_them_back() -> None:
    def many(request: Request, limit: int) -> tuple[int, ...]:
        return (5,) * min(limit, 6)

    scheduler = make_scheduler(policies=Policies(propose_drafts=many), block_size=4)
    request = make_request("a", 2, max_tokens=20)
    scheduler.add(request)
    run_step(scheduler)
    plan = must_plan(scheduler)
    assert plan.requests[0].num_drafts == 6
    assert len(plan.requests[0].block_ids) == 3
    scheduler.commit(plan, result_of(plan, {"a": (5, 9)}), 0.0)
    scheduler.check_integrity()
    assert len(request.tokens) == 5
    assert scheduler.stats().blocks_used == 2, "5 tokens need two blocks; the third was a guess's"


def test_drafts_get_no_blocks_where_somebody_waits_for_them() -> None:
    def many(request: Request, limit: int) -> tuple[int, ...]:
        return (5,) * limit

    scheduler = make_scheduler(
        policies=Policies(propose_drafts=many), block_size=4, num_blocks=8, max_model_len=32
    )
    scheduler.add(make_request("a", 2))
    scheduler.add(make_request("b", 30, max_tokens=2))
    run_step(scheduler)
    plan = must_plan(scheduler)
    assert [(r.request_id, r.num_drafts) for r in plan.requests] == [("a", 1)]


def test_no_drafts_while_tokens_are_banned() -> None:
    scheduler = make_scheduler(policies=drafting(31), block_size=8)
    scheduler.add(make_request("a", 3, min_tokens=3))
    run_step(scheduler)
    assert must_plan(scheduler).requests[0].num_drafts == 0


def test_the_nearest_deadline_is_seated_first_and_no_promise_waits_for_ever():
    scheduler = make_scheduler(policies=full_policies(fairness=False), max_num_seqs=1)
    for name, arrival, ttft in (("long", 0.0, 20.0), ("none", 1.0, None), ("short", 2.0, 3.0)):
        request = make_request(name, arrival=arrival, max_tokens=1)
        request.targets = LatencyTargets(ttft)
        scheduler.add(request)
    late = make_request("later", arrival=40.0, max_tokens=1)
    late.targets = LatencyTargets(3.0)
    scheduler.add(late)
    order = [run_step(scheduler, now=2.0)[0].requests[0].request_id for _ in range(4)]
    assert order == ["short", "long", "none", "later"]
