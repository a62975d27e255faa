"""A whole small day, step by step, as it was judged right once.

Whoever changes the scheduler on purpose changes the expected lines on purpose. A line reads:
requests with their share of the step as start+tokens, `!` where a token is sampled, then
copies and evictions.
"""

from __future__ import annotations

from core_factories import make_request, make_scheduler, result_of

from hotbatch.core import Scheduler, StepPlan

GOLDEN_MIXED = [
    "a:0+8",
    "a:8+4! b:0+4",
    # `c` finds the whole of its prompt: one block is copied, one token computed.
    "a:12+1! b:4+2! c:11+1! copy 2>6",
    "a:13+1! b:6+1! c:12+1!",
    "a:14+1! b:7+1! c:13+1!",
    "a:15+1! b:8+1! evict c",
    # Three of its blocks are still in the cache; the three tokens it generated are recomputed.
    "b:9+1! c:12+3! d:0+3!",
    "b:10+1! d:3+1!",
]

GOLDEN_SIBLINGS = [
    "s0:0+6! t:0+2",
    "s0:6+1! t:2+2! s1:5+1! s2:5+1! copy 1>3 copy 1>4",
    "s1:6+1! s2:6+1! t:4+1!",
]


def line(plan: StepPlan) -> str:
    parts = [
        f"{planned.request_id}:{planned.start}+{len(planned.tokens)}"
        f"{'!' if planned.sample is not None else ''}"
        for planned in plan.requests
    ]
    parts += [f"copy {source}>{destination}" for source, destination in plan.copies]
    parts += [f"evict {victim.request_id}" for victim in plan.preempted]
    return " ".join(parts)


def trace(scheduler: Scheduler) -> list[str]:
    lines = []
    while (plan := scheduler.plan(0.0)) is not None:
        lines.append(line(plan))
        scheduler.commit(plan, result_of(plan), 0.0)
        scheduler.check_integrity()
    return lines


def test_chunks_decodes_a_shared_prefix_and_an_eviction() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=8)
    shared = list(range(40, 52))
    scheduler.add(make_request("a", shared, max_tokens=5))
    scheduler.add(make_request("b", 6, max_tokens=6))
    scheduler.add(make_request("c", shared, max_tokens=4))
    scheduler.add(make_request("d", 3, max_tokens=2))
    assert trace(scheduler) == GOLDEN_MIXED


def test_siblings_beside_another_request() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for index in range(3):
        scheduler.add(make_request(f"s{index}", list(range(60, 66)), max_tokens=2, group_id="g"))
    scheduler.add(make_request("t", 4, max_tokens=2))
    assert trace(scheduler) == GOLDEN_SIBLINGS
