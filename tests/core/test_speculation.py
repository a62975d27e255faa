"""Which guesses are made, at what price, and what is learnt from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from core_factories import EOS, make_config, make_request, must_plan, result_of

from hotbatch.core import Request, Scheduler, StepPlan
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.speculation import Speculator
from hotbatch.core.speculation.acceptance import AcceptanceTable, OwnRecord, cell_of
from hotbatch.core.speculation.guessing import Guesser
from hotbatch.core.speculation.history import AnswerHistory
from hotbatch.core.speculation.ledger import Ledger
from hotbatch.core.speculation.pricing import Market
from hotbatch.core.speculation.suffix_index import LEVELS, MOST, SOLE
from hotbatch.core.step import Step


def machine(per_token: float, *, fixed: float = 0.01, steps: int = 200) -> CostModel:
    """A cost model that has seen a machine whose steps take `fixed` plus that much a token."""
    model = CostModel()
    for step in range(steps):
        tokens = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)[step % 12]
        features = StepFeatures(tokens, tokens, 20 * tokens, 20 * tokens, tokens)
        model.observe(features, fixed + per_token * tokens)
        if step % 10 == 0:
            model.observe(StepFeatures(200, 1, 200, 20000, 0), fixed + per_token * 200)
    return model


def step_of(num_decodes: int, budget: int = 512) -> Step:
    step = Step(budget)
    for index in range(num_decodes):
        request = make_request(f"r{index}", 20)
        request.num_computed = 19
        step.enter(request, (request.tokens[19],))
    return step


class Copyist:
    """A scheduler whose model answers with given tokens, whatever the prompt."""

    def __init__(self, model: CostModel, depth: int | None = None, **config: int) -> None:
        self.speculator = Speculator(model, depth)
        self.scheduler = Scheduler(
            make_config(**({"block_size": 16, "num_blocks": 400, "max_model_len": 400} | config)),
            cost_model=model,
            drafter=self.speculator,
        )
        self.answers: dict[str, Sequence[int]] = {}
        self.drafts: list[dict[str, int]] = []
        self.sizes: list[dict[str, int]] = []
        self.now = 0.0
        self.seconds_a_row: float | None = None  # None: all steps take the same time

    def serve(self, *requests: tuple[Request, Sequence[int]]) -> None:
        """Run requests, each with its answer, to their end; `drafts` and `sizes` tell of each
        step."""
        for request, answer in requests:
            self.answers[request.request_id] = answer
            self.scheduler.add(request)
        by_id = {request.request_id: request for request, _ in requests}
        while self.scheduler.has_work:
            plan = must_plan(self.scheduler, self.now)
            self.now += 0.01
            tokens = {p.request_id: self._sampled(p.request_id, by_id, plan) for p in plan.requests}
            result = result_of(plan, tokens)
            if self.seconds_a_row is not None:
                num_rows = sum(len(p.tokens) for p in plan.requests)
                result = replace(result, seconds=self.seconds_a_row * num_rows)
            self.scheduler.commit(plan, result, self.now)
            self.scheduler.check_integrity()
            self.drafts.append({p.request_id: p.num_drafts for p in plan.requests})
            self.sizes.append({p.request_id: len(p.tokens) for p in plan.requests})

    def _sampled(self, name: str, by_id: dict[str, Request], plan: StepPlan) -> tuple[int, ...]:
        (planned,) = [p for p in plan.requests if p.request_id == name]
        guessed = planned.tokens[len(planned.tokens) - planned.num_drafts :]
        rest = self.answers[name][by_id[name].num_output :]
        sampled = []
        for index, token in enumerate(rest[: planned.num_drafts + 1]):
            sampled.append(token)
            if index < len(guessed) and guessed[index] != token:
                break
        return tuple(sampled)


TEXT = list(range(10, 90))


def test_a_copied_text_takes_a_fraction_of_the_steps() -> None:
    copyist = Copyist(machine(per_token=1e-4))
    request = make_request("a", [*TEXT, 5], max_tokens=len(TEXT))
    copyist.serve((request, TEXT))
    assert request.tokens[request.num_prompt :] == TEXT
    assert len(copyist.drafts) < 25
    account = copyist.speculator.ledger.account()
    assert account.accepted > 60
    assert account.seconds_saved > account.seconds_spent > 0.0


def test_nothing_is_guessed_where_every_token_costs_its_full_time() -> None:
    copyist = Copyist(machine(per_token=0.01, fixed=1e-6))
    copyist.serve((make_request("a", [*TEXT, 5], max_tokens=40), TEXT[:40]))
    assert not any(sum(drafts.values()) for drafts in copyist.drafts)


def test_nothing_is_guessed_before_the_cost_of_steps_is_known() -> None:
    copyist = Copyist(CostModel())
    copyist.serve((make_request("a", [*TEXT, 5], max_tokens=20), TEXT[:20]))
    assert not any(sum(drafts.values()) for drafts in copyist.drafts[:16])


def test_guesses_that_fail_are_given_up() -> None:
    copyist = Copyist(machine(per_token=5e-4))
    # What is generated never follows what followed the same token before.
    answer = [token for turn in range(30) for token in (11, 100 + turn, 30, 200 + turn)]
    copyist.serve((make_request("a", [*TEXT, 5], max_tokens=len(answer)), answer))
    early = sum(sum(drafts.values()) for drafts in copyist.drafts[3:19])
    late = sum(sum(drafts.values()) for drafts in copyist.drafts[-16:])
    assert late < early
    assert late <= 2


def test_the_same_question_finds_its_answer() -> None:
    copyist = Copyist(machine(per_token=1e-4))
    question, answer = [1, 3, 5, 7, 9, 11], [*range(100, 140)]
    copyist.serve((make_request("a", question, max_tokens=40), answer))
    steps = len(copyist.drafts)
    copyist.serve((make_request("b", question, max_tokens=40), answer))
    assert steps >= 40
    assert len(copyist.drafts) - steps < 20


def test_tenants_and_salts_guess_from_their_own_answers_only() -> None:
    for salt, tenant in (("pepper", ""), (None, "other")):
        copyist = Copyist(machine(per_token=1e-4))
        question, answer = [1, 3, 5, 7, 9, 11], [*range(100, 140)]
        copyist.serve((make_request("a", question, max_tokens=40), answer))
        steps = len(copyist.drafts)
        other = make_request("b", question, max_tokens=40, cache_salt=salt)
        other.tenant = tenant
        copyist.serve((other, answer))
        assert len(copyist.drafts) - steps == 40


def test_who_opts_out_is_neither_guessed_for_nor_from() -> None:
    copyist = Copyist(machine(per_token=1e-4))
    for name in ("a", "b"):
        request = make_request(name, [*TEXT, 5], max_tokens=30)
        request.speculate = False
        copyist.serve((request, TEXT[:30]))
    assert not any(sum(drafts.values()) for drafts in copyist.drafts)
    assert copyist.speculator.guesser.history.num_pending == 0


def test_a_guess_ends_with_the_stop_token() -> None:
    copyist = Copyist(machine(per_token=1e-5))
    answer = [*range(100, 120), EOS]
    prompt = [*answer, *range(200, 240), 99]
    copyist.serve((make_request("a", prompt, max_tokens=40), answer))
    # Of the drafts behind each step's tokens, none goes past the end of the text.
    drafted = sum(sum(drafts.values()) for drafts in copyist.drafts)
    assert drafted <= 21


def test_nothing_is_guessed_beside_a_part_of_a_prompt() -> None:
    copyist = Copyist(machine(per_token=1e-4), max_num_batched_tokens=40)
    first = make_request("first", [*TEXT, 5], max_tokens=60)
    second = make_request("second", [*range(200, 320), 5], max_tokens=60)
    copyist.serve((first, [*TEXT, *TEXT][:60]), (second, [*range(200, 260)]))
    seen = {"beside": 0, "later": 0}
    prompt_left = len(TEXT) + 1 + 121
    for drafts, tokens in zip(copyist.drafts, copyist.sizes, strict=True):
        kind = "beside" if prompt_left > 0 else "later"
        seen[kind] += sum(drafts.values())
        prompt_left -= sum(tokens.values())
    assert seen["beside"] == 0
    assert seen["later"] > 60


def test_a_fixed_depth_guesses_at_any_price() -> None:
    copyist = Copyist(machine(per_token=0.01, fixed=1e-6), depth=3)
    copyist.serve((make_request("a", [*TEXT, 5], max_tokens=40), TEXT[:40]))
    assert max(sum(drafts.values()) for drafts in copyist.drafts) == 3
    assert len(copyist.drafts) <= 14


# Prices


def test_a_price_that_fell_is_found_out() -> None:
    """All steps take the same time here, other than the machine that the model has seen."""
    copyist = Copyist(machine(per_token=0.01, fixed=1e-6), max_model_len=1000)
    text = list(range(1000, 1300))
    copyist.serve((make_request("a", [*text, 5], max_tokens=300, temperature=0.0), text))
    drafted = [sum(drafts.values()) for drafts in copyist.drafts]
    first = next(step for step, count in enumerate(drafted) if count)
    assert 64 <= first <= 80
    assert max(drafted[first : first + 20]) <= 2, "a trial is small"
    assert len(copyist.drafts) < 240


def test_prices_that_stay_are_tried_now_and_then_only() -> None:
    copyist = Copyist(machine(per_token=0.01, fixed=1e-6), max_model_len=1000)
    copyist.seconds_a_row = 0.01
    text = list(range(1000, 1300))
    copyist.serve((make_request("a", [*text, 5], max_tokens=300, temperature=0.0), text))
    assert 3 <= sum(any(drafts.values()) for drafts in copyist.drafts) <= 5


def test_more_drafts_where_rows_are_cheap_and_none_where_decodes_fill_the_machine() -> None:
    chances = [0.9**depth for depth in range(1, 33)]
    cheap = Market(machine(per_token=1e-5), step_of(1)).best(chances, 1.0).number
    dear = Market(machine(per_token=1e-3), step_of(1)).best(chances, 1.0).number
    crowded = Market(machine(per_token=1e-3), step_of(60)).best(chances, 1.0).number
    assert cheap > dear > crowded


def test_the_number_of_drafts_yields_the_most_tokens_per_second() -> None:
    model = machine(per_token=1e-3)
    step = step_of(2)
    market = Market(model, step)
    chances = sorted([0.95, 0.9, 0.8, 0.5, 0.3, 0.3, 0.2, 0.1, 0.05], reverse=True)
    rates = [
        (2 + sum(chances[:number])) / (market.seconds + market.added_seconds(number))
        for number in range(len(chances) + 1)
    ]
    assert market.best(chances, 1.0).number == max(range(len(rates)), key=rates.__getitem__)


def test_what_a_large_batch_gains_counts_for_all_its_drafts_together() -> None:
    """Of 64 decodes the first sixteen drafts gain less than the least that is asked for, though
    every one of them pays."""
    market = Market(machine(per_token=2e-4, fixed=0.006), step_of(64))
    assert market.least_chance == pytest.approx(0.68, abs=0.05)
    few, many = [0.97] * 16, [0.97] * 200
    gain_of_few, gain_of_many = (
        market.rate(chances) * market.seconds_a_token for chances in (few, many)
    )
    assert gain_of_few < 1.08 < gain_of_many
    assert market.best(few, 1.0).number == 0
    assert market.best(many, 1.0).number >= 60
    assert market.best([0.72] * 200, 1.0).number == 0, "hardly more than their rows cost"


def test_drafts_look_past_a_tooth_of_the_curve() -> None:
    """Rows come in tiles of four: the second row costs as much as the second to fifth."""
    model = CostModel()
    for _ in range(40):
        for tokens in range(1, 17):
            features = StepFeatures(tokens, tokens, 20 * tokens, 20 * tokens, tokens)
            model.observe(features, 0.006 + 0.004 * -(-(tokens + 2) // 4))
        model.observe(StepFeatures(64, 1, 64, 4096, 0), 0.07)
    market = Market(model, step_of(2))
    chances = [0.5] * 8
    assert market.added_seconds(1) / market.seconds_a_token > 0.5, "one alone cannot pay"
    assert market.best(chances, 1.0).number in (4, 8)


def test_drafts_keep_the_deadline_that_the_step_would_keep_without_them() -> None:
    market = Market(machine(per_token=1e-3), step_of(1))
    chances = [0.99] * 8
    assert market.best(chances, latest=1.0).number == 8
    tight = market.best(chances, latest=market.seconds + 0.0035).number
    assert 0 < tight <= 3
    assert market.best(chances, latest=market.seconds).number == 0
    late, soon = 0.001, 5.0
    assert market.latest_end([late, soon], now=0.0) == soon, "what is late anyway binds nobody"


def test_where_many_are_about_to_decode_a_token_is_worth_what_it_will_cost_then() -> None:
    model = machine(per_token=1e-3)
    chances = [0.9, 0.8, 0.6]
    alone = Market(model, step_of(1), num_expected=1)
    soon_many = Market(model, step_of(1), num_expected=60)
    assert alone.best(chances, 1.0).number == 3
    assert soon_many.seconds_a_token < alone.seconds_a_token / 5
    assert soon_many.best(chances, 1.0).number == 0


def test_the_edge_of_the_table_is_no_bargain() -> None:
    """Steps of 64 are slower than the curve says; 65 are not in the table, and not cheaper."""
    model = machine(per_token=1e-3)
    full = StepFeatures(64, 64, 1280, 1280, 64)
    for _ in range(100):
        model.observe(full, 1.3 * 0.074)
    more = StepFeatures(65, 64, 1281, 1300, 65)
    assert model.predict(more) < model.predict(full)
    assert model.added_seconds(full, 20, 1, 1)[0] > 0.0


def test_rows_cost_the_difference_of_two_steps() -> None:
    """Within the table, and with a prompt in the step, where none applies."""
    model = machine(per_token=1e-3)
    decodes = StepFeatures(5, 5, 200, 200, 5)
    mixed = StepFeatures(105, 6, 300, 5250, 5)
    for base in (decodes, mixed):
        added = model.added_seconds(base, 40, 1, 12)
        for number, seconds in enumerate(added, start=1):
            more = StepFeatures(
                base.num_tokens + number,
                base.num_requests,
                base.context_tokens + number,
                base.attended + 40 * number,
                base.num_sampled + number,
            )
            assert seconds == pytest.approx(max(0.0, model.predict(more) - model.predict(base)))
        assert model.added_seconds(base, 40, 4, 6) == added[3:6]


def test_the_budget_bounds_the_drafts() -> None:
    market = Market(machine(per_token=1e-5), step_of(1, budget=4))
    assert market.best([0.99] * 8, 1.0).number == 3


def test_a_limit_bounds_the_drafts_of_a_step_and_nothing_else() -> None:
    def most(limit: int | None) -> int:
        copyist = Copyist(machine(per_token=1e-5), depth=4, max_draft_tokens=limit)
        prompts = [make_request(name, [*TEXT, *TEXT[:4]], max_tokens=40) for name in ("a", "b")]
        copyist.serve(*((prompt, TEXT[4:44]) for prompt in prompts))
        assert max(sum(rows.values()) for rows in copyist.sizes) == 32, "of the prompts"
        return max(sum(drafts.values()) for drafts in copyist.drafts)

    assert [most(limit) for limit in (None, 5, 1, 0)] == [8, 5, 1, 0]


# Chances


def test_the_table_learns_how_often_guesses_come_true() -> None:
    table = AcceptanceTable()
    cell = cell_of(0, False, 3, SOLE)
    for turn in range(400):
        table.note(cell, turn % 4 != 0)
    assert table.rates[cell] == pytest.approx(0.75, abs=0.03)
    for _ in range(800):
        table.note(cell, False)
    assert table.rates[cell] < 0.15, "it forgets"


def test_a_request_that_does_better_or_worse_than_others_shifts_its_chances() -> None:
    lucky, unlucky = OwnRecord(), OwnRecord()
    for _ in range(30):
        lucky.note(0.5, True)
        unlucky.note(0.5, False)
    assert lucky.chance(0.5) > 0.6
    assert unlucky.chance(0.5) < 0.25
    assert OwnRecord().chance(0.5) == 0.5


def test_guesses_that_are_not_verified_are_learnt_from_as_well() -> None:
    copyist = Copyist(machine(per_token=2e-3))
    copyist.serve((make_request("a", [*TEXT, 5], max_tokens=40), [*range(100, 140)]))
    rows = copyist.speculator.ledger.calibration()
    assert copyist.speculator.ledger.account().attempted <= sum(row.number for row in rows)


# Books


def test_the_ledger_tells_what_was_saved_and_wasted() -> None:
    ledger = Ledger()
    ledger.book(attempted=4, accepted=3, seconds_spent=0.002, seconds_saved=0.03)
    ledger.book(attempted=4, accepted=0, seconds_spent=0.002, seconds_saved=0.0)
    account = ledger.account()
    assert (account.attempted, account.accepted, account.wasted) == (8, 3, 5)
    assert account.seconds_spent == pytest.approx(0.004)
    assert account.seconds_wasted == pytest.approx(0.0025)
    assert account.seconds_saved == pytest.approx(0.03)


def test_the_ledger_compares_told_chances_with_what_came() -> None:
    ledger = Ledger()
    for turn in range(10):
        ledger.note_chance(0.52, turn % 2 == 0)
        ledger.note_chance(1.0, True)
    low, high = ledger.calibration()
    assert low == (pytest.approx(0.52), 0.5, 10)
    assert high == (1.0, 1.0, 10)


# Bounds


def answered(name: str, tenant: str, length: int) -> Request:
    request = make_request(name, 3, max_tokens=length)
    request.tenant = tenant
    request.tokens += range(1000, 1000 + length)
    return request


def test_the_history_is_bounded_and_forgets_the_tenant_unheard_of_for_longest() -> None:
    history = AnswerHistory(generation=50, most_tokens=250)
    for turn in range(12):
        history.remember(answered(f"r{turn}", f"tenant {turn % 4}", 60))
        history.catch_up(10_000)
        assert len(history) <= 250
    assert history.text_of(answered("x", "tenant 3", 10)) is not None
    assert history.text_of(answered("x", "tenant 0", 10)) is None


def test_answers_are_indexed_bit_by_bit() -> None:
    history = AnswerHistory()
    history.remember(answered("a", "", 100))
    assert history.num_pending == 103
    history.catch_up(40)
    assert (len(history), history.num_pending) == (40, 63)
    history.catch_up(1000)
    assert history.num_pending == 0


def test_nothing_of_a_request_is_kept_after_its_end() -> None:
    copyist = Copyist(machine(per_token=1e-4))
    copyist.serve(
        *((make_request(f"r{i}", [*TEXT, i], max_tokens=30), TEXT[i : i + 30]) for i in range(4))
    )
    speculator = copyist.speculator
    assert not speculator.guesser._tracks and not speculator._pending
    assert speculator.guesser.num_own_tokens == 0


def count_lookups(guesser: Guesser) -> list[int]:
    """The lengths of those that are looked up, in a list that grows."""
    asked: list[int] = []
    propose = guesser._propose

    def counting(own: object, answers: object, tokens: list[int], *rest: Any) -> Any:
        asked.append(len(tokens))
        return propose(own, answers, tokens, *rest)

    guesser._propose = counting
    return asked


@pytest.mark.parametrize("deepest", [1, 2, 8, 32])
@pytest.mark.parametrize(("per_token", "decodes"), [(1e-5, 1), (2e-4, 16), (2e-4, 64), (4e-4, 64)])
def test_a_guess_is_worth_looking_for_if_all_its_tokens_together_are(
    per_token: float, decodes: int, deepest: int
) -> None:
    market = Market(machine(per_token=per_token), step_of(decodes))
    least = market.least_chance

    def earned(chance: float) -> float:
        beyond = (chance**depth - least for depth in range(1, deepest + 1))
        return market.seconds_a_token * sum(gain for gain in beyond if gain > 0.0)

    for seconds in (1e-6, 2e-5, 8e-5, 3e-4):
        bar = market.worth_asking(seconds, deepest)
        if bar > 1.0:
            assert earned(1.0) <= seconds
        else:
            assert earned(bar) >= 0.99 * seconds and earned(bar - 0.01) <= seconds


def test_where_rows_are_dear_the_certain_is_still_looked_for() -> None:
    """One token of a guess would not pay for the look where 64 decode, several do."""
    market = Market(machine(per_token=4e-4), step_of(64))
    assert 0.6 < market.least_chance < 0.8
    asking = (1.0 - market.least_chance) * market.seconds_a_token
    assert market.worth_asking(asking, 1) > 1.0
    assert market.worth_asking(asking, 8) < 0.97


def test_those_whose_guesses_do_not_pay_are_asked_less_often_where_many_run() -> None:
    copyist = Copyist(machine(per_token=4e-3), max_num_seqs=32, max_num_batched_tokens=512)
    asked = count_lookups(copyist.speculator.guesser)
    copyist.serve(
        *(
            (make_request(f"r{i}", 8, max_tokens=60), range(500 + 60 * i, 560 + 60 * i))
            for i in range(24)
        )
    )
    assert len(asked) < 24 * 60 / 6
    assert len(asked) >= 24 * 2, "all are tried now and then"


def test_a_request_that_begins_to_copy_is_found_where_many_run() -> None:
    copyist = Copyist(machine(per_token=1e-4), max_num_seqs=32, max_num_batched_tokens=512)
    text = list(range(1000, 1080))
    others = [
        (make_request(f"r{i}", 8, max_tokens=140), range(5000 + 140 * i, 5140 + 140 * i))
        for i in range(15)
    ]
    late = make_request("late", [*text, 7], max_tokens=140)
    copyist.serve((late, [*range(3000, 3060), *text]), *others)
    steps = [drafts for drafts in copyist.drafts if "late" in drafts]
    assert len(steps) < 60 + len(text) - 20


def test_no_look_is_taken_while_no_match_can_be_long_enough() -> None:
    guesser = Guesser()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 4]
    request = make_request("r", prompt, max_tokens=40, temperature=0.0)
    step = Step(64)
    request.num_computed = 0
    step.enter(request, tuple(request.tokens))
    guesser.index_prompts(step)
    asked = count_lookups(guesser)
    bar = OwnRecord().chance(0.84)  # a match of 16 tokens is believed to do, one of 8 is not
    for token_id in [*range(5, 12), *range(20, 41)]:
        request.tokens.append(token_id)
        request.num_computed = len(request.tokens) - 1
        step = Step(64)
        step.enter(request, (token_id,))
        guesser.guess_all(step, lambda _: 9, 32, bar, bar)
        # What is found by trial is not what this is about.
        guesser._tracks[request].until_trial = 1000
    # On trial, a match of less than four tokens: 13 tokens later it could be of 16. Again it is
    # of less than four, so that it takes as long once more.
    assert asked == [14, 14 + 13, 14 + 26]


@pytest.mark.parametrize(("num_expected", "most"), [(1, 32), (16, 32), (64, 8), (600, 1)])
def test_of_many_requests_none_is_guessed_far_ahead(num_expected: int, most: int) -> None:
    guesser = Guesser()
    request = make_request("r", [*range(100, 160), *range(100, 110)], temperature=0.0)
    request.num_computed = len(request.tokens) - 1
    step = Step(512)
    step.enter(request, (request.tokens[-1],))
    (guess,) = guesser.guess_all(step, lambda _: 100, num_expected, 0.0, 0.0)
    assert len(guess.tokens) == most
    assert guess.tokens == list(range(110, 110 + most))


def test_what_a_chance_needs_is_what_makes_it() -> None:
    for results in ((), (True,) * 8, (False,) * 5, (True, False, True)):
        record = OwnRecord()
        for is_right in results:
            record.note(0.5, is_right)
        for chance in (0.1, 0.5, 0.9):
            assert record.chance(record.needed_rate(chance)) == pytest.approx(chance, abs=0.01)


def test_the_least_level_is_the_shortest_match_with_a_cell_as_good() -> None:
    table = AcceptanceTable()
    assert table.least_level(0, False, 0.0) == 0
    assert table.least_level(0, False, 0.99) == len(LEVELS)
    cell = cell_of(0, False, 1, MOST)
    for _ in range(300):
        table.note(cell, True)
    assert table.least_level(0, False, 0.9) == 1
    assert table.least_level(1, False, 0.9) == 5
    for _ in range(300):
        table.note(cell, False)
    assert table.least_level(0, False, 0.9) == 5
