"""The server's side of the door: asked before a prompt is rendered or tokenized.

A place is held from here until the requests are in the engine, or until whatever went wrong
on the way. All of it happens on the event loop, so nothing comes between the question and the
answer, and a burst cannot slip past the cap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hotbatch.core.admission import Door, QueueLimits
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.engine.async_engine import AsyncEngine
from hotbatch.server.errors import QueueExpiredError
from hotbatch.server.urgency import Urgency

# A prediction is no promise: who would miss its target by less than this is let in.
_PATIENCE = 2.0
_CHARS_PER_TOKEN = 4


class Entrance:
    """Lets generation requests in, or refuses them at once.

    Args:
        engine: whose queue it is.
        limits: of the queue.
        promised: targets that the operator set, by class: beyond these, times two, a request is
            refused as one beyond its own is.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        limits: QueueLimits,
        promised: Mapping[ServiceClass, LatencyTargets],
    ) -> None:
        self._engine = engine
        self._promised = dict(promised)
        self._door = Door(limits)

    @property
    def num_entering(self) -> int:
        """Requests that were let in and are not in the engine yet."""
        return self._door.num_entering

    @property
    def refused(self) -> Mapping[str, int]:
        """Rejections by reason; those that expired in the queue included."""
        return self._door.refused

    def expired(self, message: str | None, reason: str) -> QueueExpiredError:
        """The answer for a request that was let in and then waited too long."""
        self._door.refused[reason] += 1
        return QueueExpiredError(
            message or "The request waited too long.",
            reason=reason,
            retry_after=self._door.retry_after(self._engine.load()),
        )

    @contextmanager
    def place(self, urgency: Urgency, num_requests: int, num_tokens: int) -> Iterator[None]:
        """Inside, a place is held for requests on their way into the engine.

        Args:
            num_requests: sequences that will be submitted.
            num_tokens: estimated, of all their prompts; one that several share counts once.

        Raises:
            OverloadedError: there is none.
        """
        reservation = self._door.enter(
            self._engine.load(),
            num_requests,
            min(num_tokens, num_requests * self._engine.info.max_model_len),
            urgency.service_class,
            self._max_wait(urgency),
        )
        try:
            yield
        finally:
            self._door.close(reservation)

    def _max_wait(self, urgency: Urgency) -> float | None:
        target = urgency.targets.ttft
        if target is None and urgency.service_class in self._promised:
            target = self._promised[urgency.service_class].ttft
        return None if target is None else _PATIENCE * target


def estimated_tokens(prompts: Any) -> int:
    """Tokens of prompts or messages in any of their forms, by their length alone: an id is a
    token, text has one every four characters. Whatever else stands there counts nothing, as it
    is refused later."""
    num_ids = num_chars = 0
    level = [prompts]
    while level:
        value = level.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, list):
            if value and type(value[0]) is int:
                num_ids += len(value)
            else:
                level += value
        elif isinstance(value, dict):
            level += value.values()
    return num_ids + -(-num_chars // _CHARS_PER_TOKEN)
