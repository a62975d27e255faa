"""Guessed requests in the scheduler: who they give way to, who may claim them, what is booked."""

from __future__ import annotations

from typing import Any

import pytest
from core_factories import make_config, make_request, must_plan, result_of, run_step, run_to_end
from random_schedules import trained_model

from hotbatch.core import FinishReason, Request, Scheduler, StepPlan
from hotbatch.core.cost_model import StepFeatures
from hotbatch.core.errors import ContextLengthError
from hotbatch.core.policies import full_policies
from hotbatch.core.speculation import AheadBook, Fate
from hotbatch.core.speculation.ahead_pricing import AheadPrices

PROMPT = [11, 12, 13, 14, 15, 16]


def make(cost_model: Any = None, **overrides: Any) -> Scheduler:
    config = make_config(**({"batch_share": 0.0} | overrides))
    return Scheduler(config, full_policies(), cost_model, ahead=AheadBook())


def greedy(name: str, prompt: Any = PROMPT, **fields: Any) -> Request:
    return make_request(name, prompt, **({"temperature": 0.0, "max_tokens": 4} | fields))


def guess(scheduler: Scheduler, name: str = "guess", chance: float = 0.9, **fields: Any) -> None:
    scheduler.idle_work.guess(greedy(name, **fields), chance, 0.0)


def compute(scheduler: Scheduler, steps: int = 50) -> list[StepPlan]:
    """Run steps as long as there are any; the tokens are 7, 8, 9, ... by position."""
    plans: list[StepPlan] = []
    for _ in range(steps):
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        tokens = {
            planned.request_id: planned.context_len
            for planned in plan.requests
            if planned.sample is not None
        }
        scheduler.commit(plan, result_of(plan, tokens), 0.0)
        scheduler.check_integrity()
        plans.append(plan)
    return plans


def fates(scheduler: Scheduler) -> list[tuple[str, Fate]]:
    return [(news.request_id, news.fate) for news in scheduler.idle_work.news()]


def test_a_guess_is_computed_in_idle_time_and_counted_nowhere() -> None:
    scheduler = make()
    guess(scheduler)
    assert not scheduler.has_work
    plan = must_plan(scheduler)
    stats = scheduler.stats()
    assert plan.num_ahead == len(plan.requests) == 1
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.num_guesses == 1
    assert scheduler.commit(plan, result_of(plan), 0.0) == []
    compute(scheduler)
    assert fates(scheduler) == [("guess", Fate.COMPUTED)]
    assert scheduler.plan(0.0) is None
    assert not list(scheduler.idle_work.holders)
    stats = scheduler.stats()
    assert (stats.generated_tokens, stats.prompt_tokens, stats.prefix_query_tokens) == (0, 0, 0)


def test_the_very_request_gets_all_of_it_on_arrival() -> None:
    scheduler = make()
    guess(scheduler)
    compute(scheduler)
    scheduler.add(greedy("real"))
    (event,) = scheduler.answered()
    assert event.request_id == "real"
    assert event.token_ids == (6, 7, 8, 9)
    assert event.finish_reason is FinishReason.LENGTH
    assert (event.num_prompt, event.num_output, event.num_cached) == (6, 4, 6)
    assert not scheduler.has_work
    assert scheduler.plan(0.0) is None
    assert fates(scheduler)[-1] == ("guess", Fate.CLAIMED)
    account = scheduler.stats().guesses["request"]
    assert (account.attempted, account.accepted) == (9, 9)


def test_a_part_of_it_is_told_at_once_and_the_rest_computed() -> None:
    scheduler = make()
    guess(scheduler)
    compute(scheduler, steps=2)
    scheduler.add(greedy("real"))
    (event,) = scheduler.answered()
    assert (event.token_ids, event.finish_reason) == ((6, 7), None)
    plan, events = run_step(scheduler, {"real": 8})
    assert plan.num_ahead == 0
    assert plan.requests[0].start == 4  # a block was found
    assert events["real"].token_ids == (8,)
    assert events["real"].num_output == 3
    run_to_end(scheduler)


def test_a_smaller_limit_takes_a_beginning_and_a_stop_token_ends_it() -> None:
    scheduler = make()
    guess(scheduler)
    compute(scheduler)
    scheduler.add(greedy("short", max_tokens=2))
    scheduler.add(greedy("stopped", stop_token_ids=(8,)))
    short, stopped = scheduler.answered()
    assert (short.token_ids, short.finish_reason) == ((6, 7), FinishReason.LENGTH)
    assert (stopped.token_ids, stopped.finish_reason) == ((6, 7, 8), FinishReason.STOP)
    assert stopped.stop_token_id == 8


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "other"},
        {"cache_salt": "salt"},
        {"temperature": 0.5},
        {"temperature": 0.5, "seed": 0},
        {"presence_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"min_tokens": 2},
        {"prompt": [*PROMPT, 17]},
        {"group_id": "siblings"},
    ],
)
def test_nobody_else_gets_it(other: dict[str, Any]) -> None:
    scheduler = make()
    guess(scheduler)
    compute(scheduler)
    scheduler.add(greedy("real", **other))
    assert scheduler.answered() == []
    run_to_end(scheduler)


def test_whoever_opted_out_is_neither_answered_nor_remembered() -> None:
    scheduler = make()
    guess(scheduler)
    compute(scheduler)
    request = greedy("real")
    request.speculate = False
    scheduler.add(request)
    assert scheduler.answered() == []
    run_to_end(scheduler)
    shy = greedy("shy", prompt=[1, 2, 3])
    shy.speculate = False
    scheduler.add(shy)
    run_to_end(scheduler)
    scheduler.add(greedy("again", prompt=[1, 2, 3]))
    assert scheduler.answered() == []


def test_a_seeded_answer_is_known_and_a_drawn_one_is_not() -> None:
    scheduler = make()
    seeded = {"temperature": 1.0}
    for name, fields in (("a", {"seed": 5}), ("b", {"seed": 5})):
        request = greedy(name, **seeded, **fields)
        object.__setattr__(request.params, "seed", 5)
        scheduler.add(request)
        answered = scheduler.answered()
        assert len(answered) == (name == "b")
        run_to_end(scheduler)
    for name in ("c", "d"):
        scheduler.add(greedy(name, prompt=[1, 2, 3], **seeded))
        assert scheduler.answered() == []
        run_to_end(scheduler)


def test_an_exact_repeat_gets_the_answer_of_the_first() -> None:
    scheduler = make()
    scheduler.add(greedy("first"))
    run_to_end(scheduler)
    scheduler.add(greedy("second"))
    (event,) = scheduler.answered()
    assert (event.token_ids, event.finish_reason) == ((7, 7, 7, 7), FinishReason.LENGTH)
    account = scheduler.stats().guesses["repeat"]
    assert (account.attempted, account.accepted, account.seconds_spent) == (4, 4, 0.0)
    scheduler.add(greedy("longer", max_tokens=6))
    (event,) = scheduler.answered()
    assert (event.token_ids, event.finish_reason) == ((7, 7, 7, 7), None)
    assert [e.finish_reason for e in run_to_end(scheduler)][-1] is FinishReason.LENGTH


def test_a_request_that_comes_takes_the_next_step_alone() -> None:
    scheduler = make()
    guess(scheduler, max_tokens=20)
    compute(scheduler, steps=3)
    assert list(scheduler.idle_work.holders)
    scheduler.add(greedy("real", prompt=[1, 2, 3, 4]))
    plan = must_plan(scheduler)
    assert [planned.request_id for planned in plan.requests] == ["real"]
    assert not list(scheduler.idle_work.holders)  # nor does it hold a block


def test_guesses_find_what_they_computed_when_they_go_on() -> None:
    scheduler = make()
    guess(scheduler, prompt=list(range(20, 40)), max_tokens=20)
    compute(scheduler, steps=2)
    scheduler.add(greedy("real", prompt=[1, 2, 3, 4], max_tokens=1))
    run_step(scheduler)
    plan = must_plan(scheduler)
    assert plan.requests[0].request_id == "guess"
    assert plan.requests[0].start >= 16


def test_blocks_of_guesses_are_reclaimed_first() -> None:
    scheduler = make(num_blocks=8)
    scheduler.add(greedy("kept", prompt=list(range(50, 58)), max_tokens=1))
    run_to_end(scheduler)
    guess(scheduler, prompt=list(range(20, 28)), max_tokens=1)
    compute(scheduler)
    big = greedy("big", prompt=list(range(70, 94)), max_tokens=1)  # all but two blocks
    scheduler.add(big)
    run_to_end(scheduler)
    again = greedy("again", prompt=[*range(50, 58), 1], max_tokens=1)
    scheduler.add(again)
    run_to_end(scheduler)
    assert again.num_cached == 8


@pytest.mark.parametrize("order", ["lru", "return-time"])
def test_what_a_guess_found_does_not_go_with_it(order: Any) -> None:
    scheduler = make(num_blocks=12, prefix_eviction=order, ahead_kv_share=1.0)
    asked, other = list(range(20, 32)), list(range(40, 52))
    for name, prompt in (("asked", asked), ("other", other)):
        scheduler.add(greedy(name, prompt=prompt, max_tokens=1))
        run_to_end(scheduler)
    guess(scheduler, prompt=[*asked, 1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    assert compute(scheduler)[0].requests[0].start == 12
    # Of twelve blocks three each are theirs and two the guess's: these go, and one of the other.
    scheduler.add(greedy("large", prompt=[*range(60, 88)], max_tokens=1))
    run_to_end(scheduler)
    again = greedy("again", prompt=[*asked, 9], max_tokens=1)
    scheduler.add(again)
    run_to_end(scheduler)
    assert again.num_cached == 12


def test_guesses_hold_their_share_of_the_pool_and_no_more() -> None:
    scheduler = make(num_blocks=16, ahead_kv_share=0.25)  # 4 blocks, 16 tokens
    guess(scheduler, "a", prompt=list(range(20, 30)), max_tokens=20)
    guess(scheduler, "b", prompt=list(range(40, 44)), max_tokens=4, chance=0.5)
    guess(scheduler, "too long", prompt=list(range(60, 80)), chance=0.4)
    compute(scheduler)  # asserts the share in each step
    assert dict(fates(scheduler)) == dict.fromkeys(["a", "b", "too long"], Fate.COMPUTED)
    scheduler.add(greedy("real", prompt=list(range(20, 30)), max_tokens=20))
    (event,) = scheduler.answered()
    assert (len(event.token_ids), event.finish_reason) == (7, None)
    run_to_end(scheduler)


def test_what_cannot_be_served_cannot_be_guessed() -> None:
    scheduler = make()
    with pytest.raises(ContextLengthError):
        guess(scheduler, prompt=list(range(200)))


def test_a_refuted_guess_is_dropped_and_booked_as_waste() -> None:
    scheduler = make()
    guess(scheduler, chance=0.75, max_tokens=20)
    compute(scheduler, steps=3)
    scheduler.idle_work.reprice("guess", 0.0)
    scheduler.check_integrity()
    assert scheduler.plan(0.0) is None
    assert fates(scheduler) == [("guess", Fate.DROPPED)]
    account = scheduler.stats().guesses["request"]
    assert (account.attempted, account.accepted, account.wasted) == (8, 0, 8)
    (row,) = scheduler.idle_work._ahead.book.calibration()
    assert row == (0.75, 0.0, 1)


def test_a_guess_refuted_while_its_step_runs_gives_its_blocks_back_after_it() -> None:
    scheduler = make()
    guess(scheduler)
    plan = must_plan(scheduler)
    scheduler.idle_work.reprice("guess", 0.0)
    scheduler.check_integrity()
    assert scheduler.stats().blocks_used > 0
    scheduler.commit(plan, result_of(plan), 0.0)
    scheduler.check_integrity()
    assert scheduler.stats().blocks_used == 0


def test_a_failed_step_or_a_fault_ends_the_guess_and_tells_nobody() -> None:
    scheduler = make()
    guess(scheduler)
    plan = must_plan(scheduler)
    assert scheduler.fail(plan, "broken") == []
    scheduler.check_integrity()
    guess(scheduler, "second")
    plan = must_plan(scheduler)
    assert scheduler.commit(plan, result_of(plan, errors={"second": "bad"}), 0.0) == []
    scheduler.check_integrity()
    assert fates(scheduler) == [("guess", Fate.DROPPED), ("second", Fate.DROPPED)]
    assert scheduler.plan(0.0) is None


def test_old_guesses_are_given_up_and_the_least_likely_makes_way() -> None:
    scheduler = make()
    guess(scheduler, "old")
    compute(scheduler)
    scheduler.idle_work.guess(greedy("new", prompt=[1, 2]), 0.5, 1000.0)
    assert ("old", Fate.DROPPED) in fates(scheduler)
    for number in range(64):
        scheduler.idle_work.guess(greedy(f"g{number}", prompt=[3, number]), 0.6, 1000.0)
    assert ("new", Fate.DROPPED) in fates(scheduler)
    assert scheduler.stats().num_guesses == 64


def test_closed_batches_take_no_guesses() -> None:
    scheduler = make(batching="request")
    guess(scheduler)
    assert not scheduler.idle_work.takes_guesses
    assert scheduler.plan(0.0) is None


def test_beside_a_decode_a_row_joins_if_it_pays() -> None:
    """In this model a few more rows are nearly free: ten microseconds of ten milliseconds."""
    scheduler = make(trained_model())
    scheduler.add(greedy("real", prompt=[1, 2, 3, 4], max_tokens=20))
    run_step(scheduler)
    guess(scheduler, chance=0.9)
    plan, _ = run_step(scheduler)
    assert [planned.request_id for planned in plan.requests] == ["real", "guess"]
    assert plan.num_ahead == 1
    assert plan.mix is not None
    assert (plan.mix.all.num_tokens, plan.mix.decode.num_tokens) == (1, 1)
    assert plan.mix.ahead.num_tokens == len(plan.requests[1].tokens)


class DearRows:
    """Every row of a step takes as long as a step of its own."""

    is_trained = True

    def predict(self, features: StepFeatures) -> float:
        return 0.01 * features.num_tokens

    predict_p95 = predict

    def largest_chunk(self, base: Any, start: int, num_uncomputed: int, seconds: float) -> int:
        return min(num_uncomputed, int(seconds / 0.01) - base.num_tokens)


def test_beside_a_decode_no_row_joins_that_costs_more_than_it_earns() -> None:
    prices = AheadPrices(DearRows(), StepFeatures().plus_decode(5), 1)
    assert not prices.take(5, 1, 1, 0.99)
    assert prices.added_seconds == 0.0


def test_a_step_of_guesses_is_kept_short() -> None:
    prices = AheadPrices(DearRows(), StepFeatures(), 0)
    assert prices.chunk(0, 500) == 16  # two rows would be in time, a tile is the least
    assert prices.take(0, 2, 0, 0.9)
    assert not prices.take(5, 1, 1, 0.9)  # three are not


def test_no_row_joins_that_makes_a_token_late() -> None:
    model = trained_model()
    base = StepFeatures().plus_decode(5)
    in_time, late = model.predict_p95(base) * 2, model.predict_p95(base) * 1.0001
    assert AheadPrices(model, base, 1, in_time).take(5, 1, 1, 0.9)
    assert not AheadPrices(model, base, 1, late).take(5, 1, 1, 0.9)


def test_nobody_is_delayed_for_a_guess_that_is_rather_wrong() -> None:
    prices = AheadPrices(trained_model(), StepFeatures().plus_decode(5), 1)
    assert not prices.take(5, 1, 1, 0.45)
    assert prices.take(5, 1, 1, 0.55)
