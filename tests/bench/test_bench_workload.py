from __future__ import annotations

import math
import statistics

import pytest

from hotbatch.bench.workload import RandomLengths, arrival_times, random_requests


def make_requests(count: int = 20, **options: object) -> list:
    settings = {"input_len": RandomLengths(10), "output_len": RandomLengths(5), **options}
    return random_requests(count, **settings)


def test_prompts_have_the_lengths_asked_for():
    requests = make_requests()
    assert {len(request.prompt) for request in requests} == {10}
    assert {request.prompt_len for request in requests} == {10}
    assert {request.output_len for request in requests} == {5}


def test_prompts_differ_among_each_other_and_follow_the_seed():
    first = make_requests(seed=1)
    assert len({request.prompt for request in first}) == len(first)
    assert make_requests(seed=1) == first
    assert make_requests(seed=2) != first


def test_spread_lengths_stay_in_their_range_and_use_it():
    requests = make_requests(300, input_len=RandomLengths(10, 0.5))
    lengths = {request.prompt_len for request in requests}
    assert lengths == set(range(5, 16))


def test_prefix_is_shared_and_comes_on_top():
    requests = make_requests(prefix_len=4)
    assert {request.prompt[:4] for request in requests} == {requests[0].prompt[:4]}
    assert {request.prompt_len for request in requests} == {14}


def test_token_ids_stay_in_their_range():
    requests = make_requests(50, token_range=(3, 6))
    assert {token for request in requests for token in request.prompt} == {3, 4, 5}


def test_text_prompts_have_a_word_a_token():
    requests = make_requests(as_text=True)
    assert {len(request.prompt.split()) for request in requests} == {10}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_end_at_count_over_rate_and_vary_as_asked(burstiness: float):
    times = arrival_times(4000, request_rate=8.0, burstiness=burstiness, seed=3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500.0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_arrivals_at_infinite_rate_are_all_at_once():
    assert arrival_times(3, request_rate=math.inf) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)]
)
def test_arrivals_refuse_what_makes_no_sense(rate: float, burstiness: float):
    with pytest.raises(ValueError, match="must be positive"):
        arrival_times(3, request_rate=rate, burstiness=burstiness)
