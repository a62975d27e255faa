"""The scheduler's choices, as small pure functions, and the ingredients it may do without.

There is one scheduler. What it decides differently from one set-up to another is a value in
`Policies`: who waits before whom, who loses its blocks, how large a part of a prompt enters a
step, what is guessed; and whether it knows classes, deadlines, tenants, expected lengths and
partial eviction at all. `Policies()` is first come, first served; `full_policies()` is
everything. None of the functions changes anything: each sees requests and numbers and returns
a choice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.request import Request, RequestState

_HORIZON = 30.0  # seconds by which a deadline can put a request behind others at most
PATIENCE = 3  # times that a request is preempted before others are preferred


class Reclaim(enum.Enum):
    """What becomes of the KV in blocks that are needed elsewhere."""

    RECOMPUTE = "recompute"  # it is dropped, and computed again when the request goes on
    KEEP = "keep"  # the blocks stay; whoever needs them waits


def first_come(request: Request) -> tuple[float, ...]:
    """Order of arrival."""
    return (request.order,)


def by_priority(request: Request) -> tuple[float, ...]:
    """vLLM's integer priority, lower first; order of arrival among equals."""
    return (request.priority, request.order)


def by_due_time(request: Request) -> tuple[float, ...]:
    """The same, but among equals of a priority the nearest deadline of a first token first.

    Where a long prompt was promised more time than a short one, in order of arrival the short
    ones behind it would be late while it still had time. Nobody starves: who was promised
    nothing, or little, is overtaken only by those that come within `_HORIZON` seconds of it.
    """
    return (request.priority, min(request.due, request.arrival + _HORIZON), request.order)


def newest(candidates: Sequence[Request]) -> Request:
    """The request that arrived last: the oldest is never a victim, so somebody always ends."""
    return max(candidates, key=_order)


def _order(request: Request) -> int:
    return request.order


def least_valuable(candidates: Sequence[Request]) -> Request:
    """The request whose blocks are given up at the least loss.

    The lowest class goes first, in it whoever was preempted less than three times and has run
    its quantum, one that is paused before one that runs, and then the one with the least
    compute sunk. Spared as long as there is anybody else: the oldest of the top class, which
    so ends for sure and after it everybody, and the one nearest its end, which is about to
    give its blocks back by itself.
    """
    top = max(request.rank for request in candidates)
    oldest = min((request for request in candidates if request.rank == top), key=_order)
    nearest = min(candidates, key=_remaining)
    for spared in ((oldest, nearest), (oldest,)):
        others = [request for request in candidates if request not in spared]
        if others:
            return min(others, key=_value)
    return oldest


def _remaining(request: Request) -> tuple[int, int]:
    expected = request.expected_output or request.max_output
    return (max(1, expected - request.num_output), request.order)


def _value(request: Request) -> tuple[int, bool, bool, bool, int, int]:
    return (
        request.rank,
        request.num_evictions >= PATIENCE,
        request.num_computed < request.quantum_end,
        request.state is RequestState.RUNNING,
        request.num_computed,
        -request.order,
    )


def least_urgent(candidates: Sequence[Request]) -> Request:
    """The request that gives up its seat to a higher class: of the lowest class, in it the
    newest that was not sent away three times already. Its KV stays, so nothing else is lost."""
    return min(candidates, key=_urgency)


def _urgency(request: Request) -> tuple[int, bool, int]:
    return (request.rank, request.num_pauses >= PATIENCE, -request.order)


def whole_budget(request: Request, num_uncomputed: int, budget_left: int) -> int:
    """As many tokens as the step still has room for."""
    return min(num_uncomputed, budget_left)


def always_recompute(victim: Request, num_tokens: int) -> Reclaim:
    """Where host memory is device memory there is nowhere to swap to."""
    return Reclaim.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Policies:
    """The functions that a scheduler consults, and the ingredients it works with.

    Attributes:
        waiting_key: place among those of a class and tenant that wait for their first seat,
            smallest first; unique (`order` is). Who lost its seat comes before all of these.
        choose_victim: which request gives blocks back. Must never choose the same request for
            ever while others come and go, or that one starves.
        choose_displaced: which running request gives its seat to one of a higher class.
        chunk_size: (request, uncomputed tokens, budget left) -> tokens to compute now; 0 leaves
            a running request out of this step; a newly admitted one computes at least one.
            Somebody must get at least one when nobody decodes. Without `deadlines` only.
        propose_drafts: (request, limit) -> at most `limit` guessed next tokens, to be verified
            in the same step, whatever that costs; None to guess nothing. A scheduler with a
            drafter of its own (`speculation`) does not ask.
        reclaim: (victim, tokens lost) -> whether they are dropped or the victim is spared.
        classes: a higher class goes first and displaces lower ones, by pausing them.
        deadlines: prompts are ordered by deadline and remaining work, and who cannot be in time
            steps back.
        online: with `deadlines`, the settings are bounds within which parts of prompts are sized
            by the predicted time of the step, and seats by what keeps promises; without it both
            are as large as set.
        fairness: tenants of a class are served by virtual token counters.
        forecast: admission looks at the expected peak of KV tokens.
        partial_eviction: a victim gives back as many blocks as are needed, from its end.
    """

    waiting_key: Callable[[Request], tuple[float, ...]] = first_come
    choose_victim: Callable[[Sequence[Request]], Request] = newest
    choose_displaced: Callable[[Sequence[Request]], Request] = least_urgent
    chunk_size: Callable[[Request, int, int], int] = whole_budget
    propose_drafts: Callable[[Request, int], Sequence[int]] | None = None
    reclaim: Callable[[Request, int], Reclaim] = always_recompute
    classes: bool = False
    deadlines: bool = False
    online: bool = False
    fairness: bool = False
    forecast: bool = False
    partial_eviction: bool = False


_FULL = Policies(
    waiting_key=by_due_time,
    choose_victim=least_valuable,
    classes=True,
    deadlines=True,
    online=True,
    fairness=True,
    forecast=True,
    partial_eviction=True,
)


def full_policies(**changes: Any) -> Policies:
    """Every ingredient; `full_policies(fairness=False)` is everything but that one."""
    return replace(_FULL, **changes)


def batch_start(config: SchedulerConfig, oldest_arrival: float) -> float:
    """When an incomplete batch starts nevertheless, in seconds on the engine's clock."""
    if config.batching == "request":
        return oldest_arrival
    return oldest_arrival + config.static_timeout


def batch_size(config: SchedulerConfig) -> int:
    """Seats of a closed batch: `request` batching is a batch of one that waits for nobody."""
    return 1 if config.batching == "request" else config.static_batch_size


def seats_to_fill(
    config: SchedulerConfig, num_waiting: int, oldest_arrival: float, now: float
) -> int:
    """How many waiting requests form the next closed batch; 0: go on waiting.

    Called when the last batch has ended to its last member.
    """
    size = batch_size(config)
    if num_waiting < size and now < batch_start(config, oldest_arrival):
        return 0
    return min(num_waiting, size)
