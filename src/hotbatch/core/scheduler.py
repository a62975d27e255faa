"""The scheduler: which tokens go through the model together, step by step.

`plan` decides one step, `commit` takes in what it yielded. In between, any number of requests
may arrive or be cancelled, and further plans may be made: `plan` advances its own counts, and
a request whose next token is not known yet has nothing to compute. Steps run and are
committed in the order of their plans.

Before a step is filled, running requests get the blocks that their next tokens need. Where
none are left, a request chosen by policy gives its own (`preemption`), and nobody of its class
or a lower one enters this step, for the newcomer would only be the next victim.

Then the step is filled under one budget of tokens, class by class from the highest down; with
the plain policies there is one class only. In each class:

1. Paused requests of the class go on where they were, if there are seats (`seating`).
2. Its running requests with one token to compute (decodes), oldest first.
3. Parts of the prompts of its running requests: in order of arrival and as large as the budget,
   or by deadline and as large as the predicted time of the step allows (`step_time`, `shares`).
4. Waiting requests (`class_queue` says in which order), as long as there are seats, budget and
   blocks for all their known tokens. Where seats or blocks lack, those of lower classes are
   taken: a seat by pausing, blocks from the end of a victim.

Admission stops at the first request that does not fit, so a large one is not overtaken for
ever; only siblings of a group, while their prompt is being computed, let others pass. The
batch class is owed a small share of all tokens (`owed_share`), and age lifts a request of it.
As somebody always is spared by the choice of victims and is known to fit when alone, it always
ends, and so does everybody after it.

What is left of the budget may go to guesses of the next tokens of those that decode
(`speculation`), in blocks that nobody wants (`drafting`). And where nobody waits, what nobody has
asked for yet is computed ahead (`idle_work`).

Cost: planning is linear in the running requests, with nothing in it that grows with their
length; waiting requests cost nothing until there is room for them.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel
from hotbatch.core.drafting import DraftFiller
from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.group import GroupRegistry
from hotbatch.core.idle_work import IdleWork
from hotbatch.core.kv_cache import KvCache
from hotbatch.core.light_tenants import LightTenants
from hotbatch.core.owed_share import OwedShare, OwedShares
from hotbatch.core.plan import (
    FinishReason,
    PlannedRequest,
    RequestResult,
    StepPlan,
    StepResult,
    TokenEvent,
)
from hotbatch.core.policies import Policies, batch_start, seats_to_fill
from hotbatch.core.preemption import Preemptor
from hotbatch.core.rank import Rank
from hotbatch.core.request import Request, RequestEvent, RequestState
from hotbatch.core.request_check import check_request, max_output
from hotbatch.core.roster import Roster
from hotbatch.core.seating import Seating
from hotbatch.core.speculation import AheadBook, Drafter, EachAlone
from hotbatch.core.stats import SchedulerStats
from hotbatch.core.step import Step
from hotbatch.core.step_filling import StepFiller
from hotbatch.core.step_mix import HeldBack
from hotbatch.core.step_time import prompt_seconds
from hotbatch.core.turnaround import Turnaround
from hotbatch.core.urgency import Urgency
from hotbatch.core.waiting_queue import WaitingQueue

_BANKED = 2.0  # times a request's target: how far ahead of it being early may put it


class Scheduler:
    """Plans steps for requests and books their results. Not thread-safe, except `check`.

    Args:
        config: sizes and modes.
        policies: the choices that may differ; the default is first come, first served.
        cost_model: predicts the time of steps; one is made if the policies need it.
        drafter: guesses next tokens; without one, `policies.propose_drafts` does, if anything.
        ahead: the books of guessed requests; without them, nothing is computed ahead. Closed
            batches take no guesses.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policies: Policies | None = None,
        cost_model: CostModel | None = None,
        drafter: Drafter | None = None,
        ahead: AheadBook | None = None,
    ) -> None:
        self.config = config
        self._policies = policies = policies or Policies()
        self._is_closed_mode = config.batching != "continuous"
        if cost_model is None and policies.deadlines:
            cost_model = CostModel()
        self.cost_model = cost_model
        self._counters: list[VirtualTokenCounters] | None = None
        if policies.fairness:
            weights = config.tenant_weights
            self._counters = [VirtualTokenCounters(weights) for _ in Rank]
        self._kv = KvCache(config, cost_model)
        seconds_for = prompt_seconds(cost_model, config.max_num_batched_tokens)
        self._roster = Roster(self._counters, config.max_num_batched_tokens, config.block_size)
        self._shares = OwedShares(
            OwedShare(config.batch_share),
            OwedShare(config.late_share, memory=config.max_num_batched_tokens),
        )
        self._preemptor = Preemptor(self._roster, self._kv, policies, self._shares.chosen)
        light_tenants: LightTenants | None = None
        if policies.deadlines and self._counters is not None:
            light_tenants = LightTenants(self._roster, self._counters, config.tenant_weights)
        self._seating = Seating(
            config,
            policies,
            self._roster,
            self._kv,
            self._preemptor,
            self._counters,
            light_tenants,
        )
        self._urgency = Urgency(config, policies, self._roster, self._shares)
        self._turnaround = Turnaround()
        if drafter is None and policies.propose_drafts is not None:
            drafter = EachAlone(policies.propose_drafts)
        self._drafter = drafter
        self._filler = StepFiller(
            policies,
            self._roster,
            self._kv,
            self._preemptor,
            self._seating,
            self._urgency,
            self._shares,
            cost_model,
            self._counters,
            seconds_for,
            config.max_num_batched_tokens,
            config.max_chunk,
            light_tenants,
            self._turnaround,
            drafter,
        )
        self._draft_filler: DraftFiller | None = None
        if drafter is not None:
            self._draft_filler = DraftFiller(
                config, drafter, self._roster, self._kv, self._preemptor, self._seating
            )
        self.idle_work = IdleWork(
            config,
            None if self._is_closed_mode else ahead,
            self._roster,
            self._kv,
            self._preemptor,
            self._seating,
            cost_model,
        )
        self._answered: list[TokenEvent] = []  # on arrival, not told yet
        self._gathering = WaitingQueue()  # of a static batch that is not formed yet
        self._closed_batch: set[Request] = set()  # live members of a static batch
        self._draining: set[Request] = set()  # ended, but a step in flight uses their blocks
        self._groups = GroupRegistry()
        self._steps: dict[int, Step] = {}  # in flight, oldest first
        self._expiries: list[tuple[float, int, Request]] = []  # a heap
        self._next_order = 0
        self._next_step_id = 0
        self._num_expired = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    # Arrivals and departures

    def check(self, request: Request) -> None:
        """Refuse what can never be served; pure, so any thread may call it.

        Raises:
            ContextLengthError: prompt plus output exceed the model's context or the KV pool.
            InvalidRequestError: an empty prompt, or a token id outside the vocabulary.
        """
        check_request(request, self.config)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: as in `check`, or its id belongs to a live request.
        """
        check_request(request, self.config)
        roster = self._roster
        if request.request_id in roster.by_id:
            raise InvalidRequestError(
                f"A request with id {request.request_id!r} is being served already; "
                "use another id.",
                param="request_id",
            )
        request.order = self._next_order
        self._next_order += 1
        request.max_output = max_output(request, self.config)
        self._urgency.classify(request)
        request.queue_key = self._policies.waiting_key(request)
        if self._answer(request):
            return
        roster.by_id[request.request_id] = request
        self._groups.join(request)
        if request.group is not None:
            self._urgency.inherit(request.group.leader, request.rank)
        if self._is_closed_mode:
            self._gathering.push(request)
        else:
            roster.enqueue(request)
        time_to_live = self.config.queue_time_to_live
        if time_to_live is not None and request.num_output == 0:
            entry = (request.arrival + time_to_live, request.order, request)
            heappush(self._expiries, entry)

    def cancel(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> TokenEvent | None:
        """End a request now, wherever it stands; None if no live request has this id.

        If a step in flight computes it, its part of the result will be ignored, and its
        blocks come back when that step is committed.
        """
        request = self._roster.by_id.get(request_id)
        if request is None:
            return None
        self._take_out(request)
        self._end(request, reason)
        return self._event(request)

    def expire(self, now: float) -> list[TokenEvent]:
        """End the requests that have waited longer than the queue's time to live."""
        events = []
        heap = self._expiries
        while heap and heap[0][0] <= now:
            request = heappop(heap)[2]
            if self._awaits_first_seat(request):
                self._take_out(request)
                self._end(request, FinishReason.ERROR)
                self._num_expired += 1
                events.append(self._expiry_event(request))
        return events

    def answered(self) -> list[TokenEvent]:
        """What requests got on arrival, as it was computed before they came."""
        events, self._answered = self._answered, []
        return events

    @property
    def has_classes(self) -> bool:
        """True if a higher class displaces lower ones."""
        return self._policies.classes and not self._is_closed_mode

    @property
    def is_fair(self) -> bool:
        """True if the tenants of a class take turns."""
        return self._policies.fairness and not self._is_closed_mode

    @property
    def has_work(self) -> bool:
        """True while any request is live or any step is in flight."""
        return bool(self._roster.by_id or self._steps)

    # One step

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute now."""
        step = Step(self.config.max_num_batched_tokens)
        self._kv.note_time(now)
        self._preemptor.begin()
        self._seating.begin()
        self.idle_work.make_way()
        if self._urgency.lift_aged(self._next_order, now):
            self._next_order += 1
        self._urgency.raise_pressing(now)
        owed = self._urgency.call_owed(now)
        self._preemptor.make_room(is_idle=not self._steps)
        if self._is_closed_mode:
            self._seat_closed_batch(now)
        self._filler.fill(step, owed, now)
        if not step.planned and not self._steps:
            self._filler.move_somebody(step, now)
        for request in owed:
            self._urgency.settle(request)
        if step.planned and self._draft_filler is not None:
            self._draft_filler.fill(step, now)
        self.idle_work.fill(step, now)
        return self._close_plan(step) if step.planned else None

    def next_wakeup(self, now: float) -> float | None:
        """When something happens though nothing else does, in seconds; None if nothing will.

        Either a static batch that gathers starts, so that `plan` yields something, or a request
        has waited too long, so that `expire` does.
        """
        moments = []
        if self._is_closed_mode and self._gathering and not self._closed_batch:
            moments.append(batch_start(self.config, self._gathering[0].arrival))
        heap = self._expiries
        while heap and not self._awaits_first_seat(heap[0][2]):
            heappop(heap)
        if heap:
            moments.append(heap[0][0])
        return max(now, min(moments)) if moments else None

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take in a step's result: new tokens, finished requests, freed and findable blocks."""
        self._kv.note_time(now)
        step = self._close_step(plan)
        assert result.step_id == plan.step_id, "the result belongs to another plan"
        if self.cost_model is not None and step.features is not None:
            self.cost_model.observe(step.features, result.seconds)
        self._turnaround.note_commit(now, result.seconds)
        events: list[TokenEvent] = []
        counters = self._counters
        charges: dict[tuple[int, str], int] = {}
        ended = False
        num_asked = len(step.requests) - step.num_ahead
        for planned, request, outcome in zip(
            plan.requests[:num_asked],
            step.requests[:num_asked],
            result.requests[:num_asked],
            strict=True,
        ):
            assert outcome.request_id == planned.request_id, "results are not in plan order"
            request.in_flight -= 1
            if request.state is RequestState.FINISHED:
                self._drain(request)
                continue
            event = self._book(request, planned, outcome, now)
            if event is None:
                continue
            events.append(event)
            if event.finish_reason is not None:
                ended = True
            if counters is not None:
                account = request.account
                charges[account] = charges.get(account, 0) + len(event.token_ids)
        if ended:
            self._roster.drop_finished()
        if step.num_ahead:
            self.idle_work.commit(plan, result, step)
        if self._drafter is not None:
            self._drafter.settle(plan, result)
        if counters is not None:
            for (rank, tenant), num_output in charges.items():
                counters[rank].charge(tenant, num_output=num_output)
        return events

    def fail(self, plan: StepPlan, message: str) -> list[TokenEvent]:
        """The whole step failed: end its requests with an error."""
        step = self._close_step(plan)
        if self._drafter is not None:
            self._drafter.drop(plan)
        events: list[TokenEvent] = []
        if step.num_ahead:
            self.idle_work.fail(step)
        for request in step.requests[: len(step.requests) - step.num_ahead]:
            request.in_flight -= 1
            if request.state is RequestState.FINISHED:
                self._drain(request)
            else:
                self._take_out(request)
                self._end(request, FinishReason.ERROR)
                events.append(self._event(request, error=message))
        return events

    # What it looks like inside

    def stats(self) -> SchedulerStats:
        pool = self._kv.pool
        num_running, num_paused = len(self._roster.running), len(self._roster.paused)
        drafts = self._drafter.accounts() if self._drafter is not None else {}
        num_held = self.idle_work.num_held
        return SchedulerStats(
            num_running=num_running,
            num_waiting=len(self._roster) - num_running - num_paused,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached + num_held,
            blocks_used=pool.num_used - num_held,
            prefix_query_tokens=self._kv.query_tokens,
            prefix_hit_tokens=self._kv.hit_tokens,
            preemptions=self._preemptor.num_preemptions,
            steps=self._next_step_id,
            prompt_tokens=self._num_prompt_tokens,
            generated_tokens=self._num_generated_tokens,
            num_paused=num_paused,
            num_evicted=self._roster.num_evicted,
            pauses=self._preemptor.num_pauses,
            expired=self._num_expired,
            guesses={**drafts, **self.idle_work.accounts()},
            returns=self._kv.returns.calibration() if self._kv.returns is not None else (),
            num_guesses=self.idle_work.num_guesses,
        )

    def check_integrity(self) -> None:
        """Assert that no block and no request is lost or in two places."""
        held = [source for step in self._steps.values() for source, _ in step.copies]
        self.idle_work.check_integrity()
        holders = [*self._roster.holders, *self._draining, *self.idle_work.holders]
        self._kv.check_integrity(holders, held)
        self._groups.check_integrity()
        self._roster.check_integrity()
        num_placed = len(self._roster.running) + sum(map(len, self._roster.queues))
        assert num_placed + len(self._gathering) == len(self._roster), "a request is lost"
        live = set(self._roster.by_id.values())
        assert self._closed_batch <= live, "a finished request keeps a batch open"
        assert live.issuperset(self._shares.chosen), "a finished request takes a share"
        for request in live:
            assert request.rank < Rank.OWED, f"{request!r} is owed something for ever"
        for request in self._draining:
            assert request.in_flight > 0, f"{request!r} keeps its blocks for no step"
        if not live:
            assert not len(self._groups), "a group outlived its members"

    # Parts of a plan

    def _seat_closed_batch(self, now: float) -> None:
        """Form the next static batch once the last one has ended to its last member.

        Members that end early leave their seats empty until then: that waste is what static
        batching is, and it is not hidden here.
        """
        waiting = self._gathering
        if self._closed_batch or not waiting:
            return
        count = seats_to_fill(self.config, len(waiting), waiting[0].arrival, now)
        for _ in range(count):
            request = waiting.pop()
            self._closed_batch.add(request)
            self._roster.enqueue(request)

    def _close_plan(self, step: Step) -> StepPlan:
        preempted, paused = self._preemptor.end()
        predicted = None
        if self.cost_model is not None:
            predicted = self.cost_model.predict(step.measure()) + step.draft_seconds
        held_back = self._held_back()
        plan = StepPlan(
            self._next_step_id,
            tuple(step.planned),
            tuple(step.copies),
            preempted,
            paused,
            predicted,
            step.mix(held_back),
            step.model_drafts,
            step.num_ahead,
        )
        self._next_step_id += 1
        self._steps[plan.step_id] = step
        if self._drafter is not None:
            self._drafter.planned(plan)
        return plan

    def _held_back(self) -> HeldBack | None:
        """Why requests are not in the step that was just filled."""
        num_running = len(self._roster.running)
        if len(self._roster) == num_running:
            return None
        if self._seating.is_blocked:
            return HeldBack.KV
        is_full = num_running >= self._seating.limit
        return HeldBack.SEATS if is_full or self._is_closed_mode else None

    def _answer(self, request: Request) -> bool:
        """Give a request that comes what is known of its answer; True if that is all of it.

        Otherwise it goes on from there like one that has lost its KV.
        """
        given = self.idle_work.answer(request)
        if given is None:
            return False
        request.num_cached = request.num_prompt
        request.first_token_at = request.arrival
        request.due = inf
        self._num_prompt_tokens += request.num_prompt
        self._num_generated_tokens += len(given.token_ids)
        if given.reason is not None:
            request.apply(RequestEvent.FINISH)
            request.finish_reason = given.reason
        self._answered.append(
            TokenEvent(
                request.request_id,
                given.token_ids,
                given.logprobs,
                finish_reason=given.reason,
                stop_token_id=request.stop_token_id,
                num_prompt=request.num_prompt,
                num_output=request.num_output,
                num_cached=request.num_prompt,
            )
        )
        return given.reason is not None

    # Booking

    def _close_step(self, plan: StepPlan) -> Step:
        assert plan.step_id in self._steps, f"step {plan.step_id} is not in flight"
        assert plan.step_id == next(iter(self._steps)), "steps are committed in order"
        step = self._steps.pop(plan.step_id)
        self._kv.pool.release([source for source, _ in step.copies])
        return step

    def _book(
        self, request: Request, planned: PlannedRequest, outcome: RequestResult, now: float
    ) -> TokenEvent | None:
        if outcome.error is not None:
            self._finish(request, FinishReason.ERROR)
            return self._event(request, error=outcome.error)
        if outcome.prompt_logprobs:
            request.prompt_logprobs.extend(outcome.prompt_logprobs)
        if planned.sample is None:
            request.num_committed = planned.context_len
            self._kv.index(request)
            return None
        return self._book_tokens(request, planned, outcome, now)

    def _book_tokens(
        self, request: Request, planned: PlannedRequest, outcome: RequestResult, now: float
    ) -> TokenEvent:
        """Append sampled tokens up to the first that ends the request."""
        assert 1 <= len(outcome.token_ids) <= planned.num_drafts + 1, (
            f"{request!r} got {len(outcome.token_ids)} tokens for {planned.num_drafts} drafts"
        )
        num_known = num_after = len(request.tokens)
        is_first = num_known == request.num_prompt
        reason = None
        for token_id in outcome.token_ids:
            reason = request.append(token_id)
            num_after += 1
            if reason is not None:
                break
        num_new = num_after - num_known
        # An accepted draft is computed; a refused one is not, nor is the last token sampled.
        request.num_computed = request.num_committed = num_after - 1
        if (num_after - 1) // self._kv.block_size > request.num_indexed:
            self._kv.index(request)
        if planned.num_drafts:
            self._kv.shrink(request, num_after)
        self._num_generated_tokens += num_new
        if is_first:
            self._num_prompt_tokens += request.num_prompt
            self._note_first_token(request, now)
        if request.promised.tpot is not None:
            num_output = num_after - request.num_prompt
            request.due = _next_due(request, num_output, request.promised.tpot, now)
        if reason is not None:
            self._seating.note_end(request, now)
            self._finish(request, reason)
        return TokenEvent(
            request.request_id,
            outcome.token_ids[:num_new],
            outcome.logprobs[:num_new],
            tuple(request.prompt_logprobs) if is_first else (),
            reason,
            request.stop_token_id,
            None,
            None,
            request.num_prompt,
            num_after - request.num_prompt,
            request.num_cached or 0,
        )

    def _note_first_token(self, request: Request, now: float) -> None:
        request.first_token_at = now
        request.due = inf
        self._urgency.note_first_token(request)

    def _event(self, request: Request, error: str | None = None) -> TokenEvent:
        return TokenEvent(
            request.request_id,
            finish_reason=request.finish_reason,
            error=error,
            num_prompt=request.num_prompt,
            num_output=request.num_output,
            num_cached=request.num_cached or 0,
        )

    def _expiry_event(self, request: Request) -> TokenEvent:
        return TokenEvent(
            request.request_id,
            finish_reason=request.finish_reason,
            error=(
                f"The request waited {self.config.queue_time_to_live:g} seconds in the queue "
                "without being started, which is the longest this server lets one wait. "
                "Please try again later."
            ),
            error_reason="queue_ttl",
            num_prompt=request.num_prompt,
        )

    # Endings

    def _awaits_first_seat(self, request: Request) -> bool:
        # A member of a static batch that has formed is about to start.
        return request.state is RequestState.WAITING and request not in self._closed_batch

    def _take_out(self, request: Request) -> None:
        """Take a request that is about to end out of its seat or its queue."""
        if self._is_closed_mode and self._awaits_first_seat(request):
            self._gathering.remove(request)
        else:
            self._roster.leave(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request while a step is booked: seats are cleared once, behind the last one."""
        if request.state is not RequestState.RUNNING:
            self._take_out(request)  # it was paused while the step ran
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finish a request; whoever calls takes it out of its seat or its queue."""
        request.apply(RequestEvent.FINISH)
        request.finish_reason = reason
        del self._roster.by_id[request.request_id]
        self._groups.leave(request)
        self._closed_batch.discard(request)
        self._shares.drop(request)
        if self._drafter is not None:
            self._drafter.end(request)
        if reason is not FinishReason.ERROR:
            self.idle_work.remember(request)
        self._draining.add(request)
        self._drain(request)

    def _drain(self, request: Request) -> None:
        """Take an ended request's blocks back as soon as no step in flight uses them."""
        if request.in_flight == 0:
            self._kv.release(request)
            self._draining.discard(request)


def _next_due(request: Request, num_output: int, seconds_per_token: float, now: float) -> float:
    """When the next token is due: so that the average since the first one keeps the target.

    Tokens that came early do not add up without end, or a stall would be spent on them.
    """
    assert request.first_token_at is not None
    on_average = request.first_token_at + num_output * seconds_per_token
    latest = now + _BANKED * seconds_per_token
    return on_average if on_average < latest else latest
