"""Guesses the next tokens of running requests, for the model to verify in the same step.

A decode becomes several rows: its token and a few guessed ones. Each row is sampled exactly as
it would be if the guesses before it were its real past, and what was sampled is kept up to the
first guess that differs; so the output is what it would have been without guessing, and only
the number of steps changes (speculative decoding, arXiv 2211.17192, for guesses without a
distribution).

Guesses come from the request's own text and from its tenant's recent answers (`guessing`, from
`suffix_index` and `history`); how likely they are is learnt (`acceptance`), how many join a step
is a matter of price (`pricing`). The scheduler asks once a step, when everything else has its
place, and tells what came of it.

Where a part of a prompt is computed, somebody waits for a first token, whom guesses would delay:
a row costs its full time there. And those who decode would end sooner, and others come in their
place, so that ever more wait for their first token and ever fewer decode. So beside prompts,
guesses are taken at the same price, but what they gain goes to the prompts: a step that yields
several tokens for each decode lasts as many times as long, and the prompts fill it (`StepClock`);
and no more guesses are taken than it has been made longer for. A token takes as long as it would
without guesses, and the prompts get more of every second. Where the step is no longer than it
would be anyway, or what was promised bounds it, nothing is guessed.

Cost: where no guess could pay, a few predictions a step. Otherwise a microsecond for each request
and some forty for each guess; a request is asked only where its guess could be worth that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from hotbatch.core.cost_model import CostModel
from hotbatch.core.plan import UNKNOWN, StepPlan, StepResult
from hotbatch.core.request import Request
from hotbatch.core.speculation.continuing import PLAIN, Texts
from hotbatch.core.speculation.draft_model import Candidate, DraftModel
from hotbatch.core.speculation.guessing import Guess, Guesser, deepest_guess
from hotbatch.core.speculation.ledger import NEXT_TOKENS, Account, Ledger
from hotbatch.core.speculation.pricing import Market
from hotbatch.core.step import Step

_USES_OF_PRICES = 8  # steps
# Seconds that a guess takes to be found, weighed and learnt from, where the model has just swept
# the caches, and as much again for those that are not found; one that could earn no more is not
# looked for.
_ASKING = 8e-5

# Steps without guesses after which prices are tried, by how many rows, and how likely each is.
_UNTRIED, _TRIED, _SURE = 64, 2, 0.8
# Of its predicted time, what a trial takes that is followed by the next one after so many steps.
_CHEAPER, _AGAIN = 0.9, 2

_NONE: Mapping[int, int] = {}

Drafts = tuple[int, tuple[int, ...]]
"""The index of a request in the step, and the guessed tokens that follow its last one."""


class Drafter(Protocol):
    """What the scheduler asks for guesses."""

    def draft(
        self, step: Step, num_expected: int, limit_of: Callable[[Request], int], now: float
    ) -> Sequence[Drafts]:
        """Guesses for a step that holds everything else already, within `step.budget`.

        Args:
            num_expected: requests that have a seat or are about to get one.
            limit_of: how many guesses a request of the step may have.
        """
        ...

    @property
    def tokens_a_decode(self) -> float:
        """What a step with a part of a prompt may be expected to yield for each request that
        decodes in it, if it is made so much longer; 1 without guesses."""
        ...

    def planned(self, plan: StepPlan) -> None:
        """What was last asked for guesses is this step, and will be settled or dropped."""
        ...

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step that ran."""
        ...

    def drop(self, plan: StepPlan) -> None:
        """A step failed: nothing is to be learnt from it."""
        ...

    def end(self, request: Request) -> None:
        """A request has ended, for whatever reason."""
        ...

    def accounts(self) -> Mapping[str, Account]:
        """The books by distance."""
        ...


class _Pending(NamedTuple):
    """What a step in flight will tell about. `by_model` are the requests of
    `StepPlan.model_drafts`, in that order."""

    guesses: list[Guess]
    by_model: list[Request]
    num_drafts: int
    seconds_spent: float
    seconds_a_token: float


class Speculator:
    """The drafter that is served: guesses by price.

    Args:
        cost_model: predicts steps; before it can tell prices nothing is guessed.
        depth: guess so many tokens for every request instead, whatever they cost; to compare.
        draft_model: what a draft model may be asked, if there is one.
        texts: an implementation of texts; the plain one is slow.
    """

    def __init__(
        self,
        cost_model: CostModel,
        depth: int | None = None,
        draft_model: DraftModel | None = None,
        texts: Texts = PLAIN,
    ) -> None:
        self.ledger = Ledger()
        self.guesser = Guesser(texts)
        self._model = cost_model
        self._depth = depth
        self._draft_model = draft_model
        self._last_market: Market | None = None
        self._kind: tuple[int, ...] = ()  # of the step that those prices are for
        self._num_uses = 0
        self._is_trial = False
        self._num_without = 0  # steps since guesses were verified, or since that was tried
        self._pending: dict[int, _Pending] = {}
        self._asked: _Pending | None = None  # of the step that is being planned
        self._tokens_a_decode = 1.0

    def draft(
        self, step: Step, num_expected: int, limit_of: Callable[[Request], int], now: float
    ) -> Sequence[Drafts]:
        self._asked = None
        if step.budget <= 0 or not self._model.can_price_rows:
            return ()
        is_mixed = step.num_tokens != step.num_decodes
        if is_mixed:
            self.guesser.index_prompts(step)
            if self._depth is None and step.gap == inf:
                return ()
        if not step.num_decodes:
            return ()
        market = self._market(step, num_expected)
        if self._depth is not None:
            guesses = self.guesser.guess_all(step, limit_of, num_expected, 0.0, 0.0, self._depth)
            return self._ask(market, step, guesses, self._take_all(step, guesses))
        if is_mixed:
            return self._draft_beside(market, step, num_expected, limit_of, now)
        least = market.least_chance
        bar = market.worth_asking(_ASKING, deepest_guess(num_expected))
        self._num_without += 1
        if self._num_without > _UNTRIED and bar > _SURE:
            return self._try_prices(market, step, num_expected, limit_of, now)
        if market.is_closed:
            return ()
        guesses = self.guesser.guess_all(step, limit_of, num_expected, bar, least)
        if not guesses and self._draft_model is None:
            return ()
        latest = market.latest_end(_dues(step), now)
        if self._draft_model is not None:
            taken = self._draft_model.draft(
                market, self.guesser.acceptance, _candidates(step, limit_of, guesses), step, latest
            )
            if taken is not None:
                counts = [taken.others.get(guess.place, 0) for guess in guesses]
                return self._ask(market, step, guesses, counts, taken.by_model)
        if not guesses and not step.model_drafts:
            return ()
        return self._ask(market, step, guesses, _take(market, guesses, latest))

    def _draft_beside(
        self,
        market: Market,
        step: Step,
        num_expected: int,
        limit_of: Callable[[Request], int],
        now: float,
    ) -> Sequence[Drafts]:
        """As many guesses as pay, up to those that the prompts are given time for.

        How many that would be without this bound is the length of the next such step.
        """
        if market.seconds <= step.gap and step.num_sampled >= num_expected:
            return ()  # it is no longer than without guesses, and no prompt is left for the next
        self._tokens_a_decode = 1.0
        if market.is_closed:
            return ()
        least = market.least_chance
        bar = market.worth_asking(_ASKING, deepest_guess(num_expected))
        guesses = self.guesser.guess_all(step, limit_of, num_expected, bar, least)
        if not guesses:
            return ()
        offers = _offers(guesses, least)
        chances = [-chance for chance, _ in offers]
        wanted = market.number_worth(chances, market.latest_end(_dues(step), now))
        self._tokens_a_decode = 1.0 + sum(chances[:wanted]) / step.num_decodes
        most = market.most_beside(chances[:wanted], step.num_decodes, step.gap)
        return self._ask(market, step, guesses, _counts(guesses, offers[:most]))

    def _try_prices(
        self,
        market: Market,
        step: Step,
        num_expected: int,
        limit_of: Callable[[Request], int],
        now: float,
    ) -> Sequence[Drafts]:
        """Verify a few guesses that are all but certain, though they seem too dear.

        A price that is believed to be high is paid by nobody, so that nothing would ever be
        learnt of rows that have become cheap: the machine was slow for a while, say. What is all
        but certain costs little more than it earns even where a row costs as much as a token.
        """
        self._num_without = 0
        self._is_trial = True
        guesses = self.guesser.guess_all(step, limit_of, num_expected, _SURE, _SURE)
        latest = market.latest_end(_dues(step), now)
        most = next((n for n in range(_TRIED, 0, -1) if market.is_in_time(n, latest)), 0)
        counts = []
        for guess in guesses:
            counts.append(min(most, step.budget, sum(reach >= _SURE for reach in guess.reach)))
            most -= counts[-1]
        return self._ask(market, step, guesses, counts)

    def _market(self, step: Step, num_expected: int) -> Market:
        """The prices of a step; steps in a row that only decode as many differ too little for new
        ones."""
        kind = (step.num_tokens, step.num_decodes, step.budget, num_expected)
        market = self._last_market
        if market is None or kind != self._kind or self._num_uses >= _USES_OF_PRICES:
            market = Market(self._model, step, num_expected)
            self._last_market, self._kind, self._num_uses = market, kind, 0
            if step.num_tokens != step.num_decodes:
                self._last_market = None
        self._num_uses += 1
        return market

    def _ask(
        self,
        market: Market,
        step: Step,
        guesses: list[Guess],
        counts: Sequence[int],
        by_model: Mapping[int, int] = _NONE,
    ) -> list[Drafts]:
        """Note what the step will tell about; returns the drafts."""
        num_drafts = sum(counts) + sum(by_model.values())
        if num_drafts:
            self._num_without = 0
        spent = market.added_seconds(num_drafts) + step.draft_seconds
        requests = [step.requests[draft.place] for draft in step.model_drafts]
        self._asked = _Pending(guesses, requests, num_drafts, spent, market.seconds_a_token)
        drafts = [
            (guess.place, tuple(guess.tokens[:count]))
            for guess, count in zip(guesses, counts, strict=True)
            if count
        ]
        drafts += [(place, (UNKNOWN,) * count) for place, count in by_model.items()]
        return drafts

    @property
    def tokens_a_decode(self) -> float:
        """As it was in the last step that could have been longer."""
        return self._tokens_a_decode

    def planned(self, plan: StepPlan) -> None:
        """The step of the last `draft` is on its way."""
        if self._asked is not None:
            self._pending[plan.step_id] = self._asked
            self._asked = None

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        guesser = self.guesser
        guesser.catch_up()
        pending = self._pending.pop(plan.step_id, None)
        if pending is None:
            return
        for guess in pending.guesses:
            outcome = result.requests[guess.place]
            if outcome.error is None:
                guesser.learn(guess, outcome.token_ids, self.ledger)
        if self._draft_model is not None:
            self._draft_model.settle(
                plan, result, pending.by_model, guesser.acceptance, self.ledger
            )
        if not (pending.num_drafts or pending.by_model):
            return
        if self._is_trial:
            self._is_trial = False
            if plan.predicted_seconds and result.seconds < _CHEAPER * plan.predicted_seconds:
                self._num_without = _UNTRIED - _AGAIN
        attempted = accepted = 0
        for planned, outcome in zip(plan.requests, result.requests, strict=True):
            if planned.num_drafts and outcome.token_ids:
                attempted += planned.num_drafts
                accepted += len(outcome.token_ids) - 1
        if attempted or pending.by_model:
            saved = accepted * pending.seconds_a_token
            self.ledger.book(attempted, accepted, pending.seconds_spent, saved)

    def drop(self, plan: StepPlan) -> None:
        self._pending.pop(plan.step_id, None)

    def accounts(self) -> Mapping[str, Account]:
        return {NEXT_TOKENS: self.ledger.account()}

    def end(self, request: Request) -> None:
        self.guesser.end(request)
        if self._draft_model is not None:
            self._draft_model.end(request)

    def _take_all(self, step: Step, guesses: Sequence[Guess]) -> list[int]:
        """As many tokens of each guess as the budget holds, whatever they cost."""
        left = step.budget
        counts = []
        for guess in guesses:
            counts.append(min(len(guess.tokens), left))
            left -= counts[-1]
        return counts


def _dues(step: Step) -> list[float]:
    """When the next token of each request is due that gets one in this step."""
    return [
        request.due
        for request, planned in zip(step.requests, step.planned, strict=True)
        if planned.sample is not None
    ]


def _take(market: Market, guesses: Sequence[Guess], latest: float) -> list[int]:
    """How many tokens of each guess are verified."""
    offers = _offers(guesses, market.least_chance)
    best = market.best([-chance for chance, _ in offers], latest)
    return _counts(guesses, offers[: best.number])


def _offers(guesses: Sequence[Guess], least: float) -> list[tuple[float, int]]:
    """The chances of these guesses, negative, and which guess each is of; the best first."""
    return sorted(
        (-chance, index)
        for index, guess in enumerate(guesses)
        for chance in guess.reach
        if chance >= least
    )


def _counts(guesses: Sequence[Guess], taken: Sequence[tuple[float, int]]) -> list[int]:
    """How many tokens of each guess these offers are."""
    counts = [0] * len(guesses)
    for _, index in taken:
        counts[index] += 1
    return counts


def _candidates(
    step: Step, limit_of: Callable[[Request], int], guesses: Sequence[Guess]
) -> list[Candidate]:
    """The decodes of a step that a draft model may guess for."""
    reach = {guess.place: guess.reach for guess in guesses}
    candidates = []
    for place, planned in enumerate(step.planned):
        request = step.requests[place]
        if planned.sample is not None and len(planned.tokens) == 1 and request.speculate:
            limit = limit_of(request)
            if limit > 0:
                candidates.append(Candidate(place, request, limit, reach.get(place, ())))
    return candidates


class EachAlone:
    """Guesses by a function that sees one request at a time, whatever they cost.

    Args:
        propose: (request, limit) -> at most `limit` guessed next tokens.
    """

    def __init__(self, propose: Callable[[Request, int], Sequence[int]]) -> None:
        self._propose = propose

    def draft(
        self, step: Step, num_expected: int, limit_of: Callable[[Request], int], now: float
    ) -> Sequence[Drafts]:
        left = step.budget
        drafts: list[Drafts] = []
        for index, planned in enumerate(step.planned):
            request = step.requests[index]
            if planned.sample is None or len(planned.tokens) != 1 or not request.speculate:
                continue
            limit = min(limit_of(request), left)
            guessed = tuple(self._propose(request, limit))[:limit] if limit > 0 else ()
            if guessed:
                drafts.append((index, guessed))
                left -= len(guessed)
        return drafts

    @property
    def tokens_a_decode(self) -> float:
        """Nothing is known of them."""
        return 1.0

    def planned(self, plan: StepPlan) -> None:
        """Nothing is learnt."""

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Nothing is learnt."""

    def drop(self, plan: StepPlan) -> None:
        """Nothing is learnt."""

    def end(self, request: Request) -> None:
        """Nothing is learnt."""

    def accounts(self) -> Mapping[str, Account]:
        """There are none."""
        return {}
