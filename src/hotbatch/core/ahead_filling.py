"""The very last part of a step: guessed requests have what nobody who came wants.

A guess has no seat, stands in no queue and is counted nowhere. It joins a step after everything
else, if nobody waits, no prompt is being computed and its rows pay (`speculation.ahead_pricing`).
It holds KV blocks only while it joins one step after another: as soon as somebody waits, or
blocks run short, it lets go of them before anybody is placed. What it computed stays findable
until others need the room, and goes first (`KvCache.release_guess`), so going on later costs the
last part of a block. All guesses together hold a share of the pool at most.

Cost: nothing where there are no guesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf
from typing import NamedTuple

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.kv_cache import KvCache
from hotbatch.core.plan import (
    FinishReason,
    PlannedRequest,
    RequestResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from hotbatch.core.preemption import Preemptor
from hotbatch.core.request import Request
from hotbatch.core.request_check import check_request, max_output
from hotbatch.core.roster import Roster
from hotbatch.core.seating import Seating
from hotbatch.core.speculation.ahead import AheadBook, Guess
from hotbatch.core.speculation.ahead_pricing import AheadPrices
from hotbatch.core.step import Step
from hotbatch.core.step_time import prompt_seconds


class Given(NamedTuple):
    """The beginning of an answer that a request got at once; `reason` if that was all of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason | None


class AheadFiller:
    """Computes the guesses of a book."""

    def __init__(
        self,
        config: SchedulerConfig,
        book: AheadBook,
        roster: Roster,
        kv: KvCache,
        preemptor: Preemptor,
        seating: Seating,
        model: CostModel | None,
    ) -> None:
        self._config = config
        self.book = book
        self._roster = roster
        self._kv = kv
        self._preemptor = preemptor
        self._seating = seating
        self._model = model
        self._seconds_for = prompt_seconds(model, config.max_num_batched_tokens)
        self._max_blocks = int(config.ahead_kv_share * config.num_blocks)
        self._num_reserved = ceil(config.watermark * config.num_blocks)
        self._guesses: dict[Request, Guess] = {}  # those that hold blocks
        self._leaving: set[Request] = set()  # settled, but a step in flight uses their blocks
        self._next_order = 0

    @property
    def holders(self) -> Iterator[Request]:
        """Those that hold blocks."""
        yield from self._guesses
        yield from self._leaving

    @property
    def num_held(self) -> int:
        """Blocks that only guesses use."""
        if not self._guesses:
            return 0
        return sum(
            self._kv.pool.ref_count(block) == 1
            for request in self._guesses
            for block in request.block_table
        )

    # Guesses come and go

    def offer(self, request: Request, chance: float, now: float) -> None:
        """Take a guess in.

        Raises:
            InvalidRequestError: it could never be served.
        """
        check_request(request, self._config)
        request.order = self._next_order
        self._next_order += 1
        request.max_output = max_output(request, self._config)
        request.num_cached = 0  # whatever it finds is nobody's hit
        for guess in self.book.offer(request, chance, now):
            self._let_go(guess.request)

    def reprice(self, request_id: str, chance: float) -> None:
        """A guess became more or less likely; 0 ends it."""
        guess = self.book.reprice(request_id, chance)
        if guess is not None:
            self._let_go(guess.request)

    def answer(self, request: Request) -> Given | None:
        """Give a request that came what is known of its answer; None if nothing is."""
        claim = self.book.claim(request)
        if claim is None:
            return None
        reason = None
        num_used = 0
        if claim.answer is not None:
            for token_id in claim.answer.token_ids:
                reason = request.append(token_id)
                num_used += 1
                if reason is not None:
                    break
        saved = num_used * self._decode_seconds(len(request.tokens))
        num_own = 0 if claim.guess is None else claim.guess.num_own_prompt
        prompt_saved = self._seconds_for(request.num_prompt - num_own, num_own) if num_own else 0.0
        self.book.settle_claim(claim, num_used, saved, prompt_saved)
        if claim.guess is not None:
            self._let_go(claim.guess.request)
        if claim.answer is None or not num_used:
            return None
        return Given(
            tuple(claim.answer.token_ids[:num_used]), claim.answer.logprobs[:num_used], reason
        )

    # Steps

    def make_way(self) -> None:
        """Before a step is filled: whoever waits, or has to grow, finds no block taken."""
        if not self._guesses:
            return
        needed = len(self._roster.running) + self._num_reserved
        if self._roster.num_queued or self._kv.pool.num_available < needed:
            self._release_all()

    def fill(self, step: Step, now: float) -> None:
        """Let guesses into a step that holds everything else already."""
        if not self.book.has_live:
            return
        joined: set[Request] = set()
        if self._may_join(step):
            latest = self._latest_end(step, now)
            prices = AheadPrices(self._model, step.measure(), len(step.planned), latest)
            step.close_asked()
            if prices.is_open:
                joined = self._join(step, prices)
            step.ahead_seconds = prices.added_seconds
        for request in list(self._guesses):
            if request not in joined:
                self._release(request)

    def commit(self, plan: StepPlan, result: StepResult, step: Step) -> None:
        """Take in what the guesses of a step yielded."""
        first = len(step.requests) - step.num_ahead
        requests = step.requests[first:]
        num_tokens = sum(len(planned.tokens) for planned in plan.requests[first:])
        per_token = step.ahead_seconds / num_tokens
        for planned, request, outcome in zip(
            plan.requests[first:], requests, result.requests[first:], strict=True
        ):
            assert outcome.request_id == planned.request_id, "results are not in plan order"
            request.in_flight -= 1
            guess = self._guesses.get(request)
            if guess is None:
                self._drain(request)
                continue
            guess.attempted += len(planned.tokens)
            guess.num_computed = max(guess.num_computed, planned.context_len)
            guess.seconds += per_token * len(planned.tokens)
            self._book(guess, planned, outcome)

    def fail(self, step: Step) -> None:
        """The step of these guesses failed: nobody asked for them."""
        for request in step.requests[len(step.requests) - step.num_ahead :]:
            request.in_flight -= 1
            guess = self._guesses.get(request)
            if guess is None:
                self._drain(request)
            else:
                self._refute(guess)

    def check_integrity(self) -> None:
        """Assert that no guess holds blocks for nothing, and that they hold their share at most."""
        self.book.check_integrity()
        live = {guess.request for guess in self.book.live()}
        assert self._guesses.keys() <= live, "a guess that is over holds blocks"
        for request in self._leaving:
            assert request.in_flight > 0, f"{request!r} keeps its blocks for no step"
        num_held = sum(len(request.block_table) for request in self._guesses)
        assert num_held <= self._max_blocks, f"guesses hold {num_held} blocks"

    # Joining a step

    def _may_join(self, step: Step) -> bool:
        """Nobody waits or was sent away, and of those that run only decodes are in the step."""
        return (
            not self._roster.num_queued
            and (bool(step.planned) or not self._roster.running)
            and not self._seating.is_blocked
            and self._preemptor.highest_victim < 0
            and not step.prompts.num_tokens
        )

    def _join(self, step: Step, prices: AheadPrices) -> set[Request]:
        joined: set[Request] = set()
        has_chunk = False  # one prompt at a time: the first is sooner done
        for guess in self.book.live():
            if step.budget <= 0 or len(step.planned) >= self._config.max_num_seqs:
                break
            request = guess.request
            if request.in_flight:
                joined.add(request)  # its next token is not known yet
                continue
            if not prices.pays(len(request.tokens) - 1, 1, 1, guess.chance):
                break  # nor does a row of any that is less likely
            if not self._hold(guess, joined):
                continue
            num_uncomputed = len(request.tokens) - request.num_computed
            size = 1
            if num_uncomputed > 1:
                if has_chunk:
                    continue
                size = prices.chunk(request.num_computed, num_uncomputed)
                size = min(size, self._config.max_chunk, step.budget)
            num_sampled = int(size == num_uncomputed)
            if size > 0 and prices.take(request.num_computed, size, num_sampled, guess.chance):
                has_chunk = has_chunk or num_uncomputed > 1
                step.enter_ahead(request, size)
                joined.add(request)
        return joined

    def _hold(self, guess: Guess, joined: set[Request]) -> bool:
        """Give a guess blocks for all that is known of it, on the KV that there is.

        Those that joined the step already are likelier; all others give theirs.
        """
        request = guess.request
        num_blocks = -(-len(request.tokens) // self._kv.block_size)
        if num_blocks == len(request.block_table):
            return True
        if num_blocks > self._max_blocks:
            self.book.finish(guess, None)  # it gets no further
            self._let_go(request)
            return False
        for other in reversed(list(self._guesses)):
            if self._num_spare(request) >= num_blocks:
                break
            if other is not request and other not in joined:
                self._release(other)
        if self._num_spare(request) < num_blocks:
            return False
        kept = len(self._roster.running) + self._num_reserved
        if request.block_table:
            at_most = self._kv.pool.num_available - kept
            return self._kv.grow(request, len(request.tokens), at_most=at_most)
        if not self._kv.place_ahead(request, kept):
            return False
        if guess.num_found is None:
            guess.num_found = min(request.num_computed, request.num_prompt)
        self._guesses[request] = guess
        return True

    def _num_spare(self, request: Request) -> int:
        """Blocks that a guess may hold, those of the others given."""
        others = sum(len(other.block_table) for other in self._guesses if other is not request)
        return self._max_blocks - others

    def _latest_end(self, step: Step, now: float) -> float:
        """Seconds until the first moment at which a token is due that the step keeps as it is."""
        if self._model is None or not step.planned:
            return inf
        safe = now + self._model.predict_p95(step.measure())
        return min((r.due for r in step.requests if r.due >= safe), default=inf) - now

    def _decode_seconds(self, context: int) -> float:
        if self._model is None:
            return 0.0
        return self._model.predict(StepFeatures().plus_decode(context))

    # Booking

    def _book(self, guess: Guess, planned: PlannedRequest, outcome: RequestResult) -> None:
        request = guess.request
        if outcome.error is not None:
            self._refute(guess)
            return
        if planned.sample is None:
            request.num_committed = planned.context_len
            self._kv.index(request, is_guess=True)
            return
        token_id = outcome.token_ids[0]
        request.num_committed = len(request.tokens)
        reason = request.append(token_id)
        guess.logprobs += outcome.logprobs[:1]
        self._kv.index(request, is_guess=True)
        if reason is not None:
            self.book.finish(guess, reason)
            self._let_go(request)

    def _refute(self, guess: Guess) -> None:
        self.book.refute(guess)
        self._let_go(guess.request)

    # Letting go of blocks

    def _let_go(self, request: Request) -> None:
        """A guess is over: its blocks come back as soon as no step uses them."""
        if self._guesses.pop(request, None) is not None:
            self._leaving.add(request)
            self._drain(request)

    def _drain(self, request: Request) -> None:
        if request.in_flight == 0 and request in self._leaving:
            self._leaving.discard(request)
            self._kv.release_guess(request)

    def _release_all(self) -> None:
        for request in list(self._guesses):
            self._release(request)

    def _release(self, request: Request) -> None:
        """Take a guess's blocks; it goes on from what is found of them."""
        if request.in_flight:
            return
        del self._guesses[request]
        self._kv.release_guess(request)
        request.num_computed = request.num_committed = request.num_indexed = 0
