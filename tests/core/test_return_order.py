"""Which conversations are kept: those that come back and cost, and never a leaf before its root."""

from __future__ import annotations

import pytest
from core_factories import make_request, make_scheduler, must_plan, result_of

from hotbatch.core import Scheduler
from hotbatch.core.block_pool import BlockPool
from hotbatch.core.recompute_cost import RecomputeCost
from hotbatch.core.return_order import Ending, ReturnOrder


class Talks:
    """Requests one after the other on a scheduler, at moments of one's choice."""

    def __init__(self, **overrides: object) -> None:
        self.scheduler: Scheduler = make_scheduler(
            **({"prefix_eviction": "return-time"} | overrides)
        )
        self._number = 0

    def ask(self, prompt: list[int], now: float, tenant: str = "") -> int:
        """Serve a prompt with an answer of one token; the tokens that were in the cache."""
        self._number += 1
        request = make_request(f"r{self._number}", prompt, max_tokens=1, arrival=now, tenant=tenant)
        self.scheduler.add(request)
        while (plan := self.scheduler.plan(now)) is not None:
            self.scheduler.commit(plan, result_of(plan), now)
            self.scheduler.check_integrity()
        assert request.num_cached is not None
        return request.num_cached


def own(number: int, length: int = 9) -> list[int]:
    return list(range(1000 * number, 1000 * number + length))


def taught(**overrides: object) -> Talks:
    """A server on which tenant `regular` always comes back after a minute, and `once` never."""
    talks = Talks(**overrides)
    for number in range(60):
        begin = number * 4000.0
        talks.ask(own(number), begin, "once")
        talks.ask(own(100 + number), begin, "regular")
        talks.ask(own(100 + number, 18), begin + 60.0, "regular")
    return talks


@pytest.mark.parametrize(("eviction", "kept"), [("return-time", 8), ("lru", 0)])
def test_whoever_comes_back_is_kept_longer_than_who_was_here_last(eviction: str, kept: int) -> None:
    talks = taught(num_blocks=8, prefix_eviction=eviction)
    begin = 1e6
    talks.ask(own(900), begin, "regular")
    talks.ask(own(901), begin + 5.0, "once")
    talks.ask(own(902, 21), begin + 10.0, "once")  # needs the blocks of one of the two
    assert talks.ask(own(900, 13), begin + 60.0, "regular") == kept


def test_a_conversation_that_went_on_is_expected_again_more_than_a_new_one() -> None:
    talks = Talks(num_blocks=12, max_model_len=48)
    # Of ten that ask once, one asks a second time, and those always ask a third time.
    for number in range(200):
        begin = number * 4000.0
        talks.ask(own(number, 6), begin)
        if number % 10 == 0:
            talks.ask(own(number, 12), begin + 60.0)
            talks.ask(own(number, 18), begin + 120.0)
    begin = 1e7
    talks.ask(own(900, 6), begin)
    talks.ask(own(900, 12), begin + 60.0)
    talks.ask(own(901, 12), begin + 65.0)
    talks.ask(own(902, 29), begin + 70.0)  # leaves room for one of the two
    assert talks.ask(own(900, 18), begin + 120.0) == 12
    chances = talks.scheduler.stats().returns
    assert sum(row.number for row in chances) > 200
    assert all(abs(row.told - row.true) < 0.25 for row in chances if row.number > 50)


def test_after_the_horizon_nobody_is_waited_for() -> None:
    talks = taught(num_blocks=8)
    begin = 1e6
    talks.ask(own(900), begin, "regular")
    talks.ask(own(901), begin + 5000.0, "once")
    talks.ask(own(902, 21), begin + 5001.0, "once")
    assert talks.ask(own(901, 13), begin + 5002.0, "once") == 8


def test_of_equals_the_one_that_is_dearer_to_compute_stays() -> None:
    class Attention:
        is_trained = True

        def predict(self, features: object) -> float:
            return 0.001 * (features.num_tokens + features.attended)  # type: ignore[attr-defined]

        predict_p95 = predict

        def observe(self, features: object, seconds: float) -> None: ...

    scheduler = make_scheduler(num_blocks=16, cost_model=Attention(), prefix_eviction="return-time")
    talks = Talks()
    talks.scheduler = scheduler
    talks.ask(own(1, 25), 0.0)  # six blocks
    talks.ask(own(2, 9), 1.0)  # two blocks, and the more recent ones
    talks.ask(own(3, 37), 2.0)  # needs ten: eight are free, two more of somebody's
    assert talks.ask(own(1, 26), 3.0) == 24


def test_what_many_begin_with_outlives_each_of_them() -> None:
    talks = Talks(num_blocks=12)
    system = own(7, 8)
    for number in range(30):
        assert talks.ask([*system, *own(number, 9)], 10.0 * number) == (8 if number else 0)
    # A stranger takes nearly everything; the common beginning goes last.
    talks.ask(own(600, 37), 301.0)
    assert talks.ask([*system, *own(601, 9)], 302.0) == 8


def test_a_short_question_behind_a_common_prefix_is_no_return() -> None:
    talks = Talks()
    system = own(7, 8)
    for number in range(40):
        talks.ask([*system, number], 10.0 * number)
    assert all(row.true < 0.5 for row in talks.scheduler.stats().returns)
    assert talks.scheduler.stats().prefix_hit_tokens > 0


# ---- the order alone


def order_of(num_blocks: int = 8) -> tuple[BlockPool, ReturnOrder]:
    order = ReturnOrder(num_blocks, 4, RecomputeCost(None, 32))
    return BlockPool(num_blocks, lambda block: None, order), order


def keep(pool: BlockPool, order: ReturnOrder, blocks: tuple[int, ...]) -> None:
    for index, block in enumerate(blocks):
        pool.keep(block)
        order.entered(block, blocks[index - 1] if index else None, index)


def test_a_block_with_others_behind_it_waits_for_them_whoever_s_they_are() -> None:
    pool, order = order_of(4)
    begin, left, right = pool.allocate(3)
    keep(pool, order, (begin, left))
    pool.keep(right)
    order.entered(right, begin, 1)
    pool.release([begin, left])  # `right` is still in use
    pool.allocate(1)
    assert pool.allocate(1) == (left,)
    pool.release([right])
    assert pool.allocate(2) == (right, begin)


def test_a_beginning_whose_continuation_is_in_use_elsewhere_can_be_given_up() -> None:
    # Two requests computed the same first block at the same time; only one of both is findable.
    pool, order = order_of(3)
    first, copy, behind = pool.allocate(3)
    keep(pool, order, (first,))
    pool.keep(behind)
    order.entered(behind, first, 1)
    pool.release([first])
    assert pool.num_available == 1
    assert pool.allocate(1) == (first,)
    keep(pool, order, (first,))  # new content, with nothing behind it
    pool.release([behind, first])
    order.check_integrity(set(order))
    assert set(pool.allocate(2)) == {behind, first}
    assert pool.ref_count(copy) == 1


def test_memories_of_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbatch.core.return_order._MOST_REMEMBERED", 10)
    _, order = order_of()
    for number in range(100):
        order.now = float(number)
        order.open(Ending("", float(number), 4, [b"%d" % number]))
        order.close()
    assert len(order._by_key) <= 10
    assert sum(map(len, order._ages)) <= 10


def test_a_long_day_leaves_no_heap_behind() -> None:
    talks = Talks(num_blocks=32)
    for number in range(300):
        talks.ask(own(number % 40, 9 + 4 * (number // 40)), 30.0 * number)
    returns = talks.scheduler._kv.returns
    assert returns is not None
    assert len(returns._heap) <= 4 * len(returns) + 64


def test_plain_lru_is_still_there() -> None:
    scheduler = make_scheduler(prefix_eviction="lru")
    assert scheduler._kv.returns is None
    scheduler.add(make_request("a", 9, max_tokens=1))
    plan = must_plan(scheduler)
    scheduler.commit(plan, result_of(plan), 0.0)
    assert scheduler.stats().blocks_cached == 2
