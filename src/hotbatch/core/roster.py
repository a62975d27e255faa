"""Who is where: every live request is in exactly one place.

Either it has a seat (`running`, the most senior first: highest class, then order of arrival),
or it stands in the queue of its class. What a request's rank is, and when it moves, is decided
elsewhere; here the lists stay in step with the states.

Ranks are those of the service classes and two more (`rank`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from hotbatch.core.class_queue import ClassQueue
from hotbatch.core.fairness import VirtualTokenCounters
from hotbatch.core.rank import IN_TURN, Rank
from hotbatch.core.request import Request, RequestEvent, RequestState
from hotbatch.core.shared_prefixes import SharedPrefixes


def seniority(request: Request) -> tuple[int, int]:
    return (-request.rank, request.order)


def _counters_of(
    rank: Rank, counters: Sequence[VirtualTokenCounters] | None
) -> VirtualTokenCounters | None:
    return counters[rank] if counters is not None and rank in IN_TURN else None


class Roster:
    """The live requests of a scheduler, by id, by seat and by queue.

    Args:
        counters: by rank, of its tenants, if they are to be served fairly.
        leeway: by which deadlines may bend that, as in `ClassQueue`.
        block_size: tokens a KV block.
    """

    def __init__(
        self,
        counters: Sequence[VirtualTokenCounters] | None,
        leeway: float = 0.0,
        block_size: int = 16,
    ) -> None:
        self.by_id: dict[str, Request] = {}
        self.running: list[Request] = []
        self.paused: dict[Request, None] = {}  # a set in order; they stand in a queue as well
        self.queues = [ClassQueue(_counters_of(rank, counters), leeway) for rank in Rank]
        self._prefixes = SharedPrefixes(block_size)  # of those that run
        self.num_changes = 0  # of who has a seat, since the start

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def num_queued(self) -> int:
        return len(self.by_id) - len(self.running)

    @property
    def num_evicted(self) -> int:
        """Those that lost all their blocks and wait to be computed again."""
        return sum(queue.num_returning for queue in self.queues) - len(self.paused)

    @property
    def holders(self) -> Iterator[Request]:
        """Those that hold blocks."""
        yield from self.running
        yield from self.paused

    def enqueue(self, request: Request) -> None:
        self.queues[request.rank].push(request)

    def seat(self, request: Request) -> None:
        """Give a queued request a seat. It has its blocks already."""
        self.queues[request.rank].remove(request)
        if request.state is RequestState.PAUSED:
            del self.paused[request]
            request.apply(RequestEvent.RESUME)
        else:
            request.apply(RequestEvent.ADMIT)
        self.num_changes += 1
        insort(self.running, request, key=seniority)
        self._prefixes.add(request)

    def pause(self, request: Request) -> None:
        self._unseat(request)
        self._prefixes.remove(request)
        request.apply(RequestEvent.PAUSE)
        request.num_pauses += 1
        self.paused[request] = None
        self.queues[request.rank].push(request)

    def evict(self, request: Request) -> None:
        """Note that a request has lost all its blocks, and with them its seat."""
        if request.state is RequestState.PAUSED:
            del self.paused[request]
            request.apply(RequestEvent.EVICT)  # its place in the queue is the same
            return
        self._unseat(request)
        self._prefixes.remove(request)
        request.apply(RequestEvent.EVICT)
        self.queues[request.rank].push(request)

    def leave(self, request: Request) -> None:
        """Take out a request that ends."""
        if request.state is RequestState.RUNNING:
            self._unseat(request)
            self._prefixes.remove(request)
        else:
            self.queues[request.rank].remove(request)
            self.paused.pop(request, None)

    def drop_finished(self) -> None:
        """Take those out of the seats that have ended: one pass for all of a step."""
        self.num_changes += 1
        running: list[Request] = []
        for request in self.running:
            if request.state is RequestState.RUNNING:
                running.append(request)
            else:
                self._prefixes.remove(request)
        self.running = running

    def set_rank(self, request: Request, rank: int, key: tuple[float, ...] | None = None) -> None:
        """Move a request to another rank; `key` is its new place among newcomers, if it is one."""
        if rank == request.rank:
            return
        if request.state is RequestState.RUNNING:
            self._unseat(request)
            request.rank = int(rank)
            insort(self.running, request, key=seniority)
        else:
            self.queues[request.rank].remove(request)
            request.rank = int(rank)
            if key is not None:
                request.queue_key = key
            self.queues[rank].push(request)

    def _unseat(self, request: Request) -> None:
        index = bisect_left(self.running, seniority(request), key=seniority)
        assert self.running[index] is request, f"{request!r} is not in its seat"
        self.num_changes += 1
        del self.running[index]

    def check_integrity(self) -> None:
        queued = [request for queue in self.queues for request in queue]
        for request in queued:
            assert request.state in (
                RequestState.WAITING,
                RequestState.PAUSED,
                RequestState.EVICTED,
            ), f"{request!r} is queued"
            assert (request.state is RequestState.PAUSED) == (request in self.paused)
            if request.state is not RequestState.PAUSED:
                assert not request.block_table, f"{request!r} waits with blocks"
                assert request.num_computed == request.num_committed == 0
        num_evicted = sum(request.state is RequestState.EVICTED for request in queued)
        assert self.num_evicted == num_evicted, "who is evicted is miscounted"
        for request in self.running:
            assert request.state is RequestState.RUNNING
        for request in self.holders:
            assert request.num_committed <= request.num_computed <= request.capacity, f"{request!r}"
        live = [*queued, *self.running]
        assert all(self.by_id.get(request.request_id) is request for request in live)
        assert len(live) == len(set(live)), "a request is in two places"
        assert self.paused.keys() <= set(queued), "a paused request is in no queue"
        self._prefixes.check_integrity(self.running)
        assert self.running == sorted(self.running, key=seniority), "seats are out of order"
