"""The last part of a step: guesses have what is left of its budget, and blocks nobody wants."""

from __future__ import annotations

from math import ceil

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.kv_cache import KvCache
from hotbatch.core.preemption import Preemptor
from hotbatch.core.request import Request
from hotbatch.core.roster import Roster
from hotbatch.core.seating import Seating
from hotbatch.core.speculation import Drafter
from hotbatch.core.step import Step


class DraftFiller:
    """Asks a drafter for guesses, and makes room for them in the block tables."""

    def __init__(
        self,
        config: SchedulerConfig,
        drafter: Drafter,
        roster: Roster,
        kv: KvCache,
        preemptor: Preemptor,
        seating: Seating,
    ) -> None:
        self._drafter = drafter
        self._roster = roster
        self._kv = kv
        self._preemptor = preemptor
        self._seating = seating
        self._max_num_seqs = config.max_num_seqs
        self._max_drafts = config.max_draft_tokens
        self._num_reserved = ceil(config.watermark * config.num_blocks)

    def fill(self, step: Step, now: float) -> None:
        """Let guesses into a step that holds everything else already."""
        spare = self._num_spare_blocks()

        def limit_of(request: Request) -> int:
            if request.banned():
                return 0  # a sample spec bans tokens for one position only
            room = request.capacity + spare * self._kv.block_size - len(request.tokens)
            # The last token needs no successor.
            return min(room, request.max_output - request.num_output - 1)

        others = 0  # what of the budget guesses may not have
        if self._max_drafts is not None:
            others = max(0, step.budget - self._max_drafts)
        step.budget -= others
        expected = min(len(self._roster), self._max_num_seqs)
        for index, drafts in self._drafter.draft(step, expected, limit_of, now):
            request = step.requests[index]
            held = len(request.block_table)
            if not self._kv.grow(request, len(request.tokens) + len(drafts), at_most=spare):
                drafts = drafts[: request.capacity - len(request.tokens)]
            spare -= len(request.block_table) - held
            if drafts:
                step.add_drafts(index, drafts)
        step.budget += others

    def _num_spare_blocks(self) -> int:
        """Blocks that guesses may have for the time of a step: none where blocks lack, and one
        for each running request, which it could need next, is left alone."""
        if self._seating.is_blocked or self._preemptor.highest_victim >= 0:
            return 0
        kept = len(self._roster.running) + self._num_reserved
        return max(0, self._kv.pool.num_available - kept)
