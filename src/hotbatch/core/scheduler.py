"""The scheduler: which tokens go through the model together, step by step.

`plan` decides one step, `commit` takes in what it yielded. In between, any number of requests
may arrive or be cancelled, and further plans may be made: `plan` advances its own counts, and
a request whose next token is not known yet has nothing to compute. Steps run and are
committed in the order of their plans.

A step is filled in this order, under one budget of tokens:

1. Running requests with one token to compute (decodes), oldest first. Where one of them needs
   a block and none is left, a running request is evicted: it gives its blocks back and is
   recomputed later from the head of the queue, without emitting anything twice.
2. Parts of the prompts of running requests, oldest first.
3. Waiting requests, as long as there are seats, budget and blocks for all their known tokens;
   none if this step evicted somebody, for the newcomer would only be the next victim.

Admission stops at the first request that does not fit, so a large one is not overtaken for
ever; only siblings of a group, while their prompt is being computed, let others pass. As the
oldest request is never the victim of a newer one and is known to fit when alone, it always
ends, and so does everybody after it.

Cost: planning is linear in the running requests, with nothing in it that grows with their
length; waiting requests cost nothing until there is room for them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from math import ceil
from operator import attrgetter

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.errors import InvalidRequestError
from hotbatch.core.group import GroupRegistry
from hotbatch.core.kv_cache import KvCache
from hotbatch.core.plan import (
    FinishReason,
    PlannedRequest,
    Preemption,
    RequestResult,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenEvent,
)
from hotbatch.core.policies import Policies, batch_start, seats_to_fill
from hotbatch.core.request import Request, RequestEvent, RequestState
from hotbatch.core.request_check import check_request, max_output
from hotbatch.core.stats import SchedulerStats
from hotbatch.core.waiting_queue import WaitingQueue

_by_order = attrgetter("order")


@dataclass(slots=True)
class _Step:
    """A step while it is planned and until it is committed.

    `requests` runs parallel to `planned`; results are booked on these objects, not looked up
    by id, as a cancelled request's id may be in use again by then.
    """

    budget: int
    planned: list[PlannedRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Plans steps for requests and books their results. Not thread-safe, except `check`.

    Args:
        config: sizes and modes.
        policies: the choices that may differ; the default is first come, first served.
    """

    def __init__(self, config: SchedulerConfig, policies: Policies | None = None) -> None:
        self.config = config
        self._policies = policies or Policies()
        self._kv = KvCache(config)
        self._watermark = ceil(config.watermark * config.num_blocks)
        self._requests: dict[str, Request] = {}  # all live ones, by id
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # oldest first
        self._draining: set[Request] = set()  # ended, but a step in flight uses their blocks
        self._groups = GroupRegistry()
        self._closed_batch: set[Request] = set()  # live members of a static batch
        self._seated = self._waiting if config.batching == "continuous" else WaitingQueue()
        self._steps: dict[int, _Step] = {}  # in flight, oldest first
        self._preempted: list[Preemption] = []  # since the last plan
        self._next_order = 0
        self._next_step_id = 0
        self._num_preemptions = 0
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
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"A request with id {request.request_id!r} is being served already; "
                "use another id.",
                param="request_id",
            )
        request.order = self._next_order
        self._next_order += 1
        request.max_output = max_output(request, self.config)
        request.queue_key = self._policies.waiting_key(request)
        self._requests[request.request_id] = request
        self._groups.join(request)
        self._waiting.push(request)

    def cancel(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> TokenEvent | None:
        """End a request now, wherever it stands; None if no live request has this id.

        If a step in flight computes it, its part of the result will be ignored, and its
        blocks come back when that step is committed.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        else:
            self._queue_of(request).remove(request)
        self._end(request, reason)
        return self._event(request)

    @property
    def has_work(self) -> bool:
        """True while any request is live or any step is in flight."""
        return bool(self._requests or self._steps)

    # One step

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute now."""
        step = _Step(self.config.max_num_batched_tokens)
        evicted = self._make_room()
        self._plan_running(step)
        if not evicted:
            self._seat_closed_batch(now)
            self._admit(step)
        if not step.planned:
            return None
        plan = StepPlan(
            self._next_step_id,
            tuple(step.planned),
            tuple(step.copies),
            tuple(self._preempted),
        )
        self._next_step_id += 1
        self._preempted.clear()
        self._steps[plan.step_id] = step
        return plan

    def next_wakeup(self, now: float) -> float | None:
        """When `plan` may yield something though nothing else happens, in seconds.

        That is the case only while a static batch is gathering; None otherwise.
        """
        if self.config.batching == "continuous" or self._closed_batch or not self._waiting:
            return None
        return max(now, batch_start(self.config, self._waiting[0].arrival))

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take in a step's result: new tokens, finished requests, freed and findable blocks."""
        step = self._close_step(plan)
        assert result.step_id == plan.step_id, "the result belongs to another plan"
        events: list[TokenEvent] = []
        ended = False
        for planned, request, outcome in zip(
            plan.requests, step.requests, result.requests, strict=True
        ):
            assert outcome.request_id == planned.request_id, "results are not in plan order"
            request.in_flight -= 1
            if request.state is RequestState.FINISHED:
                self._drain(request)
                continue
            event = self._book(request, planned, outcome)
            if event is not None:
                events.append(event)
                ended = ended or event.finish_reason is not None
        if ended:
            self._drop_finished()
        return events

    def fail(self, plan: StepPlan, message: str) -> list[TokenEvent]:
        """The whole step failed: end its requests with an error."""
        step = self._close_step(plan)
        events: list[TokenEvent] = []
        for request in step.requests:
            request.in_flight -= 1
            if request.state is RequestState.FINISHED:
                self._drain(request)
            else:
                self._end(request, FinishReason.ERROR)
                events.append(self._event(request, error=message))
        self._drop_finished()
        return events

    # What it looks like inside

    def stats(self) -> SchedulerStats:
        pool = self._kv.pool
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_used=pool.num_used,
            prefix_query_tokens=self._kv.query_tokens,
            prefix_hit_tokens=self._kv.hit_tokens,
            preemptions=self._num_preemptions,
            steps=self._next_step_id,
            prompt_tokens=self._num_prompt_tokens,
            generated_tokens=self._num_generated_tokens,
        )

    def check_integrity(self) -> None:
        """Assert that no block and no request is lost or in two places."""
        held = [source for step in self._steps.values() for source, _ in step.copies]
        self._kv.check_integrity([*self._running, *self._draining], held)
        self._groups.check_integrity()
        queued = list(self._waiting)
        if self._seated is not self._waiting:
            queued += self._seated
        for request in queued:
            assert request.state in (RequestState.WAITING, RequestState.EVICTED)
            assert not request.block_table, f"{request!r} waits with blocks"
            assert request.num_computed == request.num_committed == 0
        for request in self._running:
            assert request.state is RequestState.RUNNING
            assert request.num_committed <= request.num_computed <= request.capacity
        live = [*queued, *self._running]
        assert len(live) == len(self._requests), "a request is lost or in two places"
        assert all(self._requests[request.request_id] is request for request in live)
        assert self._closed_batch <= set(live), "a finished request keeps a batch open"
        for request in self._draining:
            assert request.in_flight > 0, f"{request!r} keeps its blocks for no step"
        if not self._requests:
            assert not len(self._groups), "a group outlived its members"

    # Planning

    def _make_room(self) -> bool:
        """Give running requests the blocks that their known tokens need; True if it evicted."""
        short = [request for request in self._running if len(request.tokens) > request.capacity]
        evicted = False
        for request in short:
            while request.state is RequestState.RUNNING:
                if self._kv.grow(request, len(request.tokens)):
                    break
                victim = self._policies.choose_victim(self._evictable())
                if victim is request and self._steps:
                    break  # blocks will come back with a step in flight
                self._evict(victim, "out of KV blocks")
                evicted = True
        return evicted

    def _evictable(self) -> list[Request]:
        # Blocks that a step in flight writes to must stay where they are.
        return [request for request in self._running if not request.in_flight]

    def _evict(self, request: Request, reason: str) -> None:
        self._running.remove(request)
        request.apply(RequestEvent.EVICT)
        if request.group is not None:
            request.group.dethrone(request)
        self._kv.release(request)
        request.num_computed = request.num_committed = 0
        request.num_evictions += 1
        if request.num_output == 0:
            request.prompt_logprobs.clear()  # gathered anew by the recomputation
        request.queue_key = self._policies.waiting_key(request)
        self._queue_of(request).push(request)
        self._preempted.append(Preemption(request.request_id, reason))
        self._num_preemptions += 1

    def _plan_running(self, step: _Step) -> None:
        chunks: list[Request] = []
        # Every running request can have one token; only what is over is spent on drafts.
        spare = step.budget - len(self._running)
        for request in self._running:
            num_uncomputed = len(request.tokens) - request.num_computed
            if num_uncomputed == 1:
                if len(request.tokens) <= request.capacity:
                    spare -= self._plan_decode(step, request, spare)
            elif num_uncomputed > 1:
                chunks.append(request)
        for request in chunks:
            if step.budget <= 0:
                break
            self._plan_chunk(step, request)

    def _plan_decode(self, step: _Step, request: Request, spare: int) -> int:
        """Plan the one token that is left; returns how many drafts were added to it."""
        start = request.num_computed
        tokens: tuple[int, ...] = (request.tokens[start],)
        if spare > 0 and self._policies.propose_drafts is not None:
            tokens += self._drafts(request, spare)
        self._enter(step, request, tokens, num_drafts=len(tokens) - 1)
        return len(tokens) - 1

    def _drafts(self, request: Request, spare: int) -> tuple[int, ...]:
        propose = self._policies.propose_drafts
        if propose is None or request.banned():
            return ()  # a sample spec bans tokens for one position only
        limit = min(
            spare,
            request.max_output - request.num_output - 1,  # the last token needs no successor
            # Guesses never take a block that work could have: they live in the table's last one.
            request.capacity - len(request.tokens),
        )
        return tuple(propose(request, limit))[:limit] if limit > 0 else ()

    def _plan_chunk(self, step: _Step, request: Request, at_least: int = 0) -> None:
        start = request.num_computed
        num_uncomputed = len(request.tokens) - start
        size = self._policies.chunk_size(request, num_uncomputed, step.budget)
        size = min(max(size, at_least), num_uncomputed, step.budget)
        if size > 0:
            self._enter(step, request, tuple(request.tokens[start : start + size]))

    def _enter(
        self, step: _Step, request: Request, tokens: tuple[int, ...], num_drafts: int = 0
    ) -> None:
        start = request.num_computed
        end = start + len(tokens)
        num_known = len(request.tokens)
        sample = None
        if end >= num_known:
            sample = SampleSpec(
                request.params,
                request.seed,
                num_known,
                request.num_prompt,
                tuple(request.tokens) if request.needs_history else (),
                request.banned() if request.banned_early else (),
            )
        next_tokens: tuple[int, ...] = ()
        if request.params.prompt_logprobs is not None and num_known == request.num_prompt:
            next_tokens = tuple(request.tokens[start + 1 : end + 1])
        step.planned.append(
            PlannedRequest(
                request.request_id,
                start,
                tokens,
                request.block_table,
                sample,
                num_drafts,
                request.params.prompt_logprobs if next_tokens else None,
                next_tokens,
            )
        )
        step.requests.append(request)
        step.budget -= len(tokens)
        request.num_computed = end
        request.in_flight += 1

    # Admission

    def _seat_closed_batch(self, now: float) -> None:
        """Form the next static batch once the last one has ended to its last member.

        Members that end early leave their seats empty until then: that waste is what static
        batching is, and it is not hidden here.
        """
        if self._seated is self._waiting or self._closed_batch or not self._waiting:
            return
        count = seats_to_fill(self.config, len(self._waiting), self._waiting[0].arrival, now)
        for _ in range(count):
            request = self._waiting.pop()
            self._closed_batch.add(request)
            self._seated.push(request)

    def _admit(self, step: _Step) -> None:
        queue = self._seated
        index = 0
        while (
            index < len(queue) and step.budget > 0 and len(self._running) < self.config.max_num_seqs
        ):
            request = queue[index]
            if request.group is not None and request.group.is_prompt_pending():
                index += 1
                continue
            if not self._place(step, request):
                break
            queue.pop(index)
            # At least one token, as its copy and its place in the batch are made in this step.
            self._plan_chunk(step, request, at_least=1)

    def _place(self, step: _Step, request: Request) -> bool:
        group = request.group
        owner = group.prompt_owner() if group is not None else None
        # When nobody runs, nobody needs room to grow.
        keep_free = self._watermark if self._running else 0
        placement = self._kv.place(request, owner, keep_free)
        if placement is None:
            return False
        if placement.copy is not None:
            step.copies.append(placement.copy)
        request.apply(RequestEvent.ADMIT)
        insort(self._running, request, key=_by_order)
        if group is not None:
            group.lead(request)
        return True

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self._seated if request in self._closed_batch else self._waiting

    # Booking

    def _close_step(self, plan: StepPlan) -> _Step:
        assert plan.step_id in self._steps, f"step {plan.step_id} is not in flight"
        assert plan.step_id == next(iter(self._steps)), "steps are committed in order"
        step = self._steps.pop(plan.step_id)
        self._kv.pool.release([source for source, _ in step.copies])
        return step

    def _book(
        self, request: Request, planned: PlannedRequest, outcome: RequestResult
    ) -> TokenEvent | None:
        if outcome.error is not None:
            self._end(request, FinishReason.ERROR)
            return self._event(request, error=outcome.error)
        request.prompt_logprobs.extend(outcome.prompt_logprobs)
        if planned.sample is None:
            request.num_committed = planned.context_len
            self._kv.index(request)
            return None
        return self._book_tokens(request, planned, outcome)

    def _book_tokens(
        self, request: Request, planned: PlannedRequest, outcome: RequestResult
    ) -> TokenEvent:
        """Append sampled tokens up to the first that ends the request."""
        assert 1 <= len(outcome.token_ids) <= planned.num_drafts + 1, (
            f"{request!r} got {len(outcome.token_ids)} tokens for {planned.num_drafts} drafts"
        )
        is_first = request.num_output == 0
        num_known = len(request.tokens)
        reason = None
        for token_id in outcome.token_ids:
            reason = request.append(token_id)
            if reason is not None:
                break
        num_new = len(request.tokens) - num_known
        # An accepted draft is computed; a refused one is not, nor is the last token sampled.
        request.num_computed = request.num_committed = num_known + num_new - 1
        if request.num_committed // self._kv.block_size > request.num_indexed:
            self._kv.index(request)
        self._num_generated_tokens += num_new
        if is_first:
            self._num_prompt_tokens += request.num_prompt
        if reason is not None:
            self._end(request, reason)
        return TokenEvent(
            request.request_id,
            tuple(request.tokens[num_known:]),
            outcome.logprobs[:num_new],
            tuple(request.prompt_logprobs) if is_first else (),
            reason,
            request.stop_token_id,
            None,
            None,
            request.num_prompt,
            request.num_output,
            request.num_cached or 0,
        )

    def _event(self, request: Request, error: str | None = None) -> TokenEvent:
        return TokenEvent(
            request.request_id,
            finish_reason=request.finish_reason,
            error=error,
            num_prompt=request.num_prompt,
            num_output=request.num_output,
            num_cached=request.num_cached or 0,
        )

    # Endings

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finish a request; whoever calls takes it out of `_running` or its queue."""
        request.apply(RequestEvent.FINISH)
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._groups.leave(request)
        self._closed_batch.discard(request)
        self._draining.add(request)
        self._drain(request)

    def _drain(self, request: Request) -> None:
        """Take an ended request's blocks back as soon as no step in flight uses them."""
        if request.in_flight == 0:
            self._kv.release(request)
            self._draining.discard(request)

    def _drop_finished(self) -> None:
        self._running = [
            request for request in self._running if request.state is RequestState.RUNNING
        ]
