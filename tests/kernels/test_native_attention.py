"""Paged attention, native against the reference, and its promise: a row's result depends on its
own query, keys and values alone, bit for bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from paged_batches import ISAS, Heads, PagedWorld

from hotbatch.kernels import _native

# Largest error against the same numbers in f32: weights rounded to bf16 cost 2^-9 relative,
# int8 rounds queries, keys and values to 1/254 of the largest.
TOLERANCE = {"f32": 3e-6, "bf16": 6e-3, "int8": 5e-2}

# (heads, block size): group sizes 1, 3, 4, 8 and 7; head dims with and without remainders.
SHAPES = [
    (Heads(9, 3, 64), 16),
    (Heads(4, 4, 80), 32),
    (Heads(8, 2, 128), 16),
    (Heads(8, 1, 256), 48),
    (Heads(14, 2, 96), 16),
    (Heads(3, 1, 16), 256),
]


def mixed_step(world: PagedWorld) -> list[tuple[int, int, int]]:
    """A decode row of one sequence, a chunk of the next, a whole one, and so on."""
    rows = []
    for index, sequence in enumerate(world.sequences):
        new = (1, 37, len(sequence))[index % 3]
        rows.append((index, max(0, len(sequence) - new), len(sequence)))
    return rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(("heads", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [0, 50])
def test_matches_reference(
    isa: str, dtype: str, heads: Heads, block_size: int, window: int
) -> None:
    lengths = [129, 200, 45, 1, 61, 16]
    world = PagedWorld(heads, lengths, dtype=dtype, block_size=block_size, isa=isa)
    rows = mixed_step(world)
    got = world.attend(rows, window=window)
    np.testing.assert_allclose(
        got, world.expected(rows, window=window), atol=TOLERANCE[dtype], rtol=0
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("window", [0, 100, 257])
def test_neither_batch_nor_chunks_nor_threads_matter(isa: str, dtype: str, window: int) -> None:
    world = PagedWorld(Heads(6, 2, 64), [700, 150, 33], dtype=dtype, isa=isa, seed=1)
    parts = [(0, 0, 700), (1, 0, 150), (2, 0, 33)]
    whole = world.attend(parts, window=window)
    wanted = dict(zip([s for s, _, _ in parts], np.split(whole, [700, 850]), strict=True))

    def check(rows: list[tuple[int, int, int]], **options: Any) -> None:
        got = world.attend(rows, window=window, **options)
        for part, result in zip(
            rows, np.split(got, np.cumsum([e - b for _, b, e in rows])[:-1]), strict=True
        ):
            sequence, begin, end = part
            assert np.array_equal(result, wanted[sequence][begin:end]), part

    for threads, plan_threads in [(1, 2), (2, 2), (1, 16), (3, 64)]:
        check(parts, threads=threads, plan_threads=plan_threads)
        check(parts, threads=threads, plan_threads=plan_threads, stays=True)
        check([(0, 699, 700)], threads=threads, plan_threads=plan_threads)
    for position in (0, 1, 15, 16, 127, 128, 255, 256, 640, 699):  # alone, and among others
        check([(0, position, position + 1)])
        check([(2, 3, 9), (0, position, position + 1), (1, 149, 150)], plan_threads=8)
    for begin, end in itertools.pairwise([0, 5, 69, 70, 333, 700]):  # chunked
        check([(0, begin, end), (1, 100, 101)], plan_threads=4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("window", [0, 5000, 64])
def test_shared_prefixes_change_no_bit(isa: str, dtype: str, window: int) -> None:
    """Sequences that share blocks, in a tree of depth two, against the same without sharing."""
    world = PagedWorld(Heads(6, 2, 64), [600, 600, 600, 600, 600], dtype=dtype, isa=isa, seed=2)
    blocks = {index: s.blocks.copy() for index, s in enumerate(world.sequences)}
    # 0-3 share their first chunks; 1 and 2 go on together; 4 stays alone.
    for index in (1, 2, 3):
        blocks[index][:18] = blocks[0][:18]
    blocks[2][18:33] = blocks[1][18:33]
    rows = [(0, 500, 501), (1, 597, 600), (2, 599, 600), (3, 255, 257), (4, 599, 600)]
    shared = world.plan(rows, window=window, blocks=blocks)
    shares = any(_sequences_of(item[0], rows) > 1 for item in shared.items)
    assert shares == (window != 64)  # what is out of sight is not shared
    together = world.attend(rows, window=window, blocks=blocks)
    for plan_threads in (2, 16):
        again = world.attend(
            rows, window=window, blocks=blocks, threads=2, plan_threads=plan_threads
        )
        assert np.array_equal(again, together)
    begin = 0
    for part in rows:
        alone = world.attend([part], window=window, blocks=blocks)
        assert np.array_equal(together[begin : begin + len(alone)], alone), part
        begin += len(alone)


def _sequences_of(item_rows: list[int], rows: list[tuple[int, int, int]]) -> int:
    owner = [index for index, (_, begin, end) in enumerate(rows) for _ in range(begin, end)]
    return len({owner[row] for row in item_rows})


@pytest.mark.parametrize("plan_threads", [1, 2, 32])
@pytest.mark.parametrize("window", [0, 200])
def test_plan_covers_every_row_and_chunk_once(plan_threads: int, window: int) -> None:
    heads = Heads(6, 3, 64)
    world = PagedWorld(heads, [900, 900, 70, 1], isa=ISAS[0], seed=3)
    blocks = {0: world.sequences[0].blocks, 1: world.sequences[1].blocks.copy()}
    blocks[1][:24] = blocks[0][:24]
    rows = [(0, 899, 900), (1, 897, 900), (2, 0, 70), (3, 0, 1)]
    step = world.plan(rows, window=window, plan_threads=plan_threads, blocks=blocks)
    positions = [p for _, begin, end in rows for p in range(begin, end)]
    chunk = _native.KEY_CHUNK
    wanted = {
        (row, c, head)
        for row, position in enumerate(positions)
        for c in range(
            (max(0, position - window + 1) if window else 0) // chunk, position // chunk + 1
        )
        for head in range(heads.kv)
    }
    covered: list[tuple[int, int, int]] = [
        key
        for item_rows, first, end, first_head, end_head in step.items
        for key in itertools.product(item_rows, range(first, end), range(first_head, end_head))
        if key in wanted  # a tile's earlier rows do not see its last chunk
    ]
    assert sorted(covered) == sorted(wanted)


def test_plan_cuts_a_long_context_for_several_threads() -> None:
    world = PagedWorld(Heads(3, 1, 16), [4096], isa=ISAS[0])
    one = world.plan([(0, 4095, 4096)], plan_threads=1)
    assert len(one.items) == 1
    assert one.merges == 0
    two = world.plan([(0, 4095, 4096)], plan_threads=2)
    assert len(two.items) >= 2 * 3
    assert two.merges == 1


@pytest.mark.parametrize("count", [16, 24, 64, 128, 200])
def test_parts_of_a_prompt_are_cut_by_rows_and_heads_alone(count: int) -> None:
    """Partial results that one thread writes and another reads are dear on two chips."""
    world = PagedWorld(Heads(9, 3, 64), [2048 + count], isa=ISAS[0])
    plan = world.plan([(0, 2048, 2048 + count)], plan_threads=2)
    assert plan.merges == 0
    assert len(plan.items) >= 2 * 3
    rows = [len(item[0]) for item in plan.items]
    assert min(rows) >= min(8, max(rows) // 2), "and evenly"


@pytest.mark.parametrize("threads", [2, 3])
def test_rows_stay_with_the_thread_that_has_them(threads: int) -> None:
    """A thread of a pool begins with as many items as the others, in order."""
    length = 240 * threads
    world = PagedWorld(Heads(9, 3, 64), [length], isa=ISAS[0])
    plan = world.plan([(0, 0, length)], plan_threads=threads, stays=True)
    firsts = [item[0][0] for item in plan.items]
    share = len(firsts) // threads
    for thread in range(threads):
        own = firsts[thread * share : (thread + 1) * share]
        assert sum(row * threads // length == thread for row in own) >= 0.8 * len(own)
    keys = [
        (item[0][-1] + 1) * len(item[0]) * (item[4] - item[3])
        for item in plan.items
        if item[0][0] * threads // length == threads - 1
    ]
    assert keys[0] == max(keys), "from the dearest on: others take what is cheap, from the end"
    assert keys[-1] == min(keys)
    anywhere = world.plan([(0, 0, length)], plan_threads=threads)
    assert sorted(map(str, plan.items)) == sorted(map(str, anywhere.items))


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        _native.KvLayout("bf16", 1, 72, 16)
    with pytest.raises(ValueError, match="block_size"):
        _native.KvLayout("bf16", 1, 64, 24)
    with pytest.raises(ValueError, match="dtype"):
        _native.KvLayout("fp4", 1, 64, 16)
    world = PagedWorld(Heads(2, 1, 64), [20], isa=ISAS[0])
    with pytest.raises(ValueError, match="position"):
        world.plan([(0, 30, 40)])
