from __future__ import annotations

from hotbatch.engine import child_seed


def test_the_first_child_keeps_the_seed():
    assert [child_seed(seed, 0) for seed in (0, 7, -5)] == [0, 7, -5]


def test_children_are_fixed_by_the_seed_and_differ():
    # Output 1 of SplitMix64 from state 0 is a published test vector (cut to 63 bits here).
    assert child_seed(0, 1) == 0xE220A8397B1DCDAF & (2**63 - 1)
    seeds = [child_seed(seed, index) for seed in (0, 1, 2, -1) for index in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_without_a_seed_each_child_is_drawn():
    seeds = {child_seed(None, index) for index in (0, 0, 1, 1)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
