"""Guesses beside parts of prompts: what they gain goes to those who wait for a first token.

A step takes `FIXED` seconds and `A_ROW` for each of its rows, in virtual time, and the model of
its cost has seen that. So a row costs the same in any step, and a guess beside a prompt gains
what it saves of the fixed part of later steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from core_factories import make_config, make_request, must_plan, result_of

from hotbatch.core import LatencyTargets, Request, Scheduler
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import PlannedRequest
from hotbatch.core.policies import full_policies
from hotbatch.core.rank import Rank
from hotbatch.core.service_class import ServiceClass
from hotbatch.core.speculation import EachAlone, Speculator
from hotbatch.core.speculation.pricing import Market
from hotbatch.core.step import Step
from hotbatch.core.step_time import StepClock

FIXED, A_ROW = 4e-3, 1e-4
NUM_DECODES, NUM_PROMPTS = 16, 12
LENGTH = 400  # tokens of an answer that is copied


def machine() -> CostModel:
    model = CostModel()
    for step in range(300):
        rows = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)[step % 10]
        model.observe(StepFeatures(rows, rows, 50 * rows, 50 * rows, rows), FIXED + A_ROW * rows)
        if step % 5 == 0:
            rows = (80, 150, 300, 512)[step // 5 % 4]
            features = StepFeatures(rows, 20, 50 * rows, 50 * rows, 16)
            model.observe(features, FIXED + A_ROW * rows)
    return model


@dataclass
class Run:
    """What came of it. `beside` are the guesses of steps with a part of a prompt."""

    firsts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    beside: int = 0
    alone: int = 0
    seconds: float = 0.0


def texts(share_right: float) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Prompts and answers: of those who decode (d), that share of the answer copies the prompt;
    those who come later (p) have prompts of their own."""
    draw = random.Random(0)
    prompts, answers = {}, {}
    for number in range(NUM_DECODES):
        text = list(range(1000 * (number + 10), 1000 * (number + 10) + LENGTH))
        prompts[f"d{number}"] = [*text, 5]
        answers[f"d{number}"] = [
            token if draw.random() < share_right else 900_000 + 1000 * number + place
            for place, token in enumerate(text)
        ]
    for number in range(NUM_PROMPTS):
        prompts[f"p{number}"] = list(range(500_000 + 1000 * number, 500_150 + 1000 * number))
        answers[f"p{number}"] = [1, 2, 3, 4]
    return prompts, answers


def serve(share_right: float, *, guesses: bool, promised: LatencyTargets | None = None) -> Run:
    """Those who decode have been at it for a while when all others come at once."""
    prompts, answers = texts(share_right)
    model = machine()
    settings = {} if promised is None else {"targets": {ServiceClass.STANDARD: promised}}
    config = make_config(
        num_blocks=2000,
        block_size=16,
        max_model_len=1000,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        **settings,
    )
    drafter = Speculator(model) if guesses else None
    scheduler = Scheduler(config, full_policies(), model, drafter)
    run, now = Run(), 0.0
    by_id: dict[str, Request] = {}

    def send(kind: str) -> None:
        for name, prompt in prompts.items():
            if name[0] == kind:
                count = len(answers[name])
                request = make_request(name, prompt, max_tokens=count, arrival=now)
                by_id[name] = request
                scheduler.add(request)

    send("d")
    while scheduler.has_work:
        plan = must_plan(scheduler, now)
        num_rows = sum(len(planned.tokens) for planned in plan.requests)
        seconds = FIXED + A_ROW * num_rows
        now += seconds
        tokens = {p.request_id: sampled(p, answers, by_id) for p in plan.requests}
        drafted = sum(planned.num_drafts for planned in plan.requests)
        if any(planned.sample is None for planned in plan.requests):
            run.beside += drafted
        else:
            run.alone += drafted
        for event in scheduler.commit(plan, replace(result_of(plan, tokens), seconds=seconds), now):
            name = event.request_id
            run.firsts.setdefault(name, now - by_id[name].arrival)
            run.tokens.setdefault(name, []).extend(event.token_ids)
            if event.finish_reason is not None:
                run.ends[name] = now
        scheduler.check_integrity()
        if len(by_id) == NUM_DECODES and all(r.num_output > 8 for r in by_id.values()):
            send("p")
    run.seconds = now
    return run


def sampled(
    planned: PlannedRequest, answers: dict[str, Sequence[int]], by_id: dict[str, Request]
) -> tuple[int, ...]:
    """Tokens of the answer, up to the first that a guess missed."""
    guessed = planned.tokens[len(planned.tokens) - planned.num_drafts :]
    rest = answers[planned.request_id][by_id[planned.request_id].num_output :]
    result = []
    for index, token in enumerate(rest[: planned.num_drafts + 1]):
        result.append(token)
        if index < len(guessed) and guessed[index] != token:
            break
    return tuple(result)


def later(run: Run) -> list[float]:
    return sorted(seconds for name, seconds in run.firsts.items() if name[0] == "p")


@pytest.mark.parametrize("share_right", [0.8, 0.9, 1.0])
def test_guesses_that_pay_beside_prompts_bring_first_tokens_forward(share_right: float) -> None:
    """The first of them may wait for the end of a longer step; the others gain more."""
    off, on = serve(share_right, guesses=False), serve(share_right, guesses=True)
    assert on.beside > 100
    assert later(on)[NUM_PROMPTS // 2] < later(off)[NUM_PROMPTS // 2]
    assert later(on)[-1] < 0.85 * later(off)[-1]
    assert sum(later(on)) < 0.85 * sum(later(off))
    assert on.seconds < 0.8 * off.seconds
    assert on.tokens == off.tokens


def test_middling_guesses_are_not_made_beside_prompts() -> None:
    off, on = serve(0.4, guesses=False), serve(0.4, guesses=True)
    assert on.alone > 100
    assert on.beside <= 5  # until it is known how often they come true
    assert max(later(on)) <= 1.02 * max(later(off))
    assert on.tokens == off.tokens


def test_nothing_is_guessed_beside_prompts_where_what_was_promised_bounds_the_step() -> None:
    run = serve(1.0, guesses=True, promised=LatencyTargets(5.0, 0.02))
    assert run.alone > 100
    assert run.beside == 0


def beside_a_prompt(num_decodes: int, size: int, gap: float = inf) -> Step:
    step = Step(512)
    for number in range(num_decodes):
        request = make_request(f"r{number}", 20)
        request.num_computed = 19
        step.enter(request, (request.tokens[19],))
    step.enter_chunk(make_request("prompt", 400), size)
    step.gap = gap
    return step


def test_a_step_takes_as_many_guesses_as_it_was_made_longer_for() -> None:
    model = machine()
    step = beside_a_prompt(10, 200)
    market = Market(model, step, 11)
    certain = [1.0] * 200
    # As long as it would be anyway: a token would come sooner, at the prompt's expense.
    assert market.most_beside(certain, 10, inf) == 0
    assert market.most_beside(certain, 10, market.seconds) == 0
    half = market.most_beside(certain, 10, market.seconds / 2)
    assert 10 <= half < 20
    assert (1 + half / 10) * market.seconds / 2 <= market.seconds + market.added_seconds(half)
    assert market.most_beside(certain, 10, market.seconds / 3) > 2 * half


def test_few_who_decode_beside_prompts_of_many_are_guessed_for() -> None:
    """All that could be guessed for them is less than the least gain of 64, who will decode soon,
    yet each guess earns more than its row costs."""
    market = Market(machine(), beside_a_prompt(2, 200), 64)
    chances = [0.95] * 8
    assert market.best(chances, inf).number == 0
    assert market.number_worth(chances, inf) == 8
    assert market.number_worth([*chances, 0.9 * market.least_chance], inf) == 8
    assert market.number_worth([0.9 * market.least_chance], inf) == 0
    assert market.number_worth(chances, 0.0) == 0


@pytest.mark.parametrize("tokens", [1.0, 2.0, 3.5])
def test_a_step_lasts_as_many_times_as_long_as_it_yields_tokens(tokens: float) -> None:
    model = machine()
    decodes = [make_request(f"r{number}", 20) for number in range(10)]
    decodes_by_rank = [decodes if rank == Rank.STANDARD else [] for rank in Rank]
    newcomer = make_request("prompt", 3000)

    def clock(tokens: float) -> StepClock:
        return StepClock(
            model, decodes_by_rank, (), 1, [-inf] * len(Rank), 0.0, tokens_a_decode=tokens
        )

    def seconds(clock: StepClock) -> float:
        size = clock.tokens_for(Rank.STANDARD, 0, 3000, newcomer)
        return model.predict_p95(StepFeatures(10, 10, 200, 200, 10).plus_chunk(0, size))

    plain, longer = clock(1.0), clock(tokens)
    assert seconds(longer) == pytest.approx(tokens * seconds(plain), rel=0.05)
    assert plain.gap == longer.gap == pytest.approx(seconds(plain), rel=0.05)


def test_who_guesses_alone_lengthens_no_step() -> None:
    assert EachAlone(lambda request, limit: ()).tokens_a_decode == 1.0
