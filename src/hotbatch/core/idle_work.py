"""What is computed though nobody has asked for it: the beginnings of next turns, whole requests.

Both wait here until a machine has time. Whole guesses (`ahead_filling`) join a step behind
everything else; what a next turn begins with (`speculation.warming`) gets the steps that would
not be made otherwise. Each is there only if the configuration wants it; without them, every
function here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from hotbatch.core.ahead_filling import AheadFiller, Given
from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel
from hotbatch.core.kv_cache import KvCache
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.core.preemption import Preemptor
from hotbatch.core.request import Request
from hotbatch.core.roster import Roster
from hotbatch.core.seating import Seating
from hotbatch.core.speculation import Account, AheadBook, GuessNews
from hotbatch.core.speculation.ledger import NEXT_TURN
from hotbatch.core.speculation.warming import KnownPrefix, Warmer
from hotbatch.core.step import Step


class IdleWork:
    """Guesses of whole requests and of next turns, and their parts of steps.

    Args:
        book: of guessed requests; None: none are taken.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        book: AheadBook | None,
        roster: Roster,
        kv: KvCache,
        preemptor: Preemptor,
        seating: Seating,
        model: CostModel | None,
    ) -> None:
        self._roster = roster
        self._warmer: Warmer | None = None
        if config.prefill_ahead and config.enable_prefix_caching:
            keep_free = ceil(config.watermark * config.num_blocks)
            self._warmer = Warmer(kv, model, config.max_chunk, keep_free)
        self._ahead: AheadFiller | None = None
        if book is not None:
            self._ahead = AheadFiller(config, book, roster, kv, preemptor, seating, model)

    # What is offered, and what became of it

    def offer(self, prefix: KnownPrefix, now: float) -> None:
        """Compute what a next prompt will begin with when there is nothing else to do, if that
        is wanted at all."""
        if self._warmer is not None:
            self._warmer.offer(prefix, now)

    @property
    def takes_guesses(self) -> bool:
        """True if whole requests are computed before they come."""
        return self._ahead is not None

    def guess(self, request: Request, chance: float, now: float) -> None:
        """Take a request that may come, to be computed in capacity that would idle. It has no
        events; `news` says what became of it.

        Raises:
            InvalidRequestError: it could never be served.
        """
        if self._ahead is not None:
            self._ahead.offer(request, chance, now)

    def reprice(self, request_id: str, chance: float) -> None:
        """A guess became more or less likely; 0 ends it. Does nothing if it is over."""
        if self._ahead is not None:
            self._ahead.reprice(request_id, chance)

    def news(self) -> list[GuessNews]:
        """What became of guesses since the last time."""
        news = [] if self._ahead is None else self._ahead.book.take_news()
        return news if self._warmer is None else news + self._warmer.take_news()

    def answer(self, request: Request) -> Given | None:
        """Give a request that came what is known of its answer; None if nothing is."""
        if self._ahead is None or not request.speculate:
            return None
        return self._ahead.answer(request)

    def remember(self, request: Request) -> None:
        """A request has ended: whoever asks the same may get the same."""
        if self._ahead is not None and request.speculate:
            self._ahead.book.remember(request)

    # Steps

    def make_way(self) -> None:
        """A step is about to be filled: whoever came finds no block taken."""
        if self._warmer is not None and self._roster.by_id:
            self._warmer.interrupt()
        if self._ahead is not None:
            self._ahead.make_way()

    def fill(self, step: Step, now: float) -> None:
        """Use what is left of a step that holds everything else already."""
        if self._ahead is not None:
            self._ahead.fill(step, now)
        if self._warmer is not None and not step.planned and not self._roster.by_id:
            self._warmer.fill(step, now)
            step.is_warming = bool(step.planned)

    def commit(self, plan: StepPlan, result: StepResult, step: Step) -> None:
        """Take in what our part of a step yielded."""
        if step.is_warming and self._warmer is not None:
            self._warmer.settle(plan, result)
        elif step.num_ahead and self._ahead is not None:
            self._ahead.commit(plan, result, step)

    def fail(self, step: Step) -> None:
        """The step failed; nobody had asked for our part of it."""
        if step.is_warming and self._warmer is not None:
            self._warmer.drop()
        elif self._ahead is not None:
            self._ahead.fail(step)

    # What it looks like inside

    @property
    def holders(self) -> Iterator[Request]:
        """Those that hold blocks."""
        if self._warmer is not None:
            yield from self._warmer.holders
        if self._ahead is not None:
            yield from self._ahead.holders

    @property
    def num_guesses(self) -> int:
        """Requests guessed, and neither come nor given up yet."""
        return 0 if self._ahead is None else len(self._ahead.book)

    @property
    def num_held(self) -> int:
        """Blocks that only guessed requests use: whoever wants them gets them."""
        return 0 if self._ahead is None else self._ahead.num_held

    def accounts(self) -> Mapping[str, Account]:
        """The books by distance."""
        accounts: dict[str, Account] = {}
        if self._warmer is not None:
            accounts[NEXT_TURN] = self._warmer.account()
        if self._ahead is not None:
            accounts.update(self._ahead.book.accounts())
        return accounts

    def check_integrity(self) -> None:
        """Assert that no guess holds more than it may."""
        if self._ahead is not None:
            self._ahead.check_integrity()
