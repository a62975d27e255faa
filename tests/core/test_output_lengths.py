"""Expected output lengths, and the peak of a batch against running it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotbatch.core.output_lengths import OutputLengths, expected_peak


def peak_by_running(batch: list[tuple[int, int]]) -> int:
    """Let all write a token a step; who has none left to write goes."""
    peak = 0
    live = [list(request) for request in batch]
    while live:
        peak = max(peak, sum(current for current, _ in live))
        live = [request for request in live if request[1]]
        for request in live:
            request[0] += 1
            request[1] -= 1
    return peak


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=8))
def test_the_peak_equals_that_of_running_the_batch(batch: list[tuple[int, int]]) -> None:
    assert expected_peak(batch) == peak_by_running(batch)


def test_the_peak_lies_below_what_reserving_everything_takes() -> None:
    # The short one is gone before the long one has grown.
    assert expected_peak([(100, 1000), (900, 10)]) == 1100
    assert expected_peak([]) == 0


def test_without_experience_the_guess_counts() -> None:
    lengths = OutputLengths(guess=200)
    assert lengths.expected_total(0, 1000) == 200
    assert lengths.expected_total(0, 50) == 50
    assert lengths.expected_total(150, 1000) == 300
    assert lengths.expected_total(1000, 1000) == 1000


def test_experience_replaces_the_guess() -> None:
    lengths = OutputLengths(guess=1000)
    previous = 1000
    for _ in range(8):
        lengths.observe(20)
        expected = lengths.expected_total(0, 5000)
        assert expected < previous
        previous = expected
    assert previous == 20


def test_only_longer_answers_count() -> None:
    lengths = OutputLengths()
    for length in [10] * 50 + [100] * 30 + [300] * 10:
        lengths.observe(length)
    assert lengths.expected_total(0, 4096) == -(-(10 * 50 + 100 * 30 + 300 * 10) // 90)
    assert lengths.expected_total(10, 4096) == (100 * 30 + 300 * 10) // 40
    assert lengths.expected_total(100, 4096) == 300
    assert lengths.expected_total(100, 120) == 120
    assert lengths.expected_total(300, 4096) == 600, "nobody got this far: twice what there is"


def test_old_answers_are_forgotten() -> None:
    lengths = OutputLengths(window=20)
    for _ in range(20):
        lengths.observe(400)
    for _ in range(20):
        lengths.observe(30)
    assert len(lengths) == 20
    assert lengths.expected_total(0, 4096) == 30


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(0, 600), st.integers(1, 600))
def test_expectations_stay_within_their_bounds(seen: list[int], so_far: int, most: int) -> None:
    lengths = OutputLengths(window=30)
    for length in seen:
        lengths.observe(length)
    expected = lengths.expected_total(so_far, most)
    assert min(so_far + 1, most) <= expected <= most
