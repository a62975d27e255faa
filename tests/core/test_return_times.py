"""When conversations come back is learnt from gaps, and from those that never come."""

from __future__ import annotations

import pytest

from hotbatch.core.return_times import (
    BORDERS,
    NUM_BINS,
    ReturnTable,
    ReturnTimes,
    bin_of,
    turn_class,
)


def learn(table: ReturnTable, gap: float, number: int, never: int = 0) -> None:
    """`number` conversations came back after `gap` seconds, `never` ones did not."""
    for _ in range(number):
        for index in range(bin_of(gap)):
            table.note_survived(index)
        table.note_returned(bin_of(gap), bin_of(gap))
    for _ in range(never):
        for index in range(NUM_BINS):
            table.note_survived(index)


def test_bins_cover_all_gaps_to_the_horizon() -> None:
    assert bin_of(0.0) == bin_of(0.49) == 0
    for index in range(NUM_BINS):
        assert bin_of(BORDERS[index]) == index
    assert bin_of(BORDERS[-1]) == bin_of(1e9) == NUM_BINS


def test_at_first_whoever_is_longest_away_is_least_expected() -> None:
    rates = ReturnTable().rates
    assert rates == sorted(rates, reverse=True), "which is the order of LRU"
    assert rates[NUM_BINS] == 0.0


def test_whoever_will_be_back_in_a_minute_is_worth_more_just_before_it_than_after() -> None:
    table = ReturnTable()
    learn(table, 60.0, 200, never=200)
    soon, late = bin_of(40.0), bin_of(200.0)
    assert table.rates[soon] > 5 * table.rates[late]
    assert table.rates[soon] > table.rates[0], "nobody is back at once"
    assert table.chances[0] == pytest.approx(0.5, abs=0.08)
    assert table.chances[late] < 0.2


def test_a_return_that_is_told_late_takes_back_what_was_counted_meanwhile() -> None:
    table, late = ReturnTable(), ReturnTable()
    gap, told = bin_of(10.0), bin_of(100.0)
    for _ in range(100):
        for index in range(gap):
            table.note_survived(index)
        table.note_returned(gap, gap)
        for index in range(told):  # it was back, but nobody knew
            late.note_survived(index)
        late.note_returned(gap, told)
    assert late.hazards[gap] == pytest.approx(table.hazards[gap], abs=0.02)
    assert late.hazards[told - 1] == pytest.approx(table.hazards[told - 1], abs=0.02)


def test_habits_may_change() -> None:
    table = ReturnTable()
    learn(table, 30.0, 3000)
    before = table.chances[0]
    learn(table, 30.0, 0, never=6000)
    assert before > 0.9 and table.chances[0] < 0.3


def test_a_tenant_without_history_is_taken_for_one_of_all() -> None:
    times = ReturnTimes()
    for _ in range(100):
        for table in times.tables("known", 0):
            learn(table, 30.0, 1)
    new, _ = times.tables("new", 0)
    assert new.chances[0] > 0.8 > ReturnTable().chances[0]


def test_tenants_differ_and_the_stalest_are_forgotten() -> None:
    times = ReturnTimes()
    regular, stranger = times.tables("regular", 0)[0], times.tables("stranger", 0)[0]
    learn(regular, 30.0, 100)
    learn(stranger, 30.0, 0, never=100)
    assert regular.chances[0] > 0.8 and stranger.chances[0] < 0.2
    for number in range(300):
        times.tables(f"t{number}", 0)
    assert times.tables("regular", 0)[0] is not regular


def test_many_turns_are_one_class() -> None:
    assert [turn_class(turn) for turn in (0, 1, 2)] == [0, 1, 2]
    assert turn_class(50) == turn_class(6)
