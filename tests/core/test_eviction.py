"""When blocks run out: the least is lost, nobody loses for ever, and everything recovers."""

from __future__ import annotations

from core_factories import (
    full_scheduler,
    make_request,
    make_scheduler,
    run_step,
    run_to_end,
    sizes,
)

from hotbatch.core import Request, RequestState, Scheduler, ServiceClass, TokenLogprob
from hotbatch.core.policies import Reclaim, full_policies, least_urgent, least_valuable
from hotbatch.core.request import RequestEvent

BATCH, STANDARD, INTERACTIVE = ServiceClass


def candidate(
    name: str,
    *,
    order: int,
    computed: int = 0,
    rank: int = STANDARD,
    left: int = 100,
    evictions: int = 0,
    quantum_end: int = 0,
    paused: bool = False,
) -> Request:
    request = make_request(name)
    request.order, request.num_computed, request.rank = order, computed, rank
    request.expected_output = left
    request.num_evictions, request.quantum_end = evictions, quantum_end
    request.apply(RequestEvent.ADMIT)
    if paused:
        request.apply(RequestEvent.PAUSE)
    return request


OLDEST = candidate("oldest", order=0, computed=1, rank=INTERACTIVE)
NEAREST = candidate("nearest", order=1, computed=2, left=1)


def test_the_victim_is_of_the_lowest_class_and_has_the_least_compute_sunk() -> None:
    cheap = candidate("cheap", order=2, computed=5, rank=BATCH)
    dear = candidate("dear", order=3, computed=9, rank=BATCH)
    higher = candidate("higher", order=4, computed=3)
    assert least_valuable([OLDEST, NEAREST, dear, cheap, higher]) is cheap


def test_the_oldest_of_the_top_class_and_the_nearest_its_end_are_spared() -> None:
    third = candidate("third", order=2, computed=50, rank=INTERACTIVE)
    assert least_valuable([OLDEST, NEAREST, third]) is third
    assert least_valuable([OLDEST, NEAREST]) is NEAREST
    assert least_valuable([OLDEST]) is OLDEST


def test_the_victim_is_one_that_is_paused_before_one_that_runs() -> None:
    paused = candidate("paused", order=2, computed=50, paused=True)
    running = candidate("running", order=3, computed=10)
    assert least_valuable([OLDEST, NEAREST, running, paused]) is paused


def test_nobody_is_parked_more_than_three_times_while_others_can_be() -> None:
    often = candidate("often", order=2, computed=1, evictions=3)
    fresh = candidate("fresh", order=3, computed=90, evictions=2)
    assert least_valuable([OLDEST, NEAREST, often, fresh]) is fresh
    often.num_pauses, fresh.num_pauses = 3, 2
    often.order = 9
    assert least_urgent([often, fresh]) is fresh


def test_a_quantum_is_run_before_an_equal_takes_its_blocks() -> None:
    resumed = candidate("resumed", order=2, computed=1, quantum_end=10)
    other = candidate("other", order=3, computed=90)
    assert least_valuable([OLDEST, NEAREST, resumed, other]) is other


def crowded(max_tokens: int = 6, **overrides: object) -> Scheduler:
    """Three requests of two blocks each in a pool of six, all about to need a third."""
    settings: dict[str, object] = {
        "num_blocks": 6,
        "enable_prefix_caching": False,
        "without": "forecast",
    }
    scheduler = full_scheduler(**(settings | overrides))  # type: ignore[arg-type]
    for name in ("old", "mid", "new"):
        scheduler.add(make_request(name, 8, max_tokens=max_tokens))
    run_step(scheduler)
    return scheduler


def test_a_victim_gives_the_end_of_its_blocks_and_recomputes_no_more() -> None:
    scheduler = crowded()
    plan, _ = run_step(scheduler)
    # `old` takes a block of `new`; `mid` another one, so that nothing is left of it.
    assert [(victim.request_id, victim.reason) for victim in plan.preempted] == [
        ("new", "out of KV blocks: gave back 1 of its last"),
        ("new", "out of KV blocks"),
    ]
    scheduler = crowded(max_tokens=4, num_blocks=7)
    plan, _ = run_step(scheduler)
    assert sizes(plan) == {"old": 1, "mid": 1}
    assert plan.paused == ("new",)
    while "new" not in sizes(plan := run_step(scheduler)[0]):
        pass
    planned = next(planned for planned in plan.requests if planned.request_id == "new")
    assert (planned.start, len(planned.tokens)) == (4, 5)
    assert planned.sample is not None


def test_what_was_lost_is_found_again_in_the_prefix_cache() -> None:
    scheduler = crowded(num_blocks=7, enable_prefix_caching=True)
    assert run_step(scheduler)[0].preempted
    for name in ("old", "mid"):
        scheduler.cancel(name)  # so that nobody writes into the block that was given back
    scheduler.check_integrity()
    planned = run_step(scheduler)[0].requests[0]
    taken_again = 8 if planned.start == 8 else 4
    assert (planned.request_id, planned.start) == ("new", taken_again)


def test_without_partial_eviction_everything_is_lost() -> None:
    scheduler = crowded(num_blocks=7, without="forecast partial_eviction")
    plan, _ = run_step(scheduler)
    assert [victim.request_id for victim in plan.preempted] == ["new"]
    assert not plan.paused
    while "new" not in sizes(plan := run_step(scheduler)[0]):
        pass
    assert next(p for p in plan.requests if p.request_id == "new").start == 0


def test_a_victim_that_is_to_be_kept_is_not_taken_from() -> None:
    def keep_new(victim: Request, num_tokens: int) -> Reclaim:
        return Reclaim.KEEP if victim.request_id == "new" else Reclaim.RECOMPUTE

    scheduler = make_scheduler(
        policies=full_policies(forecast=False, reclaim=keep_new),
        num_blocks=7,
        enable_prefix_caching=False,
    )
    requests = [make_request(name, 8, max_tokens=6) for name in ("old", "mid", "new")]
    for request in requests:
        scheduler.add(request)
    for _ in range(4):
        run_step(scheduler)
    assert requests[2].num_evictions == 0
    run_to_end(scheduler)


def test_prompt_logprobs_of_a_lost_end_are_gathered_anew_and_told_once() -> None:
    scheduler = full_scheduler(num_blocks=6, without="forecast", max_num_batched_tokens=8)
    scheduler.add(make_request("high", 7, max_tokens=8, service_class=INTERACTIVE))
    run_step(scheduler)
    low = make_request("low", 15, max_tokens=1, prompt_logprobs=0, service_class=BATCH)
    scheduler.add(low)
    run_step(scheduler)
    low.prompt_logprobs = [TokenLogprob(token, -1.0, 1) for token in range(low.num_computed)]
    while low.state is RequestState.RUNNING and low.finish_reason is None:
        run_step(scheduler)
    assert len(low.prompt_logprobs) <= low.num_computed
    run_to_end(scheduler)


def test_equal_priorities_do_not_evict_each_other_in_turn() -> None:  # vllm PR 54530
    scheduler = full_scheduler(num_blocks=8, enable_prefix_caching=False, without="forecast")
    requests = [make_request(name, 12, max_tokens=16) for name in ("a", "b")]
    for request in requests:
        scheduler.add(request)
    victims = []
    while scheduler.has_work:
        plan, _ = run_step(scheduler)
        victims += [victim.request_id for victim in plan.preempted]
    assert set(victims) == {"b"}, "the older one loses nothing"
    assert [request.num_pauses for request in requests] == [0, 1], "and the other one waits once"


def test_preempted_and_waiting_requests_do_not_lock_each_other_out() -> None:
    # vllm-ascend#16315
    scheduler = full_scheduler(num_blocks=5, max_num_seqs=4, enable_prefix_caching=False)
    names = []
    for index in range(9):
        name = f"r{index}"
        names.append(name)
        service_class = ServiceClass(index % 3)
        scheduler.add(make_request(name, 5, max_tokens=12, service_class=service_class))
        run_step(scheduler)
    ends = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert sorted(ends) == names


def test_decoding_recovers_after_an_eviction() -> None:  # sglang#26248
    scheduler = full_scheduler(
        num_blocks=24, max_num_seqs=8, enable_prefix_caching=False, without="forecast"
    )
    for index in range(8):
        scheduler.add(make_request(f"r{index}", 8, max_tokens=60))
    num_running = []
    done = 0
    for _ in range(600):
        if not scheduler.has_work:
            break
        plan, events = run_step(scheduler)
        num_running.append(len(plan.requests))
        done += sum(event.finish_reason is not None for event in events.values())
    assert done == 8
    assert scheduler.stats().preemptions > 0
    # 24 blocks hold 96 tokens, so one request and a half at its end: the pool stays busy.
    assert sum(num_running) >= 480
    assert len(num_running) < 480, "on average more than one decodes"


def test_cold_requests_are_not_passed_by_those_that_hit_the_cache() -> None:  # sglang#31723
    scheduler = full_scheduler(max_num_seqs=2)
    warm = list(range(900, 916))
    scheduler.add(make_request("warm", warm, max_tokens=2))
    run_to_end(scheduler)
    scheduler.add(make_request("first", [*warm, 1], max_tokens=8))
    scheduler.add(make_request("second", [*warm, 2], max_tokens=8))
    run_step(scheduler)
    scheduler.add(make_request("cold", 12, max_tokens=1))
    for index in range(6):
        scheduler.add(make_request(f"hit{index}", [*warm, 3 + index], max_tokens=1))
    ends = [event.request_id for event in run_to_end(scheduler) if event.finish_reason]
    assert ends[2] == "cold"


def test_who_is_evicted_is_counted_among_those_that_wait() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=3)
    for index in range(4):
        scheduler.add(make_request(f"r{index}", 6, max_tokens=12))
    seen = set()
    while scheduler.has_work:
        run_step(scheduler)
        stats = scheduler.stats()
        states = [request.state for request in scheduler._roster.by_id.values()]
        assert stats.num_evicted == states.count(RequestState.EVICTED) <= stats.num_waiting
        seen.add(stats.num_evicted)
    assert len(seen) > 1
