"""Whose first token cannot come in time any more, so that others' still can.

Under overload "nearest deadline first" serves everybody just too late: each is begun when its
last moment has come, and with it all behind it miss theirs. So before a step is filled, prompts
that are being computed and the next that wait are laid one behind the other, and where one would
end after it is due, the longest of those up to it is given up (Moore, "An n job, one machine
sequencing algorithm for minimizing the number of late jobs", Management Science 1968). Whoever
is given up stands at the rank `LATE` until its first token: it displaces nobody who can still be
served in time, and gets what the others leave. Age lifts it back (`urgency`).

No scheduler makes a long prompt shorter. One that takes longer than its target though it had the
machine to itself is not late for that: it has a few times as long as it takes alone.

A bounded number of those that wait is looked at, so the cost does not grow with the queue. While
nobody comes or goes and all are in time, they are looked at again only when somebody could have
become late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from hotbatch.core.cost_model import CostModel
from hotbatch.core.rank import Rank, late_key
from hotbatch.core.request import Request
from hotbatch.core.roster import Roster
from hotbatch.core.step_time import sharing

_PATIENCE = 3.0  # times a prompt's own time that it has in any case
_OUTLOOK = 24  # of those that wait, the next that are looked at
_REVIEWED = (Rank.INTERACTIVE, Rank.STANDARD, Rank.PROMISED)
_TRUST = 0.1  # seconds for which a review holds at most: whose turn is next changes, too


def longest_of_the_late(work: Sequence[tuple[float, float]], begin: float) -> list[int]:
    """Whom to give up so that all others end in time; as few as possible if they come in order
    of their deadlines.

    Args:
        work: (seconds, due) of each, in the order in which they are done; due may be infinite.
        begin: when the first is begun.

    Returns:
        Indices, ascending.
    """
    end = begin
    kept: list[tuple[float, int]] = []  # (seconds, index) of those that were promised something
    given_up = []
    for index, (seconds, due) in enumerate(work):
        end += seconds
        if due == inf:
            continue
        kept.append((seconds, index))
        while end > due and kept:
            longest = max(kept)
            kept.remove(longest)
            given_up.append(longest[1])
            end -= longest[0]
    return sorted(given_up)


class Lateness:
    """Finds the late ones and lets them step back.

    Args:
        seconds_for: predicted time alone, by position of the first, for a number of prompt tokens.
    """

    def __init__(
        self, roster: Roster, seconds_for: Callable[[int, int], float], model: CostModel
    ) -> None:
        self._roster = roster
        self._seconds_for = seconds_for
        self._model = model
        self.num_late = 0  # since the start
        self._sharing = 1.0  # times the time alone that a prompt takes at the moment
        self._seen: tuple[int, ...] = ()  # at the last review
        self._holds_until = -inf

    def review(
        self, prompts: list[list[Request]], decodes: Sequence[Sequence[Request]], now: float
    ) -> None:
        """Let the late ones of each class step back.

        Args:
            prompts: those that are being computed, by rank; late ones are moved within.
            decodes: those that share the steps.
        """
        if not self._model.is_trained:
            return
        seen = self._comings_and_goings(prompts)
        if seen == self._seen and now < self._holds_until:
            return
        begin, spare = now, _TRUST
        self._sharing = sharing(self._model, decodes)
        for rank in _REVIEWED:
            running = prompts[rank]
            waiting = self._roster.queues[rank].upcoming(_OUTLOOK)
            if not running and not waiting:
                continue
            num_before = self.num_late
            begin, least = self._review([*running, *waiting], begin)
            spare = min(spare, least)
            if running and self.num_late > num_before:
                prompts[rank] = [request for request in running if request.rank == rank]
                for request in running:
                    if request.rank != rank:
                        prompts[request.rank].append(request)
        # Time passes for all alike, so the next to be late is whoever has least to spare.
        self._holds_until = now + spare
        self._seen = self._comings_and_goings(prompts)

    def _comings_and_goings(self, prompts: list[list[Request]]) -> tuple[int, ...]:
        queues = self._roster.queues
        running = (len(prompts[rank]) for rank in _REVIEWED)
        return (*running, *(queues[rank].num_changes for rank in _REVIEWED))

    def _review(self, candidates: list[Request], begin: float) -> tuple[float, float]:
        """Returns when the last one ends that is not late, and the least that any has to spare."""
        candidates.sort(key=_due)
        work = [self._work(request) for request in candidates]
        given_up = longest_of_the_late(work, begin)
        for index in given_up:
            self._step_back(candidates[index])
        end, spare = begin, inf
        for index, (seconds, due) in enumerate(work):
            if index not in given_up:
                end += seconds
                spare = min(spare, due - end)
        return end, spare

    def _work(self, request: Request) -> tuple[float, float]:
        """Seconds that its prompt still takes, and when it is late."""
        left = len(request.tokens) - request.num_computed
        seconds = self._sharing * self._seconds_for(request.num_computed, left)
        if request.due == inf or request.is_lifted or request.num_output:
            return seconds, inf
        whole = self._seconds_for(0, request.num_prompt)
        return seconds, max(request.due, request.arrival + _PATIENCE * whole)

    def _step_back(self, request: Request) -> None:
        self.num_late += 1
        if request.base_rank == Rank.PROMISED:
            request.due = inf  # or it would be pressing again
            request.account = (int(Rank.BATCH), request.tenant)
            request.base_rank = int(Rank.BATCH)
            self._roster.set_rank(request, Rank.BATCH)
            return
        request.base_rank = int(Rank.LATE)
        key = late_key(request.service_class, request.order)
        self._roster.set_rank(request, Rank.LATE, key)


def _due(request: Request) -> tuple[float, int]:
    return (request.due, request.order)
