"""How long a step may take: the tightest slack of those who decode in it.

A running request with a target for its tokens has slack until its next one is due. One
without is promised nothing in seconds, but a prompt that joins should not be felt: its next
token may come at most `_STRETCH` times as late as it would without prompts in the step. The
same holds for one that is past its target anyway: holding the prompts back would not bring
the lost time back, and give every prompt the same fate. It also holds, slack or no slack, for a
lone long prompt, which needs several steps whatever is done: short ones are sooner done
with, and a step that takes them whole wastes least.

Tenants that ask for less than their share (`light_tenants`) have a pace of their own: their next
token comes little later than if they were alone. Where decodes of the others would not fit in
that, as many of them as need be take turns, and prompts are left next to nothing.

Where guesses will give each decode several tokens of a step, it may last as many times as long:
a token takes no longer, and what guessing gains goes to the prompts.

The batch class waits as long as it has to, so a step of batch work alone is bounded by the
token budget only; unless somebody of a higher class was here lately. Then it is kept short
enough that whoever arrives in the middle of it will not wait long for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.rank import Rank
from hotbatch.core.request import Request
from hotbatch.core.turn_taking import take_turns, without

_STRETCH = 2.25  # of a step without prompts: its decodes wait no longer, 19 times of 20
_LONE_STRETCH = 2.0  # times that, where four prompts wait for each one that decodes
_LIGHT_STRETCH = 1.15  # of a step of light tenants' decodes alone: theirs wait no longer
_LEAST_CHUNK = 16  # tokens of prompts in a step, however little slack there is
_LEAST_GENTLE_CHUNK = 4  # the same where prompts should not be felt
_PACE = 0.9  # of the tightest target for tokens: a step of those that are behind it
_FELT_LITTLE = 2.05  # times as long a gap as without it: beside a long prompt, usually
_COURTEOUS = 2.0  # times its time alone, that a long prompt takes so that others do not feel it
_LESS_COURTEOUS = 1.25  # times as long a step is tried where it would be late otherwise
_HOPELESS = 2.0  # times that target, without any prompt: it cannot be kept, whatever is done
_BRIEF = 0.02  # seconds that a step may always take while somebody of a higher class may come
_SHARING = 1.1  # times the time that prompts take alone, in steps of theirs: some end, and decode
_MOST_SHARING = 3.0  # the same, however little the decodes leave
_VIGILANCE = 30.0  # seconds for which an arrival is a sign that more will come


def prompt_seconds(model: CostModel | None, max_tokens: int) -> Callable[[int, int], float]:
    """A function from the position of a prompt's first token and their number to the predicted
    seconds until they are computed, alone.

    Args:
        model: until it is trained, the answer is 0: nothing is known to be late.
        max_tokens: of a step.
    """

    def seconds_for(start: int, num_tokens: int) -> float:
        if model is None or not model.is_trained:
            return 0.0
        return model.prompt_seconds(start, num_tokens, max_tokens)

    return seconds_for


def sharing(model: CostModel, decodes: Sequence[Sequence[Request]]) -> float:
    """Times the time alone that prompts take in steps with these decodes.

    Of a step that lasts as long as the decodes allow, prompts have what those leave.
    """
    tightest = inf
    num_decodes = context = shared = 0
    for requests in decodes:
        num_decodes += len(requests)
        for request in requests:
            context += len(request.tokens)
            shared += request.num_shared
            tpot = request.promised.tpot
            if tpot is not None and tpot < tightest:
                tightest = tpot
    if not num_decodes:
        return _SHARING
    features = StepFeatures(num_decodes, num_decodes, context - shared, context, num_decodes)
    alone = model.predict(features)
    step = _STRETCH * alone
    if tightest < inf:
        step = max(_PACE * tightest, alone)
    left = max(step - alone, step / _MOST_SHARING)
    return _SHARING * step / left


class StepClock:
    """The time of one step, while the step is planned.

    Args:
        model: a trained one.
        decodes: the requests with one token to compute, by rank.
        spared: those that were left out of the last step, and so will not be of this one.
        spared_by_light: those that were left out of the last two: not even light tenants'
            requests make them wait once more.
        between: seconds from a step's end to the next one's start.
        tokens_a_decode: that this step is expected to yield, with guesses.
        num_prompts: prompts that are being computed or wait.
        last_arrival: per rank, when the last request of it arrived.
        now: when the step starts.
        light: requests of light tenants, some of which may be among `decodes`.

    Attributes:
        gap: seconds that a step without guesses would usually last, if prompts were given all
            that the pace of the decodes leaves; infinite while nothing of the kind was asked, or
            the step is bounded by what was promised.
    """

    def __init__(
        self,
        model: CostModel,
        decodes: Sequence[Sequence[Request]],
        spared: Collection[Request],
        num_prompts: int,
        last_arrival: Sequence[float],
        now: float,
        light: Collection[Request] = (),
        spared_by_light: Collection[Request] = (),
        between: float = 0.0,
        tokens_a_decode: float = 1.0,
    ) -> None:
        self._model = model
        self._last_arrival = last_arrival
        self._now = now
        self._between = between
        self.num_prompts = num_prompts
        self._tokens_a_decode = tokens_a_decode
        self.gap = inf
        self._is_felt = any(decodes[Rank.STANDARD :])
        num_decodes = context = shared = 0
        due = tightest = inf
        for requests in decodes:
            num_decodes += len(requests)
            for request in requests:
                context += len(request.tokens)
                shared += request.num_shared
                if request.due < due:
                    due = request.due
                tpot = request.promised.tpot
                if tpot is not None and tpot < tightest:
                    tightest = tpot
        self._slack = due - now
        self._tpot = tightest
        reads = context - shared
        self._decodes = StepFeatures(num_decodes, num_decodes, reads, context, num_decodes)
        self.skipped: frozenset[Request] = frozenset()
        if self._slack < inf and model.predict_p95(self._decodes) > self._slack > 0.0:
            self._skip_some(decodes, spared)
        self._pace = inf
        self._paced_rank = -1  # the highest whose work keeps to that pace, below those owed a share
        self._turn = 1  # in one of so many steps prompts may lengthen it; 0: not in this one
        if light:
            self._keep_pace(decodes, light, spared, spared_by_light)
        self._step = self._decodes

    def note_chunk(self, start: int, size: int) -> None:
        """A part of a prompt has joined."""
        self._step = self._step.plus_chunk(start, size)

    def tokens_for(
        self,
        rank: int,
        start: int,
        num_uncomputed: int,
        first: Request,
        *,
        is_lone: bool = False,
        is_light: bool = False,
    ) -> int:
        """How many tokens of prompts of this rank may still join.

        Args:
            start: position of the first of them in its request.
            num_uncomputed: how many there are.
            first: whose prompt is due first of them.
            is_lone: it needs several steps whatever is done, and there is no other prompt.
            is_light: some are of a light tenant themselves.
        """
        seconds = self._limit(rank)
        is_paced = rank <= self._paced_rank or rank == Rank.OWED
        if not is_light and is_paced and self._pace < seconds:
            if not self._turn:
                return 0
            size = self._model.largest_chunk(self._step, start, num_uncomputed, self._pace)
            return max(size, self._least(self._turn * _LEAST_GENTLE_CHUNK, num_uncomputed))
        if is_lone and self._is_felt:
            courteous = self._courteous_chunk(first, start, num_uncomputed, seconds)
            if courteous is not None:
                return courteous
        size = num_uncomputed
        if seconds < inf:
            size = self._model.largest_chunk(self._step, start, num_uncomputed, seconds)
            size = max(size, self._least(_LEAST_CHUNK, num_uncomputed))
        if self._now < first.due < inf:
            in_time = self._model.largest_chunk(
                self._step, start, num_uncomputed, first.due - self._now
            )
            if in_time >= len(first.tokens) - first.num_computed:
                size = min(size, in_time)
        return size

    def has_time(self, rank: int, long: Request, num_uncomputed: int) -> bool:
        """Would the only long prompt come in time by parts that are hardly felt, if nobody else's
        prompt were in the steps?"""
        if not self._is_felt or self._pace < inf:
            return False
        limit = self._limit(rank)
        return self._courteous_chunk(long, long.num_computed, num_uncomputed, limit) is not None

    def beside_short(self, long: Request, num_uncomputed: int) -> int:
        """How many tokens of the only long prompt join, after all of the short ones."""
        seconds = self._stretched(_FELT_LITTLE) * self._doubt()
        size = self._model.largest_chunk(self._step, long.num_computed, num_uncomputed, seconds)
        return min(max(size, _LEAST_GENTLE_CHUNK), num_uncomputed)

    def _least(self, tokens: int, num_uncomputed: int) -> int:
        joined = self._step.num_tokens - self._decodes.num_tokens
        return min(tokens - joined, num_uncomputed)

    def _courteous_chunk(
        self, request: Request, start: int, num_uncomputed: int, limit: float
    ) -> int | None:
        """A chunk that is hardly felt, or no more than it takes to come in time; None if that
        takes all that the limit allows."""
        left = len(request.tokens) - request.num_computed
        due = request.due
        if request.targets.ttft is None:
            # No scheduler makes it shorter than it is alone, and others must not pay for what is
            # promised to all of its class.
            whole = self._model.prompt_seconds(0, request.num_prompt, request.num_prompt)
            due = max(due, request.arrival + _COURTEOUS * whole)
        # Usually, not 19 times of 20: this is a courtesy, and the prompt's time counts too.
        seconds, doubt = self._stretched(_FELT_LITTLE), self._doubt()
        while seconds * doubt < limit:
            size = self._model.largest_chunk(self._step, start, num_uncomputed, seconds * doubt)
            size = max(size, self._least(_LEAST_GENTLE_CHUNK, num_uncomputed))
            if size > 0 and self._now + seconds * left / size <= due:
                return size
            seconds *= _LESS_COURTEOUS
        return None

    def _limit(self, rank: int) -> float:
        """Seconds that the step may take if a prompt of this rank joins."""
        needed = self._model.predict_p95(self._decodes)
        limit = inf
        if self._slack < inf and self._slack >= needed:
            limit = self._slack
        elif self._slack < inf and needed <= _HOPELESS * self._tpot < inf:
            limit = max(needed, _PACE * self._tpot)
        elif self._is_felt or self._slack < inf:
            limit = self._stretched(self._stretch())
            self.gap = min(self.gap, limit / self._doubt())
            limit *= self._tokens_a_decode
        if any(self._now - moment < _VIGILANCE for moment in self._last_arrival[rank + 1 :]):
            limit = min(limit, max(_BRIEF, self._stretched(_STRETCH)))
        return limit

    def _doubt(self) -> float:
        """How far the time that 19 of 20 steps with a part of a prompt keep is from the usual."""
        step = self._decodes.plus_chunk(0, _LEAST_CHUNK)
        return self._model.predict_p95(step) / self._model.predict(step)

    def _stretched(self, times: float) -> float:
        """Seconds of a step that makes gaps between tokens so many times as long as without a
        prompt: what passes between two steps is in the gap, and gets no longer."""
        alone = self._model.predict(self._decodes)
        return times * (alone + self._between) - self._between

    def _stretch(self) -> float:
        is_lone = 4 * self._decodes.num_tokens <= self.num_prompts
        return _STRETCH * (_LONE_STRETCH if is_lone else 1.0)

    def _skip_some(self, decodes: Sequence[Sequence[Request]], spared: Collection[Request]) -> None:
        """Leave out decodes that have time if that saves those that have none: lower classes
        first, then whoever has most time; nobody twice in a row."""
        with_time = [
            request
            for requests in decodes[: Rank.OWED]
            for request in requests
            if request.due - self._now > 2.0 * self._slack and request not in spared
        ]
        with_time.sort(key=_importance)
        rest = without(self._model, self._decodes, with_time, self._slack)
        if self._model.predict_p95(rest.decodes) <= self._slack:
            self._decodes = rest.decodes
            self.skipped = frozenset(rest.skipped)

    def _keep_pace(
        self,
        decodes: Sequence[Sequence[Request]],
        light: Collection[Request],
        last: Collection[Request],
        last_two: Collection[Request],
    ) -> None:
        """Leave out decodes of others, of no higher class, as far as those of light tenants are
        not to feel them.

        Args:
            last: who was left out of the last step.
            last_two: who was left out of the last two.
        """
        alone = StepFeatures()
        for request in light:
            if len(request.tokens) - request.num_computed == 1:
                alone = alone.plus_decode(len(request.tokens), 1, request.num_shared)
                self._paced_rank = max(self._paced_rank, min(request.rank, Rank.INTERACTIVE))
        if not alone.num_tokens:
            return
        self._pace = _LIGHT_STRETCH * self._model.predict_p95(alone)
        others = [
            request
            for requests in decodes[: self._paced_rank + 1]
            for request in requests
            if request not in light
            and request not in self.skipped
            and request.due - self._now > 2.0 * self._pace
        ]
        others.sort(key=_importance)
        turns = take_turns(self._model, self._decodes, others, last, last_two, self._pace)
        self._decodes, self._turn = turns.decodes, turns.length
        self.skipped = self.skipped.union(turns.skipped)


def _importance(request: Request) -> tuple[int, float, int]:
    """Low for those that had better go on: a high class, then a near deadline, then age."""
    return (-request.rank, request.due, request.order)
