"""A smaller model as a source of guesses: when it pays to ask it, and what it computes then.

Nothing is run here. What the draft model is to compute stands in the plan (`ModelDraft`), and
the executor does it right before the step itself: one pass over what the draft model does not
know of each text yet, then one pass for each further guess. It draws with the request's own
parameters and randomness, so that where both models agree on a distribution they agree on the
token, at any temperature.

The price is that of those passes, by a cost model of their own, on top of the rows to verify;
the earnings follow from how often its guesses come true (`acceptance`). Depth by depth, the
market says what a second yields, and the best depth is taken, none included. A text that the
draft model does not know is an investment: it is read, part by part, when the guesses of the
output still to come are expected to pay for that.

What does not pay is not tried, and so would never be known to pay: a hundredth of the time may
be spent on trials.

The draft model has KV blocks of its own. Who gets none is not guessed for.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import ModelDraft, StepPlan, StepResult
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.speculation.acceptance import MODEL, AcceptanceTable, OwnRecord, cell_of
from hotbatch.core.speculation.ledger import Ledger
from hotbatch.core.speculation.pricing import Market
from hotbatch.core.speculation.suffix_index import LEVELS, SOLE
from hotbatch.core.step import Step

_DEEPEST = 8  # passes of the draft model before a step
_READY = 16  # tokens unknown to the draft model that its first pass takes along
_LEAST_PART = 16  # tokens of a text that are read at once at least ...
_PART_SHARE = 0.5  # ... or as many as take this share of a step
_TRIALS = 0.01  # share of the time that may be spent on guesses that do not seem to pay
_USUAL_OUTPUT = 64.0  # tokens of an answer, until some have ended
_OUTPUT_MEMORY = 0.95
_USUAL_START = 256  # position of a guess whose request is not there yet


@dataclass(frozen=True, slots=True)
class DraftModelShape:
    """What the draft model holds: `num_blocks` KV blocks of `block_size` tokens, texts of up to
    `max_model_len` tokens whose ids are below `vocab_size`."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int


class Candidate(NamedTuple):
    """A decode at `place` of the step that may have up to `limit` guesses; `reach` are the
    chances of those that are there without the draft model."""

    place: int
    request: Request
    limit: int
    reach: Sequence[float]


class Taken(NamedTuple):
    """How many guesses of each place are verified, of the draft model's and of others.

    `rate` is in tokens per second as far as it is known, `seconds` is predicted for the passes.
    """

    rate: float
    by_model: Mapping[int, int]
    others: Mapping[int, int]
    seconds: float


class _Ready(NamedTuple):
    """Whom the draft model could guess for at once, and the chance of each of its guesses and all
    before it, as far as that can pay."""

    candidate: Candidate
    reach: Sequence[float]

    @property
    def is_better(self) -> bool:
        """Its guesses promise more tokens than the others that there are, as deep as they go."""
        return sum(self.reach) > sum(self.candidate.reach[:_DEEPEST])


class _Seat:
    """What the draft model knows of a request: the first `num_computed` tokens."""

    __slots__ = ("blocks", "is_out", "num_computed", "params", "record")

    def __init__(self, params: SamplingParams) -> None:
        self.params = dataclasses.replace(params, logprobs=None, prompt_logprobs=None)
        self.blocks: tuple[int, ...] = ()
        self.num_computed = 0
        self.record = OwnRecord()
        self.is_out = False  # its text is too long, or has tokens that the draft model lacks


class DraftModel:
    """Decides what a draft model computes, and learns what that costs and yields.

    Args:
        cost_model: of the draft model; nothing is asked of it before its passes are known.
    """

    def __init__(self, cost_model: CostModel, shape: DraftModelShape) -> None:
        self.cost_model = cost_model
        self._shape = shape
        self._free = list(range(shape.num_blocks - 1, -1, -1))
        self._seats: dict[Request, _Seat] = {}
        self._allowance = 0.0  # seconds of trials
        self._usual_output = _USUAL_OUTPUT

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    # Deciding

    def draft(
        self,
        market: Market,
        acceptance: AcceptanceTable,
        candidates: Sequence[Candidate],
        step: Step,
        latest: float,
    ) -> Taken | None:
        """Let the draft model into a step (`Step.model_drafts`) if that pays; None if not.

        Args:
            candidates: whom it may guess for.
            latest: seconds that the step may take for sure.
        """
        if not candidates or not self.cost_model.can_price_rows:
            return None
        self._allowance = min(self._allowance + _TRIALS * market.seconds, market.seconds)
        ready = {}
        for candidate in candidates:
            if self._lag(candidate.request) <= _READY and self._make_room(candidate.request):
                chances = self._chances(candidate, acceptance)
                ready[candidate.place] = _Ready(candidate, _reach(chances, market.least_chance))
        without = _take(market, _others(market, candidates), latest, 0.0)
        taken = self._best(market, ready, candidates, latest, without)
        if taken is None:
            taken = self._trial(market, ready, latest, without)
        if taken is not None:
            step.model_drafts = tuple(self._work(step, place) for place in taken.by_model)
            step.draft_seconds = taken.seconds
            return taken
        part = self._part_to_read(market, acceptance, candidates, latest)
        if part is not None:
            step.model_drafts = (part,)
            step.draft_seconds = self._predict([(part.start, len(part.tokens))])
        return None

    def _best(
        self,
        market: Market,
        ready: Mapping[int, _Ready],
        candidates: Sequence[Candidate],
        latest: float,
        without: Taken,
    ) -> Taken | None:
        """The number of passes, and of guesses, that yields the most tokens per second; None if
        that is `without` the draft model.

        It guesses for all those whose other guesses promise less than its own.
        """
        asked = [one for one in ready.values() if one.is_better]
        places = {one.candidate.place for one in asked}
        others = _others(market, [one for one in candidates if one.place not in places])
        best = without
        for depth in range(1, _DEEPEST + 1):
            if not any(len(one.reach) >= depth for one in asked):
                break
            own = [
                (-chance, one.candidate.place, True)
                for one in asked
                for chance in one.reach[:depth]
            ]
            seconds = self._passes_seconds(asked, depth)
            found = _take(market, others + own, latest, seconds)
            if found.by_model and found.rate > best.rate:
                best = found
        return best if best.by_model else None

    def _trial(
        self, market: Market, ready: Mapping[int, _Ready], latest: float, without: Taken
    ) -> Taken | None:
        """One guess that does not seem to pay, if there was none for long."""
        if self._allowance < market.seconds or not ready:
            return None
        place, one = next(iter(ready.items()))
        seconds = self._first_pass([one.candidate.request])
        if not market.is_in_time(1, latest, seconds):
            return None
        self._allowance -= seconds + market.added_seconds(1)
        others = {other: count for other, count in without.others.items() if other != place}
        return Taken(0.0, {place: 1}, others, seconds)

    def _part_to_read(
        self,
        market: Market,
        acceptance: AcceptanceTable,
        candidates: Sequence[Candidate],
        latest: float,
    ) -> ModelDraft | None:
        """A part of the first text that will pay for being read, or of any now and then."""
        for candidate in candidates:
            request = candidate.request
            lag = self._lag(request)
            if lag <= _READY or not self._make_room(request):
                continue
            start = self._seat(request).num_computed
            gain = self._gain(market, self._chances(candidate, acceptance), len(candidates))
            pays = gain * self._output_left(request) > self._predict([(start, lag)])
            if not pays and self._allowance < market.seconds:
                continue
            size = self._size_of_part(market, start, lag, latest)
            if size:
                if not pays:
                    self._allowance -= self._predict([(start, size)])
                tokens = tuple(request.tokens[start : start + size])
                return ModelDraft(candidate.place, start, tokens, self._seat(request).blocks)
        return None

    def _size_of_part(self, market: Market, start: int, lag: int, latest: float) -> int:
        """As many tokens as take their share of the step, within the deadlines."""
        seconds = min(_PART_SHARE * market.seconds, latest - market.seconds)
        size = self.cost_model.largest_chunk(StepFeatures(), start, lag, seconds)
        return max(size, min(_LEAST_PART, lag)) if latest == inf else size

    def _work(self, step: Step, place: int) -> ModelDraft:
        """What is computed for guesses at a place."""
        request, sample = step.requests[place], step.planned[place].sample
        assert sample is not None, f"{request!r} is guessed for, but does not sample"
        seat = self._seat(request)
        start = seat.num_computed
        sample = sample._replace(params=seat.params)
        return ModelDraft(place, start, tuple(request.tokens[start:]), seat.blocks, sample)

    # Learning

    def settle(
        self,
        plan: StepPlan,
        result: StepResult,
        requests: Sequence[Request],
        acceptance: AcceptanceTable,
        ledger: Ledger,
    ) -> None:
        """Take in what the draft model computed; `requests` run parallel to `plan.model_drafts`."""
        for draft, request in zip(plan.model_drafts, requests, strict=True):
            seat = self._seats.get(request)
            if seat is None:
                continue  # it has ended
            seat.num_computed = draft.start + len(draft.tokens)
            num_drafts = plan.requests[draft.place].num_drafts if draft.sample is not None else 0
            outcome = result.requests[draft.place]
            if not num_drafts or outcome.error is not None or not outcome.token_ids:
                continue
            num_right = len(outcome.token_ids) - 1
            # The last guess was drawn, but not computed.
            seat.num_computed += min(num_right, num_drafts - 1)
            for depth in range(min(num_right + 1, num_drafts)):
                is_right = depth < num_right
                cell = _cell(request, depth)
                rate = acceptance.rates[cell]
                ledger.note_chance(seat.record.chance(rate), is_right)
                acceptance.note(cell, is_right)
                seat.record.note(rate, is_right)
        for features, seconds in zip(_passes(plan), result.draft_seconds, strict=True):
            self.cost_model.observe(features, seconds)

    def end(self, request: Request) -> None:
        """A request has ended: its blocks are free."""
        seat = self._seats.pop(request, None)
        if request.num_output:
            self._usual_output *= _OUTPUT_MEMORY
            self._usual_output += (1.0 - _OUTPUT_MEMORY) * request.num_output
        if seat is not None:
            self._free += seat.blocks

    def check_integrity(self) -> None:
        """Assert that no block is lost or in two places."""
        held = [block for seat in self._seats.values() for block in seat.blocks]
        assert sorted(held + self._free) == list(range(self._shape.num_blocks))

    # What is known and held

    def _seat(self, request: Request) -> _Seat:
        seat = self._seats.get(request)
        if seat is None:
            seat = self._seats[request] = _Seat(request.params)
        return seat

    def _lag(self, request: Request) -> int:
        """Tokens that the draft model does not know yet."""
        seat = self._seats.get(request)
        return len(request.tokens) - (seat.num_computed if seat is not None else 0)

    def _make_room(self, request: Request) -> bool:
        """Blocks for all its tokens and the deepest guesses; False if that cannot be."""
        seat = self._seat(request)
        shape = self._shape
        needed = len(request.tokens) + _DEEPEST
        if seat.is_out or needed > shape.max_model_len:
            return False
        missing = -(-needed // shape.block_size) - len(seat.blocks)
        if missing > len(self._free):
            return False
        if missing > 0:
            seat.blocks += tuple(self._free.pop() for _ in range(missing))
        if max(request.tokens[seat.num_computed :], default=0) >= shape.vocab_size:
            seat.is_out = True
        return not seat.is_out

    def _output_left(self, request: Request) -> float:
        """Tokens that a request is expected to write yet: by what others wrote, doubling from
        there on."""
        expected = self._usual_output
        while expected <= request.num_output:
            expected *= 2.0
        return min(expected, float(request.max_output)) - request.num_output

    # Prices

    def _chances(self, candidate: Candidate, acceptance: AcceptanceTable) -> list[float]:
        """Of each guess, given that those before it are right."""
        record = self._seat(candidate.request).record
        return [
            record.chance(acceptance.rates[_cell(candidate.request, depth)])
            for depth in range(min(_DEEPEST, candidate.limit))
        ]

    def _gain(self, market: Market, chances: Sequence[float], num_sharing: int) -> float:
        """Seconds that guessing is expected to save for each token, at the best depth; passes are
        shared by `num_sharing` requests."""
        best, reach, rows = 0.0, 1.0, 0.0
        for depth, chance in enumerate(chances, start=1):
            reach *= chance
            rows += reach
            shared = depth * self._pass_of(num_sharing) / num_sharing
            saved = rows * market.seconds_a_token - market.added_seconds(depth) - shared
            best = max(best, saved / (1.0 + rows))
        return best

    def _pass_of(self, num_requests: int) -> float:
        """Seconds of one more guess for each of so many requests."""
        return self._predict([(_USUAL_START, 1)] * num_requests)

    def _first_pass(self, requests: Sequence[Request]) -> float:
        """Seconds until there is one guess for each of these."""
        return self._predict(
            [(self._seat(request).num_computed, self._lag(request)) for request in requests]
        )

    def _passes_seconds(self, asked: Sequence[_Ready], depth: int) -> float:
        seconds = self._first_pass([one.candidate.request for one in asked])
        for guess in range(2, depth + 1):
            deep = [one.candidate.request for one in asked if len(one.reach) >= guess]
            seconds += self._predict([(len(request.tokens) + guess - 2, 1) for request in deep])
        return seconds

    def _predict(self, rows: Sequence[tuple[int, int]]) -> float:
        return self.cost_model.predict(_pass(rows))


_Offer = tuple[float, int, bool]  # -chance, place, is it the draft model's


def _others(market: Market, candidates: Sequence[Candidate]) -> list[_Offer]:
    """The guesses that are there without the draft model."""
    return [
        (-chance, place, False)
        for place, _, _, reach in candidates
        for chance in reach
        if chance >= market.least_chance
    ]


def _take(market: Market, offers: Sequence[_Offer], latest: float, seconds: float) -> Taken:
    """The best guesses, as many as pay."""
    offers = sorted(offers)
    number, rate = market.best([-chance for chance, _, _ in offers], latest, seconds)
    by_model: Counter[int] = Counter()
    others: Counter[int] = Counter()
    for _, place, is_own in offers[:number]:
        (by_model if is_own else others)[place] += 1
    return Taken(rate, by_model, others, seconds)


def _cell(request: Request, depth: int) -> int:
    level = min(depth, len(LEVELS) - 1)
    return cell_of(MODEL, not request.params.is_greedy, level, SOLE)


def _reach(chances: Sequence[float], least: float) -> list[float]:
    """The chance of each guess and all before it, as far as it is at least `least`."""
    reach, reached = [], 1.0
    for chance in chances:
        reached *= chance
        if reached < least:
            break
        reach.append(reached)
    return reach


def _pass(rows: Sequence[tuple[int, int]], num_sampled: int | None = None) -> StepFeatures:
    """A pass of the draft model over (position, tokens) of some requests; each samples."""
    features = StepFeatures()
    for start, size in rows:
        features = features.plus_chunk(start, size, 1)
    if num_sampled is not None:
        features = features._replace(num_sampled=num_sampled)
    return features


def _passes(plan: StepPlan) -> Iterator[StepFeatures]:
    """What the draft model computes for a plan, pass by pass."""
    if not plan.model_drafts:
        return
    asked = {
        draft.place: draft
        for draft in plan.model_drafts
        if draft.sample is not None and plan.requests[draft.place].num_drafts
    }
    rows = [(draft.start, len(draft.tokens)) for draft in plan.model_drafts]
    yield _pass(rows, len(asked))
    guess = 2
    while rows := [
        (draft.start + len(draft.tokens) + guess - 2, 1)
        for place, draft in asked.items()
        if plan.requests[place].num_drafts >= guess
    ]:
        yield _pass(rows)
        guess += 1
