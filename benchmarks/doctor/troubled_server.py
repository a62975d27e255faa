"""`hotbatch serve` with a trouble of its own: `python troubled_server.py TROUBLE serve ARGUMENTS`.

slow-host      20 ms pass with each step's results, as with a slow log or a busy Python thread
wrong-guesses  five guesses for each request in each step, all wrong, at any price
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hotbatch import assembly, cli
from hotbatch.core.plan import StepPlan, StepResult, TokenEvent
from hotbatch.core.request import Request
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import EachAlone

_STALL = 0.02  # seconds
_DEPTH = 5


def slow_host() -> None:
    commit = Scheduler.commit

    def slow(self: Scheduler, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        events = commit(self, plan, result, now)
        time.sleep(_STALL)
        return events

    Scheduler.commit = slow  # type: ignore[method-assign]


def wrong_guesses() -> None:
    def guess(request: Request, limit: int) -> Sequence[int]:
        return [request.tokens[-1] + 1] * min(limit, _DEPTH)

    assembly.make_speculator = lambda *_: EachAlone(guess)  # type: ignore[assignment]


TROUBLES = {"slow-host": slow_host, "wrong-guesses": wrong_guesses}

if __name__ == "__main__":
    TROUBLES[sys.argv.pop(1)]()
    cli.main()
