"""Virtual token counters: the bound of the paper, and no more memory than needed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbatch.core.fairness import RecentService, VirtualTokenCounters


def test_the_smallest_counter_is_next_and_ties_go_to_the_earlier() -> None:
    counters = VirtualTokenCounters()
    assert counters.smallest() is None
    for tenant in "bca":
        counters.arrive(tenant)
    assert counters.smallest() == "b"
    counters.charge("b", num_prompt=10)
    assert counters.smallest() == "c"
    counters.charge("c", num_output=4)
    assert counters.smallest() == "a"
    counters.charge("a", num_prompt=11)
    assert counters.smallest() == "c"
    assert counters.counter("c") == 8.0
    assert counters.lead("a") == 3.0


def test_who_comes_back_is_lifted_and_cannot_save_up() -> None:
    counters = VirtualTokenCounters()
    counters.arrive("busy")
    counters.charge("busy", num_prompt=1000)
    counters.arrive("late")
    assert counters.counter("late") == 1000.0
    counters.leave("late")
    counters.leave("busy")
    counters.arrive("later")  # nobody waits: the mark is that of the last one who left
    assert counters.counter("later") == 1000.0


def test_a_debt_is_remembered_while_it_matters() -> None:
    counters = VirtualTokenCounters()
    counters.arrive("greedy")
    counters.arrive("modest")
    counters.charge("greedy", num_output=500)
    counters.leave("greedy")
    counters.arrive("greedy")
    assert counters.counter("greedy") == 1000.0
    assert counters.smallest() == "modest"


def test_weights_divide_what_is_charged() -> None:
    counters = VirtualTokenCounters({"gold": 4.0})
    counters.charge("gold", num_prompt=100, num_output=50)
    counters.charge("other", num_prompt=100, num_output=50)
    assert counters.counter("gold") == 50.0
    assert counters.counter("other") == 200.0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weights_must_be_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="tenant 'a'"):
        VirtualTokenCounters({"a": weight})


def test_memory_follows_the_tenants_that_are_active() -> None:
    counters = VirtualTokenCounters()
    counters.arrive("stays")
    for number in range(20_000):
        tenant = f"user-{number}"
        counters.arrive(tenant)
        counters.charge(tenant, num_prompt=5)
        counters.leave(tenant)
        counters.charge("stays", num_prompt=10)
    assert len(counters) < 3_000
    assert len(counters._heap) < 3_000
    assert len(counters._arrived) == len(counters._num_waiting) == 1


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_seats=st.integers(1, 8),
    num_tenants=st.integers(2, 5),
    longest_prompt=st.integers(1, 200),
    longest_output=st.integers(1, 50),
    weight=st.sampled_from([1.0, 1.0, 2.0, 0.5]),
)
def test_service_of_backlogged_tenants_never_drifts_apart(
    seed: int,
    num_seats: int,
    num_tenants: int,
    longest_prompt: int,
    longest_output: int,
    weight: float,
) -> None:
    """Theorem 4.4 over every interval: tenants 0 and 1 always have work waiting, others come
    and go; the batch holds at most `num_seats` of the longest requests."""
    rng = random.Random(seed)
    weights = {"0": weight}
    counters = VirtualTokenCounters(weights)
    waiting: dict[str, int] = {}
    running: list[list[object]] = []
    served = {"0": 0.0, "1": 0.0}
    gaps = [0.0]

    def charge(tenant: str, num_prompt: int, num_output: int) -> None:
        counters.charge(tenant, num_prompt, num_output)
        if tenant in served:
            price = num_prompt + 2 * num_output
            served[tenant] += price / weights.get(tenant, 1.0)

    for _ in range(150):
        for tenant in map(str, range(num_tenants)):
            if waiting.get(tenant, 0) < 2 and (tenant in served or rng.random() < 0.2):
                waiting[tenant] = waiting.get(tenant, 0) + 1
                counters.arrive(tenant)
        while len(running) < num_seats:
            tenant = counters.smallest()
            assert tenant is not None
            waiting[tenant] -= 1
            if tenant in served and not waiting[tenant]:
                waiting[tenant] += 1  # they always have more
                counters.arrive(tenant)
            counters.leave(tenant)
            charge(tenant, rng.randint(1, longest_prompt), 0)
            running.append([tenant, rng.randint(1, longest_output)])
        for request in running:
            charge(str(request[0]), 0, 1)
            request[1] = int(str(request[1])) - 1
        running = [request for request in running if request[1]]
        gaps.append(served["0"] - served["1"])
    # Weights below 1 make a prompt and a batch count for more.
    scale = max(1.0, 1.0 / weight)
    bound = 2 * scale * max(longest_prompt, 2 * num_seats * (longest_prompt + longest_output))
    assert max(gaps) - min(gaps) <= bound


# What a tenant had of late


def test_recent_service_is_told_in_fair_parts() -> None:
    recent = RecentService({"big": 3.0})
    assert recent.part("nobody") == 0.0
    recent.note("small", 5.0)
    assert recent.part("small") == 1.0, "all that there was, and nobody to share with"
    recent.note("big", 15.0)
    assert recent.part("small") == recent.part("big") == 1.0
    recent.note("big", 20.0)
    assert recent.part("small") == 0.5
    assert recent.part("nobody") == 0.0


def test_recent_service_is_that_of_two_pages() -> None:
    recent = RecentService({})
    recent.note("early", 30.0)
    recent.turn_page()
    recent.note("late", 10.0)
    recent.note("early", 10.0)
    assert (recent.part("early"), recent.part("late")) == (1.6, 0.4)
    recent.turn_page()
    assert recent.part("early") == recent.part("late") == 1.0
    recent.turn_page()
    assert recent.part("early") == recent.part("late") == 0.0


def test_counters_tell_recent_service_without_weights_and_lifts() -> None:
    counters = VirtualTokenCounters({"big": 2.0})
    recent = counters.watch()
    counters.charge("big", num_output=10)
    counters.charge("small", num_prompt=10)
    assert counters.counter("big") == counters.counter("small") == 10.0
    assert recent.part("big") == recent.part("small") == 1.0
    counters.arrive("new")
    counters.arrive("small")
    counters.charge("big", num_output=30)
    counters.arrive("back")
    assert recent.part("back") == 0.0, "a counter that was lifted is no service"


def test_recent_service_is_kept_only_from_when_it_is_asked_for() -> None:
    counters = VirtualTokenCounters()
    counters.charge("early", num_output=10)
    recent = counters.watch()
    assert recent.part("early") == 0.0, "or tenants would pile up where nobody turns the pages"
    counters.charge("early", num_output=10)
    assert counters.watch() is recent and recent.part("early") == 1.0
