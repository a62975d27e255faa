"""Blocks move between free, in use and cached, and are in exactly one of these."""

from __future__ import annotations

import pytest

from hotbatch.core.block_pool import BlockPool


def make_pool(num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    reclaimed: list[int] = []
    return BlockPool(num_blocks, on_reclaim=reclaimed.append), reclaimed


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def test_a_block_goes_from_free_to_used_and_back() -> None:
    pool, _ = make_pool()
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3
    assert counts(pool) == (1, 0, 3)
    pool.release(blocks)
    assert counts(pool) == (4, 0, 0)


def test_a_shared_block_stays_in_use_until_its_last_release() -> None:
    pool, _ = make_pool()
    blocks = pool.allocate(1)
    pool.retain(blocks)
    pool.release(blocks)
    assert counts(pool) == (3, 0, 1)
    pool.release(blocks)
    assert counts(pool) == (4, 0, 0)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(blocks)


def test_a_kept_block_can_be_revived_with_its_content() -> None:
    pool, reclaimed = make_pool()
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.release([block])
    assert counts(pool) == (3, 1, 0)
    assert pool.num_unreferenced([block]) == 1
    pool.retain([block])
    assert counts(pool) == (3, 0, 1)
    assert pool.num_unreferenced([block]) == 0
    assert reclaimed == []


def test_free_blocks_are_taken_before_cached_ones_and_the_oldest_of_these_first() -> None:
    pool, reclaimed = make_pool(3)
    first, second, third = pool.allocate(3)
    for block in (second, first):
        pool.keep(block)
        pool.release([block])
    pool.release([third])
    assert pool.allocate(1) == (third,)
    assert reclaimed == []
    assert pool.allocate(2) == (second, first)
    assert reclaimed == [second, first]


def test_the_end_of_a_released_table_is_reclaimed_before_its_beginning() -> None:
    pool, reclaimed = make_pool(3)
    table = pool.allocate(3)
    for block in table:
        pool.keep(block)
    pool.release(table)
    pool.allocate(3)
    assert reclaimed == list(reversed(table))


def test_integrity_notices_a_lost_and_a_doubled_block() -> None:
    pool, _ = make_pool()
    blocks = pool.allocate(2)
    pool.check_integrity({block: 1 for block in blocks}, set())
    with pytest.raises(AssertionError):
        pool.check_integrity({blocks[0]: 1}, set())
    with pytest.raises(AssertionError):
        pool.check_integrity({block: 2 for block in blocks}, set())
    with pytest.raises(AssertionError):
        pool.check_integrity({block: 1 for block in blocks}, {blocks[0]})
