"""When a draft model is asked, and what is learnt from its guesses; by hand, without any model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_factories import make_config, make_request, must_plan

from hotbatch.core import Request, Scheduler, StepPlan
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import UNKNOWN, RequestResult, StepResult
from hotbatch.core.speculation import DraftModel, DraftModelShape, Speculator

SHAPE = DraftModelShape(num_blocks=40, block_size=16, max_model_len=400, vocab_size=10_000_000)


def machine(fixed: float, per_token: float = 1e-4) -> CostModel:
    model = CostModel()
    for step in range(200):
        tokens = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)[step % 12]
        model.observe(
            StepFeatures(tokens, tokens, 20 * tokens, 20 * tokens, tokens),
            fixed + per_token * tokens,
        )
        if step % 10 == 0:
            model.observe(StepFeatures(200, 1, 200, 20000, 0), fixed + per_token * 200)
    return model


class Pair:
    """A scheduler before a model that answers with tokens that occur once, so that only a draft
    model can guess them; `is_right(position)` says whether it does."""

    def __init__(
        self,
        is_right: Callable[[int], bool],
        pass_seconds: float = 0.001,
        shape: DraftModelShape = SHAPE,
    ) -> None:
        self.draft_model = DraftModel(machine(pass_seconds, 1e-5), shape)
        model = machine(0.01)
        self.speculator = Speculator(model, draft_model=self.draft_model)
        config = make_config(block_size=16, num_blocks=400, max_model_len=400)
        self.scheduler = Scheduler(config, cost_model=model, drafter=self.speculator)
        self.plans: list[StepPlan] = []
        self._is_right = is_right
        self._known: dict[str, int] = {}  # tokens that the draft model has computed

    def serve(self, *requests: Request) -> None:
        by_id = {request.request_id: request for request in requests}
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step(by_id)

    def step(self, by_id: dict[str, Request]) -> None:
        plan = must_plan(self.scheduler, 0.01 * len(self.plans))
        self.plans.append(plan)
        passes = self._check(plan, by_id)
        results = []
        for planned in plan.requests:
            request = by_id[planned.request_id]
            if planned.sample is None:
                results.append(RequestResult(planned.request_id))
                continue
            first = len(request.tokens)
            count = 1
            while count <= planned.num_drafts and self._is_right(first + count - 1):
                count += 1
            begin = 2_000_000 + 1000 * request.order + first
            tokens = tuple(range(begin, begin + count))
            results.append(RequestResult(planned.request_id, tokens))
        result = StepResult(plan.step_id, tuple(results), 0.011, (0.001,) * passes)
        self.scheduler.commit(plan, result, 0.01 * len(self.plans))
        self.scheduler.check_integrity()
        self.draft_model.check_integrity()

    def _check(self, plan: StepPlan, by_id: dict[str, Request]) -> int:
        """What the draft model is asked fits what it was told before; returns its passes."""
        passes = 0
        asked = {draft.place for draft in plan.model_drafts if draft.sample is not None}
        for place, planned in enumerate(plan.requests):
            drafts = planned.tokens[len(planned.tokens) - planned.num_drafts :]
            assert (UNKNOWN in drafts) == (place in asked and planned.num_drafts > 0)
        for draft in plan.model_drafts:
            planned = plan.requests[draft.place]
            request = by_id[planned.request_id]
            assert draft.tokens == tuple(
                request.tokens[draft.start : draft.start + len(draft.tokens)]
            )
            count = planned.num_drafts if draft.sample is not None else 0
            assert len(draft.block_ids) * 16 >= draft.start + len(draft.tokens) + max(0, count - 1)
            assert draft.sample is None or draft.sample.position == len(request.tokens)
            assert draft.start <= self._known.get(planned.request_id, 0), "a gap in its cache"
            self._known[planned.request_id] = draft.start + len(draft.tokens) + max(0, count - 1)
            passes = max(passes, count, 1)
        return passes

    @property
    def num_drafts(self) -> list[int]:
        return [sum(planned.num_drafts for planned in plan.requests) for plan in self.plans]


def test_a_good_draft_model_is_asked_for_several_tokens_at_a_time() -> None:
    pair = Pair(lambda position: True)
    request = make_request("a", 40, max_tokens=200)
    pair.serve(request)
    assert request.num_output == 200
    assert len(pair.plans) < 60
    assert pair.speculator.ledger.account().accepted > 130


def test_a_poor_one_shuts_itself_off_but_for_trials() -> None:
    pair = Pair(lambda position: False)
    for turn in range(4):
        pair.serve(make_request(f"r{turn}", 40, max_tokens=200))
    assert sum(pair.num_drafts[:100]) > 0, "it is given a chance"
    late = pair.num_drafts[-400:]
    seconds = 400 * 0.01  # and a trial takes a pass of a millisecond, and a row
    assert 0 < sum(late) * 0.001 <= 0.01 * seconds, "a hundredth of the time is left for trials"


def test_a_dear_one_is_not_asked_however_good_it_is() -> None:
    pair = Pair(lambda position: True, pass_seconds=0.05)
    pair.serve(make_request("a", 40, max_tokens=200))
    assert sum(pair.num_drafts) <= 4


def test_refused_guesses_leave_the_cache_where_the_texts_part() -> None:
    pair = Pair(lambda position: position % 3 != 0)
    request = make_request("a", 40, max_tokens=150)
    pair.serve(request)
    assert sum(pair.num_drafts) > 50
    account = pair.speculator.ledger.account()
    assert 0 < account.accepted < account.attempted


def test_a_long_text_is_read_in_parts_that_a_step_can_bear() -> None:
    pair = Pair(lambda position: True)
    pair.serve(make_request("a", 300, max_tokens=80))
    read = [draft for plan in pair.plans for draft in plan.model_drafts if draft.sample is None]
    assert sum(len(draft.tokens) for draft in read) >= 280
    assert sum(pair.num_drafts) > 20


def test_nobody_waits_for_the_blocks_of_the_draft_model() -> None:
    few = DraftModelShape(num_blocks=8, block_size=16, max_model_len=400, vocab_size=10_000_000)
    pair = Pair(lambda position: True, shape=few)
    pair.serve(*(make_request(f"r{index}", 40, max_tokens=60) for index in range(6)))
    assert sum(pair.num_drafts) > 0
    assert pair.draft_model.num_free_blocks == 8


@pytest.mark.parametrize(
    ("limit", "prompt"), [("max_model_len", range(60)), ("vocab_size", [5, 70, 6])]
)
def test_texts_that_the_draft_model_cannot_read_are_not_guessed_by_it(
    limit: str, prompt: object
) -> None:
    shape = SHAPE.__class__(**{**_fields(), limit: 64})
    pair = Pair(lambda position: True, shape=shape)
    pair.serve(make_request("a", list(prompt), max_tokens=40))  # type: ignore[call-overload]
    assert not sum(pair.num_drafts)


def _fields() -> dict[str, int]:
    return {"num_blocks": 40, "block_size": 16, "max_model_len": 400, "vocab_size": 10_000_000}


def test_who_opts_out_is_not_read() -> None:
    pair = Pair(lambda position: True)
    request = make_request("a", 40, max_tokens=60)
    request.speculate = False
    pair.serve(request)
    assert not any(plan.model_drafts for plan in pair.plans)
