"""Who asks for less than its share does not feel those who ask for more."""

from __future__ import annotations

from core_factories import LinearCost, full_scheduler, make_request, run_step, sizes

from hotbatch.core import LatencyTargets, Scheduler
from hotbatch.core.light_tenants import Seats
from hotbatch.core.policies import PATIENCE
from hotbatch.core.service_class import ServiceClass


def shared(
    *,
    light: int = 1,
    heavy: int = 7,
    targets: LatencyTargets | None = None,
    service_class: ServiceClass = ServiceClass.STANDARD,
    **overrides: object,
) -> Scheduler:
    """A tenant with few decodes beside one with many: a millisecond a step and one a token."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 999}
    scheduler = full_scheduler(cost_model=LinearCost(), **(settings | overrides))
    wanted = {"max_tokens": 90} | ({} if targets is None else {"targets": targets})
    for index in range(heavy):
        scheduler.add(
            make_request(f"h{index}", 1, tenant="heavy", max_tokens=90, service_class=service_class)
        )
    for index in range(light):
        light_one = make_request(
            f"l{index}",
            1,
            tenant="light",
            service_class=service_class,
            **wanted,  # type: ignore[arg-type]
        )
        scheduler.add(light_one)
    while scheduler.stats().prompt_tokens < light + heavy:
        run_step(scheduler)
    return scheduler


def turns(scheduler: Scheduler, steps: int = 12) -> list[set[str]]:
    return [set(sizes(run_step(scheduler)[0])) for _ in range(steps)]


# The pace of its tokens


def test_decodes_of_a_heavy_tenant_take_turns_beside_a_light_one() -> None:
    served = turns(shared())
    assert all("l0" in step for step in served), "the light one decodes in every step"
    assert max(map(len, served)) == 4, "a third of the others at a time"
    for index in range(7):
        present = [f"h{index}" in step for step in served]
        assert any(present[:3]), "nobody waits for more than two steps"
        assert all(any(present[at : at + 3]) for at in range(len(present) - 2))


def test_a_light_tenant_that_named_a_target_is_served_by_that() -> None:
    assert set(map(len, turns(shared(targets=LatencyTargets(tpot=5.0))))) == {8}


def test_equal_tenants_do_not_slow_each_other_down() -> None:
    assert set(map(len, turns(shared(light=4, heavy=4)))) == {8}


def test_without_fairness_nobody_is_light() -> None:
    assert set(map(len, turns(shared(without="fairness")))) == {8}


def test_a_tenant_that_waits_for_a_seat_asks_for_more_than_it_has() -> None:
    scheduler = shared(max_num_seqs=8)
    for index in range(6):
        scheduler.add(make_request(f"more{index}", 1, tenant="light", max_tokens=90))
    # Nobody has had a seat for long enough to leave it.
    assert set(map(len, turns(scheduler, 3))) == {8}


def test_weights_say_what_a_share_is() -> None:
    # One of eight seats is what a tenant of weight 1 beside one of weight 7 is worth.
    assert set(map(len, turns(shared(tenant_weights={"heavy": 7.0})))) == {8}


def test_prompts_of_the_heavy_tenant_are_left_next_to_nothing() -> None:
    scheduler = shared(heavy=3)
    scheduler.add(make_request("prompt", 60, tenant="heavy"))
    assert sizes(run_step(scheduler)[0])["prompt"] == 4
    assert sizes(run_step(scheduler)[0])["prompt"] == 4


def test_a_light_tenants_own_prompt_is_computed_at_once() -> None:
    scheduler = shared(heavy=6)
    scheduler.add(make_request("prompt", 40, tenant="light"))
    assert sizes(run_step(scheduler)[0])["prompt"] == 16, "as much as anybody's beside decodes"


def test_nobody_of_a_higher_class_takes_turns_for_a_light_tenant() -> None:
    scheduler = shared(service_class=ServiceClass.BATCH, heavy=5, max_num_seqs=12)
    for index in range(3):
        scheduler.add(make_request(f"s{index}", 1, max_tokens=90))
    while scheduler.stats().prompt_tokens < 9:
        run_step(scheduler)
    scheduler.add(make_request("prompt", 40))
    first, *later = [sizes(run_step(scheduler)[0]) for _ in range(6)]
    assert first["prompt"] == 16, "as much as anybody's beside decodes"
    for plan in (first, *later):
        assert {"l0", "s0", "s1", "s2"} <= set(plan)
        assert sum(name.startswith("h") for name in plan) == 2


# Its seats


def seated(scheduler: Scheduler) -> int:
    return scheduler.stats().num_running


def test_a_newcomer_of_a_light_tenant_takes_a_seat_of_a_heavy_one() -> None:
    scheduler = shared(light=0, heavy=8)
    for _ in range(20):
        run_step(scheduler)  # beyond the quantum
    scheduler.add(make_request("new", 5, tenant="light"))
    plan, _ = run_step(scheduler)
    assert sizes(plan)["new"] == 5
    assert plan.paused == ("h7",), "the newest waits, and keeps its KV"
    assert scheduler.stats().num_paused == 1


def test_one_that_named_a_target_for_its_first_token_waits_for_its_turn() -> None:
    scheduler = shared(light=0, heavy=8)
    for _ in range(20):
        run_step(scheduler)
    scheduler.add(make_request("new", 5, tenant="light", targets=LatencyTargets(ttft=9.0)))
    plan, _ = run_step(scheduler)
    assert not plan.paused and "new" not in sizes(plan)


def test_the_paused_one_goes_on_in_the_next_seat() -> None:
    scheduler = shared(light=0, heavy=8)
    for _ in range(20):
        run_step(scheduler)
    scheduler.add(make_request("new", 5, tenant="light", max_tokens=3))
    for _ in range(5):
        run_step(scheduler)
    assert scheduler.stats().num_paused == 0


def test_a_tenant_with_half_its_part_takes_no_more_if_it_had_much_of_late() -> None:
    scheduler = modest(had=400)
    scheduler.add(make_request("third", 5, tenant="light"))
    plan, _ = run_step(scheduler)
    assert not plan.paused and "third" not in sizes(plan)


def test_who_comes_from_above_takes_a_seat_of_the_heavy_one() -> None:
    scheduler = shared()
    scheduler.add(make_request("urgent", 5, service_class=ServiceClass.INTERACTIVE))
    plan, _ = run_step(scheduler)
    assert plan.paused == ("h6",), "although the light one is newer"


def test_who_named_a_target_is_not_spared() -> None:
    scheduler = shared(targets=LatencyTargets(ttft=9.0))
    scheduler.add(make_request("urgent", 5, service_class=ServiceClass.INTERACTIVE))
    plan, _ = run_step(scheduler)
    assert plan.paused == ("l0",)


# What it had of late


def modest(*, had: int, light: int = 2) -> Scheduler:
    """Eight seats are taken, and the heavy tenant has had 1,000 tokens of service, or a few
    more."""
    scheduler = shared(light=light, heavy=8 - light)
    for _ in range(60):
        run_step(scheduler)  # beyond the quantum, in turns
    pages = [books.watch() for books in scheduler._counters or ()]
    (recent,) = (recent for recent in pages if recent.part("heavy"))
    recent.turn_page()
    recent.turn_page()
    recent.note("heavy", 1000.0)
    recent.note("light", float(had))
    return scheduler


def test_who_had_little_of_late_has_seats_up_to_its_part_at_once() -> None:
    scheduler = modest(had=100)
    for name in ("third", "fourth", "fifth"):
        scheduler.add(make_request(name, 5, tenant="light", max_tokens=90))
    plan, _ = run_step(scheduler)
    assert plan.paused == ("h5", "h4")
    assert "fourth" in sizes(plan) and "fifth" not in sizes(plan), "four of eight seats"


def test_others_take_turns_beside_three_of_one_that_had_little() -> None:
    assert max(map(len, turns(modest(had=100, light=3)))) == 5, "three, and two of five"
    assert set(map(len, turns(modest(had=400, light=3)))) == {8}


def test_nobody_takes_turns_beside_one_that_holds_its_whole_part() -> None:
    assert set(map(len, turns(modest(had=100, light=4)))) == {8}


def test_a_seat_that_was_left_for_a_newcomer_is_given_to_it() -> None:
    scheduler = modest(had=330)  # its own prompt makes it one that had too much
    scheduler.add(make_request("third", 40, tenant="light"))
    plan, _ = run_step(scheduler)
    assert plan.paused == ("h5",)
    assert "third" in sizes(plan)


def test_who_has_the_seats_for_itself_is_not_light_although_it_had_nothing() -> None:
    scheduler = full_scheduler(cost_model=LinearCost(), max_num_seqs=8, num_blocks=999)
    request = make_request("a", 40, tenant="only")
    scheduler.add(request)
    light_tenants = scheduler._filler._light_tenants
    assert light_tenants is not None and not light_tenants.is_light(request)


def test_what_it_had_is_forgotten_after_two_pages() -> None:
    for now, is_forgotten in ((9.0, False), (11.0, False), (21.0, True)):
        plan, _ = run_step(modest(had=400, light=3), now=now)
        assert (len(plan.requests) < 8) == is_forgotten


def test_nobody_is_paused_for_light_tenants_again_and_again() -> None:
    scheduler = shared(light=0, heavy=8)
    for _ in range(20):
        run_step(scheduler)
    pauses: dict[str, int] = {}
    for index in range(40):
        scheduler.add(make_request(f"new{index}", 1, tenant=f"t{index}", max_tokens=1))
        for name in run_step(scheduler)[0].paused:
            pauses[name] = pauses.get(name, 0) + 1
    assert pauses and max(pauses.values()) <= PATIENCE


def test_seats_are_counted_by_class_and_weight() -> None:
    seats = Seats({"big": 3.0})
    for account, count in (((1, "big"), 6), ((1, "small"), 1), ((2, "small"), 5)):
        for _ in range(count):
            seats.take(account)
    assert seats.part((1, "big")) == 6 * 4 / (3 * 7)
    assert seats.part((1, "small")) == 4 / 7
    assert seats.part((2, "small")) == 1.0
    assert seats.part((1, "new"), more=1) == 5 / 8
