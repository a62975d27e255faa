"""The scheduler's choices, as small pure functions.

There is one scheduler. What it decides differently from one set-up to another is a function
in a `Policies` value: who waits before whom, who loses its blocks, how large a part of a
prompt enters a step, how many waiting requests may be seated, what is guessed. None of them
changes anything; each sees requests and numbers and returns a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.request import Request, RequestState


def first_come(request: Request) -> tuple[float, ...]:
    """Order of arrival; who lost its blocks comes before all who never had any."""
    return (request.state is not RequestState.EVICTED, request.order)


def newest(candidates: Sequence[Request]) -> Request:
    """The request that arrived last: the oldest is never a victim, so somebody always ends."""
    return max(candidates, key=_order)


def _order(request: Request) -> int:
    return request.order


def whole_budget(request: Request, num_uncomputed: int, budget_left: int) -> int:
    """As many tokens as the step still has room for."""
    return min(num_uncomputed, budget_left)


@dataclass(frozen=True, slots=True)
class Policies:
    """The functions that a scheduler consults.

    Attributes:
        waiting_key: place in the waiting queue, smallest first; unique (`order` is).
        choose_victim: which of the running requests gives its blocks back. Must never choose
            the same request for ever while others come and go, or that one starves.
        chunk_size: (request, uncomputed tokens, budget left) -> tokens to compute now; 0 leaves
            a running request out of this step; a newly admitted one computes at least one.
            Somebody must get at least one when nobody decodes.
        propose_drafts: (request, limit) -> at most `limit` guessed next tokens, to be verified
            in the same step; None to guess nothing.
    """

    waiting_key: Callable[[Request], tuple[float, ...]] = first_come
    choose_victim: Callable[[Sequence[Request]], Request] = newest
    chunk_size: Callable[[Request, int, int], int] = whole_budget
    propose_drafts: Callable[[Request, int], Sequence[int]] | None = None


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
