"""The batch as lanes: what each request did since the last frame, folded from traces of steps.

A frame tells the whole state, not what changed, so that whoever misses one is right again with
the next. What a request did is summed up over the steps of a frame, which makes the frame's
size a matter of the requests in it and not of how fast the steps are.

Runs on the event loop. Folding a step costs some tenths of a microsecond a request in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from math import inf

from hotbatch.core.plan import FinishReason, PlannedRequest
from hotbatch.core.service_class import ServiceClass
from hotbatch.core.speculation import GuessNews
from hotbatch.engine.step_stats import RequestTimings, StepStats
from hotbatch.engine.step_trace import Promise, StepTrace
from hotbatch.server.live_ahead import LiveAhead

# A lane's state in a frame.
RUNNING, PAUSED, EVICTED, DONE, CUT, FAILED = range(6)
LANE_FIELDS = ("number", "class", "state", "prompt", "decode", "drafts", "accepted", "context")
"""A lane is so many integers: an id for as long as it lives, its class (0 batch, 1 standard,
2 interactive), its state, tokens of its prompt computed, tokens decoded (accepted drafts
included), drafts proposed, drafts accepted, and the tokens that it attends to now."""

_ENDINGS = {
    FinishReason.STOP: DONE,
    FinishReason.LENGTH: DONE,
    FinishReason.ABORT: CUT,
    FinishReason.ERROR: FAILED,
}
_MAX_POINTS = 4  # of a frame's steps, for the step curve
_TOTALS = (
    "steps",
    "failed",
    "prompt_tokens",
    "decode_tokens",
    "sampled_tokens",
    "prompt_seconds",  # of steps with a part of a prompt
    "decode_seconds",  # of steps without
    "host_seconds",  # planning, booking, handing over
)
_TIMES_NAMED = 10  # a reader may miss some frames
_RECENT_TOKENS = 512  # latencies that quantiles are taken from, by class
_RECENT_REQUESTS = 128
_STALE_SECONDS = 30.0

Quantiles = tuple[float, float]
Lookup = Callable[[str], Promise | None]


class _Lane:
    """One request, from the first step that was seen to its end."""

    __slots__ = (
        "accepted",
        "arrival",
        "context",
        "decode",
        "drafts",
        "last_token",
        "number",
        "prompt",
        "service_class",
        "state",
        "times_named",
    )

    def __init__(self, number: int, service_class: int, arrival: float | None) -> None:
        self.number = number
        self.service_class = service_class
        self.arrival = arrival  # None if it came before anybody watched
        self.state = RUNNING
        self.context = 0
        self.last_token: float | None = None
        self.times_named = 0
        self.prompt = self.decode = self.drafts = self.accepted = 0


class LiveBatch:
    """Folds traces; `take_frame` says what came together and starts anew.

    Args:
        lookup: finds an outstanding request's facts by its id.
        shown_ids: requests whose id starts with one of these are named in frames; other ids
            are their clients' affair.
    """

    def __init__(self, lookup: Lookup, shown_ids: tuple[str, ...]) -> None:
        self._lookup = lookup
        self._shown_ids = shown_ids
        self._lanes: dict[str, _Lane] = {}
        self._next_number = 0
        self._ended: dict[str, RequestTimings] = {}
        self._steps = _StepSums()
        self._ahead = LiveAhead()
        self.last_context = 0  # mean over the requests of the last step
        self._first_tokens = [deque[float](maxlen=_RECENT_REQUESTS) for _ in ServiceClass]
        self._inter_tokens = [deque[float](maxlen=_RECENT_TOKENS) for _ in ServiceClass]
        self._last_tokens = [-inf] * len(ServiceClass)  # when a token of the class came

    def note_end(self, timings: RequestTimings) -> None:
        """A request ended; if in a step, this is heard before the step's trace."""
        self._ended[timings.request_id] = timings

    def note_guesses(self, news: list[GuessNews]) -> None:
        """Something happened to requests that were guessed."""
        self._ahead.note_news(news)

    def note_step(self, trace: StepTrace) -> None:
        plan, result, stats = trace
        num_asked = len(plan.requests) - plan.num_ahead
        if plan.num_ahead and result is not None:
            self._ahead.note_step(plan.requests[num_asked:])
        if plan.num_ahead and not num_asked:
            return  # nobody asked for this step
        self._steps.add(stats)
        for request_id in plan.paused:
            self._lane(request_id).state = PAUSED
        for victim in plan.preempted:
            self._lane(victim.request_id).state = PAUSED if victim.keeps_blocks else EVICTED
        if not plan.requests:
            return
        now = stats.started + stats.plan_seconds + stats.execute_seconds
        context = 0
        if result is None:
            for planned in plan.requests[:num_asked]:
                self._lane(planned.request_id).state = RUNNING
            return
        asked, outcomes = plan.requests[:num_asked], result.requests[:num_asked]
        for planned, outcome in zip(asked, outcomes, strict=True):
            lane = self._lanes.get(planned.request_id) or self._lane(planned.request_id)
            self._note_work(lane, planned, len(outcome.token_ids), now)
            context += lane.context
        self.last_context = context // num_asked

    def _note_work(
        self, lane: _Lane, planned: PlannedRequest, num_sampled: int, now: float
    ) -> None:
        size = len(planned.tokens)
        num_drafts = planned.num_drafts
        sample = planned.sample
        lane.state = RUNNING
        lane.context = planned.start + size
        if sample is None or size > 1 + num_drafts or planned.start < sample.num_prompt:
            lane.prompt += size
        else:
            lane.decode += num_sampled
            if num_drafts:
                lane.drafts += num_drafts
                lane.accepted += max(0, num_sampled - 1)
        if num_sampled:
            if lane.last_token is not None:
                gap = (now - lane.last_token) / num_sampled
                self._inter_tokens[lane.service_class].append(gap)
            elif lane.arrival is not None and sample and sample.position == sample.num_prompt:
                self._first_tokens[lane.service_class].append(now - lane.arrival)
            lane.last_token = self._last_tokens[lane.service_class] = now

    def _lane(self, request_id: str) -> _Lane:
        lane = self._lanes.get(request_id)
        if lane is None:
            known: Promise | RequestTimings | None = self._lookup(request_id)
            known = known or self._ended.get(request_id)
            if known is None:
                lane = _Lane(self._next_number, ServiceClass.STANDARD, None)
            else:
                lane = _Lane(self._next_number, int(known.service_class), known.arrival)
            self._next_number += 1
            self._lanes[request_id] = lane
        return lane

    def totals(self) -> dict[str, float]:
        """Sums over all steps since the watch began."""
        return {name: round(value, 5) for name, value in self._steps.totals.items()}

    def latencies(self, now: float) -> list[tuple[Quantiles | None, Quantiles | None]]:
        """Times to the first token and between tokens, by class: of the last ones, and none
        where no token came for a while, as they would say nothing of now."""
        told = []
        for rank, last in enumerate(self._last_tokens):
            if now - last > _STALE_SECONDS:
                self._first_tokens[rank].clear()
                self._inter_tokens[rank].clear()
            told.append(
                (_quantiles_ms(self._first_tokens[rank]), _quantiles_ms(self._inter_tokens[rank]))
            )
        return told

    def forget_lost(self) -> None:
        """Drop lanes whose end was not heard, as it was among too many traces."""
        for request_id in list(self._lanes):
            if request_id not in self._ended and self._lookup(request_id) is None:
                del self._lanes[request_id]

    def take_frame(self) -> dict[str, object]:
        """All lanes (LANE_FIELDS one after the other), the names of new ones that may be shown,
        and sums over the steps. Lanes that ended are in a frame once more, then gone."""
        for request_id, timings in self._ended.items():
            lane = self._lanes.get(request_id)
            if lane is not None:
                lane.state = _ENDINGS[timings.finish_reason]
        flat: list[int] = []
        named: list[tuple[int, str]] = []
        for request_id, lane in self._lanes.items():
            flat += (
                lane.number,
                lane.service_class,
                lane.state,
                lane.prompt,
                lane.decode,
                lane.drafts,
                lane.accepted,
                lane.context,
            )
            lane.prompt = lane.decode = lane.drafts = lane.accepted = 0
            if lane.times_named < _TIMES_NAMED:
                lane.times_named += 1
                if request_id.startswith(self._shown_ids):
                    named.append((lane.number, request_id))
        for request_id in self._ended:
            self._lanes.pop(request_id, None)
        self._ended.clear()
        frame = {"lanes": flat, "named": named, **self._steps.take()}
        ahead = self._ahead.take_frame()
        return {**frame, "ahead": ahead} if ahead else frame


class _StepSums:
    """Sums over all steps since the watch began, and what the steps of one frame looked like."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(_TOTALS, 0.0)
        self.points: list[tuple[int, float, int]] = []
        self.span: tuple[float, float] | None = None

    def add(self, stats: StepStats) -> None:
        totals = self.totals
        totals["steps"] += 1
        totals["failed"] += stats.failed
        totals["prompt_tokens"] += stats.num_prompt_tokens
        totals["decode_tokens"] += stats.num_decode_tokens
        totals["sampled_tokens"] += stats.num_sampled_tokens
        kind = "prompt_seconds" if stats.num_prompt_tokens else "decode_seconds"
        totals[kind] += stats.execute_seconds
        totals["host_seconds"] += stats.plan_seconds + stats.commit_seconds + stats.deliver_seconds
        if not stats.failed:
            milliseconds = round(stats.execute_seconds * 1e3, 3)
            self.points.append((stats.num_tokens, milliseconds, int(stats.num_prompt_tokens > 0)))
        start = stats.started if self.span is None else self.span[0]
        self.span = (start, stats.started + stats.plan_seconds + stats.execute_seconds)

    def take(self) -> dict[str, object]:
        """Of the frame: when its steps ran (from, to), and the last few as (tokens,
        milliseconds, 1 if with a part of a prompt)."""
        span, points = self.span, self.points
        self.span, self.points = None, []
        told: dict[str, object] = {"points": points[-_MAX_POINTS:]}
        if span is not None:
            told["span"] = (round(span[0], 4), round(span[1], 4))
        return told


def _quantiles_ms(values: Collection[float]) -> Quantiles | None:
    """Median and 95th percentile of seconds, in milliseconds; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return round(ordered[last // 2] * 1e3, 2), round(ordered[int(last * 0.95)] * 1e3, 2)
