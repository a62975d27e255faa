"""Computed prefixes are found by content, and only what is really computed is shared."""

from __future__ import annotations

import pytest
from core_factories import make_request, make_scheduler, must_plan, result_of, run_step, run_to_end

from hotbatch.core import Scheduler
from hotbatch.core.prefix_cache import PrefixCache, extend_block_keys

PROMPT = list(range(100, 110))  # two full blocks of four, and a half


def warm(scheduler: Scheduler, prompt: list[int], **fields: object) -> None:
    scheduler.add(make_request("warm", prompt, max_tokens=1, **fields))  # type: ignore[arg-type]
    run_to_end(scheduler)


def test_keys_depend_on_every_token_before_and_on_the_salt() -> None:
    def keys(prompt: list[int], salt: str | None = None) -> list[bytes]:
        return list(extend_block_keys(make_request(prompt=prompt, cache_salt=salt), 2, 4))

    base = keys(PROMPT)
    assert base == keys(PROMPT)
    changed = keys([1, *PROMPT[1:]])
    assert base[0] != changed[0] and base[1] != changed[1]
    salted = keys(PROMPT, "s")
    assert not set(base) & set(salted) and not set(salted) & set(keys(PROMPT, ""))


def test_match_is_the_longest_unbroken_run() -> None:
    cache = PrefixCache(4)
    request = make_request(prompt=list(range(12)))
    keys = extend_block_keys(request, 3, 4)
    assert cache.enter(keys[0], 5) and cache.enter(keys[2], 7)
    assert cache.match(request) == [5]
    assert cache.enter(keys[1], 6)
    assert not cache.enter(keys[1], 8), "the first block with this content stays"
    assert cache.match(request) == [5, 6, 7]
    cache.forget(5)
    assert cache.match(request) == []


def test_a_second_request_computes_only_what_is_new() -> None:
    scheduler = make_scheduler()
    warm(scheduler, PROMPT)
    scheduler.add(make_request("b", [*PROMPT[:8], 1, 2, 3], max_tokens=1))
    plan, events = run_step(scheduler)
    assert plan.requests[0].start == 8
    assert plan.requests[0].tokens == (1, 2, 3)
    assert plan.copies == ()
    assert events["b"].num_cached == 8
    stats = scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (21, 8)


def test_nothing_is_shared_across_salts_or_with_caching_off() -> None:
    scheduler = make_scheduler()
    warm(scheduler, PROMPT, cache_salt="x")
    for name, salt in (("none", None), ("other", "y")):
        scheduler.add(make_request(name, PROMPT, cache_salt=salt, max_tokens=1))
        assert run_step(scheduler)[0].requests[0].start == 0
    off = make_scheduler(enable_prefix_caching=False)
    warm(off, PROMPT)
    off.add(make_request("b", PROMPT, max_tokens=1))
    assert run_step(off)[0].requests[0].start == 0
    assert off.stats().blocks_cached == 0


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", PROMPT, max_tokens=7))
    run_to_end(scheduler)
    # Ten of the prompt and seven generated; the last one was sampled but never computed.
    scheduler.add(make_request("b", [*PROMPT, *[7] * 7, 1, 2], max_tokens=1))
    assert run_step(scheduler)[0].requests[0].start == 16


def test_a_block_is_not_found_before_its_step_is_committed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", PROMPT))
    first = must_plan(scheduler)
    scheduler.add(make_request("b", PROMPT))
    second = must_plan(scheduler)
    assert [planned.start for planned in second.requests] == [0]
    assert not set(first.requests[0].block_ids) & set(second.requests[0].block_ids)
    for plan in (first, second):
        scheduler.commit(plan, result_of(plan), 0.0)
        scheduler.check_integrity()
    scheduler.add(make_request("c", PROMPT))
    assert must_plan(scheduler).requests[-1].start == 8


def test_a_commit_makes_only_the_blocks_of_its_own_step_findable() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    prompt = list(range(16))
    scheduler.add(make_request("a", prompt))
    first, second = must_plan(scheduler), must_plan(scheduler)
    scheduler.commit(first, result_of(first), 0.0)
    scheduler.add(make_request("b", prompt))
    assert must_plan(scheduler).requests[0].start == 8, "the second chunk is still computed"
    scheduler.fail(second, "lost")
    scheduler.check_integrity()


def test_a_full_hit_copies_the_last_block_and_computes_the_last_token() -> None:
    scheduler = make_scheduler()
    warm(scheduler, PROMPT[:8])
    scheduler.add(make_request("b", PROMPT[:8], max_tokens=2))
    plan = must_plan(scheduler)
    (planned,) = plan.requests
    assert (planned.start, planned.tokens) == (7, (PROMPT[7],))
    ((source, destination),) = plan.copies
    assert planned.block_ids[1] == destination != source
    assert scheduler.stats().blocks_used == 3, "the source is held while the step runs"
    scheduler.check_integrity()
    scheduler.commit(plan, result_of(plan), 0.0)
    assert scheduler.stats().blocks_used == 2
    scheduler.check_integrity()


def test_what_a_copy_brings_counts_as_computed_but_not_yet_as_there() -> None:
    # Otherwise a sibling admitted in the same step would copy from the copy's destination.
    scheduler = make_scheduler()
    warm(scheduler, PROMPT[:8])
    request = make_request("b", PROMPT[:8], max_tokens=2)
    scheduler.add(request)
    plan = must_plan(scheduler)
    assert (request.num_computed, request.num_committed) == (8, 4)
    scheduler.commit(plan, result_of(plan), 0.0)
    assert request.num_committed == 8


def test_the_source_of_a_copy_outlives_a_cancellation_until_the_commit() -> None:
    scheduler = make_scheduler(num_blocks=3)
    warm(scheduler, PROMPT[:8])
    scheduler.add(make_request("b", PROMPT[:8], max_tokens=2))
    plan = must_plan(scheduler)
    scheduler.cancel("b")
    scheduler.add(make_request("c", 4, max_tokens=1))
    assert scheduler.plan(0.0) is None, "every block is in use by the step in flight"
    scheduler.commit(plan, result_of(plan), 0.0)
    scheduler.check_integrity()
    assert must_plan(scheduler).requests[0].request_id == "c"


def test_a_full_hit_without_room_for_a_copy_recomputes_the_block() -> None:
    scheduler = make_scheduler(num_blocks=3)
    warm(scheduler, PROMPT[:8])
    scheduler.add(make_request("busy", 3, max_tokens=2))
    run_step(scheduler)
    assert scheduler.stats().blocks_used == 1
    # A copy would need the shared block, the source and its copy: three of two.
    scheduler.add(make_request("b", PROMPT[:8], max_tokens=1))
    plan, _ = run_step(scheduler)
    assert (plan.requests[-1].request_id, plan.requests[-1].start) == ("b", 4)
    assert plan.copies == ()


def test_prompt_logprobs_skip_the_cache() -> None:
    scheduler = make_scheduler()
    warm(scheduler, PROMPT)
    scheduler.add(make_request("b", PROMPT, prompt_logprobs=1, max_tokens=1))
    (planned,) = must_plan(scheduler).requests
    assert planned.start == 0
    assert planned.prompt_logprobs == 1
    assert planned.next_tokens == tuple(PROMPT[1:])


def test_the_least_recently_used_prefix_is_given_up_first() -> None:
    scheduler = make_scheduler(num_blocks=5)
    old, recent = [11, 12, 13, 14, 15], [21, 22, 23, 24, 25]
    for name, prompt in (("old", old), ("recent", recent), ("old2", old)):
        scheduler.add(make_request(name, prompt, max_tokens=1))
        run_to_end(scheduler)
    scheduler.add(make_request("big", 15, max_tokens=1))
    run_to_end(scheduler)  # takes four of five blocks
    starts = []
    for name, prompt in (("x", old), ("y", recent)):
        scheduler.add(make_request(name, prompt, max_tokens=1))
        starts.append(run_step(scheduler)[0].requests[0].start)
    assert starts == [4, 0]


@pytest.mark.parametrize("block_size", [1, 16])
def test_any_block_size_finds_its_prefix(block_size: int) -> None:
    scheduler = make_scheduler(block_size=block_size, max_num_batched_tokens=64)
    prompt = list(range(33))
    warm(scheduler, prompt)
    scheduler.add(make_request("b", prompt, max_tokens=1))
    plan, _ = run_step(scheduler)
    assert plan.requests[0].start == 32
    assert plan.requests[0].tokens == (32,)
