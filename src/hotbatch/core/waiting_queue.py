"""The queue of requests that wait for admission, ordered by a policy's key.

A sorted list: the head is at index 0 for the scan of admission, and a request is found for
cancellation by bisection, as keys are unique. Insertion moves pointers only; at ten thousand
waiting requests that is a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from hotbatch.core.request import Request

_by_key: Callable[[Request], tuple[float, ...]] = attrgetter("queue_key")


class WaitingQueue:
    """Requests in the order of their `queue_key`, which must not change while queued."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def head(self, count: int) -> list[Request]:
        return self._requests[:count]

    def first_from(self, key: tuple[float, ...]) -> Request | None:
        """The first whose key is this one or a larger one."""
        index = bisect_left(self._requests, key, key=_by_key)
        return self._requests[index] if index < len(self._requests) else None

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_by_key)

    def pop(self, index: int = 0) -> Request:
        return self._requests.pop(index)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.queue_key, key=_by_key)
        assert index < len(self._requests) and self._requests[index] is request, (
            f"{request!r} is not in its place in the queue"
        )
        self._requests.pop(index)
